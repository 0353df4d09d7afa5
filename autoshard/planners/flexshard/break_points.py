"""Where replicating a row starts to pay: neutral row probabilities, and the frontier of Fig. 5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autoshard.core import AccessProfile
from autoshard.core.accepted import Range
from autoshard.core.errors import InvalidTableError, InvalidTopologyError
from autoshard.planners.flexshard.equations import FlexMachine, RowSet, TierStrategy, communication_s, memory_bytes


def memory_neutral_probability(
    world_size: int, local_batch_size: float, memory_multiplier: float, sharded_multiplier: float = 1.0
) -> float:
    """Row probability above which replicating a row on every rank saves memory over row-wise sharding.

    Args:
        world_size: Number of ranks U, at least 2.
        local_batch_size: Samples per rank and step, B.
        memory_multiplier: Bytes held per replicated byte of weights (optimizer state, gradients).
        sharded_multiplier: Bytes held per byte of weights that are not replicated; the paper takes 1.

    Returns:
        Expected lookups of the row in one sample, in [0, inf); what no row reaches if replicas never save memory.

    Raises:
        InvalidTopologyError: If world_size is below 2.

    Source:
        FlexShard, Table 2 and Sec. 4.2: (m - 1/U) / B, with weights and payload of one dtype.
    """
    Range(at_least=2).check(world_size, "world_size", InvalidTopologyError)
    more = max(0.0, memory_multiplier - sharded_multiplier / world_size)
    return more / local_batch_size if local_batch_size > 0 else math.inf


def neutral_communication(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Row probability above which a row communicates faster by `strategy` than row-wise; infinite if it never does.

    Args:
        strategy: Data-parallel or Flex.
        rows: Widths and multipliers of the rows; how many they are and how often looked up plays no part.
        machine: The machine.

    Source:
        FlexShard, Sec. 4.2 and 4.5.
    """
    more_s, more_per_lookup_s = (
        communication_s(strategy, one, machine) - communication_s(TierStrategy.ROW_WISE, one, machine)
        for one in (rows.one_row, rows.one_lookup)
    )
    if more_s <= 0:
        return 0.0
    return -more_s / more_per_lookup_s if more_per_lookup_s < 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """Costs of replicating the most accessed rows on all ranks, over those of the whole table row-wise.

    Attributes:
        num_rows: How many rows.
        coverage: Share of the table's lookups that go to them.
        memory_bytes: Per rank; below 0 where memory is saved.
        communication_s: Per step; below 0 where time is saved.
    """

    num_rows: float
    coverage: float
    memory_bytes: float
    communication_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoFrontier:
    """The curve of Fig. 5: memory against communication as ever more rows are replicated, and its four points.

    Attributes:
        curve: From no row to all rows, at the knots of the access curve and the four points.
        most_memory_saved: A: every row more costs memory.
        memory_neutral: B: as much memory as row-wise; the paper's 2-tier break point.
        most_communication_saved: C: every row more costs time.
        whole_table: D: all rows.
    """

    curve: tuple[ParetoPoint, ...]
    most_memory_saved: ParetoPoint
    memory_neutral: ParetoPoint
    most_communication_saved: ParetoPoint
    whole_table: ParetoPoint


def pareto_frontier(access: AccessProfile, rows: RowSet, machine: FlexMachine) -> ParetoFrontier:
    """Memory and communication of a table whose hottest rows are data-parallel and the rest row-wise.

    Args:
        access: The table's access curve.
        rows: The whole table.
        machine: The machine.

    Raises:
        InvalidTableError: If the curve is of another number of rows.

    Source:
        FlexShard, Sec. 4.3 and Fig. 5.
    """
    if access.num_rows != rows.num_rows:
        raise InvalidTableError(f"describes {access.num_rows} rows, the table has {rows.num_rows:g}", field="access")

    def point(num_rows: float) -> ParetoPoint:
        coverage = float(access.coverage(num_rows))
        hot = replace(rows, num_rows=num_rows, lookups_per_sample=rows.lookups_per_sample * coverage)
        more_bytes, more_s = (
            cost(TierStrategy.DATA_PARALLEL, hot, machine) - cost(TierStrategy.ROW_WISE, hot, machine)
            for cost in (memory_bytes, communication_s)
        )
        return ParetoPoint(num_rows=num_rows, coverage=coverage, memory_bytes=more_bytes, communication_s=more_s)

    points = [point(num_rows) for num_rows in access.ranks_K.tolist()]
    lowest = min(range(len(points)), key=lambda index: points[index].memory_bytes)
    neutral = point(_neutral_rows(points, lowest))
    return ParetoFrontier(
        curve=tuple(sorted({*points, neutral}, key=lambda one: one.num_rows)),
        most_memory_saved=points[lowest],
        memory_neutral=neutral,
        most_communication_saved=min(points, key=lambda one: one.communication_s),
        whole_table=points[-1],
    )


def _neutral_rows(points: Sequence[ParetoPoint], lowest: int) -> float:
    """Where the curve comes back to 0 after its lowest point; all rows if it does not."""
    for before, after in pairwise(points[lowest:]):
        if after.memory_bytes > 0:
            share = -before.memory_bytes / (after.memory_bytes - before.memory_bytes)
            return before.num_rows + share * (after.num_rows - before.num_rows)
    return points[-1].num_rows
