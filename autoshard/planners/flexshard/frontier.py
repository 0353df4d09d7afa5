"""The frontier between memory and communication of several tables, and the best point under a budget.

Shape suffixes: I intervals of an access curve, S strategies, V vertices of a curve, T tables, E edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, Exchange, Pooling
from autoshard.core.access import FloatArray, IntArray
from autoshard.planners.flexshard.equations import Strategy
from autoshard.planners.flexshard.tier_costs import Pricing, TierCost, intervals

#: Of a row: knots are doubles, so that the bound of all rows may end up just below a whole number.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBounds:
    """How a table is cut: rows [0, replicated) data-parallel, [replicated, flexed) Flex, the rest row-wise.

    Rows count by falling access frequency.
    """

    replicated: int = 0
    flexed: int = 0
    flex_exchange: Exchange = Exchange.ROWS
    tail_exchange: Exchange = Exchange.ROWS


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Curve:
    """Ways to cut one table, from least memory to least communication, on a convex curve.

    `is_split_V[v]` says whether any mixture of vertices v - 1 and v is a way to cut it too.
    """

    memory_V: FloatArray
    seconds_V: FloatArray
    replicated_V: FloatArray
    flexed_V: FloatArray
    exchanges_V: tuple[tuple[Exchange, Exchange], ...]
    is_split_V: NDArray[np.bool_]

    def saved_per_byte(self) -> FloatArray:
        """Seconds that a byte saves on the way from each vertex to the next, never rising; shape (V - 1,)."""
        memory, saved = np.diff(self.memory_V), -np.diff(self.seconds_V)
        ratio = np.divide(saved, memory, out=np.full(len(memory), np.inf), where=memory > 0)
        # Convex, but for rounding: a step must not be taken before the one that it starts from.
        return np.asarray(np.minimum.accumulate(ratio))

    def bounds(self, vertex: int, share: float) -> TierBounds:
        """The cut at a vertex, or at a share of the way to the next one."""
        flex, tail = self.exchanges_V[vertex]
        replicated, flexed = (
            whole_rows(_between(rows_V, vertex, share)) for rows_V in (self.replicated_V, self.flexed_V)
        )
        return TierBounds(replicated=replicated, flexed=max(replicated, flexed), flex_exchange=flex, tail_exchange=tail)


def whole_rows(num_rows: float) -> int:
    """Rounded down, but for what sums of doubles lose."""
    return int(num_rows + _ROUNDING)


def _between(values_V: FloatArray, vertex: int, share: float) -> float:
    toward = values_V[min(vertex + 1, len(values_V) - 1)]
    return float(values_V[vertex] + share * (toward - values_V[vertex]))


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

    Source:
        FlexShard, Sec. 4.3 and 4.6. Differs: rows are ordered by seconds saved per byte, which for tables of one
        dim and optimizer is the paper's order by probability; with three tiers each row takes the tier that the
        frontier has for it, where the paper's rule replicates only rows that save memory.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        tiers: Sequence[Sequence[Strategy]],
        pricing: Pricing,
        exchanges: Sequence[Exchange] = tuple(Exchange),
    ) -> None:
        self.tables = tables
        pairs = list(zip(tables, tiers, strict=True))
        self._curves = [_table_curve(table, allowed, pricing, _exchanges(table, exchanges)) for table, allowed in pairs]
        self.start = [_start(table, allowed, pricing, _exchanges(table, exchanges)) for table, allowed in pairs]
        """Each table's cut without replicas, with its memory and seconds."""

    @property
    def row_wise(self) -> TierChoice:
        """No replicas, with the exchange that communicates least."""
        return TierChoice(
            bounds=tuple(bounds for bounds, _, _ in self.start),
            memory_bytes=sum(memory for _, memory, _ in self.start),
            communication_s=sum(seconds for _, _, seconds in self.start),
        )

    @property
    def least_memory_bytes(self) -> float:
        """Memory of the cuts that take least."""
        return float(sum(curve.memory_V[0] for curve in self._curves))

    def at(self, memory_bytes: float) -> TierChoice | None:
        """The cuts that communicate least within a budget for all memory of a rank; None if nothing fits it.

        More budget never communicates more.
        """
        reached = self._walk(memory_bytes - self.least_memory_bytes)
        if reached is None:
            return None
        vertex_T, last, share = reached
        choice = self._choice(vertex_T, last, share)
        without = self.row_wise
        is_worse = choice.communication_s >= without.communication_s and without.memory_bytes <= memory_bytes
        return without if is_worse else choice

    def _walk(self, room: float) -> tuple[IntArray, int, float] | None:
        """Vertices reached, and the table that is a share of the way to its next vertex, if any."""
        vertex_T = np.zeros(len(self._curves), dtype=np.int64)
        # Room for the smallest memory may be short by rounding only.
        if room < -1e-9 * max(1.0, self.least_memory_bytes):
            return None
        table_E, memory_E, is_split_E = self._edges()
        while len(table_E):
            used_E = np.cumsum(memory_E)
            stop = int(np.searchsorted(used_E, room, side="right"))
            np.add.at(vertex_T, table_E[:stop], 1)
            if stop == len(table_E):
                break
            room -= float(used_E[stop - 1]) if stop else 0.0
            if is_split_E[stop]:
                return vertex_T, int(table_E[stop]), max(0.0, room) / float(memory_E[stop])
            # No room for this step, so none of this table's later ones either; other tables go on.
            keep_E = table_E[stop:] != table_E[stop]
            table_E, memory_E, is_split_E = (of_E[stop:][keep_E] for of_E in (table_E, memory_E, is_split_E))
        return vertex_T, -1, 0.0

    def _edges(self) -> tuple[IntArray, FloatArray, NDArray[np.bool_]]:
        """Steps of all tables by falling seconds saved per byte: table, bytes, and whether they can be split."""
        num_steps = [len(curve.memory_V) - 1 for curve in self._curves]
        order_E = np.argsort(-np.concatenate([curve.saved_per_byte() for curve in self._curves]), kind="stable")
        table_E = np.repeat(np.arange(len(self._curves)), num_steps)
        memory_E = np.concatenate([np.diff(curve.memory_V) for curve in self._curves])
        is_split_E = np.concatenate([curve.is_split_V[1:] for curve in self._curves])
        return table_E[order_E], memory_E[order_E], is_split_E[order_E]

    def _choice(self, vertex_T: IntArray, last: int, share: float) -> TierChoice:
        bounds, memory, seconds = [], 0.0, 0.0
        for index, (curve, vertex) in enumerate(zip(self._curves, vertex_T.tolist(), strict=True)):
            part = share if index == last else 0.0
            bounds.append(curve.bounds(vertex, part))
            memory += _between(curve.memory_V, vertex, part)
            seconds += _between(curve.seconds_V, vertex, part)
        return TierChoice(bounds=tuple(bounds), memory_bytes=memory, communication_s=seconds)


def _exchanges(table: EmbeddingTable, exchanges: Sequence[Exchange]) -> Sequence[Exchange]:
    return (Exchange.ROWS,) if table.pooling is Pooling.SEQUENCE else exchanges


def _start(
    table: EmbeddingTable, tiers: Sequence[Strategy], pricing: Pricing, exchanges: Sequence[Exchange]
) -> tuple[TierBounds, float, float]:
    """The table in its least replicated tier."""
    wholes = [_whole(table, pricing.cost(table, tiers[0], exchange)) for exchange in exchanges]
    best = min(wholes, key=lambda curve: (float(curve.seconds_V[0]), float(curve.memory_V[0])))
    return best.bounds(0, 0.0), float(best.memory_V[0]), float(best.seconds_V[0])


def _table_curve(
    table: EmbeddingTable, tiers: Sequence[Strategy], pricing: Pricing, exchanges: Sequence[Exchange]
) -> _Curve:
    """The lower hull of all ways to cut a table."""
    curves = []
    by_exchange = {
        (strategy, exchange): pricing.cost(table, strategy, exchange) for strategy in tiers for exchange in exchanges
    }
    if Exchange.ROWS in exchanges:
        rows = [by_exchange[strategy, Exchange.ROWS] for strategy in tiers]
        curves.append(_mixed(table, rows))
        if Strategy.FLEX in tiers and Exchange.PARTIAL_SUMS in exchanges:
            pooled = by_exchange[Strategy.FLEX, Exchange.PARTIAL_SUMS]
            curves.append(_mixed(table, [pooled if one.strategy is Strategy.FLEX else one for one in rows]))
    if Exchange.PARTIAL_SUMS in exchanges:
        curves += [_whole(table, by_exchange[strategy, Exchange.PARTIAL_SUMS]) for strategy in tiers]
    return curves[0] if len(curves) == 1 else _lower_hull(curves)


def _whole(table: EmbeddingTable, cost: TierCost) -> _Curve:
    rows_I, lookups_I = intervals(table)
    num_rows = float(table.num_embeddings)
    is_flex, is_replicated = cost.strategy is Strategy.FLEX, cost.strategy is Strategy.DATA_PARALLEL
    return _Curve(
        memory_V=np.array([cost.bytes_of(rows_I, lookups_I).sum() + cost.fixed_bytes]),
        seconds_V=np.array([cost.seconds_of(rows_I, lookups_I).sum() + cost.fixed_s]),
        replicated_V=np.array([num_rows if is_replicated else 0.0]),
        flexed_V=np.array([num_rows if is_flex or is_replicated else 0.0]),
        exchanges_V=((cost.exchange, cost.exchange),),
        is_split_V=np.array([False]),
    )


def _mixed(table: EmbeddingTable, costs: Sequence[TierCost]) -> _Curve:
    """The curve of tables cut into tiers, interval by interval; fixed costs count whether a tier is used or not."""
    rows_I, lookups_I = intervals(table)
    memory_SI = np.stack([cost.bytes_of(rows_I, lookups_I) for cost in costs])
    seconds_SI = np.stack([cost.seconds_of(rows_I, lookups_I) for cost in costs])
    start_I, steps = _steps(memory_SI, seconds_SI)
    interval_E = np.array([step[0] for step in steps], dtype=np.int64)
    from_E = np.array([step[1] for step in steps], dtype=np.int64)
    to_E = np.array([step[2] for step in steps], dtype=np.int64)
    more_E = memory_SI[to_E, interval_E] - memory_SI[from_E, interval_E]
    saved_E = seconds_SI[from_E, interval_E] - seconds_SI[to_E, interval_E]
    order_E = np.lexsort((interval_E, -saved_E / more_E))
    is_replicated_S = np.array([cost.strategy is Strategy.DATA_PARALLEL for cost in costs], dtype=np.float64)
    is_held_S = np.array([cost.strategy is not Strategy.ROW_WISE for cost in costs], dtype=np.float64)

    def walked(first: float, step_E: FloatArray) -> FloatArray:
        return np.concatenate([[first], first + np.cumsum(step_E[order_E])])

    flex = next((cost.exchange for cost in costs if cost.strategy is Strategy.FLEX), Exchange.ROWS)
    every = np.arange(len(rows_I))
    return _Curve(
        memory_V=walked(memory_SI[start_I, every].sum() + sum(cost.fixed_bytes for cost in costs), more_E),
        seconds_V=walked(seconds_SI[start_I, every].sum() + sum(cost.fixed_s for cost in costs), -saved_E),
        replicated_V=walked(
            (rows_I * is_replicated_S[start_I]).sum(),
            rows_I[interval_E] * (is_replicated_S[to_E] - is_replicated_S[from_E]),
        ),
        flexed_V=walked(
            (rows_I * is_held_S[start_I]).sum(), rows_I[interval_E] * (is_held_S[to_E] - is_held_S[from_E])
        ),
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
    memory = np.concatenate([curve.memory_V for curve in curves])
    seconds = np.concatenate([curve.seconds_V for curve in curves])
    owner = np.repeat(np.arange(len(curves)), [len(curve.memory_V) for curve in curves])
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
    chosen = np.array(kept)
    exchanges = [pair for curve in curves for pair in curve.exchanges_V]
    same = np.r_[False, owner[chosen[1:]] == owner[chosen[:-1]]]
    return _Curve(
        memory_V=memory[chosen],
        seconds_V=seconds[chosen],
        replicated_V=np.concatenate([curve.replicated_V for curve in curves])[chosen],
        flexed_V=np.concatenate([curve.flexed_V for curve in curves])[chosen],
        exchanges_V=tuple(exchanges[index] for index in kept),
        is_split_V=same,
    )
