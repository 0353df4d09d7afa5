"""The benchmark of predicted steps: what it sums up, what it keeps, and a real run of it."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from autoshard.core.errors import FormatError
from autoshard.core.step import StepPart
from autoshard.trials import DEFAULT_PLANNERS, MeasuredStep, draw_trials
from studies.planners.step_runs import RunLog, StepRun, main, summary_of


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


def test_sums_up():
    summary = summary_of([run(11.0, 10.0), run(8.0, 10.0), run(20.0, 10.0, low_ms=15.0), run(10.0, 10.0)])
    assert (summary.num_runs, summary.share_within, summary.coverage) == (4, 0.5, 0.75)
    assert summary.median_error == pytest.approx(0.15)
    assert summary.bias == pytest.approx(0.05)
    share, error, bias = summary.parts["input"]
    assert (share, error, bias) == (pytest.approx(1 / 6), pytest.approx(0.15), pytest.approx(0.05))


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


@pytest.mark.smoke
def test_keeps_what_is_done(tmp_path):
    file, settings = tmp_path / "runs.json", {"seed": 0, "batch_sizes": (64,)}
    RunLog(file, settings).append([run(11.0, 10.0)])
    again = RunLog(file, settings)
    assert again.runs == [run(11.0, 10.0)]
    again.append([run(1.0, 2.0)])
    assert len(RunLog(file, settings).runs) == 2
    with pytest.raises(FormatError, match="settings: are those of another benchmark"):
        RunLog(file, {"seed": 1})
    file.write_text("{")
    with pytest.raises(FormatError, match=r"runs\.json: is no file of step runs"):
        RunLog(file, settings)


@pytest.mark.timeout(180)
def test_real_plans(tmp_path):
    file = tmp_path / "runs.json"
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
        "--output": file,
    }
    import typer

    program = typer.Typer()
    program.command()(main)
    words = [str(word) for pair in options.items() for word in pair]
    outcome = CliRunner().invoke(program, [*words, "--json"])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(outcome.stdout)
    assert [one["trial"]["planner"] for one in result["runs"]] == ["random", "lopsided"]
    assert all(one["measured_ms"] > 0 and one["predicted_ms"] > 0 for one in result["runs"])
    assert set(result["summary"]["parts"]) <= set(StepPart)
    # What is done is not run again.
    assert json.loads(CliRunner().invoke(program, [*words, "--json"]).stdout) == result
