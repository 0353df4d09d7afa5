"""Calibrates predicted steps on runs of the runtime.

Shape suffixes: R ranks, S rows of a fit, F features of a part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autoshard.core import CostModels, Estimate, ShardingPlan, TableSet, Topology
from autoshard.core.errors import ModelError
from autoshard.core.step import PART_FEATURES, Coefficients, Overlap, StepPart, plain_coefficients
from autoshard.evaluation.evaluate import price_step
from autoshard.evaluation.step_price import StepPrice
from autoshard.planning import plan_costs
from autoshard.runtime.processes.launch import LOCAL, Launcher
from autoshard.trials import MeasuredStep, Trial, plan_trial, run_trials
from costmodel.step.model import CalibratedStep, StepCard
from costmodel.step.regression import FloatArray, fit_nonnegative

#: Runs that a calibration needs; a part has at most five coefficients, all drawn to their priors.
MIN_RUNS = 4
#: Pull to the models as they are, as `fit_nonnegative` takes it: a little, and as much as a run out of so many.
_PULL, _PULL_RUNS = 0.005, 0.1
#: What the runtime's thin engine overlaps.
_ENGINE, _OVERLAP = "thin", Overlap.NONE
_RUNS_PER_LAUNCH = 5
#: A part's relative interval may be that of a model that is far off before the calibration, or of none at all; a
#: step's is at least this wide before it is scaled.
_SMALLEST_HALF_WIDTH = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """A plan, the models that price it, and what it took."""

    plan: ShardingPlan
    costs: CostModels
    measured: MeasuredStep


def calibrate_step(runs: Sequence[CalibrationRun], device: str) -> CalibratedStep:
    """Fits the weights of every part's features to runs, near the models as they are.

    Raises:
        ModelError: If there are fewer than `MIN_RUNS`, or a time is not finite.
    """
    if len(runs) < MIN_RUNS:
        raise ModelError(f"needs at least {MIN_RUNS} runs to calibrate on, got {len(runs)}", field="runs")
    if not all(0 < run.measured.step_ms < math.inf for run in runs):
        raise ModelError("must be finite and above 0 in every run", field="step_ms")
    plain = [replace(run, costs=replace(run.costs, step=None)) for run in runs]
    prices = [price_step(run.plan, run.costs) for run in plain]
    whole = _fit_all(plain, prices, device)
    steps, offsets = _held_out(plain, prices, device), []
    for run, step in zip(runs, steps, strict=True):
        error_ms = run.measured.step_ms - step.value
        width = step.high - step.value if error_ms > 0 else step.value - step.low
        offsets.append(abs(error_ms) / max(width, _SMALLEST_HALF_WIDTH))
    error_S = _errors(runs, steps)
    card = replace(
        whole.card,
        interval_scale=_interval_scale(np.array(offsets)),
        metrics={
            "num_runs": float(len(runs)),
            "median_error": float(np.median(error_S)),
            "mean_error": float(error_S.mean()),
            "share_within_15_percent": float(np.mean(error_S <= 0.15)),
        },
    )
    return CalibratedStep(whole.fitted, card)


def step_errors(runs: Sequence[CalibrationRun], device: str, model: CalibratedStep | None = None) -> FloatArray:
    """Relative errors of steps of runs, shape (S,): priced by a model, else each by a calibration on the other runs."""
    if model is not None:
        return _errors(runs, [price_step(run.plan, replace(run.costs, step=model)).step_ms for run in runs])
    plain = [replace(run, costs=replace(run.costs, step=None)) for run in runs]
    return _errors(runs, _held_out(plain, [price_step(run.plan, run.costs) for run in plain], device))


def _held_out(runs: Sequence[CalibrationRun], prices: Sequence[StepPrice], device: str) -> list[Estimate]:
    """The step of each run, calibrated on the others."""
    steps = []
    for out, run in enumerate(runs):
        kept = [index for index in range(len(runs)) if index != out]
        model = _fit_all([runs[index] for index in kept], [prices[index] for index in kept], device)
        steps.append(price_step(run.plan, replace(run.costs, step=model)).step_ms)
    return steps


def _errors(runs: Sequence[CalibrationRun], steps: Sequence[Estimate]) -> FloatArray:
    ratios = [step.value / run.measured.step_ms for run, step in zip(runs, steps, strict=True)]
    return np.abs(np.array(ratios) - 1.0)


def run_calibration(
    trials: Sequence[Trial],
    pool: TableSet,
    topology: Topology,
    *,
    registry: Path | None = None,
    steps: int = 20,
    repeats: int = 2,
    advance: Callable[[int], None] = lambda _: None,
    launcher: Launcher = LOCAL,
) -> tuple[CalibrationRun, ...]:
    """Plans and runs trials on this machine, one process per rank of the topology.

    Args:
        trials: What to run.
        pool: Tables that tasks are drawn from.
        topology: Ranks; its device is what the models are of.
        registry: Models that price the plans; None for the default.
        steps: Measured steps of each run.
        repeats: Runs of each plan, of which the quickest counts.
        advance: Told how many runs have just ended.
        launcher: Nodes that the processes run on.

    Raises:
        AutoshardError: If a plan cannot be made or executed.
    """
    runs: list[CalibrationRun] = []
    device = "cpu" if topology.device == "cpu" else "cuda"
    for start in range(0, len(trials), _RUNS_PER_LAUNCH):
        chunk = trials[start : start + _RUNS_PER_LAUNCH]
        plans = [plan_trial(trial, pool, topology, registry) for trial in chunk]
        seeds = [trial.seed for trial in chunk]
        measured = run_trials(plans, seeds, steps=steps, repeats=repeats, device=device, launcher=launcher)
        for plan, one in zip(plans, measured, strict=True):
            runs.append(CalibrationRun(plan=plan, costs=plan_costs(plan, registry), measured=one))
        advance(len(chunk))
    return tuple(runs)


def _fit_all(runs: Sequence[CalibrationRun], prices: Sequence[StepPrice], device: str) -> CalibratedStep:
    rows: dict[tuple[StepPart, str], list[tuple[FloatArray, float]]] = defaultdict(list)
    for run, price in zip(runs, prices, strict=True):
        for part in StepPart:
            rows[part, price.bases[part]] += _rows(part, price.work[part], run.measured)
    fitted: dict[tuple[StepPart, str], Coefficients] = {}
    for (part, basis), known in rows.items():
        usable = [(features_F, ms) for features_F, ms in known if ms > 0]
        if basis and usable:
            fitted[part, basis] = _fit(part, usable)
    card = StepCard(
        device=device,
        engine=_ENGINE,
        overlap=_OVERLAP,
        interval_scale=1.0,
        metrics={},
        training={
            "num_runs": len(runs),
            "num_ranks": sorted({run.plan.topology.world_size for run in runs}),
            "models": sorted({name for run in runs for name in _names(run.costs)}),
        },
    )
    return CalibratedStep(fitted, card)


def _rows(part: StepPart, work_RF: FloatArray, measured: MeasuredStep) -> list[tuple[FloatArray, float]]:
    """What a run says about a part: features and milliseconds. Kernels are timed rank by rank."""
    if part in (StepPart.FORWARD_KERNEL, StepPart.BACKWARD_KERNEL):
        column = 0 if part is StepPart.FORWARD_KERNEL else 1
        return [(work_RF[rank], kernels[column]) for rank, kernels in enumerate(measured.kernel_ms_R)]
    slowest = int(work_RF[:, 0].argmax())
    return [(work_RF[slowest], measured.part_ms[part])]


def _fit(part: StepPart, rows: Sequence[tuple[FloatArray, float]]) -> Coefficients:
    features_SF = np.array([features_F for features_F, _ in rows])
    measured_S = np.array([ms for _, ms in rows])
    strength = _PULL + _PULL_RUNS / len(rows)
    weights = fit_nonnegative(features_SF, measured_S, np.array(plain_coefficients(part)), strength)
    assert len(weights) == len(PART_FEATURES[part])
    return tuple(float(weight) for weight in weights)


def _names(costs: CostModels) -> tuple[str, ...]:
    dense = (costs.dense.name,) if costs.dense else ()
    return (costs.kernel.name, costs.comm.name, *dense)


def _interval_scale(offset_S: FloatArray) -> float:
    """What nine of ten offsets are below, the next one counted in: with few runs, all of them."""
    rank = math.ceil(0.9 * (len(offset_S) + 1))
    return float(np.sort(offset_S)[min(rank, len(offset_S)) - 1])
