"""Tasks to train and to test on: random subsets of a pool of tables, on a number of ranks.

Shape suffixes: N items, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from autoshard.core import (
    CostModel,
    CostModels,
    Level,
    Link,
    LocalShard,
    MemoryBytes,
    Payload,
    Shard,
    TableSet,
    Tier,
    Topology,
)
from autoshard.core.accepted import AT_LEAST_0, AT_LEAST_1, SHARE, Range
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.oper.partition import equal_row_ranges
from autoshard.planners.space.options import UnplacedShard
from autoshard.planners.space.placement import PlacementProblem
from env import Objective, PlacementTask, SplitBy
from env.feasible_placement import feasible_placement
from env.splits import HOT_SHARES
from policies.choices import Items

#: Seeds of tasks start here, far above those that people choose for their own draws from the same pool.
_FIRST_SEED = 1 << 40
_SEEDS_PER_RUN = 1 << 20

#: Ranges that the rows of every table are cut into where row groups are placed.
NUM_ROW_RANGES = 4
_TIERS = (Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE)

#: Ranks of a node, where there are several.
NODE_SIZE = 8
# Of processes of one machine and between machines: assumptions, for devices whose collectives were never measured.
_NODE_LINK = Link(bytes_per_s=2e9, latency_s=2e-4)
_CLUSTER_LINK = Link(bytes_per_s=1e9, latency_s=4e-4)
#: How much more memory is tried where nothing fits.
_MORE_MEMORY = 1.01


class TaskSplit(Enum):
    """What tasks are for."""

    VALIDATION = 0
    """To choose the best weights by; the same ones for every run."""
    TEST = 1
    """To measure them on; the same ones for every run, so that runs can be compared."""
    TRAIN = 2
    """Different ones for every seed of a run."""


def task_seeds(split: TaskSplit, num_tasks: int, seed: int = 0) -> range:
    """Seeds of a run's tasks; those of different splits never meet.

    Raises:
        InvalidOptionError: If there are more tasks than seeds.
    """
    Range(at_least=1, at_most=_SEEDS_PER_RUN).check(num_tasks, "num_tasks")
    AT_LEAST_0.check(seed, "seed")
    block = split.value + (seed if split is TaskSplit.TRAIN else 0)
    first = _FIRST_SEED + block * _SEEDS_PER_RUN
    return range(first, first + num_tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskKind:
    """What tasks are like, whatever tables they hold.

    Attributes:
        device: Key of the device kind.
        num_tables: Tables per task.
        num_ranks: Ranks per task.
        items: What is placed.
        memory_fill: Share of all memory that a task's tables take if each is held once; None for unlimited memory.
            Where not even a single placement is found, there is as little more memory as it takes.
    """

    device: str
    num_tables: int
    num_ranks: int
    items: Items = Items.TABLES
    memory_fill: float | None = None

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "num_ranks")
        SHARE.check_fields(self, "memory_fill")


def sample_tables(pool: TableSet, kind: TaskKind, seeds: range) -> Iterator[TableSet]:
    """Random tables of the pool for each task.

    Tables that have fewer rows than each is to be cut into are left out of the pool, since whole ones would be fewer
    items.

    Raises:
        InvalidTableError: If the pool has too few tables.

    Source:
        AutoShard Sec. 5.1.
    """
    num_parts = NUM_ROW_RANGES if kind.items is Items.ROW_GROUPS else 1
    kept = replace(pool, tables=tuple(table for table in pool.tables if table.num_embeddings >= num_parts))
    return (kept.sample(kind.num_tables, seed) for seed in seeds)


def sample_problems(pool: TableSet, model: CostModel, kind: TaskKind, seeds: range) -> tuple[PlacementProblem, ...]:
    """Placement problems of random tables of the pool, all with equally many items.

    Raises:
        InvalidTableError: If the pool has too few tables.
        ModelError: If the model cannot price the pool's tables as they are to be held.
    """
    topology = training_topology(kind.device, kind.num_ranks, pool.storage_bytes)
    return tuple(_problem(tables, model, kind, topology) for tables in sample_tables(pool, kind, seeds))


def _problem(tables: TableSet, model: CostModel, kind: TaskKind, topology: Topology) -> PlacementProblem:
    problem = items_problem(tables, topology, model, kind.items)
    return problem if kind.memory_fill is None else _filled(problem, kind.memory_fill)


def items_problem(
    tables: TableSet, topology: Topology, model: CostModel, items: Items, payload: Payload | None = None
) -> PlacementProblem:
    """The problem of placing all items of some tables, with the tiers that they may be held in.

    Raises:
        InvalidPlanError: If a constraint names a table or rank that is not there.
        InfeasiblePlanError: If an item fits nowhere, or all together exceed the memory.
        ModelError: If the model cannot price an item as it would be held.
    """
    tiers = _TIERS if items is Items.TIERS else ()
    return PlacementProblem.of(tables, topology, model, cut(tables, items), tiers, payload)


def items_task(
    problem: PlacementProblem,
    items: Items,
    *,
    objective: Objective = Objective.BALANCE,
    costs: CostModels | None = None,
) -> PlacementTask:
    """The task of placing such items: with tiers, hot rows may be cut off every table.

    Raises:
        InfeasiblePlanError: If no placement within the memory limits was found.
        InvalidOptionError: If steps are the objective and lack their costs.
        ModelError: If the model cannot price a part as it would be held.
    """
    max_splits = num_splits(items)
    return PlacementTask.of(problem, objective=objective, costs=costs, max_splits=max_splits, split_by=SplitBy.HOT_ROWS)


def num_splits(items: Items) -> int:
    """How often an item may be split, one split within the other."""
    return len(HOT_SHARES) if items is Items.TIERS else 0


def cut(tables: TableSet, items: Items) -> tuple[Shard, ...]:
    """What tables are cut into before they are placed: ranges of rows for row groups, else nothing.

    Returns:
        Shards that tile the tables, table by table and in the order of their rows.

    Source:
        OPER Sec. 4.1 for row groups; differs: equal ranges of row ids, so that tasks have equally many.
    """
    if items is Items.ROW_GROUPS:
        return equal_row_ranges(tables, NUM_ROW_RANGES)
    return tuple(Shard.whole(table) for table in tables.tables)


def _filled(problem: PlacementProblem, memory_fill: float) -> PlacementProblem:
    """The problem with as much memory as its items fill to that share, all ranks alike."""
    hbm_bytes = math.ceil(problem.bytes_N.sum() / (memory_fill * problem.num_ranks))
    hbm_bytes = max(hbm_bytes, int(problem.bytes_N.max()))
    while True:
        topology = replace(problem.topology, memory_bytes=MemoryBytes(hbm=hbm_bytes))
        filled = replace(problem, topology=topology, capacity_R=np.full(problem.num_ranks, hbm_bytes, dtype=np.int64))
        try:
            feasible_placement(filled)
        except InfeasiblePlanError:
            hbm_bytes = math.ceil(_MORE_MEMORY * hbm_bytes)
        else:
            return filled


def whole_tables(pool: TableSet, device: str) -> tuple[LocalShard, ...]:
    """Each table of a pool as a rank that holds it alone runs it, whole."""
    one_rank = training_topology(device, 1, 0)
    whole = (UnplacedShard.of(Shard.whole(table), Tier.TABLE_WISE, one_rank) for table in pool.tables)
    return tuple(part.local(one_rank, pool.batch_size) for part in whole)


def training_topology(device: str, num_ranks: int, hbm_bytes: int) -> Topology:
    """Ranks in nodes of `NODE_SIZE`, or of half as many, whichever first makes several nodes; else in a single one."""
    node = next((size for size in (NODE_SIZE, NODE_SIZE // 2) if num_ranks > size and num_ranks % size == 0), num_ranks)
    levels = [Level(name="node", size=node, all_to_all=_NODE_LINK, all_reduce=_NODE_LINK)]
    if node < num_ranks:
        levels.append(Level(name="cluster", size=num_ranks, all_to_all=_CLUSTER_LINK, all_reduce=_CLUSTER_LINK))
    return Topology(world_size=num_ranks, device=device, memory_bytes=MemoryBytes(hbm=hbm_bytes), levels=tuple(levels))
