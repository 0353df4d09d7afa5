"""A plan on other access than it was planned for, and how far two accesses are apart.

Shape suffix: L rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import AccessProfile, ImpliedOrder, MemoryLevel, RowsBy, ShardingPlan, TableSet
from autoshard.core.access import IntArray
from autoshard.core.access.counted import CountedRows
from autoshard.core.access.orders import BY_ID
from autoshard.core.errors import InvalidTableError
from autoshard.core.quoting import shown
from autoshard.evaluation.cached_rows import cache_traffic


def with_access(tables: TableSet, now: TableSet) -> TableSet:
    """Tables with the access, the lookups per sample and the row orders of others of the same names.

    A table without a row order keeps the one that it has.

    Raises:
        InvalidTableError: If these lack a table, or have another number of rows or other features of one.
    """
    others = {table.name: table for table in now.tables}
    found = []
    for table in tables.tables:
        other = others.get(table.name)
        if other is None:
            raise InvalidTableError(
                f"must have the plan's tables; there is no table {shown(table.name)}", field="access"
            )
        if other.num_embeddings != table.num_embeddings:
            raise InvalidTableError(
                f"must have the plan's tables; {shown(table.name)} has {other.num_embeddings:,} rows, "
                f"{table.num_embeddings:,} in the plan",
                field="access",
            )
        if [one.name for one in other.features] != [one.name for one in table.features]:
            names = ", ".join(one.name for one in table.features)
            raise InvalidTableError(f"must have the plan's features; {shown(table.name)} needs {names}", field="access")
        order = other.row_order or table.row_order
        found.append(replace(table, access=other.access, features=other.features, row_order=order))
    return replace(tables, tables=tuple(found))


def planned_rows(plan: ShardingPlan, orders: Mapping[str, IntArray]) -> dict[str, CountedRows]:
    """Rows of a plan's tables by falling planned lookups: of those that have a known row order.

    Tables that it cuts by access rank without a list are in the order of their ids.

    Args:
        plan: The plan.
        orders: Ids in falling access frequency, of the tables for which it names a file.
    """
    cut = {placed.shard.table.name for placed in plan.shards if placed.shard.rows.by is RowsBy.ACCESS_RANK}
    found = {}
    for table in plan.tables.tables:
        if table.name in orders or table.name in cut or table.row_order is ImpliedOrder.BY_ID:
            found[table.name] = CountedRows.of_order(table.access, orders.get(table.name, BY_ID))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessedPlan:
    """A plan, and how its tables are looked up today.

    Attributes:
        plan: The plan.
        now: Its tables as they are looked up, see `with_access`.
        planned: Rows of the plan, see `planned_rows`.
        rows_now: Those of today; tables that are left out have the plan's row order.
    """

    plan: ShardingPlan
    now: TableSet
    planned: Mapping[str, CountedRows]
    rows_now: Mapping[str, CountedRows]

    @property
    def today(self) -> ShardingPlan:
        """The plan as it is, with the rows that it holds as hot, on today's access."""
        tables = []
        for table in self.now.tables:
            access = table.access
            if table.name in self.planned and table.name in self.rows_now:
                access = self.rows_now[table.name].in_order(access, self.planned[table.name].order_N)
            tables.append(replace(table, access=access))
        return held_of(self.plan, replace(self.now, tables=tuple(tables)))


def held_of(plan: ShardingPlan, tables: TableSet) -> ShardingPlan:
    """A plan with other tables of the same names, held as it holds its own; without a prediction."""
    by_name = {table.name: table for table in tables.tables}
    shards = (replace(one, shard=replace(one.shard, table=by_name[one.shard.table.name])) for one in plan.shards)
    return replace(plan, tables=tables, shards=tuple(shards), predicted=None)


def distance(
    before: AccessProfile, after: AccessProfile, rows_before: CountedRows | None, rows_after: CountedRows | None
) -> float:
    """Share of a table's lookups that went to other rows, 0 to 1: the total variation distance.

    Rows whose shares are not known on both sides count together. Without the rows of both sides, it is that of the
    curves alone, rank by rank.

    Args:
        before: The curve as it was.
        after: As it is.
        rows_before: Rows by falling lookups then; None if their order is unknown.
        rows_after: Those of now, alike.
    """
    if rows_before is None or rows_after is None:
        ranks_K = np.union1d(before.ranks_K, after.ranks_K)
        gaps = np.diff(before.coverage(ranks_K)) - np.diff(after.coverage(ranks_K))
        return float(np.abs(gaps).sum() / 2)
    sides = (rows_before, rows_after)
    # A row that would be known on either side if it had this share.
    least = max(one.known_from for one in sides)
    ids_L = np.union1d(*(one.ids_N[one.shares_N >= least] for one in sides))
    then_L, now_L = (one.shares_of(ids_L) for one in sides)
    return float((np.abs(then_L - now_L).sum() + abs(then_L.sum() - now_L.sum())) / 2)


def moved_share(accessed: AccessedPlan) -> float:
    """Share of all lookups that go to other rows than planned, or are more or fewer, 0 to 1."""
    moved = total = 0.0
    for table, now in zip(accessed.plan.tables.tables, accessed.now.tables, strict=True):
        rows, rows_now = accessed.planned.get(table.name), accessed.rows_now.get(table.name)
        most = max(table.pooling_factor, now.pooling_factor)
        elsewhere = distance(table.access, now.access, rows, rows_now) * most
        moved += max(elsewhere, abs(table.pooling_factor - now.pooling_factor))
        total += most
    return moved / total if total else 0.0


def hot_rows(plan: ShardingPlan) -> dict[str, int]:
    """Rows of the hottest row group of each table that a plan cuts by access rank."""
    found: dict[str, int] = {}
    for placed in plan.shards:
        rows, table = placed.shard.rows, placed.shard.table
        if rows.by is RowsBy.ACCESS_RANK and rows.start == 0 and rows.stop < table.num_embeddings:
            found[table.name] = rows.stop
    return found


def cache_hits(plan: ShardingPlan) -> dict[str, float]:
    """Share of the lookups of each table behind caches that find their row in one."""
    lookups: dict[str, list[tuple[float, float]]] = {}
    for held in plan.of_one_group().held_shards():
        if held.local.level is not MemoryLevel.HBM and held.local.cache_bytes:
            num_lookups = held.local.num_lookups * len(held.ranks)
            lookups.setdefault(held.local.table, []).append((num_lookups, cache_traffic(held.local).hit_rate))
    return {
        name: sum(number * share for number, share in found) / sum(number for number, _ in found)
        for name, found in lookups.items()
        if sum(number for number, _ in found) > 0
    }
