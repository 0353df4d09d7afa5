"""A step's parts, priced: models' milliseconds, what runs said about them, and the interval of their sum.

Shape suffixes: R ranks of a replica group, F features of a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModels, Estimate, KernelCosts, ShardingPlan, TableSet, Topology
from autoshard.core.costs import CollectiveName, DenseCosts, MsArray
from autoshard.core.dense import dense_shapes
from autoshard.core.errors import InvalidOptionError, InvalidPlanError
from autoshard.core.shard import fused_kernel
from autoshard.core.step import (
    Coefficients,
    Overlap,
    StepPart,
    StepTimes,
    model_basis,
    plain_coefficients,
    weighted_ms,
)
from autoshard.evaluation.dense_time import AnalyticDenseModel
from autoshard.evaluation.reader_work import READER_PARTS
from autoshard.evaluation.stages import Stages
from autoshard.evaluation.traffic import ID_BYTES, LENGTH_BYTES, Stream, Traffic

#: Gradients of dense layers are fp32.
_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWork:
    """The dense layers of a rank: what they cost, and how many numbers they have.

    Attributes:
        costs: Of the bottom perceptron, the interaction and the top perceptron.
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

    @classmethod
    def of(cls, plan: ShardingPlan, costs: CostModels) -> DenseWork | None:
        """Prices a plan's dense layers; None if its tables describe none.

        Raises:
            InvalidPlanError: If the layers make no model.
        """
        layers = plan.tables.dense
        if layers is None:
            return None
        dims = [table.embedding_dim for table in plan.tables.tables for _ in table.features]
        local_batch = max(1, round(plan.group_batch_size / plan.group_size))
        try:
            shapes = dense_shapes(layers, dims, local_batch)
        except InvalidOptionError as error:
            raise InvalidPlanError(error.message, field="tables.dense") from error
        model = costs.dense or AnalyticDenseModel.for_device(plan.topology.device)
        num_parameters = sum(shape.num_parameters for shape in shapes)
        return cls(
            costs=model.predict_parts(shapes),
            all_reduce_ms=costs.comm.all_reduce_ms(float(num_parameters * _GRADIENT_BYTES), plan.topology),
            num_parameters=num_parameters,
            interacted_bytes=float(_GRADIENT_BYTES * local_batch * sum(shapes[1].widths)),
            basis=model.name,
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
        work: For each part, its features per rank, shape (R, F), as `PART_FEATURES` names them.
        bases: For each part, the model whose milliseconds its first feature is, without its version; empty for none.
    """

    step_ms: Estimate
    times: StepTimes
    parts: Mapping[StepPart, Estimate]
    overlap: Overlap
    models: Mapping[str, str]
    work: Mapping[StepPart, MsArray]
    bases: Mapping[StepPart, str]

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


def compose_step(
    plan: ShardingPlan,
    costs: CostModels,
    kernels: KernelCosts,
    traffic: Traffic,
    stages: Stages,
    overlap: Overlap | None,
) -> StepPrice:
    """Puts the parts of a step together; see `evaluate`.

    Args:
        plan: The whole plan; everything else but the dense layers is of one of its replica groups.
        costs: Models to price it with.
        kernels: Of each rank.
        traffic: What ranks send.
        stages: What that costs.
        overlap: Which parts hide behind each other.
    """
    dense = DenseWork.of(plan, costs)
    work = step_work(plan, kernels, traffic, stages, dense)
    overlap = overlap or (costs.step.overlap if costs.step else Overlap.NONE)
    bases = {part: _basis(part, costs, dense) for part in StepPart}
    weights = part_weights(costs, bases)
    times = _times(work, weights, dense, stages)
    value = times.step_ms(overlap)
    spreads = _Spreads.of(plan, costs, kernels, stages, dense)
    below, above = spreads.half_widths(times)
    step_ms = _estimate(value, below, above)
    if costs.step is not None and all(costs.step.coefficients(part, bases[part]) for part in StepPart):
        low, high = costs.step.interval_ms(value, below, above)
        step_ms = Estimate(value=value, low=low, high=high)
    return StepPrice(
        step_ms=step_ms,
        times=times,
        parts=spreads.parts(times),
        overlap=overlap,
        models=model_names(costs, plan.tables, plan.topology.device),
        work=work,
        bases=bases,
    )


def step_work(
    plan: ShardingPlan, kernels: KernelCosts, traffic: Traffic, stages: Stages, dense: DenseWork | None
) -> dict[StepPart, MsArray]:
    """Features of every part on every rank, shapes (R, F)."""
    one_R = np.ones(plan.group_size)
    num_kernels_R, num_features_R = _served(plan)

    columns = embedding_columns(
        model_ms={
            StepPart.INPUT: stages.input_ms_R,
            StepPart.FORWARD_KERNEL: kernels.forward_ms_S,
            StepPart.FORWARD_EXCHANGE: stages.forward_ms_R,
            StepPart.BACKWARD_EXCHANGE: stages.backward_ms_R,
            StepPart.BACKWARD_KERNEL: kernels.backward_ms_S,
        },
        handled_bytes={stream: traffic.sent_R(stream) + traffic.received_R(stream) for stream in Stream},
        served_length_bytes=traffic.received_R(Stream.LENGTHS),
        num_kernels=num_kernels_R,
        num_features=num_features_R,
    )
    columns[StepPart.DENSE] = _dense_columns(one_R, stages, dense)
    return {part: np.stack(columns[part], axis=1) for part in StepPart}


def embedding_columns(
    *,
    model_ms: Mapping[StepPart, MsArray],
    handled_bytes: Mapping[Stream, MsArray],
    served_length_bytes: MsArray,
    num_kernels: MsArray,
    num_features: MsArray,
) -> dict[StepPart, tuple[MsArray, ...]]:
    """Features of every part but the dense layers, as `PART_FEATURES` names them.

    Args:
        model_ms: The models' milliseconds; all arrays are of one shape.
        handled_bytes: What ranks send and receive.
        served_length_bytes: Lengths that they receive.
        num_kernels: Their fused kernels.
        num_features: Features that these serve.
    """
    one = np.ones_like(num_features)
    million_ids = handled_bytes[Stream.IDS] / ID_BYTES / 1e6
    million_lengths = handled_bytes[Stream.LENGTHS] / LENGTH_BYTES / 1e6
    served = (num_kernels, num_features)
    return {
        StepPart.INPUT: (model_ms[StepPart.INPUT], one, million_ids, million_lengths),
        StepPart.FORWARD_KERNEL: (model_ms[StepPart.FORWARD_KERNEL], *served, served_length_bytes / LENGTH_BYTES / 1e6),
        StepPart.FORWARD_EXCHANGE: (model_ms[StepPart.FORWARD_EXCHANGE], one, handled_bytes[Stream.FORWARD] / 1e6),
        StepPart.BACKWARD_EXCHANGE: (model_ms[StepPart.BACKWARD_EXCHANGE], one, handled_bytes[Stream.BACKWARD] / 1e6),
        StepPart.BACKWARD_KERNEL: (model_ms[StepPart.BACKWARD_KERNEL], *served),
    }


def _dense_columns(one_R: MsArray, stages: Stages, dense: DenseWork | None) -> tuple[MsArray, ...]:
    if dense is None:
        return (0 * one_R, stages.sync_ms_R, 0 * one_R, 0 * one_R, 0 * one_R, _sums_rows(stages))
    layers_ms = float(dense.costs.forward_ms_N.sum() + dense.costs.backward_ms_N.sum())
    return (
        layers_ms * one_R,
        stages.sync_ms_R + dense.all_reduce_ms,
        one_R,
        dense.num_parameters / 1e6 * one_R,
        dense.interacted_bytes / 1e6 * one_R,
        _sums_rows(stages),
    )


def _sums_rows(stages: Stages) -> MsArray:
    """1 on ranks that sum gradients of replicas, shape (R,)."""
    return (stages.sync_ms_R > 0).astype(np.float64)


def _served(plan: ShardingPlan) -> tuple[MsArray, MsArray]:
    """Fused kernels of each rank, and features that they serve, shapes (R,)."""
    num_features_R = np.zeros(plan.group_size)
    has_kernel: dict[tuple[object, ...], NDArray[np.bool_]] = {}
    ranks_of: dict[int, NDArray[np.int64]] = {}
    for placed in plan.shards:
        table = placed.shard.table
        if id(placed.replicas) not in ranks_of:
            flat = [rank for replica in placed.replicas for rank in replica]
            ranks_of[id(placed.replicas)] = np.array(flat, dtype=np.int64)
        ranks = ranks_of[id(placed.replicas)]
        has_kernel.setdefault(fused_kernel(table, placed.update), np.zeros(plan.group_size, dtype=np.bool_))[ranks] = (
            True
        )
        num_features_R[ranks] += len(table.features)
    return np.sum(list(has_kernel.values()), axis=0, dtype=np.float64), num_features_R


def _basis(part: StepPart, costs: CostModels, dense: DenseWork | None) -> str:
    """The model whose milliseconds a part's first feature is, whichever version of it."""
    return model_basis(_priced_by(part, costs, dense))


def _priced_by(part: StepPart, costs: CostModels, dense: DenseWork | None) -> str:
    if part in (StepPart.FORWARD_KERNEL, StepPart.BACKWARD_KERNEL):
        return costs.kernel.name
    if part is StepPart.DENSE:
        return dense.basis if dense else ""
    return costs.comm.name


def part_weights(costs: CostModels, bases: Mapping[StepPart, str]) -> dict[StepPart, Coefficients]:
    """Weights of every part's features: the step model's where it was calibrated with the part's basis, else plain."""
    step = costs.step
    return {
        part: (step.coefficients(part, bases[part]) if step else None) or plain_coefficients(part) for part in StepPart
    }


def _times(
    work: Mapping[StepPart, MsArray],
    weights: Mapping[StepPart, Coefficients],
    dense: DenseWork | None,
    stages: Stages,
) -> StepTimes:
    embedding = {
        part.value: float(weighted_ms(work[part], weights[part]).max())
        for part in StepPart
        if part is not StepPart.DENSE
    }
    for part, reader_ms in zip(READER_PARTS, stages.reader_ms, strict=True):
        embedding[part.value] += reader_ms
    group_sync = float(stages.group_sync_ms_R.max())
    if dense is None:
        row_reduce = float(stages.sync_ms_R.max())
        return StepTimes(**embedding, all_reduce=row_reduce, row_reduce=row_reduce, group_sync=group_sync)
    layers, all_reduce, *_, row_sums = weights[StepPart.DENSE]
    row_sums *= float(_sums_rows(stages).max())
    forward, backward = dense.costs.forward_ms_N * layers, dense.costs.backward_ms_N * layers
    total = float(weighted_ms(work[StepPart.DENSE], weights[StepPart.DENSE]).max())
    reduced = all_reduce * float(work[StepPart.DENSE][:, 1].max()) + row_sums
    return StepTimes(
        **embedding,
        bottom_forward=float(forward[0]),
        interaction_forward=float(forward[1]),
        top_forward=float(forward[2]),
        bottom_backward=float(backward[0]),
        interaction_backward=float(backward[1]),
        top_backward=float(backward[2]),
        all_reduce=reduced,
        row_reduce=all_reduce * float(stages.sync_ms_R.max()) + row_sums,
        overhead=max(0.0, total - reduced - float(forward.sum() + backward.sum())),
        group_sync=group_sync,
    )


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
    """What the models say of their own prices. A part keeps it, whatever a step model makes of its value."""

    kernels: _Spread
    input: _Spread
    forward_exchange: _Spread
    backward_exchange: _Spread
    all_reduce: _Spread
    group_sync: _Spread
    dense_layers: _Spread

    @classmethod
    def of(
        cls, plan: ShardingPlan, costs: CostModels, kernels: KernelCosts, stages: Stages, dense: DenseWork | None
    ) -> _Spreads:
        def collective(
            name: CollectiveName, ms_R: MsArray, topology: Topology, *more: tuple[CollectiveName, float]
        ) -> _Spread:
            """Of a collective, with others behind it: they are priced by one model, whose errors do not cancel."""
            slowest, value = int(ms_R.argmax()), float(ms_R.max())
            low, high = (float(of_R[slowest]) for of_R in costs.comm.bounds_ms(name, ms_R, topology))
            for other, ms in ((other, ms) for other, ms in more if ms):
                ends = costs.comm.bounds_ms(other, np.array([ms]), topology)
                value, low, high = value + ms, low + float(ends[0][0]), high + float(ends[1][0])
            return _Spread.of(value, low, high)

        worst = int(kernels.kernel_ms_S.argmax())
        ends = (kernels.kernel_ms_S, kernels.low_ms_S, kernels.high_ms_S)
        return cls(
            kernels=_Spread.of(*(float(of_S[worst]) for of_S in ends)),
            # What ranks work on it was measured, unlike what the links take.
            input=collective("all_to_all", stages.input_ms_R, stages.topology).beside(
                float(stages.input_ms_R.max()), stages.reader_ms[0]
            ),
            forward_exchange=collective(
                "all_to_all",
                stages.forward_ms_R - stages.reduce_scatter_ms,
                stages.topology,
                ("reduce_scatter", stages.reduce_scatter_ms),
            ),
            backward_exchange=collective(
                "all_to_all",
                stages.backward_ms_R - stages.all_gather_ms,
                stages.topology,
                ("all_gather", stages.all_gather_ms),
            ),
            all_reduce=collective(
                "all_reduce", stages.sync_ms_R + (dense.all_reduce_ms if dense else 0.0), plan.topology
            ),
            group_sync=collective("all_reduce", stages.group_sync_ms_R, stages.replicas),
            # The three parts are priced by one model, whose errors do not cancel.
            dense_layers=_Spread() if dense is None else _dense_spread(dense.costs),
        )

    def half_widths(self, times: StepTimes) -> tuple[float, float]:
        """How far the step may be below and above its value."""
        return _combined(
            (times.forward_kernel + times.backward_kernel, self.kernels),
            (times.input, self.input),
            (times.forward_exchange, self.forward_exchange),
            (times.backward_exchange, self.backward_exchange),
            (times.all_reduce, self.all_reduce),
            (times.group_sync, self.group_sync),
            (times.dense_layers, self.dense_layers),
        )

    def parts(self, times: StepTimes) -> dict[StepPart, Estimate]:
        """The parts with their intervals."""
        made_of: dict[StepPart, tuple[tuple[float, _Spread], ...]] = {
            StepPart.INPUT: ((times.input, self.input),),
            StepPart.FORWARD_KERNEL: ((times.forward_kernel, self.kernels),),
            StepPart.FORWARD_EXCHANGE: ((times.forward_exchange, self.forward_exchange),),
            StepPart.BACKWARD_EXCHANGE: ((times.backward_exchange, self.backward_exchange),),
            StepPart.BACKWARD_KERNEL: ((times.backward_kernel, self.kernels),),
            StepPart.DENSE: (
                (times.dense_layers, self.dense_layers),
                (times.all_reduce, self.all_reduce),
                (times.group_sync, self.group_sync),
            ),
        }
        return {part: _estimate(_part_ms(times, part), *_combined(*made_of[part])) for part in StepPart}


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


def _part_ms(times: StepTimes, part: StepPart) -> float:
    return float(getattr(times, part.value))
