"""A plan near an older one for today's access, with the price of the way there."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import CostModels, ImpliedOrder, ShardingPlan, TableSet
from autoshard.core.accepted import FINITE_ABOVE_0, FINITE_AT_LEAST_0
from autoshard.core.access import IntArray
from autoshard.core.errors import InvalidPlanError
from autoshard.core.quoting import write_bytes
from autoshard.evaluation import evaluate, price_step
from autoshard.evaluation.drift import AccessedPlan
from autoshard.evaluation.migration import Migration, migration, renumbered
from autoshard.planners.auto_options import AUTO, AutoOptions
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.warm_start import start_of
from autoshard.planning import finished_plan, make_plan
from autoshard.results.replanned import MovedTable, Replanning
from autoshard.validator import is_valid

#: Share of the time limit that the search has; what is left decides, table by table, what stays.
_SEARCH_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """What is to be held from now on.

    Attributes:
        plan: The new plan, or the older one if that stays.
        orders: Row orders of the plan's tables that list ids, by table.
        figures: What changing gains and costs.
    """

    plan: ShardingPlan
    orders: Mapping[str, IntArray]
    figures: Replanning


def replan(accessed: AccessedPlan, request: PlanRequest, *, horizon_steps: float, least_gain: float) -> Replanned:
    """Plans again for today's access, and changes what pays for its migration within a number of steps.

    The planner searches from the older plan. Then every table that its plan holds otherwise goes back to where it is,
    as long as that makes the step plus the migration's time over the horizon shorter: first all of them, then halves,
    and so on. The older layout with today's hot rows is tried alike. The result is never worse than staying.

    Args:
        accessed: The older plan, and today's access.
        request: The task: the topology, the models and the time; tables, start and payload are those of `accessed`.
        horizon_steps: Steps within which a change has to pay, above 0.
        least_gain: Share by which the step has to become shorter, at least 0: what models cannot tell is no gain.

    Raises:
        InvalidPlanError: If the topology has another number of ranks than the plan's.
        InvalidOptionError: If a number is out of range.
        InfeasiblePlanError: If no plan fits the memory.
    """
    FINITE_ABOVE_0.check(horizon_steps, "horizon")
    FINITE_AT_LEAST_0.check(least_gain, "least_gain")
    here, there = request.topology.world_size, accessed.plan.topology.world_size
    if here != there:
        raise InvalidPlanError(
            f"must have the plan's {there} ranks, has {here}; load a checkpoint under a new plan for other numbers",
            field="topology",
        )
    stay = replace(accessed.today, topology=request.topology)
    request = replace(
        request,
        tables=_tables_to_plan(accessed),
        start=accessed.plan,
        payload=accessed.plan.payload,
        started_s=time.perf_counter() if request.started_s is None else request.started_s,
    )
    deadline_s = request.deadline_s()
    made = make_plan(AUTO, replace(request, time_limit_s=_SEARCH_SHARE * request.time_limit_s))
    refreshed = start_of(request)
    asked = parse_options(AutoOptions, request.options)
    targets = [made] if refreshed is None or not asked.has_room(refreshed) else [made, refreshed]
    orders = _orders_today(accessed)
    ways = [_Way.of(accessed, stay, target, orders, request.costs, horizon_steps, asked) for target in targets]
    found = min((way.shortest(deadline_s) for way in ways), key=lambda one: one.objective_ms)
    had_room = asked.has_room(accessed.plan)
    figures = _figures(stay, found, request.costs, horizon_steps, least_gain, asked, had_room=had_room)
    if not figures.is_changed:
        listed = {name: rows.order_N for name, rows in accessed.planned.items() if len(rows.order_N)}
        return Replanned(plan=accessed.plan, orders=listed, figures=figures)
    assert made.provenance is not None, "planning says how a plan was made"
    provenance = replace(made.provenance, models={**made.provenance.models, "replanned": figures.reason})
    plan = finished_plan(replace(found.plan, predicted=None, provenance=None), request.costs, provenance)
    return Replanned(plan=plan, orders={name: one for name, one in found.orders.items() if len(one)}, figures=figures)


def _tables_to_plan(accessed: AccessedPlan) -> TableSet:
    """Today's tables; those that the plan cuts by access rank have a row order in any case."""
    tables = []
    for table in accessed.now.tables:
        order = table.row_order
        if order is None and table.name in accessed.planned:
            order = accessed.plan.row_orders.get(table.name, ImpliedOrder.BY_ID)
        tables.append(replace(table, row_order=order))
    return replace(accessed.now, tables=tuple(tables))


def _orders_today(accessed: AccessedPlan) -> dict[str, IntArray]:
    """Row orders of new plans: rows that were counted, and behind them the others in the order that they had."""
    orders = {name: rows.order_N for name, rows in accessed.planned.items()}
    for name, rows in accessed.rows_now.items():
        before_N = orders.get(name)
        orders[name] = rows.order_N
        if before_N is not None and len(before_N) and len(rows.order_N):
            others_N = before_N[~np.isin(before_N, rows.order_N)]
            orders[name] = np.concatenate([rows.order_N, others_N])
    return orders


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A plan on the way.

    Attributes:
        plan: The plan.
        kept: Tables that stay as they are.
        migration: What moves to get there.
        orders: Its row orders.
        objective_ms: The step, and the migration's share of each step of the horizon.
    """

    plan: ShardingPlan
    kept: frozenset[str]
    migration: Migration
    orders: Mapping[str, IntArray]
    objective_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """From a plan that stays to one that a planner made: any of the tables may stay.

    Attributes:
        stay: The plan as it is, on today's access.
        target: The other plan.
        all_moves: What moves to get there.
        orders: Row orders of both plans' tables.
        costs: Prices steps and migrations.
        horizon_steps: Steps over which the migration counts.
        asked: Options, of the memory that stays free among others.
    """

    stay: ShardingPlan
    target: ShardingPlan
    all_moves: Migration
    orders: tuple[Mapping[str, IntArray], Mapping[str, IntArray]]
    costs: CostModels
    horizon_steps: float
    asked: AutoOptions

    @classmethod
    def of(
        cls,
        accessed: AccessedPlan,
        stay: ShardingPlan,
        target: ShardingPlan,
        orders: Mapping[str, IntArray],
        costs: CostModels,
        horizon_steps: float,
        asked: AutoOptions,
    ) -> _Way:
        """The way from a plan to another."""
        planned = {name: rows.order_N for name, rows in accessed.planned.items()}
        # Rows behind those whose order matters keep their places, unless they are listed.
        ends = target.ordered_rows()
        orders = {name: order_N[: ends.get(name)] for name, order_N in orders.items()}
        target = renumbered(stay, target, planned, orders)
        return cls(
            stay=stay,
            target=target,
            all_moves=migration(stay, target, planned, orders),
            orders=(planned, orders),
            costs=costs,
            horizon_steps=horizon_steps,
            asked=asked,
        )

    def shortest(self, deadline_s: float) -> _Place:
        """The place with the shortest step and migration that is found in time."""
        best = self._place(frozenset())
        moving = sorted(self.all_moves.bytes_of, key=lambda name: -self.all_moves.bytes_of[name])
        if self.stay.replica_groups != self.target.replica_groups:
            return best
        for chunk in _halves(moving):
            if time.perf_counter() > deadline_s:
                break
            if chunk <= best.kept:
                continue
            place = self._place(best.kept | chunk)
            if place.objective_ms < best.objective_ms and is_valid(place.plan) and self.asked.has_room(place.plan):
                best = place
        return best

    def _place(self, kept: Collection[str]) -> _Place:
        sides = {True: self.stay, False: self.target}
        tables = tuple(sides[one.name in kept].tables[one.name] for one in self.target.tables.tables)
        shards = [
            placed for is_kept, side in sides.items() for placed in side.shards
            if (placed.shard.table.name in kept) is is_kept
        ]  # fmt: skip
        plan = replace(
            self.target, tables=replace(self.target.tables, tables=tables), shards=tuple(shards), predicted=None
        )
        moves = self.all_moves.without(kept)
        planned, today = self.orders
        step_ms = price_step(plan, self.costs).step_ms.value
        return _Place(
            plan=plan,
            kept=frozenset(kept),
            migration=moves,
            orders={**today, **{name: planned[name] for name in kept if name in planned}},
            objective_ms=step_ms + moves.ms(self.stay, self.costs.comm) / self.horizon_steps,
        )


def _halves(names: list[str]) -> Iterator[frozenset[str]]:
    """All names, then halves of them, and so on down to each."""
    size = len(names)
    while size:
        for start in range(0, len(names), size):
            yield frozenset(names[start : start + size])
        size = -(-size // 2) if size > 1 else 0


def _figures(
    stay: ShardingPlan,
    found: _Place,
    costs: CostModels,
    horizon_steps: float,
    least_gain: float,
    asked: AutoOptions,
    *,
    had_room: bool,
) -> Replanning:
    before, after = evaluate(stay, costs).step_ms, price_step(found.plan, costs).step_ms
    moves, migration_ms = found.migration, found.migration.ms(stay, costs.comm)
    saved_ms = before.value - after.value
    pays_after = migration_ms / saved_ms if saved_ms > 0 else None
    gain = before.value / after.value - 1.0 if after.value else 0.0
    # Plans that never had room by the model stay, unless a reserve was asked for.
    has_room = asked.has_room(stay) or not (asked.reserved_bytes or had_room)
    is_changed, reason = _decision(stay, pays_after, gain, moves, horizon_steps, least_gain, has_room=has_room)
    by_bytes = sorted(moves.bytes_of.items(), key=lambda one: -one[1])
    return Replanning(
        is_changed=is_changed,
        reason=reason,
        step_ms_before=before,
        step_ms_after=after,
        gain=gain,
        migration_bytes=moves.num_bytes,
        migration_ms=migration_ms,
        pays_off_after_steps=pays_after,
        horizon_steps=horizon_steps,
        num_kept=len(found.kept),
        tables=tuple(MovedTable(table=name, received_bytes=received) for name, received in by_bytes),
    )


def _decision(
    stay: ShardingPlan,
    pays_after: float | None,
    gain: float,
    moves: Migration,
    horizon_steps: float,
    least_gain: float,
    *,
    has_room: bool,
) -> tuple[bool, str]:
    """Whether to change, and why."""
    if not is_valid(stay):
        return True, "the older plan does not fit the topology"
    if not has_room:
        return True, "the older plan leaves less memory free than it has to"
    if pays_after is None:
        return False, "no plan was found that is faster on today's access"
    shorter = gain / (1.0 + gain)
    if shorter <= least_gain:
        return False, f"the step would be {shorter:.1%} shorter, and has to be more than {least_gain:.1%}"
    after = f"moving {write_bytes(moves.num_bytes)} pays off after {pays_after:,.0f} steps"
    if pays_after >= horizon_steps:
        return False, f"{after}, and has to within {horizon_steps:,.0f}"
    return True, after
