"""A step of the published program on DGX-A100, predicted.

Shape suffixes: R ranks, L levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autoshard.core import CostModels, PlacedShard, RowRange, Shard, ShardingPlan, TableSet, Tier, Topology
from autoshard.core.costs import CollectiveName, LinkBytes, MsArray
from autoshard.core.step import Overlap, StepTimes
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel, price_step
from autoshard.formats import load_machine
from studies.papers.nvidia.hardware import A100, HOROVOD_CYCLE_S, Gpu
from studies.papers.nvidia.kernels import TensorFlowKernels
from studies.papers.nvidia.models import PUBLISHED_MS, SyntheticModel, synthetic_model

MACHINE = "dgx-a100"
_VALUE_BYTES = 4
#: Kernels of a layer: product, and bias with activation; backward two products and the gradients of both others.
_LAYER_KERNELS = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A published point.

    Attributes:
        model: Name of the model.
        num_ranks: GPUs.
        published_ms: Measured step.
        times: Predicted parts.
        fused_ms: The same placement, exchange and dense layers with fused kernels (the analytic model of the A100),
            without Horovod: what the hardware would allow.
    """

    model: str
    num_ranks: int
    published_ms: float
    times: StepTimes
    fused_ms: float

    @property
    def predicted_ms(self) -> float:
        """The step; dense gradients are reduced while embeddings are updated."""
        return self.times.step_ms(Overlap.NEO)

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted_ms / self.published_ms - 1


@dataclass(frozen=True, slots=True)
class HorovodComm:
    """Collectives that start with the next round of a background thread, half a round late on average.

    Ranks' rounds are in step, since each of them starts with an all-reduce of what is ready (Horovod, controller.cc,
    `CoordinateCacheAndState`; operations.cc, `RunLoopOnce`).
    """

    links: AlphaBetaComm = AlphaBetaComm()  # noqa: RUF009 - it has no state

    @property
    def name(self) -> str:
        """Name of the model in results."""
        return "alpha-beta behind Horovod's rounds"

    def all_to_all_ms(self, sent_bytes_RR: MsArray, topology: Topology) -> MsArray:
        """Time per rank, shape (R,)."""
        return self._after_round(self.links.all_to_all_ms(sent_bytes_RR, topology), topology)

    def links_ms(self, links: LinkBytes, topology: Topology) -> MsArray:
        """As `all_to_all_ms`, from what leaves and reaches ranks by level; shape (..., R)."""
        return self._after_round(self.links.links_ms(links, topology), topology)

    def all_reduce_ms(self, num_bytes: float, topology: Topology) -> float:
        """Time on every rank."""
        return float(self._after_round(np.array(self.links.all_reduce_ms(num_bytes, topology)), topology))

    def reduce_scatter_ms(self, num_bytes: float, topology: Topology) -> float:
        """As `all_reduce_ms`; the program has none."""
        return self.all_reduce_ms(num_bytes / 2, topology)

    def all_gather_ms(self, num_bytes: float, topology: Topology) -> float:
        """As `all_reduce_ms`; the program has none."""
        return self.all_reduce_ms(num_bytes / 2, topology)

    def bounds_ms(self, collective: CollectiveName, value_ms: MsArray, topology: Topology) -> tuple[MsArray, MsArray]:
        """Those of the links."""
        return self.links.bounds_ms(collective, value_ms, topology)

    def _after_round(self, value_ms: MsArray, topology: Topology) -> MsArray:
        return np.where(value_ms > 0, value_ms + round_ms(topology.world_size), 0.0)


def round_ms(num_ranks: int) -> float:
    """Mean wait for Horovod's next round; none on a single rank."""
    return 0.0 if num_ranks == 1 else HOROVOD_CYCLE_S * 1e3 / 2


def memory_balanced(tables: TableSet, num_ranks: int, slice_threshold: int | None) -> tuple[PlacedShard, ...]:
    """The library's placement: tables by falling size, to ranks forth and back; large ones cut by columns before.

    Args:
        tables: Tables to place.
        num_ranks: Where to; on a single one nothing is cut.
        slice_threshold: Elements above which a table is cut in two, each part again, up to a part per rank.

    Source:
        dist_model_parallel.py of the first commit: `maybe_slice_table_column`, `apply_stragety` (`memory_balanced`).
        Sizes count elements; of equal ones the later table comes first.
    """
    parts: list[tuple[int, int, Shard]] = []
    for number, table in enumerate(tables.tables):
        num_slices = 1
        size = table.num_embeddings * table.embedding_dim
        while num_ranks > 1 and slice_threshold is not None and size / num_slices > slice_threshold:
            num_slices *= 2
        num_slices = min(num_slices, num_ranks, table.embedding_dim)
        edges = np.cumsum([0, *(len(part) for part in np.array_split(np.arange(table.embedding_dim), num_slices))])
        for start, stop in pairwise(edges.tolist()):
            rows = RowRange(start=0, stop=table.num_embeddings)
            parts.append(
                (table.num_embeddings * (stop - start), number, Shard(table=table, rows=rows, columns=(start, stop)))
            )
    parts.sort(key=lambda part: part[:2], reverse=True)
    placed = []
    for position, (_, _, shard) in enumerate(parts):
        lap, place = divmod(position, num_ranks)
        rank = place if lap % 2 == 0 else num_ranks - 1 - place
        placed.append(PlacedShard(shard=shard, tier=Tier.TABLE_WISE, replicas=((rank,),)))
    return tuple(placed)


def predict(name: str, num_ranks: int) -> Prediction:
    """Predicts one of `PUBLISHED_MS`."""
    model, topology = synthetic_model(name), load_machine(MACHINE, num_ranks)
    tables = model.tables
    plan = ShardingPlan(
        tables=tables,
        topology=topology,
        shards=memory_balanced(tables, num_ranks, model.slice_threshold),
    )
    lengths = {table.name: tuple(feature.pooling_factor for feature in table.features) for table in tables.tables}
    kernels = TensorFlowKernels(lengths=lengths, batch_size=tables.batch_size, is_distributed=num_ranks > 1)
    comm = HorovodComm()
    parts = price_step(plan, CostModels(kernel=kernels, comm=comm), overlap=Overlap.NEO).times
    # Every rank makes the ids of its own tables itself (`dp_input` is false), so that none are exchanged.
    times = replace(parts, **_dense_times(model, num_ranks, comm, topology), input=0.0)
    links = AlphaBetaComm()
    fused = price_step(
        plan, CostModels(kernel=AnalyticCostModel.for_device("a100"), comm=links), overlap=Overlap.NEO
    ).times
    fused = replace(fused, **{**_dense_times(model, num_ranks, links, topology), "overhead": 0.0}, input=0.0)
    return Prediction(
        model=name,
        num_ranks=num_ranks,
        published_ms=PUBLISHED_MS[name][num_ranks],
        times=times,
        fused_ms=fused.step_ms(Overlap.NEO),
    )


def predict_all(on_predicted: Callable[[], None] = lambda: None) -> tuple[Prediction, ...]:
    """Predicts all published points."""
    predictions = []
    for name, published in PUBLISHED_MS.items():
        for num_ranks in published:
            predictions.append(predict(name, num_ranks))
            on_predicted()
    return tuple(predictions)


def _dense_times(
    model: SyntheticModel, num_ranks: int, comm: HorovodComm | AlphaBetaComm, topology: Topology, gpu: Gpu = A100
) -> dict[str, float]:
    """Milliseconds of all that is not embeddings, with the names of `StepTimes`.

    `overhead` is the dense layers' optimizer and the all-reduce of the loss that the program waits for in every step.
    """
    local_batch = model.tables.batch_size / num_ranks
    pooled = model.width if model.stride is None else -(-model.width // model.stride)
    widths = (pooled + model.num_numerical, *model.mlp, 1)
    forward_s, backward_s = _layers_s(widths, local_batch, gpu)
    joined_s, parted_s = _interaction_s(model, local_batch, num_ranks, gpu)
    num_parameters = sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))
    optimizer_s = 2 * (len(widths) - 1) * gpu.kernel_s()
    return {
        "interaction_forward": joined_s * 1e3,
        "interaction_backward": parted_s * 1e3,
        "top_forward": forward_s * 1e3,
        "top_backward": backward_s * 1e3,
        "all_reduce": comm.all_reduce_ms(float(num_parameters * _VALUE_BYTES), topology),
        "overhead": optimizer_s * 1e3 + round_ms(num_ranks),
    }


def _layers_s(widths: tuple[int, ...], local_batch: float, gpu: Gpu) -> tuple[float, float]:
    """Products in TF32, TensorFlow's default on the A100, and what activations move."""
    forward_s = backward_s = 0.0
    for inputs, outputs in pairwise(widths):
        product_s = 2 * local_batch * inputs * outputs / gpu.matrix_flops_per_s
        activated_s = gpu.stream_s(2 * local_batch * outputs * _VALUE_BYTES)
        forward_s += gpu.kernel_s(product_s) + (_LAYER_KERNELS[0] - 1) * gpu.kernel_s(activated_s)
        backward_s += 2 * gpu.kernel_s(product_s) + (_LAYER_KERNELS[1] - 2) * gpu.kernel_s(activated_s)
    return forward_s, backward_s


def _interaction_s(model: SyntheticModel, local_batch: float, num_ranks: int, gpu: Gpu) -> tuple[float, float]:
    """Copies between the exchange and the first layer.

    Forward: what each rank sent is split by columns, all features are put together, pooled, and joined with the dense
    inputs. Backward: the same the other way round, with a slice for each feature, and the ranks' parts put together.
    """
    local_bytes = local_batch * model.width * _VALUE_BYTES
    pooled_bytes = local_bytes if model.stride is None else local_bytes / model.stride

    def copied_s(num_bytes: float, num_kernels: int = 1) -> float:
        return num_kernels * gpu.kernel_s(gpu.stream_s(2 * num_bytes / num_kernels))

    joined_s = copied_s(local_bytes) + copied_s(pooled_bytes)
    parted_s = copied_s(pooled_bytes) + copied_s(local_bytes, model.num_features)
    if model.stride is not None:
        joined_s += gpu.kernel_s(gpu.stream_s(local_bytes + pooled_bytes))
        # The gradient of pooling reads inputs, outputs and gradients, and writes the inputs' gradients (cuDNN).
        parted_s += gpu.kernel_s(gpu.stream_s(2 * local_bytes + 2 * pooled_bytes))
    if num_ranks > 1:
        joined_s += copied_s(local_bytes, num_ranks)
        parted_s += copied_s(local_bytes, num_ranks) + copied_s(local_bytes)
    return joined_s, parted_s
