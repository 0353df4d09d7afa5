"""Tasks to train and to test on: random subsets of a pool of tables, on a number of ranks."""

from __future__ import annotations

from enum import Enum

from autoshard.core import CostModel, Level, Link, MemoryBytes, TableSet, Topology
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.placement import PlacementProblem

#: Seeds of tasks start here, far above those that people choose for their own draws from the same pool.
_FIRST_SEED = 1 << 40
_SEEDS_PER_RUN = 1 << 20


class Split(Enum):
    """What tasks are for."""

    VALIDATION = 0
    """To choose the best weights by; the same ones for every run."""
    TEST = 1
    """To measure them on; the same ones for every run, so that runs can be compared."""
    TRAIN = 2
    """Different ones for every seed of a run."""


def task_seeds(split: Split, num_tasks: int, seed: int = 0) -> range:
    """Seeds of a run's tasks; those of different splits never meet.

    Raises:
        InvalidOptionError: If there are more tasks than seeds.
    """
    if not 1 <= num_tasks <= _SEEDS_PER_RUN:
        raise InvalidOptionError(f"must be in [1, {_SEEDS_PER_RUN}], got {num_tasks}", field="num_tasks")
    if seed < 0:
        raise InvalidOptionError(f"must be at least 0, got {seed}", field="seed")
    block = split.value + (seed if split is Split.TRAIN else 0)
    first = _FIRST_SEED + block * _SEEDS_PER_RUN
    return range(first, first + num_tasks)


def sample_problems(
    pool: TableSet, model: CostModel, *, device: str, num_tables: int, num_ranks: int, seeds: range
) -> tuple[PlacementProblem, ...]:
    """Placement problems of `num_tables` tables of the pool each.

    Every rank has memory for all tables: limits are kept by masks when planning, and nothing can be learned from
    them here.

    Raises:
        InvalidOptionError: If there are no ranks.
        InvalidTableError: If the pool has too few tables.
        ModelError: If the model cannot price the pool's tables.

    Source:
        AutoShard Sec. 5.1.
    """
    if num_ranks < 1:
        raise InvalidOptionError(f"must be at least 1, got {num_ranks}", field="num_ranks")
    topology = _topology(device, num_ranks, sum(table.hbm_bytes for table in pool.tables))
    return tuple(PlacementProblem.table_wise(pool.sample(num_tables, seed), topology, model) for seed in seeds)


def _topology(device: str, num_ranks: int, hbm_bytes: int) -> Topology:
    # Kernel costs are all that is learned from, so the links may be any.
    link = Link(bytes_per_s=1e9)
    level = Level(name="all", size=num_ranks, all_to_all=link, all_reduce=link)
    return Topology(world_size=num_ranks, device=device, memory_bytes=MemoryBytes(hbm=hbm_bytes), levels=(level,))
