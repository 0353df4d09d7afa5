"""The benchmark of predicted steps: what it sums up, what it keeps, and a real run of it."""

import json
from dataclasses import replace

import pytest

from autoshard.core.step import StepPart
from autoshard.whatif.trials import DEFAULT_PLANNERS, MeasuredStep, draw_trials
from studies.planners.step_runs import StepRun, summary_of


def run(predicted_ms, measured_ms, low_ms=0.0, high_ms=1e9):
    parts = {part.value: (predicted_ms / 6, measured_ms / 6) for part in StepPart}
    return StepRun(
        trial={"num_tables": 8, "batch_size": 64, "planner": "random"},
        predicted_ms=predicted_ms,
        low_ms=low_ms,
        high_ms=high_ms,
        measured_ms=measured_ms,
        spread=0.02,
        parts=parts,
        models={"kernel": "analytic:cpu"},
    )


@pytest.mark.smoke
def test_sums_up():
    summary = summary_of([run(11.0, 10.0), run(8.0, 10.0), run(20.0, 10.0, low_ms=15.0), run(10.0, 10.0)])
    assert (summary.num_runs, summary.share_within, summary.coverage) == (4, 0.5, 0.75)
    assert summary.median_error == pytest.approx(0.15)
    assert summary.bias == pytest.approx(0.05)
    found = summary.parts["input"]
    assert found.share_of_step == pytest.approx(1 / 6)
    assert (found.median_error, found.bias) == (pytest.approx(0.15), pytest.approx(0.05))


def test_trials_are_drawn_alike_and_differ():
    trials = draw_trials(20, seed=1)
    assert draw_trials(10, seed=1) == trials[:10]
    assert draw_trials(20, seed=2) != trials
    assert {trial.planner for trial in trials} == set(DEFAULT_PLANNERS)
    assert all(8 <= trial.num_tables <= 80 for trial in trials)
    assert len({trial.batch_size for trial in trials}) > 1


def test_the_quickest_run_counts():
    runs = [MeasuredStep(step_ms=value) for value in (12.0, 10.0, 15.0)]
    assert MeasuredStep.quickest(runs) == replace(runs[1], spread=0.5)


@pytest.mark.timeout(180)
def test_real_plans(tmp_path, run_study, capsys):
    options = {
        "--runs": 2,
        "--registry": tmp_path,
        "--nproc": 2,
        "--steps": 3,
        "--repeats": 1,
        "--planners": "random,lopsided",
        "--max-tables": 10,
        "--batch-sizes": 64,
        "--scale": 4096,
        "--parts": tmp_path / "parts",
    }
    words = [word for pair in options.items() for word in pair]
    assert run_study("steps", *words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [one["trial"]["planner"] for one in result["runs"]] == ["random", "lopsided"]
    assert all(one["measured_ms"] > 0 and one["predicted_ms"] > 0 for one in result["runs"])
    assert set(result["summary"]["parts"]) <= set(StepPart)
    # What is done is not run again.
    assert run_study("steps", *words, "--json") == 0
    assert json.loads(capsys.readouterr().out) == result
    assert run_study("steps", *words, "--seed", 1) == 2
    assert "parts whose seed is 0, not 1" in capsys.readouterr().err
