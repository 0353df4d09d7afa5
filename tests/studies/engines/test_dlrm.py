"""TorchRec's DLRM trained by TorchRec and by our engine, and what recording costs."""

import json

import pytest

from studies.engines.dlrm import study
from studies.engines.dlrm.setting import DlrmSetting, Round, TrainedWay, Way

SMALL = ["--scale", "4096", "--batch-size", "32", "--nproc", "2", "--rounds", "1", "--steps", "2", "--plan-s", "0.2"]


@pytest.mark.smoke
def test_rounds_are_kept_and_summed_up(tmp_path, run_study, monkeypatch, capsys):
    """Ways are compared within a round: in the second one, the machine is half as fast."""
    taken = []

    def run_round(_setting, number):
        taken.append(number)
        ways = [
            TrainedWay(
                way=way,
                layout="26 table_wise",
                plan_s=1.0,
                samples_per_s=(1000.0 + 500 * index) / (1 + number),
                losses=(0.7, 0.6 + 1e-6 * index),
            )
            for index, way in enumerate(Way)
        ]
        return Round(number=number, ways=tuple(ways))

    monkeypatch.setattr(study, "run_round", run_round)
    for rounds in ("1", "2"):
        assert run_study("dlrm", *SMALL[:-4], "--rounds", rounds, "--parts", tmp_path, "--json") == 0
        document = json.loads(capsys.readouterr().out)
    assert taken == [0, 1]
    assert document["schema"] == "autoshard.dlrm/1"
    assert [way["way"] for way in document["ways"]] == list(Way)
    assert [way["ratio"] for way in document["ways"]] == [1.0, 1.5, 2.0, 2.5]
    assert [way["samples_per_s"] for way in document["ways"]] == [750.0, 1125.0, 1500.0, 1875.0]
    assert document["ways"][3]["loss_difference"] == pytest.approx(3e-6)


@pytest.mark.smoke
def test_batches_that_cannot_be_shared_are_refused(run_study, capsys):
    assert run_study("dlrm", "--batch-size", "30", "--nproc", "4") == 2
    assert "--batch-size: must be a multiple of the 4 processes" in capsys.readouterr().err


@pytest.mark.smoke
def test_each_round_starts_with_another_way(monkeypatch):
    jobs = []

    class Started:
        def __enter__(self):
            return None, iter(())

        def __exit__(self, *_):
            return False

    monkeypatch.setattr(
        study, "running_workers", lambda _module, job, *_args, **_settings: jobs.append(job) or Started()
    )
    for number in range(4):
        study.run_round(DlrmSetting(), number)
    assert sorted(job["ways"][0] for job in jobs) == sorted(Way)
    assert all(sorted(job["ways"]) == sorted(Way) for job in jobs)


def test_all_ways_have_the_same_losses(tmp_path, run_study, capsys):
    assert run_study("dlrm", *SMALL, "-o", tmp_path) == 0
    assert "DLRM of TorchRec on criteo-kaggle" in capsys.readouterr().out
    document = json.loads((tmp_path / "dlrm.json").read_text())
    for way in document["ways"]:
        assert way["samples_per_s"] > 0
        assert way["loss_difference"] < 1e-5


def test_what_recording_adds_is_measured(run_study, capsys):
    small = ["--batch-size", "16", "--scale", "4096", "--every", "3", "--rounds", "2"]
    assert run_study("recorder", *small, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["every"], found["rounds"], found["num_counted"]) == (3, 2, 2)
    assert found["step_ms"] > 0
    assert found["longer_low_ms"] <= found["longer_ms"] <= found["longer_high_ms"]
    taken_ms = found["counted_ms"] + 2 * found["passed_ms"]
    assert found["share"] == pytest.approx(taken_ms / (3 * found["step_ms"]))
