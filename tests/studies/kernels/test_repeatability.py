"""The same sets over and over: how far apart, before and after the machine's drift is divided out."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from autoshard.core.errors import FormatError, InvalidOptionError
from bench.kernels.harness import Settings
from bench.measuring.devices import find_device
from studies.frame import Machine, read_document
from studies.kernels.repeatability import (
    SCHEMA,
    Repeatability,
    Run,
    Series,
    measure_repeatability,
    repeatability_result,
    settings_of,
    verdicts,
)

TIMES_S = tuple(np.linspace(5, 600, 200).tolist())
DRIFT_N = 1 + 0.1 * np.sin(np.array(TIMES_S) / 60)  # slowness of a machine


def drifting(num_tables, noise, reference_drifts=True, seed=0):
    """Synthetic measurements on a drifting machine, forward and backward."""
    rng = np.random.default_rng(seed)
    forward_ms, backward_ms = (tuple((ms * DRIFT_N * rng.normal(1, noise, 200)).tolist()) for ms in (3.0, 7.0))
    reference_ms = tuple((10 * DRIFT_N if reference_drifts else np.full(200, 10.0)).tolist())
    return Series(
        num_tables=num_tables,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        reference_forward_ms=reference_ms,
        reference_backward_ms=reference_ms,
        spread=(0.02,) * 200,
    )


def synthetic(*sets, bound=0.03):
    machine = Machine(
        device="cpu",
        device_name="a processor",
        num_cores=2,
        load_average=0.5,
        torch_version="1",
        fbgemm_version="1",
        autoshard_version="1",
        git_commit="",
        command="python -m studies repeatability",
        measured_at=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    )
    run = Run(settings="collecting", num_rounds=3, group_sets=48, elapsed_s=TIMES_S, sets=sets)
    return Repeatability(machine=machine, seconds=600.0, bound=bound, runs=(run, replace(run, settings="usual")))


def test_drift_is_divided_out_and_noise_stays():
    found = synthetic(drifting(8, 0.004), drifting(1, 0.08), drifting(4, 0.004, reference_drifts=False))
    quiet, noisy, blind, *usual = verdicts(found)
    assert quiet.raw.plain > 0.06
    assert quiet.corrected.plain < 0.005
    assert quiet.corrected.robust < 0.005
    assert noisy.corrected.plain == pytest.approx(0.08 * (0.3**2 + 0.7**2) ** 0.5, rel=0.15)
    assert blind.corrected.plain == pytest.approx(blind.raw.plain)
    assert [row.is_met for row in (quiet, noisy, blind)] == [True, False, False]
    assert quiet.median_ms == pytest.approx(10.0 * np.median(DRIFT_N), rel=0.01)
    assert quiet.drift.range == pytest.approx(1.1 / 0.9 - 1, rel=0.01)
    assert [row.settings for row in usual] == ["usual"] * 3


def test_the_report_says_met_or_missed_beside_the_bound():
    found = synthetic(drifting(8, 0.004), drifting(1, 0.08))
    result = repeatability_result(found)
    (section,) = result.page.sections
    assert [line[-2:] for line in section.tables[0].lines] == [("3.0%", "met"), ("3.0%", "missed")] * 2
    assert "2 of 4 keep the bound" in section.caption
    assert [fact[0] for fact in result.page.facts] == ["8 tables, collecting settings", "8 tables, usual settings"]
    assert [row["is_met"] for row in result.document["verdicts"]] == [True, False] * 2
    wide = repeatability_result(replace(found, bound=0.5))
    assert "4 of 4 keep the bound" in wide.page.sections[0].caption


def test_the_chart_shows_raw_and_corrected_over_time():
    found = synthetic(drifting(8, 0.004), drifting(1, 0.08))
    traces = repeatability_result(found).images[""].data
    lines = {trace.name: np.asarray(trace.y) for trace in traces if trace.type == "scatter"}
    assert np.ptp(lines["raw"]) > 0.18
    assert np.ptp(lines["corrected"]) < 0.03
    bars = {trace.name: list(trace.y) for trace in traces if trace.type == "bar"}
    rows = sorted(verdicts(found), key=lambda row: (row.settings, row.num_tables))
    assert bars["corrected"] == [row.corrected.plain for row in rows]


def test_sets_of_all_sizes_are_measured_with_both_settings(quick_settings):
    device = find_device("cpu")
    kinds = {"few": quick_settings, "many": replace(quick_settings, max_group_sets=6)}
    passed = []
    found = measure_repeatability(device, kinds, num_tables=2, seconds=0.01, scale=16384, advance=passed.append)
    assert [run.settings for run in found.runs] == ["few", "many"]
    for run in found.runs:
        assert [series.num_tables for series in run.sets] == [2, 1, 4, 15]
        assert len(run.elapsed_s) == 3
        assert list(run.elapsed_s) == sorted(run.elapsed_s)
        assert all(min(series.raw_ms) > 0 for series in run.sets)
    assert len(passed) == 6
    assert sum(passed) == pytest.approx(found.seconds)
    assert found.bound == 0.03


def test_the_settings_are_those_that_samples_are_measured_with():
    device = find_device("cpu")
    assert settings_of(device) == {
        "collecting": Settings.for_collecting(device),
        "usual": Settings.for_device(device),
    }


@pytest.mark.smoke
def test_the_command_reports_and_reads_its_numbers_again(tmp_path, quick_settings, monkeypatch, capsys, run_study):
    monkeypatch.setattr("studies.kernels.repeatability.settings_of", lambda _: {"collecting": quick_settings})
    monkeypatch.setenv("BROWSER_PATH", "/nowhere")  # images are drawn in another test
    options = ("--seconds", 0.01, "--tables", 4, "--scale", 16384, "--device", "cpu")
    assert run_study("repeatability", "--output-dir", tmp_path / "a", *options) == 1
    captured = capsys.readouterr()
    assert "corrected CoV" in captured.out
    assert "BROWSER_PATH must name" in captured.err
    numbers = tmp_path / "a" / "repeatability.json"
    found = read_document(numbers, Repeatability, SCHEMA)
    assert [series.num_tables for series in found.runs[0].sets] == [4, 1, 15]
    assert "--tables 4" in found.machine.command
    assert run_study("repeatability", "--output-dir", tmp_path / "b", "--from", numbers, "--json") == 1
    assert json.loads(capsys.readouterr().out) == json.loads(numbers.read_text())
    assert {file.name for file in (tmp_path / "b").iterdir()} == {"repeatability.json", "repeatability.html"}


def test_options_out_of_range_are_refused(quick_settings):
    device, kinds = find_device("cpu"), {"few": quick_settings}
    with pytest.raises(InvalidOptionError, match=r"tables: must be in \[1, 856\], got 0"):
        measure_repeatability(device, kinds, num_tables=0)
    with pytest.raises(InvalidOptionError, match="seconds: must be above 0, got 0"):
        measure_repeatability(device, kinds, seconds=0.0)


def test_numbers_that_do_not_fit_together_are_refused():
    series = drifting(1, 0.01)
    with pytest.raises(FormatError, match="spread: must be 200 numbers"):
        replace(series, spread=(0.1,))
    with pytest.raises(FormatError, match="sets: must hold 3 measurements each"):
        Run(settings="few", num_rounds=3, group_sets=4, elapsed_s=(1.0, 2.0, 3.0), sets=(series,))
    with pytest.raises(FormatError, match="elapsed_s: must be 3 or more, got 1"):
        Run(settings="few", num_rounds=3, group_sets=4, elapsed_s=(1.0,), sets=(series,))
