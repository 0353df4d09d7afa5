"""One search over every way to hold a table: starts, short descents from the best of them, and a long one."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.core import CostModels, EmbeddingTable, MemoryLevel, ShardingPlan, TableSet, Topology
from autoshard.core.errors import (
    AutoshardError,
    InfeasiblePlanError,
    InvalidPlanError,
    InvalidTopologyError,
    ModelError,
)
from autoshard.evaluation.cached_rows import behind_cache
from autoshard.evaluation.evaluate import price_step
from autoshard.evaluation.validator import validate_plan
from autoshard.planners.hybrid.descent import Improved, improve
from autoshard.planners.hybrid.layout import Layout, Limits
from autoshard.planners.hybrid.starts import Asked, asked_plans, balanced_layouts, is_searchable, layout_of, no_room
from autoshard.planners.neo.caches import with_grown_caches
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.options import ShardingOption, ShardingType, enumerate_options
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planners.space.planner_space import PlannerSpace

#: Share of the time limit that descents from each of the best starts get, before the long one from the best of them.
_TRIAL_SHARE = 0.1
_NUM_TRIALS = 3
#: Share of what is left that a search within replica groups gets, where they are the best start, and its least seconds.
_GROUPS_SHARE, _LEAST_SECONDS = 0.6, 0.01
#: Share of the time limit that is left for the search if starts take longer than it.
_LEAST_SHARE = 0.3
#: Largest shares of the time limit for planners whose plans often win, and for those whose plans never did.
_MOST, _LEAST = 0.6, 0.01
_HEURISTICS = (
    Asked(name="cost-greedy"),
    Asked(name="karmarkar-karp"),
    Asked(name="size-greedy"),
    Asked(name="dim-greedy"),
)
_PLANNERS = (
    Asked(name="flexshard", base_s=0.02, table_s=1.5e-3, share=_MOST),
    Asked(name="neo", base_s=0.05, table_s=2e-3, table_rank_s=1e-5, share=_MOST),
    Asked(name="oper", base_s=0.5, table_s=5e-3, rank_s=0.03, share=_LEAST),
    Asked(name="replica-groups", base_s=0.1, table_s=2e-3, table_rank_s=1e-5),
)
#: About what the policy takes once it is loaded (docs of `auto`).
_POLICY = Asked(name="policy", table_s=1e-3, table_rank_s=1e-6)
#: Rows are offered behind caches where tables take more than this share of the devices' memory.
_SCARCE_SHARE = 0.5
#: Cache sizes that are offered, over the rows that a batch hits; memory that is left makes them larger.
_CACHE_SHARES = (1.0, 0.25)
#: Larger worlds are not searched: a descent alone would take 15 s to begin, 3 tables on 131,072 ranks (November 2026).
_MAX_RANKS = 16_384

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSearch:
    """What the search may do.

    Attributes:
        names: Ways that tables may be held.
        steps: Most steps of the search; 0 for as many as there is time for.
        reserved_bytes: Of every device, to stay free beside tables and a batch's inputs and outputs; with 0 only tables
            count.
        with_policy: Whether a trained policy may be asked for a start.
        with_groups: Whether the plan may have several replica groups.
    """

    names: frozenset[ShardingType] = frozenset(ShardingType)
    steps: int = 0
    reserved_bytes: int = 0
    with_policy: bool = True
    with_groups: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plan found.

    Attributes:
        plan: The plan.
        step_ms: Its step, by `evaluate`.
        status: How the search ended.
        models: Names of trained models that a start came from.
    """

    plan: ShardingPlan
    step_ms: float
    status: str
    models: dict[str, str] = field(default_factory=dict)


def space_of(request: PlanRequest, names: Collection[ShardingType] = tuple(ShardingType)) -> PlannerSpace:
    """Every way to hold the tables of a task, with rows behind caches where device memory is scarce."""
    topology, tables = request.topology, request.tables
    levels = _spare_levels(tables, topology)

    def schemes(table: EmbeddingTable) -> list[ShardingOption]:
        offered = list(enumerate_options(table, topology, names))
        simple = [scheme for scheme in offered if scheme.name is not ShardingType.ROW_TIERS]
        for level in levels:
            for share in _CACHE_SHARES:
                offered += [_behind_cache(scheme, level, share, topology, tables.batch_size) for scheme in simple]
        return offered

    return PlannerSpace(tables, topology, request.costs, schemes)


def search_steps(request: PlanRequest, search: StepSearch) -> Found:
    """The plan with the shortest predicted step that starts and search find within the time limit.

    Never worse than the best start: candidates are compared by what `evaluate` says of their plans.

    Worlds of more than 16,384 ranks get the best plan of the other planners, as it is.

    Raises:
        InfeasiblePlanError: If nothing was found that fits the memory.
        InvalidPlanError: If a constraint names a table or rank that is not there.
        InvalidTopologyError: If the world is too large to be searched and no other planner's plan is allowed.
    """
    if request.topology.world_size > _MAX_RANKS:
        return _best_start(request, search)
    started_s = time.perf_counter()
    space = space_of(request, search.names)
    limits = Limits.of(space, search.reserved_bytes)
    plans = _plans(request, search)
    layouts: list[tuple[float, str, Layout]] = []
    others: list[tuple[float, str, ShardingPlan]] = []
    for name, plan in plans.items():
        layout = layout_of(space, limits, plan, search.names) if is_searchable(plan) else None
        if layout is not None and layout.fits():
            layouts.append((layout.step_ms(), name, layout))
        elif _is_allowed(plan, search):
            others += _as_it_is(name, plan, request.costs)
    layouts += [(layout.step_ms(), "balanced", layout) for layout in balanced_layouts(space, limits)]
    if not layouts and not others:
        raise _why(request, space, limits, search)
    layouts.sort(key=lambda one: one[0])
    others.sort(key=lambda one: one[0])
    now_s = time.perf_counter()
    deadline_s = max(started_s + request.time_limit_s, now_s + _LEAST_SHARE * request.time_limit_s)
    if others and others[0][2].replica_groups.num_groups > 1 and (not layouts or others[0][0] < layouts[0][0]):
        others += _within_groups(others[0][2], request, search, _GROUPS_SHARE * (deadline_s - now_s))
    if layouts:
        improved = _improved([layout for _, _, layout in layouts], request.seed, search.steps, deadline_s)
        start_ms, start, _ = layouts[0]
        status = (
            f"stopped by {improved.stopped} after {improved.num_steps} steps: {start_ms:.6g} ms ({start}) -> "
            f"{improved.step_ms:.6g} ms"
        )
        plan = _with_caches(improved.layout)
        others.append((price_step(plan, request.costs).step_ms.value, status, plan))
    return _best_of(others, plans)


def _best_of(priced: Sequence[tuple[float, str, ShardingPlan]], plans: Mapping[str, ShardingPlan]) -> Found:
    step_ms, status, plan = min(priced, key=lambda one: one[0])
    models = plans["policy"].provenance.models if "policy" in plans and plans["policy"].provenance else {}
    return Found(plan=plan, step_ms=step_ms, status=status, models=dict(models))


def _best_start(request: PlanRequest, search: StepSearch) -> Found:
    """The best plan of the other planners, for a world that is too large to be searched."""
    num_ranks = request.topology.world_size
    plans = _plans(request, search)
    allowed = {name: plan for name, plan in plans.items() if _is_allowed(plan, search)}
    priced = [one for name, plan in allowed.items() for one in _as_it_is(name, plan, request.costs)]
    if not priced:
        raise InvalidTopologyError(
            f"must be at most {_MAX_RANKS:,} for a search by the planner auto, got {num_ranks:,}, and no other "
            "planner's plan is at hand: name another planner",
            field="world_size",
        )
    _log.warning("auto: worlds of more than %s ranks are not searched; the best plan of others is taken", _MAX_RANKS)
    found = _best_of(priced, plans)
    return replace(found, status=f"not searched, over {_MAX_RANKS:,} ranks: {found.status}")


def _within_groups(
    plan: ShardingPlan, request: PlanRequest, search: StepSearch, seconds: float
) -> list[tuple[float, str, ShardingPlan]]:
    """The same replica groups with what the search finds for one of them."""
    group = plan.of_one_group()
    asked = replace(
        request, tables=group.tables, topology=group.topology, time_limit_s=max(seconds, _LEAST_SECONDS), options={}
    )
    try:
        found = search_steps(asked, replace(search, with_groups=False, with_policy=False))
    except InfeasiblePlanError:
        return []
    whole = replace(plan, shards=found.plan.shards, predicted=None, provenance=None)
    status = f"{plan.replica_groups.num_groups} replica groups, in one of them: {found.status}"
    if not _is_valid(whole):
        return []
    return [(price_step(whole, request.costs).step_ms.value, status, whole)]


def _plans(request: PlanRequest, search: StepSearch) -> dict[str, ShardingPlan]:
    """Plans of other planners that are quick enough; whole tables always."""
    plans = asked_plans(request, _HEURISTICS)
    planners = [one for one in _PLANNERS if search.with_groups or one.name != "replica-groups"]
    if search.names == {ShardingType.TABLE_WISE}:
        planners = []
    if search.with_policy:
        planners.append(_POLICY)
    return plans | asked_plans(request, planners)


def _as_it_is(name: str, plan: ShardingPlan, costs: CostModels) -> list[tuple[float, str, ShardingPlan]]:
    """A plan with its price, if the models have one."""
    try:
        return [(price_step(plan, costs).step_ms.value, f"as {name} has it", plan)]
    except ModelError:
        return []


def _is_allowed(plan: ShardingPlan, search: StepSearch) -> bool:
    """Whether a plan that the search cannot work on may be the answer as it is."""
    if search.reserved_bytes or (plan.replica_groups.num_groups > 1 and not search.with_groups):
        return False
    return search.names == frozenset(ShardingType) and _is_valid(plan)


def _is_valid(plan: ShardingPlan) -> bool:
    try:
        validate_plan(plan)
    except InvalidPlanError:
        return False
    return True


def _improved(layouts: Sequence[Layout], seed: int, steps: int, deadline_s: float) -> Improved:
    """Short descents from the best starts, and a long one from where the best of them ended."""
    left_s = deadline_s - time.perf_counter()
    trials: list[Improved] = []
    trial_steps = max(1, round(_TRIAL_SHARE * steps)) if steps else None
    for layout in layouts[:_NUM_TRIALS]:
        until_s = time.perf_counter() + _TRIAL_SHARE * left_s
        trials.append(improve(layout, seed=seed, deadline_s=until_s, max_steps=trial_steps))
    best = min(trials, key=lambda one: one.step_ms)
    done = sum(one.num_steps for one in trials)
    last = improve(best.layout, seed=seed + 1, deadline_s=deadline_s, max_steps=max(0, steps - done) if steps else None)
    return Improved(layout=last.layout, step_ms=last.step_ms, num_steps=done + last.num_steps, stopped=last.stopped)


def _spare_levels(tables: TableSet, topology: Topology) -> list[MemoryLevel]:
    """Memory levels below the devices' that there are, if the devices' memory is scarce; the fastest first."""
    memories = [topology.memory_of(rank) for rank in range(topology.world_size)]
    held = sum(table.storage_bytes for table in tables.tables)
    if held <= _SCARCE_SHARE * sum(memory.hbm for memory in memories):
        return []
    return [level for level in (MemoryLevel.DDR, MemoryLevel.SSD) if any(memory[level] for memory in memories)]


def _behind_cache(
    scheme: ShardingOption, level: MemoryLevel, share: float, topology: Topology, batch_size: int
) -> ShardingOption:
    """The scheme with rows in another memory, behind caches for a share of the rows that a batch hits."""
    local = scheme.parts[0].local(topology, batch_size)
    num_rows = max(1, round(share * local.access.expected_distinct(local.num_lookups)))
    return scheme.in_memory(behind_cache(local, level, num_rows))


def _with_caches(layout: Layout) -> ShardingPlan:
    """The layout's plan, its caches grown into the memory that is left."""
    plan = layout.plan()
    if all(placed.memory.level is MemoryLevel.HBM for placed in plan.shards):
        return plan
    free_R = layout.free_bytes()[:, 0] + layout.bytes_RM[:, 0]
    shards = with_grown_caches(
        plan.shards, plan.topology, plan.tables.batch_size, [max(0, int(free)) for free in free_R.tolist()]
    )
    return ShardingPlan(tables=plan.tables, topology=plan.topology, shards=shards)


def _why(request: PlanRequest, space: PlannerSpace, limits: Limits, search: StepSearch) -> AutoshardError:
    """Why there is no start: what whole tables lack if they have to be whole, else the memory of all ranks."""
    if search.names == {ShardingType.TABLE_WISE}:
        try:
            PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel)
        except InfeasiblePlanError as error:
            return error
    return no_room(space, limits)
