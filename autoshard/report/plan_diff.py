"""How two plans differ: their tasks, how each table is held, what ranks would have to receive, what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autoshard.core import CostBreakdown, Estimate, PlacedShard, ShardingPlan
from autoshard.core.declared import Role, values
from autoshard.core.step import StepPart
from autoshard.evaluation.migration import by_table, cut, held_pieces, layouts
from autoshard.report.wording import write_columns, write_ranks, write_rows
from autoshard.results.plan_diff import Change, PlanDiff, RankChange, TableChange, ValueChange


def diff_plans(before: ShardingPlan, after: ShardingPlan) -> PlanDiff:
    """Compares two plans.

    Tables are the same if their names are. Bytes to receive are counted for each rank of the world: a rank receives
    what it holds after and not before. Where rows are dealt in two different ways, the rows that stay are those
    expected of independent dealing; rows by id and rows by access rank are taken as independent, too.

    Args:
        before: A valid plan.
        after: Another one.
    """
    held_before, held_after = by_table(before), by_table(after)
    changes = []
    for name in held_before | held_after:
        change = _table_change(name, held_before.get(name, ()), held_after.get(name, ()), before, after)
        if change is not None:
            changes.append(change)
    changes.sort(key=lambda one: -one.received_bytes)
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
        received_bytes=sum(change.received_bytes for change in changes),
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


def _table_change(
    name: str,
    held_before: Sequence[PlacedShard],
    held_after: Sequence[PlacedShard],
    before: ShardingPlan,
    after: ShardingPlan,
) -> TableChange | None:
    """How a table differs; None if both plans hold it alike."""
    if _world(before) == _world(after) and layouts(held_before) == layouts(held_after):
        return None
    change = _kind(held_before, held_after)
    kept = {} if change is Change.RESIZED else held_pieces(held_before, before)
    received = 0.0
    for rank, pieces in held_pieces(held_after, after).items():
        known = kept.get(rank, ())
        received += sum(piece.num_bytes - sum(piece.shared_bytes(other) for other in known) for piece in pieces)
    return TableChange(
        table=name,
        change=change,
        before=_text(held_before),
        after=_text(held_after),
        received_bytes=round(received),
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
