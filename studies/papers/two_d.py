"""Two-dimensional sparse parallelism: its Tables 1 and 2 and Fig. 2, 6 and 7, from autoshard's planner and prices.

Shape suffixes: N tables.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Final

import numpy as np
import plotly.graph_objects as go
import typer
from plotly.subplots import make_subplots

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core import (
    AccessProfile,
    CostModels,
    DenseLayers,
    EmbeddingTable,
    GroupLayout,
    Level,
    Link,
    MemoryBytes,
    ShardingPlan,
    SyncRows,
    TableSet,
    Topology,
)
from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.plan import Provenance
from autoshard.core.step import Overlap, StepPart
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel, evaluate
from autoshard.evaluation.traffic import HELD_ID_BYTES, Stream, held_id_bytes, id_bytes, plan_traffic
from autoshard.planners.planner import PlanRequest
from autoshard.planners.replica_groups import ReplicaGroupsPlanner
from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, in_house_style
from autoshard.table import Table
from studies.frame import OutputOptions, StudyResult
from studies.papers.drawn import drawn_tables, normal_quantiles, scaled_to

_LEVELS = ("host", "building", "buildings")
#: Numbers of rows that tables have; those of one size have one access curve.
_NUM_SIZES = 100
#: A row-wise AdaGrad moment; weights are fp32.
_STATE_BYTES, _WEIGHT_BYTES = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """A model of the paper's scale.

    Attributes:
        name: The paper's name for it.
        total_bytes: Tables with their moments: Sec. 4, "total embedding table size".
        hbm_bytes: Memory of a rank in which the planner has to place tables and a batch's inputs and outputs. Chosen,
            ExFM's between what Table 1's 8 groups and what full model parallelism over 2,048 ranks needs.
        other_bytes: Memory of a rank that has nothing to do with tables: dense layers, their optimizer and activations,
            the framework. Chosen so that the largest errors of Table 1's peaks above and below are as large.
        num_tables: ExFM: "more than 4000" (Sec. 2.2); CTR: chosen.
        mean_pooling: Lookups per sample and table in the mean. Chosen.
        pooling_deviation: Standard deviation of their logarithms, which are normal. Chosen for the imbalance ratio of
            full model parallelism in Table 1.
        dense: Chosen: as many parameters as make the dense layers' time that of Table 1's steps, about.
        size_deviation: Standard deviation of the logarithms of the tables' rows. Chosen.
        dims: Embedding dims, as many tables of each. Chosen.
        alpha: Zipf exponent of the accesses. Chosen.
    """

    name: str
    total_bytes: float
    hbm_bytes: int
    other_bytes: float
    num_tables: int
    mean_pooling: float
    pooling_deviation: float
    dense: DenseLayers
    size_deviation: float = 0.6
    dims: tuple[int, ...] = (32, 64, 128)
    alpha: float = 1.05

    def tables(self, batch_size: int) -> TableSet:
        """Its tables, always alike, with that many samples per step."""
        return TableSet(batch_size=batch_size, tables=_drawn_tables(self), dense=self.dense)


@lru_cache(maxsize=2)
def _drawn_tables(model: PaperModel) -> tuple[EmbeddingTable, ...]:
    """Evenly spaced quantiles of the distributions, paired at random."""
    rng, count = np.random.default_rng(0), model.num_tables
    pooling_N = np.exp(model.pooling_deviation * normal_quantiles(count))
    pooling_N = scaled_to(pooling_N, model.mean_pooling * count)
    dims_N = rng.permutation(np.resize(model.dims, count))
    sizes_N = np.exp(model.size_deviation * np.resize(normal_quantiles(_NUM_SIZES), count))
    row_bytes_N = dims_N * _WEIGHT_BYTES + _STATE_BYTES
    rows_N = scaled_to(rng.permutation(sizes_N) * row_bytes_N, model.total_bytes) / row_bytes_N
    return drawn_tables(rows_N, dims_N, pooling_N, lambda rows: AccessProfile.zipf(rows, model.alpha))


CTR: Final = PaperModel(
    name="CTR",
    total_bytes=0.5e12,
    hbm_bytes=40_000_000_000,
    other_bytes=27.2e9,
    num_tables=1000,
    mean_pooling=20.0,
    pooling_deviation=1.25,
    dense=DenseLayers(num_dense_features=1000, bottom_mlp=(512, 64), top_mlp=(768, 512, 1), interaction="concat"),
)

EXFM: Final = PaperModel(
    name="ExFM",
    total_bytes=1.7e12,
    hbm_bytes=44_000_000_000,
    other_bytes=39.4e9,
    num_tables=4000,
    mean_pooling=60.0,
    pooling_deviation=0.85,
    dense=DenseLayers(
        num_dense_features=1000, bottom_mlp=(512, 64), top_mlp=(8192, 8192, 4096, 1), interaction="concat"
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperMachine:
    """A cluster of A100 in three nested levels: hosts, buildings, and all buildings.

    Attributes:
        device: Prices kernels and dense layers by published bandwidths. The paper does not name its GPU.
        card_bytes_per_s: Bandwidth that a rank's port reaches of a network card of 200 Gbit/s (25 GB/s): 24 GB/s, by
            NVIDIA's engineers (NVIDIA/nccl issue 412). Cards as in Neo, Table 2, and FlexShard, Sec. 5.
        host_speedup: Intra-host communication is "7x" faster (Sec. 5).
        building_ranks: Ranks of a building. At 4,096 "cross-building communication is triggered" (Sec. 4.3), at 2,048
            it is not.
        between_buildings: Share of a port's bandwidth that is left between buildings. Chosen.
        latencies_s: By level. Chosen.
    """

    device: str = "a100"
    card_bytes_per_s: float = 24e9
    host_speedup: float = 7.0
    host_ranks: int = 8
    building_ranks: int = 2048
    between_buildings: float = 0.5
    latencies_s: tuple[float, float, float] = (1e-5, 2e-5, 1e-4)

    def topology(self, world_size: int, hbm_bytes: int) -> Topology:
        """So many ranks of it, with that much memory each."""
        host_port, card = self.host_speedup * self.card_bytes_per_s, self.card_bytes_per_s
        ports = (host_port, card, card * self.between_buildings)
        sizes = [self.host_ranks, min(world_size, self.building_ranks)]
        if world_size > self.building_ranks:
            sizes.append(world_size)
        levels = []
        for name, size, port, latency_s in zip(_LEVELS, sizes, ports, self.latencies_s, strict=False):
            # A ring over hosts, whose ranks have added up among themselves; over ranks within one.
            shared = 1 if size == self.host_ranks else self.host_ranks
            passing = 2 * (size // shared - 1) / (size // shared)
            levels.append(
                Level(
                    name=name,
                    size=size,
                    all_to_all=Link(bytes_per_s=port, latency_s=latency_s),
                    all_reduce=Link(bytes_per_s=port * shared / passing, latency_s=latency_s),
                )
            )
        return Topology(
            world_size=world_size,
            device=self.device,
            memory_bytes=MemoryBytes(hbm=hbm_bytes),
            levels=tuple(levels),
        )


MACHINE: Final = PaperMachine()


#: Of an A100 with 80 GB. The paper does not name its GPU.
GPU_BYTES: Final = 80e9
#: Bytes per lookup that FBGEMM holds beside the ids while it groups a pooled batch's lookups by row, with ids of 8
#: bytes (`transpose_embedding_input`, fbgemm_gpu/src/split_embeddings_utils): linear ids, sorted and not (16), their
#: positions, sorted and not (8), the distinct ids with room for all (8), their counts and the counts' sums (8).
SORT_BYTES: Final = 16 + 8 + 8 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes of each rank of a group, shapes (R,).

    Attributes:
        tables_R: Weights and moments.
        ids_R: Ids and lengths: of the rank's own samples, and those that it serves.
        sort_R: Buffers in which served lookups are grouped by row.
        exchanged_R: Embeddings of the rank's samples, their gradients, and the gradients that it receives.
    """

    tables_R: MsArray
    ids_R: MsArray
    sort_R: MsArray
    exchanged_R: MsArray

    @classmethod
    def of(cls, plan: ShardingPlan) -> StepMemory:
        """Of a plan without replicas within its groups."""
        group = plan.of_one_group()
        traffic = plan_traffic(group)
        tables_R = np.zeros(group.group_size)
        for shard in group.held_shards():
            tables_R[shard.ranks] += shard.local.memory_bytes
        # As they are held, which is wider than they travel where tables are short.
        held_per_sent = held_id_bytes(group.tables.tables) / id_bytes(group.tables.tables)
        served_R = traffic.received_R(Stream.IDS) * held_per_sent
        own_R = traffic.sent_R(Stream.IDS) * held_per_sent
        return cls(
            tables_R=tables_R,
            ids_R=served_R + own_R + traffic.received_R(Stream.LENGTHS),
            sort_R=served_R / HELD_ID_BYTES * SORT_BYTES,
            exchanged_R=traffic.received_R(Stream.FORWARD)
            + traffic.sent_R(Stream.BACKWARD)
            + traffic.received_R(Stream.BACKWARD),
        )

    @property
    def lookups_R(self) -> MsArray:  # noqa: N802 - a shape suffix
        """All but the tables."""
        return np.asarray(self.ids_R + self.sort_R + self.exchanged_R)

    @property
    def total_R(self) -> MsArray:  # noqa: N802 - a shape suffix
        """Everything about tables."""
        return np.asarray(self.tables_R + self.lookups_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A line of the paper's tables.

    Attributes:
        model: The model.
        world_size: GPUs.
        num_groups: 1 for full model parallelism.
        local_batch: Samples per GPU and step.
        paper_qps: Samples per second; None where it ran out of memory.
        paper_imbalance: Largest over mean lookup time; None where it is not published.
        paper_peak: Largest share of a GPU's memory over ranks; None where it ran out of memory.
        paper_mean: Its mean over ranks; None where it is not published.
        paper_factor: Scaling factor in Table 2: QPS per GPU over that of 256 GPUs.
        layout: Of the groups. The paper's: copies in one host, where there are no more groups than GPUs (Sec. 5).
    """

    model: PaperModel
    world_size: int
    num_groups: int
    local_batch: int
    paper_qps: float | None = None
    paper_imbalance: float | None = None
    paper_peak: float | None = None
    paper_mean: float | None = None
    paper_factor: float | None = None
    layout: GroupLayout = GroupLayout.ACROSS_NODES


def _table1(
    model: PaperModel, world_size: int, local_batch: int, lines: Mapping[int, tuple[float, float, float, float]]
) -> tuple[Run, ...]:
    return tuple(
        Run(
            model=model,
            world_size=world_size,
            num_groups=num_groups,
            local_batch=local_batch,
            paper_qps=qps,
            paper_imbalance=imbalance,
            paper_peak=peak,
            paper_mean=mean,
        )
        for num_groups, (qps, imbalance, peak, mean) in lines.items()
    )


#: Table 1: QPS, imbalance ratio, peak and mean memory by number of groups.
CTR_RUNS: Final = _table1(
    CTR,
    256,
    4096,
    {
        1: (1.53e6, 5.70, 0.7240, 0.4966),
        2: (2.34e6, 2.01, 0.5365, 0.4765),
        4: (2.66e6, 1.57, 0.5474, 0.5059),
        8: (2.26e6, 1.53, 0.6990, 0.6291),
    },
)
EXFM_RUNS: Final = _table1(
    EXFM,
    1024,
    896,
    {
        1: (5.51e5, 5.18, 0.9944, 0.7695),
        2: (6.31e5, 2.23, 0.8557, 0.7915),
        4: (6.54e5, 1.65, 0.8777, 0.8281),
        8: (6.32e5, 1.63, 0.9485, 0.9022),
    },
)

_TABLE2_BATCH: Final = 1152
#: GPUs of a group in Table 2.
_TABLE2_GROUP: Final = 256


def _table2(lines: Mapping[int, tuple[float | None, float | None, float | None]], *, grouped: bool) -> tuple[Run, ...]:
    return tuple(
        Run(
            model=EXFM,
            world_size=world_size,
            num_groups=world_size // _TABLE2_GROUP if grouped else 1,
            local_batch=_TABLE2_BATCH,
            paper_qps=qps,
            paper_peak=peak,
            paper_factor=factor,
        )
        for world_size, (peak, qps, factor) in lines.items()
    )


#: Table 2: peak memory, QPS and scaling factor by GPUs, full model parallelism.
FULL_RUNS: Final = _table2(
    {
        256: (0.9654, 1.76e5, 1.0),
        512: (0.9547, 3.37e5, 0.95),
        1024: (1.0, 5.61e5, 0.797),
        2048: (None, None, None),
        4096: (None, None, None),
    },
    grouped=False,
)
#: Table 2: groups of 256 GPUs.
GROUPED_RUNS: Final = _table2(
    {
        256: (0.9654, 1.76e5, 1.0),
        512: (0.9659, 3.56e5, 1.0),
        1024: (0.9495, 6.76e5, 0.96),
        2048: (0.9507, 1.34e6, 0.95),
        4096: (0.9556, 2.53e6, 0.90),
    },
    grouped=True,
)
#: Table 2's last line with the groups laid the other way, which the paper does not have.
WITHIN_RUN: Final = Run(
    model=EXFM, world_size=4096, num_groups=16, local_batch=_TABLE2_BATCH, layout=GroupLayout.WITHIN_NODES
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Prices and memory of a run.

    Attributes:
        run: The run.
        out_of_memory: Missing memory of a run that does not fit; all else is 0 then.
        step_ms: Predicted step.
        parts_ms: Its parts at their slowest ranks; `dense` holds the dense layers and both synchronisations.
        group_sync_ms: Synchronisation of the groups.
        imbalance: Largest over mean kernel time.
        peak_bytes: Tables and lookups of the fullest rank at its fullest moment (`StepMemory`).
        mean_bytes: Of all ranks.
        lookup_bytes: Of the rank with most bytes of lookups, without its tables.
        pricing_s: Time that pricing the plan took.
    """

    run: Run
    out_of_memory: str = ""
    step_ms: float = 0.0
    parts_ms: Mapping[StepPart, float]
    group_sync_ms: float = 0.0
    imbalance: float = 0.0
    peak_bytes: float = 0.0
    mean_bytes: float = 0.0
    lookup_bytes: float = 0.0
    pricing_s: float = 0.0

    @property
    def qps(self) -> float:
        """Samples per second; 0 where it does not fit."""
        return self.run.local_batch * self.run.world_size / self.step_ms * 1e3 if self.step_ms else 0.0

    @property
    def kernels_ms(self) -> float:
        """Embedding computation of the slowest ranks, forward and backward."""
        return self.parts_ms[StepPart.FORWARD_KERNEL] + self.parts_ms[StepPart.BACKWARD_KERNEL]

    @property
    def exchange_ms(self) -> float:
        """Embedding all-to-alls, forward and backward."""
        return self.parts_ms[StepPart.FORWARD_EXCHANGE] + self.parts_ms[StepPart.BACKWARD_EXCHANGE]

    @property
    def all_to_all_ms(self) -> float:
        """All-to-alls of ids and embeddings."""
        return self.parts_ms[StepPart.INPUT] + self.exchange_ms

    @property
    def peak(self) -> float:
        """Share of a GPU's memory that the fullest rank takes, all else included."""
        return (self.run.model.other_bytes + self.peak_bytes) / GPU_BYTES

    @property
    def mean(self) -> float:
        """As `peak`, of all ranks."""
        return (self.run.model.other_bytes + self.mean_bytes) / GPU_BYTES

    @property
    def sparse_ms(self) -> float:
        """Everything about tables: ids, lookups, exchanges, and synchronisation of the groups (Fig. 6)."""
        return self.all_to_all_ms + self.kernels_ms + self.group_sync_ms

    def factor(self, base: Outcome) -> float:
        """Scaling factor: samples per second and GPU over those of another run."""
        return (self.qps / self.run.world_size) / (base.qps / base.run.world_size)


def paper_costs(machine: PaperMachine = MACHINE) -> CostModels:
    """The models that price the runs: published bandwidths, nothing measured.

    All that is chosen was chosen with kernels that take their bytes' time and launches of 10 and 100 microseconds. What
    an H200 was measured to take beside them is left out: lookups a sample, which the paper does not tell, would be
    fewer with it.
    """
    model = AnalyticCostModel.for_device(machine.device)
    waits: dict[str, Any] = dict.fromkeys(("output_bytes_per_s", "lookup_s", "sort_s", "update_s", "state_s"), 0.0)
    memory = replace(model.memory, forward_launch_ms=0.01, backward_launch_ms=0.1, **waits)
    return CostModels(kernel=replace(model, memory=memory), comm=AlphaBetaComm())


def request_of(run: Run, machine: PaperMachine = MACHINE, **options: object) -> PlanRequest:
    """A run's planning task for `replica-groups`, whose synchronisation averages all rows, as the paper's does."""
    return PlanRequest(
        tables=run.model.tables(run.local_batch * run.world_size),
        topology=machine.topology(run.world_size, run.model.hbm_bytes),
        costs=paper_costs(machine),
        options={"sync_rows": SyncRows.ALL.value, **options},
    )


def outcome(run: Run, machine: PaperMachine = MACHINE) -> Outcome:
    """Plans and prices a run: tables on single ranks by `cost-greedy`, stages overlapping as in Neo's Eq. 1."""
    request = request_of(run, machine, num_groups=run.num_groups, layout=run.layout.value)
    try:
        plan = ReplicaGroupsPlanner().plan(request)
    except InfeasiblePlanError as error:
        return Outcome(run=run, out_of_memory=error.message, parts_ms={})
    return priced(run, plan, request.costs)


def priced(run: Run, plan: ShardingPlan, costs: CostModels) -> Outcome:
    """Prices and memory of a run's plan."""
    started_s = time.perf_counter()
    found = evaluate(plan, costs, overlap=Overlap.NEO)
    pricing_s = time.perf_counter() - started_s
    memory = StepMemory.of(plan)
    return Outcome(
        run=run,
        step_ms=found.step_ms.value,
        parts_ms={part: estimate.value for part, estimate in found.parts.items()},
        group_sync_ms=found.group_sync_ms or 0.0,
        imbalance=found.imbalance,
        peak_bytes=float(memory.total_R.max()),
        mean_bytes=float(memory.total_R.mean()),
        lookup_bytes=float(memory.lookups_R.max()),
        pricing_s=pricing_s,
    )


SCHEMA = "autoshard.papers.two-d/1"
#: Fig. 2 by GPUs, as Sec. 2.2 has it in words: computation, all-to-all and memory of lookups.
FIG2_PAPER: Mapping[int, tuple[str, str, str]] = {
    256: ("100", "-", "less than 4"),
    1024: ("200", "more than 600", "almost 15"),
}


def table1(outcomes: Sequence[Outcome]) -> Table:
    """Efficiency by number of groups, for one model."""
    run = outcomes[0].run
    return Table.of(
        outcomes,
        (
            ("groups", lambda one: str(one.run.num_groups)),
            ("QPS", lambda one: _qps(one.qps)),
            ("paper", lambda one: _qps(one.run.paper_qps)),
            ("imbalance", lambda one: f"{one.imbalance:.2f}"),
            ("paper", lambda one: f"{one.run.paper_imbalance:.2f}"),
            ("sync, ms", lambda one: f"{one.group_sync_ms:.0f}"),
            ("peak / mean memory", lambda one: f"{_share(one.peak)} / {_share(one.mean)}"),
            ("paper", lambda one: f"{_share(one.run.paper_peak)} / {_share(one.run.paper_mean)}"),
            ("tables and lookups, GB", lambda one: f"{one.peak_bytes / 1e9:.1f} / {one.mean_bytes / 1e9:.1f}"),
        ),
        caption=f"Table 1, {run.model.name}: {run.world_size:,} GPUs, {run.local_batch:,} samples each",
    )


def table2(full: Sequence[Outcome], grouped: Sequence[Outcome]) -> Table:
    """Scaling of ExFM: full model parallelism, and groups of 256 GPUs."""
    base = full[0]
    lines = []
    for one, other in zip(full, grouped, strict=True):
        lines.append((f"{one.run.world_size:,}", *_scaling(one, base), *_scaling(other, base)))
    return Table(
        caption="Table 2, ExFM: 1,152 samples per GPU; full model parallelism, then groups of 256 GPUs",
        columns=("GPUs", "QPS", "scaling", "paper", "QPS in groups", "scaling", "paper"),
        rows=tuple(lines),
    )


def memory_table(full: Sequence[Outcome], grouped: Sequence[Outcome]) -> Table:
    """Table 2's peaks."""
    lines = zip(full, grouped, strict=True)
    return Table(
        caption="Table 2: peak memory; full model parallelism, then groups of 256 GPUs",
        columns=("GPUs", "peak", "paper", "peak in groups", "paper"),
        rows=tuple((f"{one.run.world_size:,}", *_peaks(one), *_peaks(other)) for one, other in lines),
    )


def fig2_table(full: Sequence[Outcome]) -> Table:
    """Fig. 2's three curves, as far as they fit."""
    return Table.of(
        [one for one in full if not one.out_of_memory],
        (
            ("GPUs", lambda one: f"{one.run.world_size:,}"),
            ("computation, ms", lambda one: f"{one.kernels_ms:.0f}"),
            ("paper", lambda one: FIG2_PAPER.get(one.run.world_size, ("-", "-", "-"))[0]),
            ("all-to-all, ms", lambda one: f"{one.all_to_all_ms:.0f}"),
            ("paper", lambda one: FIG2_PAPER.get(one.run.world_size, ("-", "-", "-"))[1]),
            ("lookups, GB", lambda one: f"{one.lookup_bytes / 1e9:.1f}"),
            ("paper", lambda one: FIG2_PAPER.get(one.run.world_size, ("-", "-", "-"))[2]),
        ),
        caption="Fig. 2: full model parallelism, slowest and fullest ranks",
    )


def choice_table(name: str, provenance: Provenance) -> Table:
    """The planner's remark on every number of groups that it tried."""
    remarks = {
        label: text for label, text in provenance.models.items() if label.endswith("group") or " groups " in label
    }
    return Table(
        caption=f"Choice of `replica-groups` for {name} (stages one after the other)",
        columns=("groups", "predicted, or why not"),
        rows=tuple((label, text) for label, text in remarks.items()),
    )


def document(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, object]:
    """The numbers behind the tables and images."""
    return {"schema": SCHEMA, **{name: [_outcome(one) for one in found] for name, found in outcomes.items()}}


def _scaling(one: Outcome, base: Outcome) -> tuple[str, str, str]:
    published = "-" if one.run.paper_factor is None else f"{100 * one.run.paper_factor:.1f}%"
    if one.out_of_memory:
        return "out of memory", "-", "out of memory" if one.run.paper_qps is None else published
    return _qps(one.qps), f"{100 * one.factor(base):.1f}%", published


def _peaks(one: Outcome) -> tuple[str, str]:
    published = "out of memory" if one.run.paper_peak is None else _share(one.run.paper_peak)
    return "out of memory" if one.out_of_memory else _share(one.peak), published


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _qps(value: float | None) -> str:
    return "out of memory" if not value else f"{value:.3g}"


def _outcome(one: Outcome) -> dict[str, object]:
    run: Run = one.run
    return {
        "model": run.model.name,
        "world_size": run.world_size,
        "num_groups": run.num_groups,
        "layout": run.layout.value,
        "local_batch": run.local_batch,
        "paper": {
            "qps": run.paper_qps,
            "imbalance": run.paper_imbalance,
            "scaling_factor": run.paper_factor,
            "peak": run.paper_peak,
            "mean": run.paper_mean,
        },
        "out_of_memory": one.out_of_memory,
        "step_ms": one.step_ms,
        "qps": one.qps,
        "parts_ms": {part.value: value for part, value in one.parts_ms.items()},
        "group_sync_ms": one.group_sync_ms,
        "imbalance": one.imbalance,
        "peak_bytes": one.peak_bytes,
        "mean_bytes": one.mean_bytes,
        "lookup_bytes": one.lookup_bytes,
        "other_bytes": run.model.other_bytes,
        "pricing_s": one.pricing_s,
    }


#: Height of the images in pixels.
HEIGHT = 480


def fig2_figure(full: Sequence[Outcome]) -> go.Figure:
    """Latencies of slowest ranks and lookups' memory of the fullest, against GPUs, as far as they fit."""
    fits = [one for one in full if not one.out_of_memory]
    figure = make_subplots(1, 2, horizontal_spacing=0.12)
    in_house_style(figure, height=HEIGHT)
    sizes = [one.run.world_size for one in fits]
    curves = (
        ("computation", [one.kernels_ms for one in fits], {256: 100.0, 1024: 200.0}, BLUE, 1),
        ("all-to-all", [one.all_to_all_ms for one in fits], {1024: 600.0}, GREEN, 1),
        ("memory of lookups", [one.lookup_bytes / 1e9 for one in fits], {256: 4.0, 1024: 15.0}, ORANGE, 2),
    )
    for name, values, published, colour, column in curves:
        line = {"color": colour, "width": 3}
        figure.add_scatter(name=name, x=sizes, y=values, mode="lines+markers", line=line, row=1, col=column)
        marker = {"color": colour, "size": 11, "symbol": "circle-open", "line": {"width": 2}}
        figure.add_scatter(
            name=f"{name}, paper",
            x=list(published),
            y=list(published.values()),
            mode="markers",
            marker=marker,
            row=1,
            col=column,
        )
    figure.update_xaxes(title_text="GPUs", type="log", tickvals=sizes)
    figure.update_yaxes(title_text="ms per step", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="GB", rangemode="tozero", row=1, col=2)
    return figure


def fig6_figure(models: Sequence[Sequence[Outcome]]) -> go.Figure:
    """Kernel costs of the slowest rank by number of groups, a panel for each model."""
    figure = make_subplots(1, len(models), horizontal_spacing=0.1)
    in_house_style(figure, height=HEIGHT)
    for column, found in enumerate(models, start=1):
        groups = [str(one.run.num_groups) for one in found]
        bars = (
            ("ids to owners", [one.parts_ms[StepPart.INPUT] for one in found], SKY),
            ("embedding computation", [one.kernels_ms for one in found], BLUE),
            ("embedding all-to-all", [one.exchange_ms for one in found], GREEN),
            ("table all-reduce", [one.group_sync_ms for one in found], PINK),
        )
        for name, values, colour in bars:
            figure.add_bar(
                name=name, x=groups, y=values, marker_color=colour, showlegend=column == 1, row=1, col=column
            )
        figure.update_xaxes(title_text=f"{found[0].run.model.name}: groups", type="category", row=1, col=column)
        figure.update_yaxes(title_text="ms per step", row=1, col=column)
    figure.update_layout(barmode="stack")
    return figure


def fig7_figure(full: Sequence[Outcome], grouped: Sequence[Outcome]) -> go.Figure:
    """Samples per second against GPUs, with the paper's marks."""
    figure = in_house_style(go.Figure(), height=HEIGHT)
    for name, found, colour in (
        ("full model parallelism", full, ORANGE),
        ("groups of 256 GPUs", grouped, BLUE),
    ):
        fits = [one for one in found if not one.out_of_memory]
        sizes = [one.run.world_size for one in fits]
        figure.add_scatter(
            name=name, x=sizes, y=[one.qps for one in fits], mode="lines", line={"color": colour, "width": 3}
        )
        published = [one for one in found if one.run.paper_qps is not None]
        figure.add_scatter(
            name=f"{name}, paper",
            x=[one.run.world_size for one in published],
            y=[one.run.paper_qps for one in published],
            mode="markers",
            marker={"color": colour, "size": 11, "symbol": "circle-open", "line": {"width": 2}},
        )
    ends = [grouped[0], grouped[-1]]
    figure.add_scatter(
        name="linear",
        x=[one.run.world_size for one in ends],
        y=[grouped[0].qps * one.run.world_size / grouped[0].run.world_size for one in ends],
        mode="lines",
        line={"color": GREY, "dash": "dot"},
    )
    figure.update_xaxes(title_text="GPUs", type="log", dtick=0.30103)
    figure.update_yaxes(title_text="samples per second", type="log", dtick=0.30103)
    return figure


@command_options()
class TwoDOptions:
    """Options of the study `two-d`."""

    choose: Annotated[bool, typer.Option(help="Also let the planner choose the groups of CTR.")] = True


def main(options: TwoDOptions, output: OutputOptions) -> None:
    """Plans and prices 2D's runs, prints its Tables 1 and 2 beside them, and draws its Fig. 2, 6 and 7.

    Example:
        python -m studies two-d -o docs/figures
    """
    runs = {
        "ctr": CTR_RUNS,
        "exfm": EXFM_RUNS,
        "full": FULL_RUNS,
        "grouped": GROUPED_RUNS,
        "within_nodes": (WITHIN_RUN,),
    }
    found = {name: [_logged(run) for run in of_table] for name, of_table in runs.items()}
    full, grouped, (within,) = found["full"], found["grouped"], found["within_nodes"]
    notes = [
        f"16 groups laid within nodes: {within.qps:.3g} samples per second, {100 * within.factor(full[0]):.1f}%; laid "
        f"across nodes: {grouped[-1].qps:.3g}."
    ]
    notes += [
        f"{one.run.world_size:,} GPUs in {one.run.num_groups} group: {one.out_of_memory}"
        for one in (*full, *grouped)
        if one.out_of_memory
    ]
    tables = (
        table1(found["ctr"]),
        table1(found["exfm"]),
        table2(full, grouped),
        memory_table(full, grouped),
        fig2_table(full),
    )
    output.write(
        StudyResult(
            name="two-d",
            document=document(found),
            tables=(*tables, _choice()) if options.choose else tables,
            notes=tuple(notes),
            images={
                "-fig2": fig2_figure(full),
                "-fig6": fig6_figure([found["ctr"], found["exfm"]]),
                "-fig7": fig7_figure(full, grouped),
            },
        )
    )


def _choice() -> Table:
    plan = ReplicaGroupsPlanner().plan(request_of(CTR_RUNS[0]))
    assert plan.provenance is not None, "this planner names what it tried"
    return choice_table(f"{CTR_RUNS[0].model.name} on {CTR_RUNS[0].world_size} GPUs", plan.provenance)


def _logged(run: Run) -> Outcome:
    found = outcome(run)
    console.log(
        f"{run.model.name}, {run.world_size:,} GPUs in {run.num_groups} groups: "
        + (found.out_of_memory or f"step {found.step_ms:.0f} ms, priced in {found.pricing_s:.2f} s")
    )
    return found
