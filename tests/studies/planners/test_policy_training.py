"""The study of the policy's training: what is left out, its parts and tables, and what it refuses."""

import pytest

from autoshard.formats import load_topology
from costmodel import Registry
from policies.network import first_weights
from policies.planning.trained import TrainedPolicy
from policies.training import runs
from policies.training.drawn_tasks import POOLS, TaskKind
from studies.__main__ import main
from studies.planners import policy_training


@pytest.mark.parametrize(
    ("cut", "is_out"),
    [
        ("CPUs", lambda name: load_topology(name).device == "cpu"),
        ("32 and 64 ranks", lambda name: load_topology(name).world_size >= 32),
    ],
)
def test_machines_are_left_out_of_trainings_and_measured_on(cut, is_out):
    inside, left_out = policy_training.halves(cut, TaskKind())
    assert inside.machines
    assert not any(map(is_out, inside.machines))
    assert left_out.machines
    assert all(map(is_out, left_out.machines))
    assert {*inside.machines, *left_out.machines} == set(TaskKind().machines)
    assert inside.pools == left_out.pools == POOLS


def test_a_pool_of_tables_is_left_out():
    inside, left_out = policy_training.halves("MetaSyn's tables", TaskKind())
    assert "metasyn" not in inside.pools
    assert set(left_out.pools) == {"metasyn"}


@pytest.mark.smoke
def test_rows_of_a_table_are_means_over_seeds():
    found = [
        {"training": "a", "done": 0.5, "planned": [0.1, 0.3], "decode": [0.4, 0.4], "loss": 2.0},
        {"training": "a", "done": 0.5, "planned": [0.0, 0.2], "decode": [0.2, 0.2], "loss": 1.0},
        {"training": "b", "done": 1.0, "planned": [0.5], "decode": [0.5]},
    ]
    lines = policy_training.trainings_table(found, ("training", "done"), "").lines
    assert lines[0] == ("a", "50%", "2", "15.00% (10.00% to 20.00%)", "30.00% (20.00% to 40.00%)", "1.500")
    assert lines[1] == ("b", "100%", "1", "50.00% (50.00% to 50.00%)", "50.00% (50.00% to 50.00%)", "")


def test_a_small_study_trains_measures_and_reads_its_parts_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "NUM_VALIDATION", 2)
    monkeypatch.setattr(policy_training, "_NUM_TABLES", (5,))
    options = ["--measure", "stages,transfer", "--seeds", "1", "--num-tasks", "2", "--search-seconds", "0.02"]
    options += ["--updates", "4", "--vtrace-updates", "1", "--num-held-out", "2", "--best-s", "0.05"]
    TrainedPolicy(weights=first_weights(0), training={}).publish(Registry(tmp_path / "models"))
    options += ["--registry", str(tmp_path / "models"), "--parts", str(tmp_path / "parts")]
    assert main(["policy-training", *options]) == 0
    printed = capsys.readouterr().out
    for name in ("| imitation and on | improvement | 100% | 1 |", "V-trace only | vtrace", "without CPUs"):
        assert name in printed
    monkeypatch.setattr(policy_training, "PolicyTraining", None)
    assert main(["policy-training", *options]) == 0
    assert capsys.readouterr().out == printed


def test_bad_input_is_one_line(capsys):
    assert main(["policy-training", "--measure", "stages,all"]) != 0
    assert "--measure: must be any of stages, transfer, fine-tune" in capsys.readouterr().err
