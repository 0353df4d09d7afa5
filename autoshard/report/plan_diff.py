"""How two plans differ: their tasks, how each table is held, what ranks would have to receive, what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.core import CostBreakdown, Estimate, ImpliedOrder, PlacedShard, ShardingPlan
from autoshard.core.access import IntArray
from autoshard.core.access.orders import BY_ID
from autoshard.core.declared import Role, values
from autoshard.core.step import StepPart
from autoshard.evaluation.migration import by_table, cut, held_pieces, layouts, reordering
from autoshard.report.wording import write_columns, write_ranks, write_rows
from autoshard.results.plan_diff import Change, PlanDiff, RankChange, TableChange, ValueChange


def diff_plans(
    before: ShardingPlan,
    after: ShardingPlan,
    orders_before: Mapping[str, IntArray] | None = None,
    orders_after: Mapping[str, IntArray] | None = None,
) -> PlanDiff:
    """Compares two plans.

    Tables are the same if their names are. Bytes to receive are counted for each rank of the world: a rank receives
    what it holds after and not before. Where rows are dealt in two different ways, the rows that stay are those
    expected of independent dealing; rows by id and rows by an access rank that is not given are taken as independent,
    too. Between two row orders that are not both given, the bytes are unknown; orders that no plan names are taken as
    one.

    Args:
        before: A valid plan.
        after: Another one.
        orders_before: Row orders of its tables that list ids, as far as they are at hand.
        orders_after: Those of the second plan.
    """
    rows = (_RankedRows.of(before, orders_before or {}), _RankedRows.of(after, orders_after or {}))
    held_before, held_after = by_table(before), by_table(after)
    changes = []
    for name in held_before | held_after:
        change = _table_change(name, held_before.get(name, ()), held_after.get(name, ()), (before, after), rows)
        if change is not None:
            changes.append(change)
    changes.sort(key=lambda one: -math.inf if one.received_bytes is None else -one.received_bytes)
    received = [change.received_bytes for change in changes]
    first, second = before.predicted, after.predicted
    return PlanDiff(
        task=tuple(_differing(_task(before), _task(after))),
        step_ms_before=first.step_ms if first else None,
        step_ms_after=second.step_ms if second else None,
        is_within_intervals=_overlaps(first.step_ms, second.step_ms) if first and second else None,
        parts=tuple(_differing(_parts(first), _parts(second))),
        tables=tuple(changes),
        num_alike=len(held_before | held_after) - len(changes),
        ranks=tuple(_rank_changes(first, second)),
        received_bytes=None if None in received else sum(filter(None, received)),
    )


def _task(plan: ShardingPlan) -> dict[str, object]:
    groups, source = plan.replica_groups, plan.provenance
    return {
        "batch_size": plan.tables.batch_size,
        "device": plan.topology.device,
        "num_ranks": plan.topology.world_size,
        "hbm_bytes": plan.topology.memory_bytes.hbm,
        "num_groups": groups.num_groups,
        "group_layout": groups.layout.value if groups.num_groups > 1 else None,
        "sync_every": groups.sync_every if groups.num_groups > 1 else None,
        "payload": str(plan.payload),
        "planner": source.planner if source else None,
        "seed": source.seed if source else None,
        "risk": source.risk.value if source else None,
        "version": source.version if source else None,
        **({f"options.{name}": value for name, value in source.options.items()} if source else {}),
        "cost_model": plan.predicted.cost_model if plan.predicted else None,
    }


def _parts(predicted: CostBreakdown | None) -> dict[str, object]:
    if predicted is None:
        return {}
    parts: dict[str, object] = {part.value: estimate.value for part, estimate in predicted.parts.items()}
    parts.pop(StepPart.DENSE.value, None)
    return {
        **parts,
        "dense_layers": predicted.dense_ms,
        "sync": predicted.sync_ms,
        "overhead": predicted.overhead_ms,
        "max_kernel": predicted.max_kernel_ms,
    }


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[ValueChange]:
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield ValueChange(name=name, before=before.get(name), after=after.get(name))


def _overlaps(first: Estimate, second: Estimate) -> bool:
    return first.low <= second.high and second.low <= first.high


def _rank_changes(before: CostBreakdown | None, after: CostBreakdown | None) -> Iterator[RankChange]:
    first, second = (tuple(one.ranks) if one else () for one in (before, after))
    for rank in range(max(len(first), len(second))):
        old, new = (found[rank] if rank < len(found) else None for found in (first, second))
        if old is None or new is None or (old.kernel_ms, old.hbm_bytes) != (new.kernel_ms, new.hbm_bytes):
            yield RankChange(
                rank=rank,
                kernel_ms_before=old.kernel_ms if old else None,
                kernel_ms_after=new.kernel_ms if new else None,
                hbm_bytes_before=old.hbm_bytes if old else None,
                hbm_bytes_after=new.hbm_bytes if new else None,
            )


@dataclass(frozen=True, slots=True)
class _RankedRows:
    """Which tables a plan cuts by access rank, and by which row orders.

    Attributes:
        named: By table: the digest of the order's file, that it is by id, or None if the plan names none.
        known: Orders whose ids are known.
    """

    named: Mapping[str, str | None]
    known: Mapping[str, IntArray]

    @classmethod
    def of(cls, plan: ShardingPlan, listed: Mapping[str, IntArray]) -> _RankedRows:
        """Those of a plan, with the orders that list ids, as far as they are at hand."""
        named = {name: _order_of(name, plan) for name, num_ordered in plan.ordered_rows().items() if num_ordered}
        by_id = {name: BY_ID for name, order in named.items() if order is ImpliedOrder.BY_ID}
        return cls(named, {**by_id, **listed})


def _order_of(name: str, plan: ShardingPlan) -> str | None:
    if name in plan.row_orders:
        return plan.row_orders[name].digest
    implied = plan.tables[name].row_order
    return implied if implied is ImpliedOrder.BY_ID else None


def _table_change(
    name: str,
    held_before: Sequence[PlacedShard],
    held_after: Sequence[PlacedShard],
    plans: tuple[ShardingPlan, ShardingPlan],
    rows: tuple[_RankedRows, _RankedRows],
) -> TableChange | None:
    """How a table differs; None if both plans hold it alike."""
    before, after = plans
    change, orders, is_reordered, is_unknown = _kind(held_before, held_after), None, False, False
    if change in (Change.MOVED, Change.RESHARDED):
        are_by_rank = all(name in of.named for of in rows)
        if all(name in of.known or name not in of.named for of in rows):
            orders = reordering(name, held_before, held_after, rows[0].known, rows[1].known)
            is_reordered = are_by_rank and orders is not None
        elif are_by_rank:
            is_reordered = is_unknown = rows[0].named[name] != rows[1].named[name]
        if _world(before) == _world(after) and layouts(held_before) == layouts(held_after):
            if not is_reordered:
                return None
            change = Change.REORDERED
    kept = {} if change is Change.RESIZED else held_pieces(held_before, before)
    received = 0.0
    for rank, pieces in held_pieces(held_after, after).items():
        earlier = kept.get(rank, ())
        received += sum(piece.num_bytes - sum(piece.shared_bytes(one, orders) for one in earlier) for piece in pieces)
    return TableChange(
        table=name,
        change=change,
        before=_text(held_before),
        after=_text(held_after),
        received_bytes=None if is_unknown else round(received),
    )


def _world(plan: ShardingPlan) -> tuple[object, ...]:
    return plan.replica_groups, plan.topology.world_size


def _kind(before: Sequence[PlacedShard], after: Sequence[PlacedShard]) -> Change:
    if not before or not after:
        return Change.REMOVED if before else Change.ADDED
    if values(before[0].shard.table, Role.MEMORY) != values(after[0].shard.table, Role.MEMORY):
        return Change.RESIZED
    cuts = [[cut(placed) for placed in held] for held in (before, after)]
    return Change.MOVED if cuts[0] == cuts[1] else Change.RESHARDED


def _text(held: Sequence[PlacedShard]) -> str:
    """`row wise on 0-7`, with rows and columns where a table is cut."""
    texts = []
    for placed in held:
        cuts = [("rows", write_rows(placed.shard)), ("columns", write_columns(placed.shard))]
        parts = "".join(f", {what} {which}" for what, which in cuts if which != "all")
        texts.append(f"{placed.tier.value} on {write_ranks(placed)}{parts}")
    return "; ".join(texts)
