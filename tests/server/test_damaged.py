"""Damaged files and bodies: each is refused with what is wrong with it, nothing is left behind, no path is told."""

import contextlib
import json
import os
import random
import sqlite3

import pytest

from autoshard.api import JOB_BODIES, JobKind
from autoshard.core.errors import AutoshardError, ExecutionError, FormatError
from autoshard.formats.stores.samples import KERNEL_SAMPLES
from server.planning.worker import answered
from server.problems import StorageError, problem_of
from server.settings import ServerSettings
from server.tasks.sampling import answer_samples
from server.tasks.work import Body, Work, WorkKind
from tests.server.test_samples import STORE

TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}
#: Of the long run.
NUM_CASES = int(os.environ.get("AUTOSHARD_FUZZ_CASES", "10000"))


@pytest.fixture(scope="module")
def few():
    """The bytes of a file of 20 real samples."""
    samples = KERNEL_SAMPLES.read_file(KERNEL_SAMPLES.files(STORE)[0])[:20]
    return KERNEL_SAMPLES.file_content(samples)


def damaged(content, rng):
    """A text with other, fewer or more bytes; half of the time near its end, where Parquet says what there is."""
    data = bytearray(content)
    first = max(0, len(data) - 4000) if rng.random() < 0.5 else 0
    match rng.randrange(3):
        case 0:
            for _ in range(rng.choice((1, 2, 5, 20))):
                data[rng.randrange(first, len(data))] = rng.randrange(256)
        case 1:
            start = rng.randrange(first, len(data))
            del data[start : start + rng.randrange(1, 200)]
        case 2:
            data[rng.randrange(first, len(data)) :][:0] = rng.randbytes(rng.randrange(1, 50))
    return bytes(data)


def values_of(document, path=()):
    """Places of all values in a document."""
    yield path
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from values_of(value, (*path, key))


ODD = (None, True, -1, 0, 1 << 62, 1e308, -0.5, "", "x" * 600, "\0", "../../etc/passwd", [], {}, [[]], {"": {}})


def odd(document, rng):
    """A body in which a value is another."""
    changed = json.loads(json.dumps(document))
    *parents, last = rng.choice([path for path in values_of(changed) if path])
    place = changed
    for key in parents:
        place = place[key]
    if rng.random() < 0.2:
        del place[last]
    else:
        place[last] = rng.choice(ODD)
    return json.dumps(changed).encode()


def sent(settings, kind, body, *stored):
    reply = answered(Work(kind=kind, body=Body(body), stored=stored, request_id="0"), settings)
    assert str(settings.data) not in reply.body.decode()
    assert "Traceback" not in reply.body.decode()
    return reply.status


def check_samples(few, settings, num_cases):
    """Sends damaged files; returns the statuses."""
    rng, statuses = random.Random(0), set()
    for _ in range(num_cases):
        statuses.add(sent(settings, WorkKind.SAMPLES, b"{}", damaged(few, rng)))
    left = [file for file in settings.data.rglob("*") if file.is_file() and "samples" not in file.parts]
    assert {file.parent for file in left} <= {settings.quarantine_folder}
    assert sorted(file.stem for file in left if file.suffix == ".json") == sorted(
        file.stem for file in left if file.suffix == ".parquet"
    )
    assert len(left) <= 128
    return statuses


def test_damaged_files_of_samples_are_refused(few, tmp_path):
    settings = ServerSettings(data=tmp_path)
    assert sent(settings, WorkKind.SAMPLES, b"{}", few) == 200
    assert check_samples(few, settings, 60) <= {200, 400, 422}
    assert sent(settings, WorkKind.SAMPLES, b"{}", b"PAR1" + bytes(200) + b"\x10\0\0\0PAR1") == 400


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_damaged_files_of_samples_are_refused(few, tmp_path):
    assert check_samples(few, ServerSettings(data=tmp_path), NUM_CASES) <= {200, 400, 422}


def example_bodies(settings):
    """A body of each kind of work, and the stored plans that it is about."""
    small = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy", "time_limit_s": 0.1}
    answer = answered(Work(kind=WorkKind.PLAN, body=Body(json.dumps(small).encode())), settings).body
    plan = json.loads(answer)["plan"]
    given = {"tables": plan["tables"], "topology": plan["topology"]}
    yield WorkKind.PLAN, {**small, **given, "options": {}, "seed": 1}, ()
    yield WorkKind.VALIDATE, given, ()
    yield WorkKind.CHECK_PLAN, {**small, **given}, ()
    yield WorkKind.CHECK_COMPARISON, {**given, "planners": ["cost-greedy"]}, ()
    yield WorkKind.EVALUATE, {"plan": plan}, ()
    yield WorkKind.REPLAN, {"batch_size": 4096, "topology": plan["topology"], "time_limit_s": 0.1}, (answer,)
    yield WorkKind.RUN, {"steps_ms": [1.0, 2.0], "pooling_factors": {"c0": 1.0}}, (answer,)
    yield WorkKind.EXPLAIN, {"tables": ["c0"], "risk": "mean"}, (answer,)


def check_bodies(settings, num_cases):
    rng, bodies, found = random.Random(0), list(example_bodies(settings)), {}
    for _ in range(num_cases):
        kind, body, stored = rng.choice(bodies)
        text = odd(body, rng) if rng.random() < 0.7 else damaged(json.dumps(body).encode(), rng)
        found.setdefault(sent(settings, kind, text, *stored), text)
    return found


def test_odd_bodies_are_refused(tmp_path):
    assert {status for status in check_bodies(ServerSettings(data=tmp_path), 60) if status >= 500} == set()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_odd_bodies_are_refused(tmp_path):
    found = check_bodies(ServerSettings(data=tmp_path), NUM_CASES)
    assert {status: text for status, text in found.items() if status >= 500} == {}


def test_a_disk_that_takes_no_samples_is_named_and_nothing_is_left(few, tmp_path):
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "samples").write_text("no folder")
    with pytest.raises(StorageError) as caught:
        answer_samples(None, type("Context", (), {"settings": ServerSettings(data=tmp_path)}), few)
    assert str(tmp_path) not in problem_of(caught.value).detail
    assert not list((tmp_path / "quarantine").iterdir())


def test_no_problem_tells_where_the_service_keeps_its_files(tmp_path):
    try:
        (tmp_path / "none").read_text()
    except OSError as error:
        raised = FormatError(f"cannot be read: {error}", source="body")
        raised.__cause__ = error
    assert str(tmp_path) not in problem_of(raised).detail
    assert problem_of(FormatError("is wrong", field="x", source=f"{tmp_path}/y")).detail == "x: is wrong"
    assert problem_of(FormatError("is wrong", field="x", source="body")).detail == "body: x: is wrong"
    hidden = problem_of(ExecutionError(f"{tmp_path} is full"))
    assert (hidden.status, str(tmp_path) in hidden.detail) == (500, False)


def all_errors(kind=AutoshardError):
    for sub in kind.__subclasses__():
        yield sub
        yield from all_errors(sub)


def test_every_error_of_the_tree_is_a_problem_of_its_own(monkeypatch):
    monkeypatch.setattr("server.problems._log.error", lambda *_, **__: None, raising=False)
    for kind in set(all_errors()):
        try:
            error = kind("what is wrong")
        except TypeError:  # has more arguments
            continue
        assert 400 <= problem_of(error).status < 600, kind


def test_an_exception_of_a_handler_is_logged_with_its_request_and_told_without_it(own_service, tmp_path):
    service = own_service("--workers", "1")
    with service.client() as client:
        plan_id = client.post("/v1/plans", json=TASK).json()["id"]
        with contextlib.closing(sqlite3.connect(tmp_path / "service.sqlite")) as database, database:
            database.execute("UPDATE plan_documents SET answer = x'00'")
        answer = client.get(f"/v1/plans/{plan_id}", headers={"X-Request-ID": "this-one"})
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:autoshard:problem:internal")
    assert "zlib" not in answer.text
    assert service.stop() == 0
    (line,) = [line for line in service.log() if line["level"] == "error"]
    assert line["request_id"] == "this-one"
    assert "zlib.error" in line["exception"]


def test_the_bodies_of_jobs_have_limits_that_fit_them():
    for kind, body in JOB_BODIES.items():
        assert body.max_bytes == (16 << 20 if kind in (JobKind.PLAN, JobKind.COMPARE) else 4 << 10)
