"""The paper's runs, planned and priced, and the device memory that they take.

Shape suffixes: R ranks of a replica group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from autoshard.core import CostModels, GroupLayout, ShardingPlan, SyncRows
from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.step import Overlap, StepPart
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel, evaluate
from autoshard.evaluation.traffic import HELD_ID_BYTES, Stream, id_bytes, plan_traffic
from autoshard.planners.planner import PlanRequest
from autoshard.planners.replica_groups import ReplicaGroupsPlanner
from studies.papers.two_d.models import CTR, EXFM, MACHINE, PaperMachine, PaperModel

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
        held_per_sent = HELD_ID_BYTES / id_bytes(group.tables.tables)
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
    """The models that price the runs: published bandwidths, nothing measured."""
    return CostModels(kernel=AnalyticCostModel.for_device(machine.device), comm=AlphaBetaComm())


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
