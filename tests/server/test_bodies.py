"""Bodies of requests: none is parsed between the turns of other requests."""

import asyncio
import contextlib
import json

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from autoshard.api import (
    JOB_BODIES,
    ComparisonBody,
    PromotionBody,
    RequestBody,
    RollbackBody,
    ScheduleBody,
)
from autoshard.core.errors import FormatError
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.storage.location import DATABASE_VARIABLE
from server.storage.storage import open_storage
from server.tasks.reply import Reply
from server.web.app import create_app

PLACES = {"plan_id": "sha256:" + "0" * 64, "kind": "cost", "name": "cpu"}
#: Bodies that the service itself parses; planning processes parse all others.
PARSED_HERE = {*JOB_BODIES.values(), PromotionBody, RollbackBody, ScheduleBody}


@pytest.fixture
def app(tmp_path, monkeypatch):
    async def answer(*_):
        return Reply(status=422, body=b"{}")

    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    monkeypatch.setattr(WorkerPool, "check_room", lambda *_: None)
    monkeypatch.setattr(WorkerPool, "answer", answer)
    settings = ServerSettings(data=tmp_path)
    pool = WorkerPool(settings, on_ready=lambda: None, on_failure=lambda _: None)
    with contextlib.closing(open_storage()) as storage:
        yield TestClient(
            create_app(settings, pool, storage), base_url="http://localhost", raise_server_exceptions=False
        )


def is_on_loop():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def operations(document):
    """Paths and bodies of all requests with a JSON body."""
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
            yield path.format_map(PLACES), document["components"]["schemas"][name].get("examples", [{}])[0]


def test_no_body_is_parsed_between_the_turns_of_other_requests(app, monkeypatch):
    loads, parse = json.loads, RequestBody.parse.__func__
    on_loop, parsed = [], set()

    def watched_loads(text, **options):
        if is_on_loop():
            on_loop.append(text)
        return loads(text, **options)

    def watched_parse(kind, document):
        parsed.add(kind)
        if is_on_loop():
            on_loop.append(document)
        return parse(kind, document)

    found = list(operations(app.get("/openapi.json").json()))
    monkeypatch.setattr(json, "loads", watched_loads)
    monkeypatch.setattr(RequestBody, "parse", classmethod(watched_parse))
    for path, body in found:
        answer = app.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code not in (400, 405, 415), (path, answer.text)
    assert len(found) == 17
    assert parsed == PARSED_HERE
    assert on_loop == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"tables": [1.5] * 200_000, "topology": "cpu-8", "planners": ["neo"]},
            "tables: input should be a valid string",
        ),
        ({"tables": "a", "topology": "b", "planners": [1] * 200_000}, "planners: input should be a valid string"),
        (
            {"tables": "a", "topology": "b", "planners": ["neo"], "options": {"neo": {str(n): [] for n in range(129)}}},
            "options: must have at most 128 keys, got 129",
        ),
    ],
)
def test_of_many_faults_the_first_is_told(body, message, monkeypatch):
    found = []
    errors = ValidationError.errors
    monkeypatch.setattr(ValidationError, "errors", lambda self, **how: found.extend(errors(self, **how)) or found)
    with pytest.raises(FormatError) as caught:
        ComparisonBody.parse(body)
    assert str(caught.value) == message
    assert len(found) < 20
