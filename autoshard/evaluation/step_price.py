"""A step's parts, priced: models' milliseconds, what runs said about them, and the interval of their sum.

Shape suffixes: R ranks of a replica group, B placements (none for one plan), F features of a part, P `EMBEDDING_PARTS`,
X `EXCHANGE_PARTS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.core import CostModels, Estimate, KernelCosts, ShardingPlan, TableSet, Topology
from autoshard.core.costs import CollectiveName, DenseCosts, MsArray
from autoshard.core.step import (
    EMBEDDING_PARTS,
    EXCHANGE_PARTS,
    KERNEL_PARTS,
    PART_INDEX,
    Coefficients,
    Overlap,
    StepPart,
    StepTimes,
    model_basis,
    plain_coefficients,
)
from autoshard.evaluation.dense_time import AnalyticDenseModel, dense_parts
from autoshard.evaluation.rank_work import RankWork
from autoshard.evaluation.reader_work import sequence_sums_ms
from autoshard.evaluation.stages import Stages, syncs_ms
from autoshard.evaluation.traffic import LENGTH_BYTES, Stream, id_bytes

#: Gradients of dense layers are fp32.
_GRADIENT_BYTES = 4
#: Times of the dense layers, as `StepTimes` names them: forward, then backward.
_DENSE_LAYERS = tuple(f"{layer}_{way}" for way in ("forward", "backward") for layer in ("bottom", "interaction", "top"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWork:
    """The dense layers of a rank: what they cost, and how many numbers they have.

    Attributes:
        costs: Of the bottom perceptron, the interaction and the top perceptron; sums over sequences are the second's.
        all_reduce_ms: Of their gradients.
        num_parameters: Of both perceptrons.
        interacted_bytes: Outputs of the bottom perceptron and pooled embeddings of the local batch.
        basis: Name of the model that priced them.
    """

    costs: DenseCosts
    all_reduce_ms: float
    num_parameters: int
    interacted_bytes: float
    basis: str

    @property
    def layers_ms(self) -> float:
        """Forward and backward of all three."""
        return float(self.costs.forward_ms_N.sum() + self.costs.backward_ms_N.sum())

    @classmethod
    def of(cls, tables: TableSet, topology: Topology, costs: CostModels) -> DenseWork | None:
        """Prices the dense layers of a task; None if its tables describe none.

        Args:
            tables: The tables, with the batch of the whole world.
            topology: Of the whole world.
            costs: Models of dense layers and of collectives.

        Raises:
            InvalidPlanError: If the layers make no model.
        """
        shapes = dense_parts(tables, tables.batch_size / topology.world_size)
        if not shapes:
            return None
        local_batch = shapes[0].batch_size
        model = costs.dense or AnalyticDenseModel.for_device(topology.device)
        num_parameters = sum(shape.num_parameters for shape in shapes)
        return cls(
            costs=_with_sums(model.predict_parts(shapes), sequence_sums_ms(tables, local_batch, topology.device)),
            all_reduce_ms=costs.comm.collective_ms("all_reduce", float(num_parameters * _GRADIENT_BYTES), topology),
            num_parameters=num_parameters,
            interacted_bytes=float(_GRADIENT_BYTES * local_batch * sum(shapes[1].widths)),
            basis=model.name,
        )


def _with_sums(costs: DenseCosts, sums_ms_2: MsArray) -> DenseCosts:
    """Costs of the dense layers, whose interaction begins with sums over sequences."""
    is_interaction = np.array([0.0, 1.0, 0.0])
    forward_N, backward_N = (ms * is_interaction for ms in sums_ms_2)
    return DenseCosts(
        forward_ms_N=costs.forward_ms_N + forward_N,
        backward_ms_N=costs.backward_ms_N + backward_N,
        low_ms_N=costs.low_ms_N + forward_N + backward_N,
        high_ms_N=costs.high_ms_N + forward_N + backward_N,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """A step and its parts.

    Attributes:
        step_ms: The whole, with its interval.
        times: Its parts at their slowest ranks, calibrated where a step model knows them.
        parts: What the runtime times of them, with the models' intervals.
        overlap: Which of them were taken to run at the same time.
        models: Names of the models behind it: kernel, communication, dense, step.
        stages: Its collectives within a replica group.
        parts_ms_PR: `EMBEDDING_PARTS` on every rank, calibrated as `times`.
        group_sync_ms_R: What synchronisation with other replica groups takes, per step.
        work: For each part, its features per rank, shape (R, F), as `PART_FEATURES` names them.
        bases: For each part, the model whose milliseconds its first feature is, without its version; empty for none.
        weights: Of every part's features.
    """

    step_ms: Estimate
    times: StepTimes[float]
    parts: Mapping[StepPart, Estimate]
    overlap: Overlap
    models: Mapping[str, str]
    stages: Stages
    parts_ms_PR: MsArray
    group_sync_ms_R: MsArray
    work: Mapping[StepPart, MsArray]
    bases: Mapping[StepPart, str]
    weights: Mapping[StepPart, Coefficients]

    def part_ms(self, part: StepPart) -> float:
        """Predicted time of a part that the runtime times, or of all else."""
        return self.parts[part].value


def model_names(costs: CostModels, tables: TableSet, device: str) -> dict[str, str]:
    """Names of the models that price a task's plans; dense layers and steps only where they are priced."""
    models = {"kernel": costs.kernel.name, "communication": costs.comm.name}
    if tables.dense is not None:
        models["dense"] = (costs.dense or AnalyticDenseModel.for_device(device)).name
    if costs.step is not None:
        models["step"] = costs.step.name
    return models


class StepPricer:
    """Prices steps of one task from what ranks do: the one place where parts are put together, of plans and searches.

    A rule for what is added here: models price what was measured of one kernel or collective, by itself; whatever a
    step takes besides is a term of the step, and belongs here or into the features of its parts.

    Args:
        tables: The task's tables, with the batch of the whole world.
        topology: Of a replica group.
        costs: Models of all parts.
        world: Topology of all groups, where there are several.
        overlap: Which parts hide behind each other; left out, what the step model was calibrated on, or nothing.

    Attributes:
        dense: The dense layers; None where the tables describe none.
        overlap: Which parts hide behind each other.
        bases: For each part, the model whose milliseconds its first feature is, without its version; empty for none.
        weights: Of every part's features.

    Raises:
        InvalidPlanError: If the dense layers make no model.
    """

    def __init__(
        self,
        tables: TableSet,
        topology: Topology,
        costs: CostModels,
        *,
        world: Topology | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self.topology, self.costs, self._id_bytes = topology, costs, id_bytes(tables.tables)
        self.dense = DenseWork.of(tables, world or topology, costs)
        self.overlap = overlap or (costs.step.overlap if costs.step else Overlap.NONE)
        self.bases = {part: _basis(part, costs, self.dense) for part in StepPart}
        step, device = costs.step, topology.device
        #: The step model's where it was calibrated with the part's basis, else plain.
        self.weights = {
            part: (step.coefficients(part, basis, topology) if step else None) or plain_coefficients(part, device)
            for part, basis in self.bases.items()
        }
        # Without dense layers, what synchronisation takes is that of the model of collectives.
        plain = plain_coefficients(StepPart.DENSE, topology.device)
        self._dense_weights = plain if self.dense is None else self.weights[StepPart.DENSE]
        self._fixed = self._dense_times()

    def prices_alike(self, other: StepPricer) -> bool:
        """Whether both make the same step of the same work, on links that are alike."""
        return (
            self.costs is other.costs
            and self.weights == other.weights
            and self.overlap is other.overlap
            and self._fixed == other._fixed
        )

    def stages(self, work: RankWork) -> Stages:
        """What their collectives take."""
        return Stages.of(work, self.costs.comm, self.topology)

    def features(
        self, work: RankWork, stages: Stages, kernels: KernelCosts | None = None
    ) -> dict[StepPart, tuple[MsArray, ...]]:
        """Features of `EMBEDDING_PARTS`, as `PART_FEATURES` names them, of the shape of `work.num_features_BR`.

        Args:
            work: What ranks do.
            stages: What their collectives take.
            kernels: What their kernels take; left out, nothing.
        """
        one = np.ones_like(work.num_features_BR)
        handled = dict(zip(Stream, work.handled_EBR, strict=True))
        input_ms, forward_ms, backward_ms = stages.exchange_ms_XBR
        reading_ms = dict(zip(EXCHANGE_PARTS, one * work.reading_ms_XBR, strict=True))
        million_lengths = handled[Stream.LENGTHS] / LENGTH_BYTES / 1e6
        million_served = work.served_lengths_BR / LENGTH_BYTES / 1e6
        once = tuple(one * work.once_2BR)
        served = (work.num_kernels_BR, work.num_features_BR)
        kernel_ms = (kernels.forward_ms_S, kernels.backward_ms_S) if kernels else (0 * one, 0 * one)
        return {
            StepPart.INPUT: (
                *(input_ms, reading_ms[StepPart.INPUT], one),
                handled[Stream.IDS] / self._id_bytes / 1e6,
                million_lengths,
                *once,
            ),
            StepPart.FORWARD_KERNEL: (kernel_ms[0], *served, million_served),
            StepPart.FORWARD_EXCHANGE: (
                *(forward_ms, reading_ms[StepPart.FORWARD_EXCHANGE], one),
                handled[Stream.FORWARD] / 1e6,
                *once,
            ),
            StepPart.BACKWARD_EXCHANGE: (
                *(backward_ms, reading_ms[StepPart.BACKWARD_EXCHANGE], one),
                handled[Stream.BACKWARD] / 1e6,
                *once,
            ),
            StepPart.BACKWARD_KERNEL: (kernel_ms[1], *served),
        }

    def dense_features(self, work: RankWork, stages: Stages) -> tuple[MsArray, ...]:
        """Features of all else, of the shape of `stages.sync_ms_BR`."""
        sync_ms, dense = stages.sync_ms_BR, self.dense
        one, synced = np.ones_like(sync_ms), ((sync_ms > 0).astype(np.float64), synced_megabytes(work.synced_BR2))
        if dense is None:
            return (0 * one, sync_ms, 0 * one, 0 * one, 0 * one, *synced)
        return (
            dense.layers_ms * one,
            sync_ms + dense.all_reduce_ms,
            one,
            dense.num_parameters / 1e6 * one,
            dense.interacted_bytes / 1e6 * one,
            *synced,
        )

    def parts_ms(self, features: Mapping[StepPart, tuple[MsArray, ...]]) -> MsArray:
        """Times of `EMBEDDING_PARTS` on every rank, of what `features` says; shape (P, B, R)."""
        return np.stack([_weighted(features[part], self.weights[part]) for part in EMBEDDING_PARTS])

    def times(
        self, slowest_PB: MsArray, sync_ms_B: MsArray, synced_bytes_B2: MsArray, group_sync_ms: float = 0.0
    ) -> StepTimes[MsArray]:
        """All parts of steps.

        Args:
            slowest_PB: `EMBEDDING_PARTS` at their slowest ranks, shape (P, B).
            sync_ms_B: What the collectives of gradients of rows that ranks hold copies of take at the slowest.
            synced_bytes_B2: What is reduced and gathered in them there.
            group_sync_ms: Synchronisation with other replica groups.
        """
        _, all_reduce, *_, row_sums, megabytes = self._dense_weights
        rows_ms_B = all_reduce * sync_ms_B + row_sums * (sync_ms_B > 0) + megabytes * synced_megabytes(synced_bytes_B2)
        every = np.ones_like(sync_ms_B)
        parts = {name: ms * every for name, ms in self._fixed.items()}
        parts |= dict(zip(map(str, EMBEDDING_PARTS), slowest_PB, strict=True))
        parts["all_reduce"] = parts["all_reduce"] + rows_ms_B
        return StepTimes(**parts, row_reduce=rows_ms_B, group_sync=group_sync_ms * every)

    def steps_ms(self, slowest_PB: MsArray, synced_bytes_B2: MsArray) -> MsArray:
        """Steps of parts at their slowest ranks, shape (B,); see `times`."""
        sync_ms_B = syncs_ms(synced_bytes_B2, self.costs.comm, self.topology)
        return self.times(slowest_PB, sync_ms_B, synced_bytes_B2).step_ms(self.overlap)

    def _dense_times(self) -> dict[str, float]:
        """Parts that do not depend on who holds what."""
        dense = self.dense
        if dense is None:
            return dict.fromkeys((*_DENSE_LAYERS, "all_reduce", "overhead"), 0.0)
        layers, all_reduce, steps, million_parameters, megabytes, *_ = self._dense_weights
        layers_ms = [*(layers * dense.costs.forward_ms_N).tolist(), *(layers * dense.costs.backward_ms_N).tolist()]
        overhead = steps + million_parameters * dense.num_parameters / 1e6 + megabytes * dense.interacted_bytes / 1e6
        return {
            **dict(zip(_DENSE_LAYERS, layers_ms, strict=True)),
            "all_reduce": all_reduce * dense.all_reduce_ms,
            "overhead": max(0.0, overhead),
        }


def price_plan_step(
    pricer: StepPricer, plan: ShardingPlan, work: RankWork, kernels: KernelCosts, group_sync_ms_R: MsArray
) -> StepPrice:
    """The step of one plan.

    Args:
        pricer: Of the plan's task.
        plan: The whole plan; everything else is of one of its replica groups.
        work: What ranks do.
        kernels: What their kernels take.
        group_sync_ms_R: What synchronisation with other replica groups takes.
    """
    costs, stages = pricer.costs, pricer.stages(work)
    features = pricer.features(work, stages, kernels)
    parts_PR, slowest = pricer.parts_ms(features), int(stages.sync_ms_BR.argmax())
    times = pricer.times(
        parts_PR.max(axis=1)[:, None],
        stages.sync_ms_BR[slowest, None],
        work.synced_BR2[slowest, None],
        float(group_sync_ms_R.max()),
    ).only()
    value = times.step_ms(pricer.overlap)
    spreads = _Spreads.of(pricer, plan, kernels, stages, parts_PR, group_sync_ms_R)
    below, above = spreads.half_widths(times)
    step_ms = _estimate(value, below, above)
    if costs.step is not None and all(
        costs.step.coefficients(part, basis, pricer.topology) for part, basis in pricer.bases.items()
    ):
        low, high = costs.step.interval_ms(value, below, above)
        step_ms = Estimate(value=value, low=low, high=high)
    features[StepPart.DENSE] = pricer.dense_features(work, stages)
    return StepPrice(
        step_ms=step_ms,
        times=times,
        parts=spreads.parts(times),
        overlap=pricer.overlap,
        models=model_names(costs, plan.tables, plan.topology.device),
        stages=stages,
        parts_ms_PR=parts_PR,
        group_sync_ms_R=group_sync_ms_R,
        work={part: np.stack(features[part], axis=1) for part in StepPart},
        bases=pricer.bases,
        weights=pricer.weights,
    )


def _weighted(features: tuple[MsArray, ...], weights: Coefficients) -> MsArray:
    return np.asarray(sum(weight * of for weight, of in zip(weights, features, strict=True)))


def _basis(part: StepPart, costs: CostModels, dense: DenseWork | None) -> str:
    """The model whose milliseconds a part's first feature is, whichever version of it."""
    if part in KERNEL_PARTS:
        return model_basis(costs.kernel.name)
    if part is StepPart.DENSE:
        return model_basis(dense.basis) if dense else ""
    return model_basis(costs.comm.name)


def synced_megabytes(synced_bytes_B2: MsArray) -> MsArray:
    """What is reduced and gathered of gradients of rows with copies, shape (B,)."""
    return np.asarray(synced_bytes_B2.sum(axis=-1) / 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread:
    """How far a value may be below and above itself, as shares of it."""

    below: float = 0.0
    above: float = 0.0

    @classmethod
    def of(cls, value_ms: float, low_ms: float, high_ms: float) -> _Spread:
        if value_ms <= 0:
            return cls()
        return cls(below=max(0.0, 1 - low_ms / value_ms), above=max(0.0, high_ms / value_ms - 1))

    def beside(self, value_ms: float, known_ms: float) -> _Spread:
        """Of the sum of such a value and one that is known."""
        share = value_ms / (value_ms + known_ms) if value_ms > 0 else 0.0
        return _Spread(below=self.below * share, above=self.above * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spreads:
    """What the models say of their own prices. A part keeps it, whatever a step model makes of its value.

    Attributes:
        kernels: Of forward and backward together: one model prices them, whose errors do not cancel.
        others: Of all other times of a step, as `StepTimes` names them.
    """

    kernels: _Spread
    others: Mapping[str, _Spread]

    @classmethod
    def of(
        cls,
        pricer: StepPricer,
        plan: ShardingPlan,
        kernels: KernelCosts,
        stages: Stages,
        parts_ms_PR: MsArray,
        group_sync_ms_R: MsArray,
    ) -> _Spreads:
        comm, dense = pricer.costs.comm, pricer.dense

        def collective(
            name: CollectiveName, ms_R: MsArray, topology: Topology, *more: tuple[CollectiveName, float]
        ) -> _Spread:
            """Of a collective, with others behind it: they are priced by one model, whose errors do not cancel."""
            slowest, value = int(ms_R.argmax()), float(ms_R.max())
            low, high = (float(of_R[slowest]) for of_R in comm.bounds_ms(name, ms_R, topology))
            for other, ms in ((other, ms) for other, ms in more if ms):
                ends = comm.bounds_ms(other, np.array([ms]), topology)
                value, low, high = value + ms, low + float(ends[0][0]), high + float(ends[1][0])
            return _Spread.of(value, low, high)

        def exchange(part: StepPart, *more: tuple[CollectiveName, float]) -> _Spread:
            """Of an exchange: what ranks work on it was measured, unlike what the links take."""
            wire_R = stages.all_to_all_ms_XBR[EXCHANGE_PARTS.index(part)]
            wire_ms = pricer.weights[part][0] * float(stages.exchange_ms_XBR[EXCHANGE_PARTS.index(part)].max())
            known_ms = max(0.0, float(parts_ms_PR[PART_INDEX[part]].max()) - wire_ms)
            return collective("all_to_all", wire_R, pricer.topology, *more).beside(wire_ms, known_ms)

        worst = int(kernels.kernel_ms_S.argmax())
        ends = (kernels.kernel_ms_S, kernels.low_ms_S, kernels.high_ms_S)
        scatter_ms, gather_ms = stages.scatter_ms_2B.tolist()
        replicas = plan.replica_groups.replica_topology(plan.topology)
        all_reduce_R = stages.sync_ms_BR + (dense.all_reduce_ms if dense else 0.0)
        return cls(
            kernels=_Spread.of(*(float(of_S[worst]) for of_S in ends)),
            others={
                "input": exchange(StepPart.INPUT),
                "forward_exchange": exchange(StepPart.FORWARD_EXCHANGE, ("reduce_scatter", scatter_ms)),
                "backward_exchange": exchange(StepPart.BACKWARD_EXCHANGE, ("all_gather", gather_ms)),
                "all_reduce": collective("all_reduce", all_reduce_R, plan.topology),
                "group_sync": collective("all_reduce", group_sync_ms_R, replicas),
                # The three parts are priced by one model, whose errors do not cancel.
                "dense_layers": _Spread() if dense is None else _dense_spread(dense.costs),
            },
        )

    def half_widths(self, times: StepTimes[float]) -> tuple[float, float]:
        """How far the step may be below and above its value."""
        kernels = (times.forward_kernel + times.backward_kernel, self.kernels)
        return _combined(kernels, *((getattr(times, name), spread) for name, spread in self.others.items()))

    def parts(self, times: StepTimes[float]) -> dict[StepPart, Estimate]:
        """The parts with their intervals."""
        made_of: dict[StepPart, tuple[str, ...]] = {part: (part.value,) for part in EMBEDDING_PARTS}
        made_of[StepPart.DENSE] = ("dense_layers", "all_reduce", "group_sync")
        spread_of = {**dict.fromkeys(map(str, KERNEL_PARTS), self.kernels), **self.others}
        return {
            part: _estimate(
                getattr(times, part.value), *_combined(*((getattr(times, name), spread_of[name]) for name in names))
            )
            for part, names in made_of.items()
        }


def _dense_spread(costs: DenseCosts) -> _Spread:
    total = float(costs.forward_ms_N.sum() + costs.backward_ms_N.sum())
    return _Spread.of(total, float(costs.low_ms_N.sum()), float(costs.high_ms_N.sum()))


def _combined(*values: tuple[float, _Spread]) -> tuple[float, float]:
    """Below and above a sum: what is priced apart errs independently, so squares add up."""
    below = math.sqrt(sum((value * spread.below) ** 2 for value, spread in values))
    above = math.sqrt(sum((value * spread.above) ** 2 for value, spread in values))
    return below, above


def _estimate(value: float, below: float, above: float) -> Estimate:
    """No wider than the value: everything could be free, nothing can cost less."""
    return Estimate(value=value, low=max(0.0, value - below), high=value + above)
