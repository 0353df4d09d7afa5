"""OPER's data sets and machines (Table 1, Sec. 6.1; as far as they are published), its evaluation, and CP-SAT's.

Exchange by memory, threshold and link, balance by method, time of the search. Exchange is that of rows in the forward
pass, as in the paper, in MiB per step or in milliseconds of the cost matrix.

Shape suffixes: R ranks, N row groups. Entry [i, j] of a matrix (R, R) is what rank i fetches from rank j.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    AccessProfile,
    CostModels,
    EmbeddingTable,
    Exchange,
    Level,
    Link,
    MemoryBytes,
    PlacedShard,
    Shard,
    ShardingPlan,
    TableSet,
    Topology,
)
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel, evaluate, plan_traffic
from autoshard.evaluation.traffic import Stream
from autoshard.formats import load_tables, load_topology
from autoshard.planners.oper import lookup_bytes, row_groups
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner
from autoshard.validator import validate_plan
from studies.papers.oper.equations import (
    ExactPaths,
    ExactTask,
    exchange_ms,
    fetch_matrix_ms,
    least_exchange,
    mean_row_bytes,
    rank_exchange_ms,
    topology_frequency,
)

#: Samples per GPU and step. Not in the paper; with these, Table 2's first line comes out to its last digit.
BATCH_PER_RANK = 16_384
#: Zipf exponent of all tables.
ALPHA = 1.05
#: Of Table 1.
AVAZU_ROWS, AVAZU_DIM = 8_900_000, 16
TERABYTE_ROWS, TERABYTE_DIM = 242_500_000, 64
#: Distinct values of Avazu's columns, as hpcaitech/CachedEmbedding has them (recsys/datasets/avazu.py). Of its 21
#: columns the first is left out, of 7 values: the paper counts 20.
_AVAZU_VALUES = (
    *(7, 4737, 7745, 26, 8552, 559, 36, 2686408, 6729486, 8251),
    *(5, 4, 2626, 8, 9, 435, 4, 68, 172, 60),
)
SMALL_ROWS, LARGE_ROWS = 838_900_000, 2_500_000_000
#: How much longer a row takes from another node than from a GPU of the own one (Fig. 8).
LINK_GAP = 4.21
#: Cost of a row in the own memory over one from a GPU of the own node: NVLink's 300 GB/s and HBM's 1,555 GB/s.
_OWN_MEMORY = 300 / 1555
_A100_BYTES = 40 << 30


def dgx_a100() -> Topology:
    """One node of 8 A100 (Sec. 6.1)."""
    return load_topology("a100-8")


def two_nodes() -> Topology:
    """Fig. 8's cluster: 2 nodes of 4 GPUs whose links differ 4.21 times."""
    node_R = np.arange(8) // 4
    cost_RR = np.where(node_R[:, None] == node_R, 1.0, LINK_GAP)
    np.fill_diagonal(cost_RR, _OWN_MEMORY)
    row_ms = 64 / 300e9 * 1e3
    return replace(nodes_of_four(2), fetch_ms=tuple(tuple(row) for row in (cost_RR * row_ms).tolist()))


def nodes_of_four(num_nodes: int) -> Topology:
    """Nodes of 4 A100, whose links differ 4.21 times: 4 nodes in Fig. 9b, 8 for the larger synthetic data."""
    near, far = Link(bytes_per_s=3e11), Link(bytes_per_s=3e11 / LINK_GAP)
    return Topology(
        world_size=4 * num_nodes,
        device="a100",
        memory_bytes=MemoryBytes(hbm=_A100_BYTES),
        levels=(
            Level(name="node", size=4, all_to_all=near, all_reduce=near),
            Level(name="cluster", size=4 * num_nodes, all_to_all=far, all_reduce=far),
        ),
    )


def kaggle(num_ranks: int = 8) -> TableSet:
    """Criteo Kaggle: 26 tables of dimension 16."""
    return replace(load_tables("criteo-kaggle"), batch_size=BATCH_PER_RANK * num_ranks)


def avazu(num_ranks: int = 8) -> TableSet:
    """Avazu: 8.9 million rows of dimension 16 in 20 tables, in the proportions of its columns' distinct values."""
    scale = AVAZU_ROWS / sum(_AVAZU_VALUES)
    kinds = replace(load_tables("criteo-kaggle").tables[0], embedding_dim=AVAZU_DIM)
    tables = []
    for index, num_values in enumerate(_AVAZU_VALUES):
        feature = replace(kinds.features[0], name=f"feature_{index}")
        table = replace(kinds, name=f"avazu_{index}", features=(feature,))
        tables.append(_resized(table, max(1, round(scale * num_values))))
    return TableSet(batch_size=BATCH_PER_RANK * num_ranks, tables=tuple(tables))


def terabyte(num_ranks: int = 8) -> TableSet:
    """Criteo Terabyte: 242.5 million rows of dimension 64, in the proportions of the published sizes of its tables."""
    return _in_proportion(TERABYTE_ROWS, num_ranks)


def syn_small(num_ranks: int = 16) -> TableSet:
    """As large as Syn_Small: 838.9 million rows of dimension 64, in the same proportions."""
    return _in_proportion(SMALL_ROWS, num_ranks)


def syn_large(num_ranks: int = 32) -> TableSet:
    """As large as Syn_Large: 2.5 billion rows of dimension 64, in the same proportions."""
    return _in_proportion(LARGE_ROWS, num_ranks)


def _in_proportion(num_rows: int, num_ranks: int) -> TableSet:
    published = load_tables("criteo-1tb")
    scale = num_rows / sum(table.num_embeddings for table in published.tables)
    wide = [replace(table, embedding_dim=TERABYTE_DIM) for table in published.tables]
    tables = tuple(_resized(table, max(1, round(scale * table.num_embeddings))) for table in wide)
    return TableSet(batch_size=BATCH_PER_RANK * num_ranks, tables=tables)


def _resized(table: EmbeddingTable, num_rows: int) -> EmbeddingTable:
    access = AccessProfile.zipf(num_rows, ALPHA)
    return replace(table, num_embeddings=num_rows, access=access)


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
    sets = (("Criteo Terabyte", terabyte, dgx_a100), ("Syn_Large", syn_large, partial(nodes_of_four, 8)))
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


#: The only threshold at which the paper's solver came to an end (Table 3).
COARSE = 0.05
#: Work of CP-SAT in its own units: 20 to 40 s of one core.
_EFFORT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """OPER's heuristic and CP-SAT on groups of one threshold: exchange of the most loaded rank in MiB per step.

    Attributes:
        data: Name of the data.
        ratio: Extra memory.
        oper: OPER's, without search over thresholds.
        exact: CP-SAT's.
        bound: No parallelization of the same groups has less.
        least: Of the least loaded rank, CP-SAT's.
        cpu_s: Seconds of one core that CP-SAT took.
        loads: What CP-SAT's parallelization puts on ranks and links.
    """

    data: str
    ratio: float
    oper: float
    exact: float
    bound: float
    least: float
    cpu_s: float
    loads: MethodLoads


def against_exact(data: str, tables: TableSet, ratio: float, *, effort: float = _EFFORT) -> Reference:
    """OPER at threshold 5% on one node, and the least that CP-SAT finds for the same groups.

    Where there are copies, OPER cuts the groups that it copies further, which CP-SAT does not.
    """
    topology = dgx_a100()
    plan = make_plan(tables, topology, mode=INFERENCE, threshold=COARSE, balance=0.0, extra_memory_ratio=ratio)
    task = _task(tables, topology, ratio)
    start_s = time.process_time()
    found = least_exchange(task, effort=effort)
    cpu_s = time.process_time() - start_s
    unit_ms = float(task.fetch_ms_RR[0, 1]) * MIB / _row_bytes(tables)
    exact_R = rank_exchange_ms(found.paths_NR, task.lookups_N, task.fetch_ms_RR) / unit_ms
    return Reference(
        data=data,
        ratio=ratio,
        oper=float(rank_mib(plan).max()),
        exact=float(exact_R.max()),
        bound=found.bound_ms / unit_ms,
        least=float(exact_R.min()),
        cpu_s=cpu_s,
        loads=_loads(task, found, _row_bytes(tables)),
    )


def _task(tables: TableSet, topology: Topology, ratio: float) -> ExactTask:
    shards = row_groups(tables, COARSE)
    rows_per_byte = tables.batch_size / topology.world_size / _row_bytes(tables)
    return ExactTask(
        lookups_N=lookup_bytes(shards) * rows_per_byte,
        bytes_N=np.array([shard.storage_bytes for shard in shards], dtype=np.int64),
        capacity_R=np.array([topology.memory_of(rank).hbm for rank in range(topology.world_size)], dtype=np.int64),
        extra_bytes=int(ratio * sum(shard.storage_bytes for shard in shards)),
        fetch_ms_RR=fetch_matrix_ms(topology, _row_bytes(tables)),
    )


def _loads(task: ExactTask, found: ExactPaths, row_bytes: float) -> MethodLoads:
    """Who is read from holds a copy; lookups take place there (Eq. 1 and 2)."""
    ranks = np.arange(len(task.capacity_R))
    is_held_NR = (found.paths_NR[:, :, None] == ranks).any(axis=1)
    mib_RR = exchange_ms(found.paths_NR, task.lookups_N, np.full_like(task.fetch_ms_RR, row_bytes / MIB))
    return MethodLoads(memory_R=task.bytes_N @ is_held_NR / MIB, lookups_R=mib_RR.sum(axis=0), links=links(mib_RR))


def _row_bytes(tables: TableSet) -> float:
    """Of any row: the paper's data have tables of one width each."""
    return float(tables.tables[0].embedding_dim * tables.tables[0].dtype.num_bytes)
