"""The study of what the policy is worth: its excesses, its parts, and what it refuses."""

import numpy as np
import pytest

from costmodel import Registry
from policies.network import first_weights
from policies.planning.trained import TrainedPolicy
from studies.__main__ import main
from studies.planners import policy_runs
from studies.planners.limit_runs import LimitTask
from studies.planners.policy_runs import PolicyRun, PolicyStudyOptions, interval, pairs_table, policy_table


def test_numbers_become_tables():
    found = [
        PolicyRun(
            task="80-cpu",
            seed=seed,
            steps_ms={"policy": 1.2 + 0.2 * seed, "auto, 1 s": 1.0},
            cpu_s={"policy": 0.1, "auto, 1 s": 1.0},
            best_ms=1.0,
        )
        for seed in (0, 1)
    ]
    assert found[0].excess("policy") == pytest.approx(0.2)
    assert "policy 20.00%, auto, 1 s 0.00% above 1 ms" in found[0].line
    first, second = policy_table(found).lines
    assert first == ("policy", "2", "30.00%", "20.00% to 40.00%", "30.00%", "40.00%", "0.100")
    assert second[2] == "0.00%"


@pytest.mark.smoke
def test_pairs_are_compared_task_by_task():
    found = [
        PolicyRun(
            task="80-cpu",
            seed=seed,
            steps_ms={"auto, 0.1 s": 1.0, "auto with the policy, 0.1 s": with_ms, "policy": 5.0},
            cpu_s={},
            best_ms=1.0,
        )
        for seed, with_ms in enumerate((0.9, 0.9, 1.2))
    ]
    (line,) = pairs_table(found).lines
    assert line == ("80-cpu", "0.1 s", "3", "+0.00% ± 10.00%", "2", "1")


def test_without_a_search_auto_is_planned_alone(monkeypatch):
    monkeypatch.setattr(policy_runs, "TASKS", {"80-cpu": LimitTask(num_tables=4, num_ranks=2, base="cpu-8", goals={})})
    found = policy_runs.run("80-cpu", 7, PolicyStudyOptions(tasks="80-cpu", limits="0.05", best_s=0.0))
    assert found.steps_ms.keys() == {"auto, 0.05 s", "auto with the policy, 0.05 s"}
    assert found.best_ms == min(found.steps_ms.values())


def test_the_interval_of_a_mean_narrows_with_its_values():
    few, many = (np.random.default_rng(0).normal(1.0, 0.1, size) for size in (5, 500))
    widths = [high - low for low, high in (interval(few), interval(many))]
    assert widths[1] < 0.3 * widths[0]


def test_parts_are_kept_and_read_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(policy_runs, "TASKS", {"80-cpu": LimitTask(num_tables=4, num_ranks=2, base="cpu-8", goals={})})
    TrainedPolicy(weights=first_weights(0), training={}).publish(Registry(tmp_path / "models"))
    options = ["--tasks", "80-cpu", "--seeds", "1", "--limits", "0.05", "--best-s", "0.1"]
    options += ["--registry", str(tmp_path / "models"), "--parts", str(tmp_path / "parts")]
    assert main(["policy", *options]) == 0
    printed = capsys.readouterr().out
    for name in ("cost-greedy", "policy, 64 samples, no burst", "auto, 0.05 s", "auto with the policy, 0.05 s"):
        assert name in printed
    monkeypatch.setattr(policy_runs, "run", lambda *_: pytest.fail("made again"))
    assert main(["policy", *options]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "90-cpu"), "--tasks: must be any of"),
        (("--limits", "0"), "--limits: each must be a number above 0"),
        (("--limits", "soon"), "--limits: each must be a number above 0"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert main(["policy", *arguments]) != 0
    assert message in capsys.readouterr().err
