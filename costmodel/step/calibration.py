"""Calibrates predicted steps on runs of the runtime.

Shape suffixes: R ranks, S rows of a fit, or runs, P plans, F features of a part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoshard import console
from autoshard.core import CostModels, Estimate, ShardingPlan
from autoshard.core.errors import ModelError
from autoshard.core.machine import MeasuredMachine, device_family
from autoshard.core.step import (
    KERNEL_PARTS,
    PART_FEATURES,
    WIRE_FEATURES,
    Coefficients,
    Overlap,
    StepPart,
    plain_coefficients,
)
from autoshard.evaluation.evaluate import price_step
from autoshard.evaluation.step_price import StepPrice
from autoshard.formats import plan_to_json
from autoshard.formats.documents.digest import digest
from autoshard.hardware import is_of_device, this_processor
from autoshard.planning import plan_costs
from autoshard.runtime.processes.launch import LOCAL, Launcher
from autoshard.runtime.run_store import read_runs
from autoshard.whatif.trials import MeasuredStep, run_trials
from costmodel.step.model import CalibratedStep, StepCard, links_of
from costmodel.step.regression import FloatArray, fit_nonnegative

#: Plans that a calibration needs runs of; a part has at most seven coefficients, all drawn to their priors.
MIN_PLANS = 4
#: Pull to the models as they are, as `fit_nonnegative` takes it: a little, and as much as a run out of so many.
_PULL, _PULL_RUNS = 0.005, 0.1
#: What the runtime's thin engine overlaps.
_ENGINE, _OVERLAP = "thin", Overlap.NONE
_RUNS_PER_LAUNCH = 5
_Fitted = dict[tuple[StepPart, str], Coefficients]
#: All other parts, which are fitted together where ranks were not timed in virtual time.
_JOINT_PARTS = tuple(part for part in StepPart if part not in KERNEL_PARTS)
#: What a step takes at least beside its kernels.
_LEAST_MS = 1e-6
#: A part's relative interval may be that of a model that is far off before the calibration, or of none at all; a
#: step's is at least this wide before it is scaled.
_SMALLEST_HALF_WIDTH = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """A plan, the models that price it, what it took, and on whose processors, where that is known."""

    plan: ShardingPlan
    costs: CostModels
    measured: MeasuredStep
    machine: MeasuredMachine | None = None

    @property
    def is_virtual(self) -> bool:
        """Whether ranks were timed in virtual time, so that each says what all its parts take."""
        return self.measured.work_ms_R[0].keys() >= set(_JOINT_PARTS)


def calibrate_step(runs: Sequence[CalibrationRun], device: str) -> CalibratedStep:
    """Fits the weights of every part's features to runs, near the models as they are.

    Errors and the interval are of plans that the fit has not seen: runs of one plan, at whatever batch size, differ
    from the models alike.

    Raises:
        ModelError: If they are of fewer than `MIN_PLANS` plans, in real time and in virtual time, or a time is not
            finite.
    """
    if len({run.is_virtual for run in runs}) > 1:
        raise ModelError("must all be in real time, or all in virtual time", field="runs")
    plans, plan_S = plans_of(runs)
    num_plans = len(plans)
    if num_plans < MIN_PLANS:
        raise ModelError(
            f"needs runs of at least {MIN_PLANS} plans to calibrate on, got {len(runs)} of {num_plans}", field="runs"
        )
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
    error_P = _by_plan(_errors(runs, steps), plan_S)
    card = replace(
        whole.card,
        interval_scale=_interval_scale(np.array(offsets), plan_S),
        training={**whole.card.training, "plans": list(plans)},
        metrics={
            "num_runs": float(len(runs)),
            "num_plans": float(num_plans),
            "median_error": float(np.median(error_P)),
            "mean_error": float(error_P.mean()),
            "share_within_15_percent": float(np.mean(error_P <= 0.15)),
        },
    )
    return CalibratedStep(whole.fitted, card)


def step_errors(runs: Sequence[CalibrationRun], device: str, model: CalibratedStep | None = None) -> FloatArray:
    """Mean relative errors of the steps of each plan, shape (P,): by a model, else by a calibration on the others."""
    if model is not None:
        steps = [price_step(run.plan, replace(run.costs, step=model)).step_ms for run in runs]
    else:
        plain = [replace(run, costs=replace(run.costs, step=None)) for run in runs]
        steps = _held_out(plain, [price_step(run.plan, run.costs) for run in plain], device)
    return _by_plan(_errors(runs, steps), plans_of(runs)[1])


def _held_out(runs: Sequence[CalibrationRun], prices: Sequence[StepPrice], device: str) -> list[Estimate]:
    """The step of each run, calibrated on those of other plans."""
    plan_S = plans_of(runs)[1]
    models = {}
    for plan in np.unique(plan_S).tolist():
        kept = np.flatnonzero(plan_S != plan).tolist()
        models[plan] = _fit_all([runs[index] for index in kept], [prices[index] for index in kept], device)
    return [
        price_step(run.plan, replace(run.costs, step=models[plan])).step_ms
        for run, plan in zip(runs, plan_S.tolist(), strict=True)
    ]


def plans_of(runs: Sequence[CalibrationRun]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """What tells the plans of some runs apart, as cards have it (`plans`), length P, and the plan of each run, (S,)."""
    number_of: dict[str, int] = {}
    plan_S = [number_of.setdefault(_plan_digest(run.plan), len(number_of)) for run in runs]
    return tuple(number_of), np.array(plan_S, dtype=np.int64)


def _plan_digest(plan: ShardingPlan) -> str:
    """What is held where; batch size, prediction and provenance do not count."""
    document = plan_to_json(replace(plan, predicted=None, provenance=None))
    return digest({**document, "tables": {**document["tables"], "batch_size": None}}).removeprefix("sha256:")[:16]


def _by_plan(value_S: FloatArray, plan_S: NDArray[np.int64]) -> FloatArray:
    """Means over the runs of each plan, shape (P,)."""
    means_P: FloatArray = np.bincount(plan_S, value_S) / np.bincount(plan_S)
    return means_P


def _errors(runs: Sequence[CalibrationRun], steps: Sequence[Estimate]) -> FloatArray:
    ratios = [step.value / run.measured.step_ms for run, step in zip(runs, steps, strict=True)]
    return np.abs(np.array(ratios) - 1.0)


def run_calibration(
    plans: Iterable[ShardingPlan],
    seeds: Iterable[int],
    *,
    registry: Path | None = None,
    steps: int = 20,
    repeats: int = 2,
    advance: Callable[[int], None] = lambda _: None,
    launcher: Launcher = LOCAL,
) -> tuple[CalibrationRun, ...]:
    """Runs plans on this machine, one process per rank.

    Args:
        plans: Plans of one topology, whose device is what the models are of; taken one after the other.
        seeds: Of weights and batches, one per plan.
        registry: Models that price the plans; None for the default.
        steps: Measured steps of each run.
        repeats: Runs of each plan, of which the quickest counts.
        advance: Told how many runs have just ended.
        launcher: Nodes that the processes run on.

    Raises:
        AutoshardError: If a plan cannot be executed.
    """
    runs: list[CalibrationRun] = []
    left = zip(plans, seeds, strict=True)
    while chunk := list(islice(left, _RUNS_PER_LAUNCH)):
        device = "cpu" if device_family(chunk[0][0].topology.device) == "cpu" else "cuda"
        chosen, drawn = zip(*chunk, strict=True)
        measured = run_trials(chosen, drawn, steps=steps, repeats=repeats, device=device, launcher=launcher)
        machine = this_processor() if device == "cpu" else None
        for plan, one in zip(chosen, measured, strict=True):
            costs = plan_costs(plan, registry)
            runs.append(CalibrationRun(plan=plan, costs=costs, measured=one, machine=machine))
        advance(len(chunk))
    return tuple(runs)


def recorded_runs(store: Path, device: str, registry: Path | None = None) -> tuple[CalibrationRun, ...]:
    """Runs of a store that predictions are of, see `RunRecord.is_comparable`, priced by the models that there are now.

    Where they are of several machines, those of others than the device's key means are left out, which a line on
    standard error counts, as `of_one_machine` does with samples. Where some are in virtual time, the others are left
    out: processes that share cores take longer.

    Args:
        store: Folder that `append_run` fills.
        device: Key of the device; runs of plans for others are left out.
        registry: Models that price the plans; None for the default.

    Raises:
        SampleStoreError: If the store cannot be read.
    """
    runs = [one for one in read_runs(store) if one.is_comparable and one.plan.topology.device == device]
    machines = [one.machine for one in runs if one.machine is not None]
    is_one = all(one.is_like(machines[0]) for one in machines)
    found = [one for one in runs if one.machine is None or is_one or is_of_device(one.machine, device)]
    if others := len(runs) - len(found):
        console.log(f"{store}: {others:,} of {len(runs):,} runs are left out, which other machines made")
    in_virtual_time = [one for one in found if one.result.virtual is not None]
    return tuple(
        CalibrationRun(
            plan=one.plan,
            costs=plan_costs(one.plan, registry),
            measured=MeasuredStep.of(one.result),
            machine=one.machine,
        )
        for one in in_virtual_time or found
    )


def _fit_all(runs: Sequence[CalibrationRun], prices: Sequence[StepPrice], device: str) -> CalibratedStep:
    fitted = _fit_alone(runs, prices)
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, price in enumerate(prices):
        if not runs[index].is_virtual:
            alike[tuple(price.bases[part] for part in _JOINT_PARTS)].append(index)
    # Runs that were priced by other models are other equations; of parts that two have in common the larger decides.
    for indices in sorted(alike.values(), key=len):
        fitted |= _fit_rest([runs[index] for index in indices], [prices[index] for index in indices])
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
        measured_on=next((run.machine for run in runs if run.machine is not None), None),
        links=tuple(sorted({links for run in runs for links in links_of(run.plan.topology)})),
    )
    return CalibratedStep(fitted, card)


def _fit_alone(runs: Sequence[CalibrationRun], prices: Sequence[StepPrice]) -> _Fitted:
    """Weights of parts that were timed rank by rank: of what ranks work, not of what collectives take."""
    rows: dict[tuple[StepPart, str], list[tuple[FloatArray, float]]] = defaultdict(list)
    for run, price in zip(runs, prices, strict=True):
        groups, topology = run.plan.replica_groups, run.plan.topology
        for part, basis in price.bases.items():
            # What the averages of replica groups take a rank is among all that is left, and has a price of its own.
            if not basis or (part is StepPart.DENSE and groups.num_groups > 1):
                continue
            features_RF = np.broadcast_to(price.work[part], (run.plan.group_size, len(PART_FEATURES[part])))
            rows[part, basis] += [
                (features_F, run.measured.work_ms_R[world][part])
                for rank, features_F in enumerate(features_RF)
                for world in groups.world_ranks(rank, topology)
                if part in run.measured.work_ms_R[world]
            ]
    fitted: _Fitted = {}
    for (part, basis), known in ((key, known) for key, known in rows.items() if known):
        features_SF, measured_S = (np.array(column) for column in zip(*known, strict=True))
        weights_F = np.array(plain_coefficients(part, runs[0].plan.topology.device))
        used_S = measured_S > 0
        is_work_F = np.array([name != WIRE_FEATURES.get(part) for name in PART_FEATURES[part]])
        if used_S.any():
            weights_F[is_work_F] = _fitted(
                features_SF[used_S][:, is_work_F], measured_S[used_S], weights_F[is_work_F].tolist()
            )
            fitted[part, basis] = tuple(weights_F.tolist())
    return fitted


def _fit_rest(runs: Sequence[CalibrationRun], prices: Sequence[StepPrice]) -> _Fitted:
    """Weights of all parts but kernels, which must make up what steps take beside their slowest kernels.

    That is of runs in real time: where a rank waits for others depends on who comes late and whose messages are long,
    so that no rank's own time says what an exchange takes; only the whole step does.
    """
    parts = [part for part in _JOINT_PARTS if prices[0].bases[part]]
    features_SF = np.array([np.concatenate([_slowest(price, part) for part in parts]) for price in prices])
    kernels_S = np.array([sum(run.measured.part_ms[part] for part in KERNEL_PARTS) for run in runs])
    rest_S = np.array([run.measured.step_ms for run in runs]) - kernels_S
    device = runs[0].plan.topology.device
    prior = [weight for part in parts for weight in plain_coefficients(part, device)]
    weights_F = _fitted(features_SF, np.maximum(rest_S, _LEAST_MS), prior)
    ends = np.cumsum([len(PART_FEATURES[part]) for part in parts])[:-1]
    pieces = np.split(weights_F, ends)
    return {(part, prices[0].bases[part]): tuple(piece.tolist()) for part, piece in zip(parts, pieces, strict=True)}


def _slowest(price: StepPrice, part: StepPart) -> FloatArray:
    """Features of the rank on which the models take longest."""
    work_RF = price.work[part]
    features_F: FloatArray = work_RF[int(work_RF[:, 0].argmax())]
    return features_F


def _fitted(features_SF: FloatArray, measured_S: FloatArray, prior: Sequence[float]) -> FloatArray:
    strength = _PULL + _PULL_RUNS / len(measured_S)
    return fit_nonnegative(features_SF, measured_S, np.array(prior), strength)


def _names(costs: CostModels) -> tuple[str, ...]:
    dense = (costs.dense.name,) if costs.dense else ()
    return (costs.kernel.name, costs.comm.name, *dense)


def _interval_scale(offset_S: FloatArray, plan_S: NDArray[np.int64]) -> float:
    """What nine of ten plans' offsets are below, the next one counted in: with few plans, all of them.

    A plan counts once, each of its runs an equal part.

    Source:
        Dunn, Wasserman, Ramdas, "Distribution-Free Prediction Sets for Two-Layer Hierarchical Models" (2022): pooled
        empirical distributions of groups.
    """
    order_S = np.argsort(offset_S)
    count_P = np.bincount(plan_S)
    below_S = np.cumsum(1.0 / count_P[plan_S[order_S]])
    rank = int(np.searchsorted(below_S, math.ceil(0.9 * (len(count_P) + 1)) - 1e-9))
    return float(offset_S[order_S][min(rank, len(offset_S) - 1)])
