"""The frontier between memory and communication of several tables, and the best point under a budget.

Shape suffixes: I intervals of an access curve, S strategies, V vertices of a curve, Q their quantities,
T tables, E edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, Exchange, Pooling
from autoshard.core.access import FloatArray, IntArray
from autoshard.planners.flexshard.equations import TierStrategy
from autoshard.planners.flexshard.tier_costs import Pricing, TierCost, intervals

#: Of a row: knots are doubles, so that the bound of all rows may end up just below a whole number.
_ROUNDING = 1e-6
#: What a point of a curve has first.
_MEMORY, _SECONDS = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBounds:
    """How a table is cut: rows [0, replicated) data-parallel, [replicated, flexed) Flex, the rest row-wise.

    Rows count by falling access frequency.
    """

    replicated: int = 0
    flexed: int = 0
    flex_exchange: Exchange = Exchange.ROWS
    tail_exchange: Exchange = Exchange.ROWS

    def tiers(self, table: EmbeddingTable) -> list[tuple[TierStrategy, int, int, Exchange]]:
        """The tiers of a table that have rows: strategy, first access rank, end, and exchange."""
        hot_exchange = Exchange.ROWS if table.pooling is Pooling.SEQUENCE else Exchange.PARTIAL_SUMS
        tiers = [
            (TierStrategy.DATA_PARALLEL, 0, self.replicated, hot_exchange),
            (TierStrategy.FLEX, self.replicated, self.flexed, self.flex_exchange),
            (TierStrategy.ROW_WISE, self.flexed, table.num_embeddings, self.tail_exchange),
        ]
        return [tier for tier in tiers if tier[1] < tier[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierChoice:
    """Bounds of all tables, and what they cost by the scaling equations.

    Attributes:
        bounds: By table.
        memory_bytes: Per rank, static and dynamic.
        communication_s: Per step.
    """

    bounds: tuple[TierBounds, ...]
    memory_bytes: float
    communication_s: float

    @classmethod
    def of(cls, cuts: Iterable[tuple[TierBounds, float, float]]) -> TierChoice:
        """Of the bounds, memory and seconds of each table."""
        bounds, memory, seconds = zip(*cuts, strict=True)
        return cls(bounds=bounds, memory_bytes=sum(memory), communication_s=sum(seconds))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Curve:
    """Ways to cut one table, from least memory to least communication, on a convex curve.

    Attributes:
        points_VQ: Of each vertex, memory, seconds, replicated rows, and rows that are replicated or Flex.
        exchanges_V: Of the Flex and the row-wise tier.
        is_split_V: Whether any mixture of a vertex and the one before it is a way to cut the table, too.
    """

    points_VQ: FloatArray
    exchanges_V: tuple[tuple[Exchange, Exchange], ...]
    is_split_V: NDArray[np.bool_]

    def steps(self) -> Iterator[tuple[float, float, bool]]:
        """From each vertex to the next: seconds saved per byte, never rising; bytes; whether it can be split."""
        memory, seconds, *_ = np.diff(self.points_VQ, axis=0).T
        ratio = np.divide(-seconds, memory, out=np.full(len(memory), np.inf), where=memory > 0)
        # Convex, but for rounding: a step must not be taken before the one that it starts from.
        saved_per_byte = np.minimum.accumulate(ratio)
        return zip(saved_per_byte.tolist(), memory.tolist(), self.is_split_V[1:].tolist(), strict=True)

    def cut(self, vertex: int, share: float = 0.0) -> tuple[TierBounds, float, float]:
        """Bounds, memory and seconds at a vertex, or at a share of the way to the next one."""
        here, toward = self.points_VQ[vertex], self.points_VQ[min(vertex + 1, len(self.points_VQ) - 1)]
        memory, seconds, *rows = (here + share * (toward - here)).tolist()
        replicated, flexed = map(whole_rows, rows)
        flex, tail = self.exchanges_V[vertex]
        bounds = TierBounds(
            replicated=replicated, flexed=max(replicated, flexed), flex_exchange=flex, tail_exchange=tail
        )
        return bounds, memory, seconds


def whole_rows(num_rows: float) -> int:
    """Rounded down, but for what sums of doubles lose."""
    return int(num_rows + _ROUNDING)


class Frontier:
    """Cuts of several tables at once: memory goes where it saves most communication per byte, over all tables.

    Rows of one probability cost alike, so every interval of every access curve is an item with one choice of a tier,
    and the choice under a budget is a knapsack whose items can be split. Its optimum takes the steps to a more
    replicated tier by falling seconds saved per byte. Two steps cannot be split: between kinds of exchange.

    Args:
        tables: The tables.
        tiers: Strategies that each may use, from least to most replicated; at least one each.
        pricing: How they are priced.
        exchanges: What owners of pooled tables may send; sequence tables send rows.

    Attributes:
        row_wise: No replicas, with the exchange that communicates least.
        least_memory_bytes: Memory of the cuts that take least.

    Source:
        FlexShard, Sec. 4.3 and 4.6. Differs: rows are ordered by seconds saved per byte, which for tables of one
        dim and optimizer is the paper's order by probability; with three tiers each row takes the tier that the
        frontier has for it, where the paper's rule replicates only rows that save memory.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        tiers: Sequence[Sequence[TierStrategy]],
        pricing: Pricing,
        exchanges: Sequence[Exchange] = tuple(Exchange),
    ) -> None:
        self._curves: list[_Curve] = []
        unreplicated = []
        for table, allowed in zip(tables, tiers, strict=True):
            sent = (Exchange.ROWS,) if table.pooling is Pooling.SEQUENCE else exchanges
            self._curves.append(_table_curve(table, allowed, pricing, sent))
            cuts = [_whole(table, pricing.cost(table, allowed[0], exchange)).cut(0) for exchange in sent]
            unreplicated.append(min(cuts, key=lambda cut: (cut[2], cut[1])))
        self.row_wise = TierChoice.of(unreplicated)
        self.least_memory_bytes = float(sum(curve.points_VQ[0, _MEMORY] for curve in self._curves))
        steps = [(*step, table) for table, curve in enumerate(self._curves) for step in curve.steps()]
        self._steps = sorted(steps, key=lambda step: -step[0])

    def at(self, memory_bytes: float) -> TierChoice | None:
        """The cuts that communicate least within a budget for all memory of a rank; None if nothing fits it.

        More budget never communicates more.
        """
        room = memory_bytes - self.least_memory_bytes
        # Room for the smallest memory may be short by rounding only.
        if room < -1e-9 * max(1.0, self.least_memory_bytes):
            return None
        shares = self._walk(room)
        choice = TierChoice.of(curve.cut(*reached) for curve, reached in zip(self._curves, shares, strict=True))
        without = self.row_wise
        is_worse = choice.communication_s >= without.communication_s and without.memory_bytes <= memory_bytes
        return without if is_worse else choice

    def _walk(self, room: float) -> list[tuple[int, float]]:
        """The vertex that each table reaches, and the share of the way that it gets to the next one."""
        reached = [(0, 0.0)] * len(self._curves)
        used, is_full = 0.0, [False] * len(self._curves)
        for _, memory, is_split, table in self._steps:
            if is_full[table]:
                continue
            vertex, _ = reached[table]
            if used + memory <= room:
                used += memory
                reached[table] = vertex + 1, 0.0
                continue
            room, used = room - used, 0.0
            if is_split:
                reached[table] = vertex, max(0.0, room) / memory
                break
            # No room for this step, so none of this table's later ones either; other tables go on.
            is_full[table] = True
        return reached


def _table_curve(
    table: EmbeddingTable, tiers: Sequence[TierStrategy], pricing: Pricing, exchanges: Sequence[Exchange]
) -> _Curve:
    """The lower hull of all ways to cut a table."""
    curves = []
    if Exchange.ROWS in exchanges:
        rows = [pricing.cost(table, strategy, Exchange.ROWS) for strategy in tiers]
        curves.append(_mixed(table, rows))
        if TierStrategy.FLEX in tiers and Exchange.PARTIAL_SUMS in exchanges:
            pooled = pricing.cost(table, TierStrategy.FLEX, Exchange.PARTIAL_SUMS)
            curves.append(_mixed(table, [pooled if one.strategy is TierStrategy.FLEX else one for one in rows]))
    if Exchange.PARTIAL_SUMS in exchanges:
        curves += [_whole(table, pricing.cost(table, strategy, Exchange.PARTIAL_SUMS)) for strategy in tiers]
    return curves[0] if len(curves) == 1 else _lower_hull(curves)


def _whole(table: EmbeddingTable, cost: TierCost) -> _Curve:
    """The one vertex of a table that is in one tier."""
    memory_s = cost.of(*intervals(table)).sum(axis=1) + cost.fixed
    rows = [table.num_embeddings * is_in for is_in in _is_in(cost.strategy)]
    return _Curve(
        points_VQ=np.array([[*memory_s, *rows]]),
        exchanges_V=((cost.exchange, cost.exchange),),
        is_split_V=np.array([False]),
    )


def _is_in(strategy: TierStrategy) -> tuple[bool, bool]:
    """Whether rows of a strategy are replicated, and whether they are replicated or Flex."""
    return strategy is TierStrategy.DATA_PARALLEL, strategy is not TierStrategy.ROW_WISE


def _mixed(table: EmbeddingTable, costs: Sequence[TierCost]) -> _Curve:
    """The curve of tables cut into tiers, interval by interval; fixed costs count whether a tier is used or not."""
    rows_I, lookups_I = intervals(table)
    values_SQI = np.stack(
        [[*cost.of(rows_I, lookups_I), *(rows_I * is_in for is_in in _is_in(cost.strategy))] for cost in costs]
    )
    start_I, steps = _steps(values_SQI[:, _MEMORY], values_SQI[:, _SECONDS])
    interval_E, from_E, to_E = np.array(steps, dtype=np.int64).reshape(-1, 3).T
    more_EQ = values_SQI[to_E, :, interval_E] - values_SQI[from_E, :, interval_E]
    order_E = np.lexsort((interval_E, more_EQ[:, _SECONDS] / more_EQ[:, _MEMORY]))
    start_QI = np.ascontiguousarray(values_SQI[start_I, :, np.arange(len(rows_I))].T)
    first_Q = start_QI.sum(axis=1)
    first_Q[: len(costs[0].fixed)] += sum(cost.fixed for cost in costs)
    flex = next((cost.exchange for cost in costs if cost.strategy is TierStrategy.FLEX), Exchange.ROWS)
    return _Curve(
        points_VQ=np.concatenate([first_Q[None], first_Q + np.cumsum(more_EQ[order_E], axis=0)]),
        exchanges_V=((flex, Exchange.ROWS),) * (len(steps) + 1),
        is_split_V=np.arange(len(steps) + 1) > 0,
    )


def _steps(memory_SI: FloatArray, seconds_SI: FloatArray) -> tuple[IntArray, list[tuple[int, int, int]]]:
    """Per interval the strategy of least memory, and (interval, from, to) steps from there along the lower hull."""
    start_I = np.lexsort((seconds_SI, memory_SI), axis=0)[0]
    current_I = start_I.copy()
    every = np.arange(memory_SI.shape[1])
    steps: list[tuple[int, int, int]] = []
    for _ in range(len(memory_SI) - 1):
        more_SI = memory_SI - memory_SI[current_I, every]
        saved_SI = seconds_SI[current_I, every] - seconds_SI
        is_step_SI = (saved_SI > 0) & (more_SI > 0)
        ratio_SI = np.where(is_step_SI, saved_SI / np.where(is_step_SI, more_SI, 1.0), -1.0)
        best_I = ratio_SI.argmax(axis=0)
        for interval in np.flatnonzero(is_step_SI.any(axis=0)).tolist():
            steps.append((interval, int(current_I[interval]), int(best_I[interval])))
            current_I[interval] = best_I[interval]
    return start_I, steps


def _lower_hull(curves: Sequence[_Curve]) -> _Curve:
    """The convex hull of several curves' vertices, from least memory to least communication."""
    points_VQ = np.concatenate([curve.points_VQ for curve in curves])
    exchanges = [pair for curve in curves for pair in curve.exchanges_V]
    owner_V = np.repeat(np.arange(len(curves)), [len(curve.points_VQ) for curve in curves])
    memory, seconds = points_VQ[:, _MEMORY], points_VQ[:, _SECONDS]
    kept: list[int] = []
    for index in np.lexsort((seconds, memory)).tolist():
        if kept and seconds[index] >= seconds[kept[-1]]:
            continue
        while len(kept) > 1:
            first, last = kept[-2], kept[-1]
            along = (seconds[first] - seconds[last]) * (memory[index] - memory[first])
            if along > (seconds[first] - seconds[index]) * (memory[last] - memory[first]):
                break
            kept.pop()
        kept.append(index)
    return _Curve(
        points_VQ=points_VQ[kept],
        exchanges_V=tuple(exchanges[index] for index in kept),
        is_split_V=np.r_[False, owner_V[kept[1:]] == owner_V[kept[:-1]]],
    )
