"""OPER's evaluation: exchange by memory, threshold and link, balance by method, time of the search.

Exchange is that of rows in the forward pass, as in the paper, in MiB per step or in milliseconds of the cost matrix.

Shape suffixes: R ranks, N row groups. Entry [i, j] of a matrix (R, R) is what rank i fetches from rank j.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModels, Exchange, PlacedShard, Shard, ShardingPlan, TableSet, Topology
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel, evaluate, plan_traffic
from autoshard.evaluation.traffic import Stream
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner
from autoshard.validator import validate_plan
from studies.papers.oper.equations import fetch_matrix_ms, mean_row_bytes, topology_frequency
from studies.papers.oper.tasks import dgx_a100, eight_nodes, kaggle, syn_large, terabyte, two_nodes

FloatArray = NDArray[np.float64]

MIB = 1 << 20
RATIOS = (0.0, 0.01, 0.02, 0.05, 0.10, 0.15, 0.20)
THRESHOLDS = (0.05, 0.01, 0.005, 0.001, 0.0005)
#: The paper's extra memory and threshold wherever it does not vary them (Sec. 6.1).
RATIO, THRESHOLD = 0.05, 0.001
#: What a plan is for: copies save exchange in both, but cost an all-reduce of their gradients when training.
TRAINING, INFERENCE = "training", "inference"
MODES = (TRAINING, INFERENCE)
#: Table 3's lines are made for each of these modes and shares of extra memory; without copies both modes are one.
SETTINGS = ((TRAINING, RATIO), (INFERENCE, RATIO), (INFERENCE, 0.0))
_COSTS = CostModels(kernel=AnalyticCostModel.for_device("a100"), comm=AlphaBetaComm())


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """Exchange over the links between two ranks, either way, in MiB per step (Table 2).

    Attributes:
        ratio: Extra memory that copies may take, over the bytes of all tables.
        used: Extra memory that they take.
        mean: Over links.
        variance: Over links.
    """

    ratio: float
    used: float
    mean: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """Exchange of the most and the least loaded rank, in MiB per step (Table 3).

    Attributes:
        label: Which line of the table.
        mode: What the plan is for.
        ratio: Extra memory.
        cpu_s: Seconds of one core for the plan.
        most: Larger of fetched and served data of the most loaded rank.
        least: Of the least loaded one.
        num_shards: Shards of the plan; 0 where there is none.
    """

    label: str
    mode: str
    ratio: float
    cpu_s: float
    most: float
    least: float
    num_shards: int

    @property
    def balance(self) -> float:
        """The paper's degree of balance."""
        return self.least / self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTime:
    """One search: what it took and how even its plan is.

    Attributes:
        label: Data and mode.
        num_rows: Rows of all tables.
        num_ranks: Ranks.
        cpu_s: Seconds of one core.
        peak_gib: Most memory that this process has had until then.
        exchange_balance: Least over most loaded rank, by time of the priced exchange.
        memory_balance: By bytes held.
        num_shards: Shards of the plan.
    """

    label: str
    num_rows: int
    num_ranks: int
    cpu_s: float
    peak_gib: float
    exchange_balance: float
    memory_balance: float
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkCosts:
    """Fig. 8: the cost matrix, and what each link costs per step without and with copies, in ms."""

    fetch_ms_RR: FloatArray
    alone_ms_RR: FloatArray
    copied_ms_RR: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MethodLoads:
    """Fig. 10: what one method puts on each rank and link, in MiB.

    Attributes:
        memory_R: Weights and optimizer state.
        lookups_R: Rows looked up per step, for itself and others.
        links: Exchange per step between each two ranks, shape (R (R - 1),).
    """

    memory_R: FloatArray
    lookups_R: FloatArray
    links: FloatArray


def make_plan(tables: TableSet, topology: Topology, planner: str = "oper", **options: object) -> ShardingPlan:
    """A valid plan that exchanges rows; OPER's with the paper's threshold and copies above the frequency of Eq. 5."""
    if planner == "oper":
        row_bytes = mean_row_bytes(tables)
        frequency = topology_frequency(
            topology, fetch_matrix_ms(topology, row_bytes), row_bytes, tables.batch_size / topology.world_size
        )
        options = {"threshold": THRESHOLD, "copy_frequency": frequency, **options}
    plan = get_planner(planner).plan(PlanRequest(tables=tables, topology=topology, costs=_COSTS, options=options))
    plan = replace(
        plan, shards=tuple(replace(placed, exchange=Exchange.ROWS) for placed in plan.shards), predicted=None
    )
    validate_plan(plan)
    return plan


def fetched_mib(plan: ShardingPlan) -> FloatArray:
    """MiB that rank i fetches from rank j per step, shape (R, R); 0 for what it has itself."""
    bytes_RR = plan_traffic(plan).pairs_RR(Stream.FORWARD).T
    return np.asarray((bytes_RR - np.diag(bytes_RR.diagonal())) / MIB)


def links(matrix_RR: FloatArray) -> FloatArray:
    """The entries of different ranks."""
    return matrix_RR[~np.eye(len(matrix_RR), dtype=np.bool_)]


def held_mib(plan: ShardingPlan) -> FloatArray:
    """MiB that each rank holds, shape (R,)."""
    return np.array([sum(shard.memory_bytes for shard in shards) for shards in plan.local_shards()]) / MIB


def rank_mib(plan: ShardingPlan) -> FloatArray:
    """What each rank fetches or serves per step, whichever is more, in MiB, shape (R,)."""
    mib_RR = fetched_mib(plan)
    return np.maximum(mib_RR.sum(axis=0), mib_RR.sum(axis=1))


def exchange_by_memory(tables: TableSet, mode: str) -> tuple[LinkTraffic, ...]:
    """Table 2, for training or for inference."""
    whole_mib = sum(table.storage_bytes for table in tables.tables) / MIB
    traffic = []
    for ratio in RATIOS:
        plan = make_plan(tables, dgx_a100(), mode=mode, extra_memory_ratio=ratio)
        each = links(fetched_mib(plan))
        used = float(held_mib(plan).sum()) / whole_mib - 1
        traffic.append(LinkTraffic(ratio=ratio, used=used, mean=float(each.mean()), variance=float(each.var())))
    return tuple(traffic)


def exchange_by_threshold(mode: str, ratio: float) -> tuple[RankTraffic, ...]:
    """Table 3 without the solver: Kaggle's groups as each threshold makes them, no finer."""
    lines = []
    for threshold in THRESHOLDS:
        start_s = time.process_time()
        plan = make_plan(kaggle(), dgx_a100(), mode=mode, threshold=threshold, balance=0.0, extra_memory_ratio=ratio)
        cpu_s = time.process_time() - start_s
        load_R = rank_mib(plan)
        lines.append(
            RankTraffic(
                label=f"{100 * threshold:g}%",
                mode=mode,
                ratio=ratio,
                cpu_s=cpu_s,
                most=float(load_R.max()),
                least=float(load_R.min()),
                num_shards=len(plan.shards),
            )
        )
    return tuple(lines)


def search_times() -> tuple[SearchTime, ...]:
    """The search at the paper's threshold for Criteo Terabyte's rows, and for ten times as many, in both modes."""
    sets = (("Criteo Terabyte", terabyte, dgx_a100), ("Syn_Large", syn_large, eight_nodes))
    return tuple(
        _search_time(f"{name}, {mode}", tables(), topology(), mode) for name, tables, topology in sets for mode in MODES
    )


def costs_by_link() -> LinkCosts:
    """Fig. 8: Kaggle on two nodes."""
    topology, tables = two_nodes(), kaggle()
    row_bytes = tables.tables[0].embedding_dim * tables.tables[0].dtype.num_bytes
    fetch_ms_RR = fetch_matrix_ms(topology, float(row_bytes))

    def cost_ms(ratio: float) -> FloatArray:
        plan = make_plan(tables, topology, mode=INFERENCE, extra_memory_ratio=ratio)
        return np.asarray(fetched_mib(plan) * MIB / row_bytes * fetch_ms_RR)

    return LinkCosts(fetch_ms_RR=fetch_ms_RR, alone_ms_RR=cost_ms(0.0), copied_ms_RR=cost_ms(RATIO))


def loads_by_method(tables: TableSet) -> Mapping[str, MethodLoads]:
    """Fig. 10: MG, AG, whole tables dealt in turns (TW), TorchRec's planner (whole tables), OPER in both modes."""
    topology = dgx_a100()
    plans = {
        "MG": make_plan(tables, topology, method="mg"),
        "AG": make_plan(tables, topology, method="ag"),
        "TW": _in_turns(tables, topology),
        "TorchRec": make_plan(tables, topology, "torchrec"),
        **{f"OPER, {mode}": make_plan(tables, topology, mode=mode, extra_memory_ratio=RATIO) for mode in MODES},
    }
    return {
        name: MethodLoads(
            memory_R=held_mib(plan),
            lookups_R=plan_traffic(plan).pairs_RR(Stream.FORWARD).sum(axis=1) / MIB,
            links=links(fetched_mib(plan)),
        )
        for name, plan in plans.items()
    }


def _search_time(label: str, tables: TableSet, topology: Topology, mode: str) -> SearchTime:
    start_s = time.process_time()
    plan = make_plan(tables, topology, mode=mode, extra_memory_ratio=RATIO)
    cpu_s = time.process_time() - start_s
    memory_R = held_mib(plan)
    return SearchTime(
        label=label,
        num_rows=sum(table.num_embeddings for table in tables.tables),
        num_ranks=topology.world_size,
        cpu_s=cpu_s,
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        exchange_balance=evaluate(plan, _COSTS).exchange_balance,
        memory_balance=float(memory_R.min() / memory_R.max()),
        num_shards=len(plan.shards),
    )


def _in_turns(tables: TableSet, topology: Topology) -> ShardingPlan:
    """Whole tables, as many on each rank as on the others, in the order of the data."""
    shards = tuple(
        replace(PlacedShard.table_wise(Shard.whole(table), index % topology.world_size), exchange=Exchange.ROWS)
        for index, table in enumerate(tables.tables)
    )
    return ShardingPlan(tables=tables, topology=topology, shards=shards)
