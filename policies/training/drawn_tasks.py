"""Tasks that a policy learns from, and is measured on: drawn over devices, links, memory, tables and batch sizes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np

from autoshard.core import ImpliedOrder, Level, Link, MemoryBytes, Pooling, TableSet, Topology
from autoshard.core.accepted import AT_LEAST_0, Range
from autoshard.core.errors import InvalidOptionError
from autoshard.core.machine import device_family
from autoshard.formats import load_tables, load_topology
from autoshard.planners.hybrid.option_offers import space_of
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.layout import Limits
from autoshard.planning import make_costs
from env.game import GameTask
from policies.planning.trained import ANY_DEVICE

#: Seeds of tasks start here, far above those that people choose for their own draws from the same pools.
_FIRST_SEED = 1 << 40
_SEEDS_PER_RUN = 1 << 20
#: Machines that tasks are drawn for, and pools of tables; of CPUs, rows and batch are divided by `_CPU_SCALE`.
MACHINES = (
    *("a100-8", "a100-32", "dgx-a100-8", "dgx-a100-16", "dgx-a100-32", "dgx-a100-64"),
    *("h100-8", "dgx-h100-16", "dgx-h100-32", "cpu-8", "cpu-host-16"),
)
POOLS = ("metasyn", "metasyn", "metasyn", "nvidia-tiny", "nvidia-medium", "mlperf-dlrm-v2", "criteo-1tb")
_CPU_SCALE = 64
#: Numbers of tables, and what batches are divided by.
_NUM_TABLES, _BATCH_DIVISORS = (24, 40, 80, 80, 120, 160), (1, 1, 4, 16)
#: Factors of bandwidths, as powers of two; shares of all memory that tables take; and of tasks in which they take so
#: much, that have sequences, and that know no row orders.
_LINK_POWERS, _FILLS = (-1.0, 1.0), (0.15, 0.75)
_FILLED, _SEQUENCES, _UNORDERED = 0.6, 0.15, 0.15
#: Share of the tables of such tasks that are sequences.
_IS_SEQUENCE = 0.3


#: Where prices of tasks are warned of.
_PRICES_LOG = logging.getLogger(make_costs.__module__)
_log = logging.getLogger(__name__)


@contextmanager
def warnings_once() -> Iterator[None]:
    """Warns of what prices of drawn tasks are worth at the end, once for each kind of warning, and says how many more.

    Tasks that other processes draw are not counted.
    """
    first: dict[int, str] = {}
    count: dict[int, int] = {}

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        first.setdefault(record.lineno, record.getMessage())
        count[record.lineno] = count.get(record.lineno, 0) + 1
        return False

    _PRICES_LOG.addFilter(keep)
    try:
        yield
    finally:
        _PRICES_LOG.removeFilter(keep)
        for line, text in first.items():
            _log.warning("%s%s", text, f" (and {count[line] - 1} like it)" if count[line] > 1 else "")


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
    """What tasks are drawn from; each draw varies links, memory, batch and tables.

    Attributes:
        machines: Names of topologies.
        pools: Names of tables, or files.
        num_tables: Numbers of tables.
        registry: Folder of the models that price tasks; None for the default.
    """

    machines: tuple[str, ...] = MACHINES
    pools: tuple[str, ...] = POOLS
    num_tables: tuple[int, ...] = _NUM_TABLES
    registry: Path | None = None

    def request(self, seed: int) -> PlanRequest:
        """The task of a seed."""
        rng = np.random.default_rng(seed)
        base = load_topology(str(rng.choice(self.machines)))
        tables = _tables(load_tables(str(rng.choice(self.pools))), int(rng.choice(self.num_tables)), base, rng)
        topology = _varied(base, tables, rng)
        costs = make_costs(tables, topology, self.registry)
        return PlanRequest(tables=tables, topology=topology, costs=costs, registry=self.registry)


def game_task(request: PlanRequest) -> GameTask:
    """The game of a request, with all sharding options of its tables, and what training needs for a batch.

    Raises:
        InfeasiblePlanError: If no layout was found that fits the memory.
    """
    space = space_of(request)
    return GameTask(space, Limits.of(space, with_activations=True))


def _tables(pool: TableSet, number: int, topology: Topology, rng: np.random.Generator) -> TableSet:
    if topology.device.startswith("cpu"):
        pool = pool.scaled(_CPU_SCALE)
    tables = pool.redrawn(number, int(rng.integers(1 << 40)))
    batch_size = max(topology.world_size, tables.batch_size // int(rng.choice(_BATCH_DIVISORS)))
    row_order = None if rng.random() < _UNORDERED else ImpliedOrder.BY_ID
    share = _IS_SEQUENCE if rng.random() < _SEQUENCES else 0.0
    varied = []
    for table in tables.tables:
        pooling = Pooling.SEQUENCE if rng.random() < share else table.pooling
        varied.append(replace(table, row_order=row_order, pooling=pooling))
    return replace(tables, tables=tuple(varied), batch_size=batch_size)


def _varied(base: Topology, tables: TableSet, rng: np.random.Generator) -> Topology:
    """A machine with other links, and with as much memory as tables fill to some share."""
    levels = tuple(_faster(level, rng) for level in base.levels)
    room = base.memory_bytes.hbm
    needed = tables.storage_bytes / base.world_size
    fill = rng.uniform(*_FILLS)
    if rng.random() < _FILLED or needed > _FILLS[1] * room:
        largest = max(table.storage_bytes for table in tables.tables)
        room = math.ceil(max(needed / fill, min(largest, 4 * needed)))
    return replace(base, levels=levels, memory_bytes=MemoryBytes(hbm=room))


def _faster(level: Level, rng: np.random.Generator) -> Level:
    """A level whose links are up to twice as fast, or slow."""

    def faster(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * 2 ** rng.uniform(*_LINK_POWERS))

    return replace(level, all_to_all=faster(level.all_to_all), all_reduce=faster(level.all_reduce))


def machines_of(device: str) -> tuple[str, ...]:
    """Names of the machines of a device that tasks are drawn for; all of them for `any`.

    Raises:
        InvalidOptionError: If there is none.
    """
    known = {name: load_topology(name).device for name in MACHINES}
    found = tuple(name for name, of in known.items() if device in (ANY_DEVICE, of) or device_family(device) == of)
    if not found:
        raise InvalidOptionError(
            f"must be {ANY_DEVICE} or any of {', '.join(sorted(set(known.values())))}, got {device}", field="--device"
        )
    return found
