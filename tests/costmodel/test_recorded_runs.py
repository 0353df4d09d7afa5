"""Runs that `autoshard run --append-to` recorded, and steps that are calibrated on them."""

import json
import shutil
from dataclasses import replace

import pytest

from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.core.step import Overlap, StepPart
from autoshard.formats import write_plan
from autoshard.formats.documents.machine_json import MACHINE
from autoshard.formats.metasyn import metasyn
from autoshard.hardware import this_processor
from autoshard.runtime import RunRequest
from autoshard.runtime.results import VirtualRun
from autoshard.runtime.run_store import append_run, read_runs
from autoshard.whatif.trials import draw_trials, local_topology, plan_trial
from costmodel.step.calibration import recorded_runs
from tests.costmodel.test_step_command import train
from tests.ranks import executed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A store of four runs of two processes, and one that predictions are not of."""
    folder = tmp_path_factory.mktemp("runs")
    trials = draw_trials(4, seed=0, planners=["cost-greedy", "random"], num_tables=(8, 8), batch_sizes=[64, 128])
    topology = local_topology("cpu", 2, 1 << 30)
    plans = [plan_trial(trial, metasyn().scaled(4096), topology) for trial in trials]
    requests = []
    for number, plan in enumerate(plans):
        write_plan(plan, folder / f"{number}.json")
        requests.append(RunRequest(plan_path=str(folder / f"{number}.json"), steps=3, batch_size=256, device="cpu"))
    results = executed(requests, 2)
    assert all(rank.memory_bytes > 0 for result in results for rank in result.ranks)
    for plan, result in zip(plans, results, strict=True):
        append_run(folder / "store", plan, result)
    append_run(folder / "store", plans[0], replace(results[0], overlap=Overlap.PIPELINED))
    return folder / "store"


def test_a_store_gives_back_what_was_measured_and_whether_predictions_are_of_it(runs):
    found = list(read_runs(runs))
    assert sorted(one.is_comparable for one in found) == [False, True, True, True, True]
    assert {one.plan.tables.batch_size for one in found} == {256}
    measured = recorded_runs(runs, "cpu")
    assert [run.measured.step_ms for run in measured] == [one.result.step_ms for one in found if one.is_comparable]
    assert recorded_runs(runs, "a100") == ()


def test_runs_in_virtual_time_are_not_mixed_with_others(runs, tmp_path):
    records = [one for one in read_runs(runs) if one.is_comparable]
    virtual = VirtualRun(wire="alpha-beta", num_cores=2, row_share=1.0)
    for number, one in enumerate(records):
        result = replace(one.result, virtual=virtual if number < 2 else None, step_ms=100.0 + number)
        append_run(tmp_path / "store", one.plan, result)
    found = recorded_runs(tmp_path / "store", "cpu")
    assert sorted(run.measured.step_ms for run in found) == [100.0, 101.0]


def test_runs_of_another_machine_are_left_out(runs, tmp_path, capsys):
    shutil.copytree(runs, tmp_path / "store")
    pairs = zip(sorted((tmp_path / "store").iterdir()), read_runs(runs), strict=True)
    files = [file for file, one in pairs if one.is_comparable]
    for file, change in zip(files, ({"core": "other-1-1"}, None), strict=False):
        document = json.loads(file.read_text(encoding="utf-8"))
        machine = document.pop("machine")
        assert MACHINE.read(machine, "machine") == this_processor()
        if change:  # the second one is a record of before, which says no machine
            document["machine"] = machine | change
        file.write_text(json.dumps(document), encoding="utf-8")
    found = recorded_runs(tmp_path / "store", "cpu")
    assert sorted(one.machine == this_processor() for one in found) == [False, True, True]
    assert "1 of 4 runs are left out, which other machines made" in capsys.readouterr().err
    for file in files[2:]:
        file.unlink()
    (elsewhere,) = (one for one in recorded_runs(tmp_path / "store", "cpu") if one.machine is not None)
    assert elsewhere.machine.core == "other-1-1"


def test_steps_are_calibrated_on_a_store(runs, tmp_path):
    outcome = train("--runs", runs, "--registry", tmp_path / "registry", "--device", "cpu")
    assert outcome.exit_code == 0, outcome.output
    (model,) = json.loads(outcome.stdout[outcome.stdout.index("{") :])["models"]
    assert (model["kind"], model["training"]["num_runs"]) == ("step", 4)
    (card,) = (tmp_path / "registry").rglob("card.json")
    assert MACHINE.read(json.loads(card.read_text(encoding="utf-8"))["measured_on"], "measured_on") == this_processor()


def test_runs_in_real_time_do_not_add_to_those_in_virtual_time(runs, tmp_path):
    record = next(one for one in read_runs(runs) if one.is_comparable)
    virtual = VirtualRun(wire="alpha-beta", num_cores=2, row_share=1.0)
    ranks = [replace(rank, work_ms=dict.fromkeys(StepPart, 1.0)) for rank in record.result.ranks]
    append_run(tmp_path / "store", record.plan, replace(record.result, virtual=virtual, ranks=tuple(ranks)))
    outcome = train("--runs", tmp_path / "store", "--calibrate", "4", "--registry", tmp_path / "registry")
    assert isinstance(outcome.exception, InvalidOptionError)
    assert "holds runs in virtual time: calibrate on either" in str(outcome.exception)


def test_a_store_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SampleStoreError, match=r"nowhere: is no folder of runs; `autoshard run --append-to` makes one"):
        list(read_runs(tmp_path / "nowhere"))
    (tmp_path / "torn.run.json").write_text('{"schema": "autosh', encoding="utf-8")
    with pytest.raises(SampleStoreError, match=r"torn.run.json: cannot be read: "):
        list(read_runs(tmp_path))
    (tmp_path / "torn.run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SampleStoreError, match=r"torn.run.json: must be of schema autoshard.run-record/1"):
        list(read_runs(tmp_path))
