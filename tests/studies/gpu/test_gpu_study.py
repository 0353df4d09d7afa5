"""The study `gpu`: stages keep to their minutes and leave what they have, on a CPU as on a GPU."""

import contextlib
import json
import time

import numpy as np
import pytest

from autoshard.core.errors import DeviceError
from autoshard.formats.stores.samples import KERNEL_SAMPLES
from bench.measuring.devices import find_device
from costmodel.registry.versions import SHIPPED_VARIABLE
from studies.frame import Machine
from studies.gpu.samples import SAMPLES_FILE, SEEN, SEEN_TEST, UNSEEN_TEST, drawn_sets
from studies.gpu.stages import Found, Outcome, Stage, State, failures, run_stages
from studies.gpu.study import STAGES, gpu_result

pytestmark = pytest.mark.smoke

#: What a run may leave.
MOST_FILES, MOST_BYTES = 8, 16 * 2**20


def stage(name, run, share=1.0):
    return Stage(name=name, share=share, run=run, show=lambda _: (), headline=lambda _: "")


@pytest.fixture
def run(tmp_path):
    device = find_device("cpu")

    def run(*stages, found=None, seconds=300.0):
        found = found or Found(machine=Machine.this(device, "gpu"))
        return run_stages(stages, device, tmp_path, found, deadline=time.monotonic() + seconds)

    return run


def test_time_left_is_dealt_by_shares(run):
    given = []

    def note(visit):
        given.append(visit.seconds_left)
        return {}

    run(stage("a", note, share=1.0), stage("b", note, share=2.0), stage("c", note, share=1.0), seconds=100.0)
    # What the first does not use goes to the others.
    np.testing.assert_allclose(given, [25.0, 66.7, 100.0], atol=1.0)


def test_a_stage_that_fails_leaves_the_others_their_minutes_and_what_it_had(run, tmp_path):
    def fails(visit):
        visit.keep({"half": 1})
        raise RuntimeError("CUDA error: an illegal memory access")

    def refuses(_):
        raise DeviceError("no memory")

    found = run(stage("a", fails), stage("b", refuses), stage("c", lambda _: {"x": 2}))
    assert found == Found.read(tmp_path)
    assert [one.state for one in found.outcomes.values()] == [State.FAILED, State.FAILED, State.DONE]
    assert found.numbers("a") == {"half": 1}
    assert failures(found)["a"] == "RuntimeError: CUDA error: an illegal memory access"
    assert failures(found)["b"].endswith("no memory")


def test_what_a_killed_stage_kept_is_there(run, tmp_path):
    def killed(visit):
        visit.keep({"sets": 5})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stage("a", lambda _: {"x": 1}), stage("b", killed))
    found = Found.read(tmp_path)
    assert {name: one.state for name, one in found.outcomes.items()} == {"a": State.DONE, "b": State.CUT}
    assert found.numbers("b") == {"sets": 5}


@pytest.mark.slow
def test_a_stage_that_goes_on_when_its_time_is_up_is_ended_and_the_page_says_so(run):
    numbers = {"rows": [], "topology": "h100", "cost_model": "analytic"}

    def goes_on(visit):
        visit.keep(numbers)
        while True:
            with contextlib.suppress(Exception):  # as what is measured might
                time.sleep(60)

    found = run(stage("plans", goes_on), stage("b", lambda _: {"x": 1}), seconds=6.0)
    assert {name: one.state for name, one in found.outcomes.items()} == {"plans": State.CUT, "b": State.DONE}
    assert found.numbers("plans") == numbers
    assert "The stage plans was cut" in gpu_result(found).to_markdown()


def test_a_later_run_does_what_is_left(run):
    asked = []

    def note(visit):
        asked.append(visit.found.numbers("b"))
        return {"x": 1}

    done, cut = Outcome(state=State.DONE, numbers={"y": 3}), Outcome(state=State.CUT, seconds=7.0, numbers={"z": 4})
    found = Found(machine=Machine.this(find_device("cpu"), "gpu"), outcomes={"a": done, "b": cut})
    now = run(stage("a", note), stage("b", note), found=found)
    assert asked == [{"z": 4}]
    assert now.outcomes["a"] == done
    assert now.outcomes["b"].seconds >= 7.0


def test_no_stage_begins_without_time(run):
    found = run(stage("a", lambda _: pytest.fail("no time")), seconds=1.0)
    assert found.outcomes == {}


def test_shares_are_of_one_whole():
    assert len({one.name for one in STAGES}) == len(STAGES)
    assert all(0 < one.share <= 1 for one in STAGES)


def test_sets_are_of_ten_seen_or_unseen_tables_and_of_all_kinds():
    chosen = drawn_sets(find_device("cpu"), seed=0)
    sets = [next(chosen) for _ in range(120)]
    by_source = {name: [one for one in sets if one.source == name] for name in (SEEN, SEEN_TEST, UNSEEN_TEST)}
    assert all(len(one.shards) == 10 for name in (SEEN_TEST, UNSEEN_TEST) for one in by_source[name])
    names = {name: {shard.table for one in some for shard in one.shards} for name, some in by_source.items()}
    assert not (names[SEEN] | names[SEEN_TEST]) & names[UNSEEN_TEST]
    shards = [shard for one in sets for shard in one.shards]
    assert {4, 64, 128, 256} <= {shard.embedding_dim for shard in shards}
    assert {"fp16", "fp32"} <= {str(shard.dtype) for shard in shards}
    assert {"sum", "sequence"} <= {str(shard.pooling) for shard in shards}
    assert min(shard.pooling_factor for shard in shards) < 0.1


def test_a_short_run_leaves_a_page(run_study, tmp_path):
    options = ("--device", "cpu", "--stages", "card", "--minutes", "0.2", "--no-images")
    assert run_study("gpu", *options, "-o", tmp_path) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu.html", "gpu.json", "gpu.md"]
    numbers = json.loads((tmp_path / "gpu.json").read_text())["outcomes"]["card"]["numbers"]
    assert numbers["copy_bytes_per_s"] > 0


@pytest.mark.slow
def test_a_run_of_three_minutes_and_one_that_goes_on(run_study, tmp_path, monkeypatch):
    monkeypatch.delenv(SHIPPED_VARIABLE, raising=False)
    first, second = tmp_path / "first", tmp_path / "second"
    started = time.monotonic()
    assert run_study("gpu", "--device", "cpu", "--minutes", "3", "--no-images", "-o", first) == 0
    assert time.monotonic() - started < 3.5 * 60
    found = Found.read(first)
    assert {name: one.state for name, one in found.outcomes.items()} == {one.name: State.DONE for one in STAGES}
    files = list(first.iterdir())
    assert len(files) <= MOST_FILES
    assert max(file.stat().st_size for file in files) < MOST_BYTES
    before = KERNEL_SAMPLES.read_file(first / SAMPLES_FILE)

    options = ("--device", "cpu", "--minutes", "0.5", "--no-images", "--resume", first, "--stages", "samples")
    assert run_study("gpu", *options, "-o", second) == 0
    after = KERNEL_SAMPLES.read_file(second / SAMPLES_FILE)
    assert after[: len(before)] == before
    assert len(after) > len(before)
