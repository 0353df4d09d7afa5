"""One search over all sharding types: starts, a race of bursts from them, then more bursts from the best."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import ShardingPlan
from autoshard.core.costs import recorded_errors
from autoshard.core.errors import (
    AutoshardError,
    InfeasiblePlanError,
    InvalidTopologyError,
    ModelError,
)
from autoshard.evaluation.batch_memory import has_room
from autoshard.evaluation.evaluate import price_with_kernels
from autoshard.evaluation.group_sync import with_cheaper_sync
from autoshard.evaluation.migration import by_table
from autoshard.planners.comparison import FoundPlan, choose, num_cuts
from autoshard.planners.hybrid.compiled.library import library
from autoshard.planners.hybrid.descent import Start
from autoshard.planners.hybrid.option_offers import OfferedOptions, ScoreWays, share_of_time
from autoshard.planners.hybrid.starts import (
    FINE_LUMPS,
    GrownStarts,
    LaterStarts,
    StartSpec,
    balanced_starts,
    is_searchable,
    layout_of,
    no_room,
    warm_starts,
)
from autoshard.planners.hybrid.successive_halving import QUICK_TASK, SearchOutcome, improve
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner, planner_names
from autoshard.planners.space.caches import with_grown_caches
from autoshard.planners.space.cost_gradient import FlatOptions
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.options import ShardingType, keeps_width, option_of_placed
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planners.space.planner_space import PlannerSpace
from autoshard.planners.warm_start import start_of
from autoshard.validator import is_valid

#: Share of what is left that a search within replica groups gets, where they are the best start, and its least seconds.
_GROUPS_SHARE, _LEAST_SECONDS = 0.6, 0.01
#: Shares of the time left, each when its turn comes, in which options, starts of the search's own and then other
#: planners' plans have to be made; the search has the rest.
_OFFERS_SHARE, _OWN_SHARE, _STARTS_SHARE = 0.65, 0.25, 0.5
#: Seconds for making, pricing and checking the plan in the end: whatever the task, and for each table (CPU time of
#: `Layout.plan`, `price_with_kernels`, `breakdown_of` and `finished_plan`, 80 to 10,000 tables, one core of an EPYC,
#: November 2026).
_FINISH_S, _FINISH_TABLE_S = 0.005, 3.5e-5
#: Seconds that options have, or twice what is left: of 80 tables on 8 ranks, most of what 0.1 s are offered.
_LEAST_OFFERS_S = 0.06
#: Seconds for each table that the first start of the search's own takes, in which options are not offered; and that a
#: search takes before its first burst, with less of which none begins in large tasks (10,000 tables on 1,024 ranks, one
#: core of an EPYC, November 2026).
_START_TABLE_S, _SEARCH_TABLE_S = 1.2e-5, 1.5e-5
#: What finishing and a start of a large task take at least, over what its items and whole tables take, which is first.
_FINISH_SPACES, _START_SPACES = 2.2, 0.9
#: Seconds that the search has in any case, and for each table, and most of them: a burst of the compiled search takes
#: 2 to 3 ms for 80 tables on 8 ranks.
_LEAST_SEARCH_S, _LEAST_SEARCH_TABLE_S, _MOST_LEAST_S = 0.03, 5e-5, 0.07
#: Largest shares of the time limit for planners whose plans win on some machines, rarely, and never did; and for those
#: that are never better than the search's own starts but where there is nothing else. Own starts are shorter than all
#: of theirs for metasyn's tables (80 on 8 A100 and CPUs, 160 on 32, 200 on 16), which took a third of 3 s for 200
#: tables with larger shares; without `flexshard` 1 s ends 13% above its plan for nvidia-tiny on 32 A100.
_MEDIUM, _SMALL, _LEAST, _QUICK = 0.15, 0.05, 0.01, 0.02
#: Whose plans layouts do not express.
_OF_GROUPS = "replica-groups"
_HEURISTICS = (
    StartSpec(name="cost-greedy", table_s=2e-5, table_rank_s=1.7e-7),
    StartSpec(name="dim-greedy", table_s=2e-5, table_rank_s=1.7e-7, share=_QUICK),
    StartSpec(name="karmarkar-karp", table_s=2e-5, table_rank_s=1.7e-7, share=_QUICK),
    StartSpec(name="size-greedy", table_s=2e-5, table_rank_s=1.7e-7, share=_QUICK),
    StartSpec(name="neuroshard", base_s=0.01, table_s=2e-5, table_rank_s=1.7e-7, share=_QUICK, options={"steps": 0}),
)
_PLANNERS = (
    StartSpec(name="flexshard", base_s=0.02, table_s=1.5e-3, share=_MEDIUM),
    StartSpec(name="neo", table_s=2.3e-3, share=_SMALL),
    StartSpec(name="oper", table_s=2e-3, rank_s=0.03, share=_LEAST),
    StartSpec(name="neuroshard", table_s=5e-3, table_rank_s=1e-6, share=_SMALL),
    StartSpec(name=_OF_GROUPS, table_s=1e-3, share=_SMALL),
)
#: Whose plan is taken where the model cannot tell another one from it: the caller's start, or else this planner's.
_GIVEN, _PLAINEST = "start", "cost-greedy"
#: The planner that names the sharding types which are priced first, and seconds for each table above which it is not
#: asked: with more time for options, searches end hardly lower with its choice (metasyn, 160 tables on 32 A100: 5.3
#: points of the step at 0.1 s, 1.1 at 0.2 s, with errors of 1.0 and 0.4, 20 draws; none at 0.5 s, nine draws;
#: docs/results/policy.md).
_POLICY, _POLICY_TABLE_S = "policy", 1.3e-3
#: Of shards on single ranks, whole or cut by columns.
_ON_SINGLE_RANKS = frozenset({ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE})
#: Those that cut columns.
_CUT_COLUMNS = frozenset({"neo", "neuroshard"})
#: Larger worlds are not searched: a descent alone would take 15 s to begin, 3 tables on 131,072 ranks (November 2026).
_MAX_RANKS = 16_384

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSearch:
    """What the search may do.

    Attributes:
        names: Ways that tables may be held.
        steps: Most steps of the search; 0 for as many as there is time for.
        reserved_bytes: Of every device, to stay free beside all that counts.
        count_activations: Whether what training needs for a batch has to fit beside the tables.
        with_policy: Whether a trained policy may be asked which options are worth pricing.
        with_groups: Whether the plan may have several replica groups.
        min_partition: Least columns of a column shard; 0 for 32 bytes of a row, and in other planners' plans for any.
        by_kernels: Whether the kernels of the slowest rank are to be short, in place of the step.
    """

    names: frozenset[ShardingType] = frozenset(ShardingType)
    steps: int = 0
    reserved_bytes: int = 0
    count_activations: bool = True
    with_policy: bool = True
    with_groups: bool = True
    min_partition: int = 0
    by_kernels: bool = False


def search_steps(request: PlanRequest, search: StepSearch) -> FoundPlan:
    """The plan with the shortest predicted step that starts and search find within the time limit.

    Never worse than the best start: candidates are compared by what `evaluate` says of their plans.

    Worlds of more than 16,384 ranks get the best plan of the other planners, as it is.

    Raises:
        InfeasiblePlanError: If nothing was found that fits the memory.
        InvalidPlanError: If a constraint names a table or rank that is not there.
        InvalidTopologyError: If the world is too large to be searched and no other planner's plan is allowed.
        AutoshardError: If autoshard was installed without a C compiler.
    """
    if request.topology.world_size > _MAX_RANKS:
        return _best_start(request, search)
    library()
    finish_s = _FINISH_S + _FINISH_TABLE_S * len(request.tables.tables)
    start_s = _START_TABLE_S * len(request.tables.tables)
    began_s, space_s = request.deadline_s() - request.time_limit_s, time.perf_counter()
    offers = OfferedOptions(
        request,
        search.names,
        search.min_partition,
        by_kernels=search.by_kernels,
        reserved_bytes=search.reserved_bytes,
    )
    if offers.is_large:
        # A processor that is busy with others takes longer for everything.
        space_s = time.perf_counter() - space_s
        finish_s, start_s = max(finish_s, _FINISH_SPACES * space_s), max(start_s, _START_SPACES * space_s)
    deadline_s = began_s + request.time_limit_s - finish_s
    # Where steps are counted, the clock decides nothing but the end.
    until_s = math.inf if search.steps else deadline_s
    asked = None
    if search.names <= _ON_SINGLE_RANKS:
        offers.complete()
    else:
        is_short = request.time_limit_s < _POLICY_TABLE_S * len(request.tables.tables) and not search.steps
        is_asked = search.with_policy and is_short and not search.by_kernels and not offers.is_large
        asked = _policy(request) if is_asked else None
        now_s = time.perf_counter()
        # Requests whose time was up before they began, as where a service is behind, get no more of it.
        least_s = min(_LEAST_OFFERS_S, 2 * max(0.0, until_s - now_s))
        offers_s = max(share_of_time(1.0 if offers.is_large else _OFFERS_SHARE, until_s - start_s), now_s + least_s)
        offers.begin(offers_s, None if asked is None else asked[0])
    space, limits = offers.space, _limits(offers.space, search)
    lumps = () if asked is None else FINE_LUMPS
    own_s = time.perf_counter()
    own = balanced_starts(space, limits, share_of_time(_OWN_SHARE, until_s), lumps)
    if not own and not offers.is_complete:
        offers.complete()
        own = balanced_starts(space, limits, share_of_time(_OWN_SHARE, until_s))
    if not own and offers.offer_caches():
        own = balanced_starts(space, limits, share_of_time(_OWN_SHARE, until_s))
    own_s = time.perf_counter() - own_s
    starts_s = share_of_time(_STARTS_SHARE, until_s)
    # Plans that no search goes on from are needed before it; others can wait, where there is a start.
    at_once = [one for one in _planners(search) if one.name == _OF_GROUPS or search.steps or not own]
    plans = _plans(request, search, at_once, starts_s, is_needed=not own)
    read, found = _read(plans, space, limits, request, search)
    later = LaterStarts(request, [one for one in _planners(search) if one not in at_once], began_s, deadline_s)

    grown = GrownStarts(space, limits, own_s, until_s)

    def more_starts() -> list[Start]:
        due = _wide(later.due(), search)
        more, taken = _read(due, space, limits, request, search)
        plans.update(due)
        read[:] = [*(one for one in read if one.name not in due), *more]
        found.extend(taken)
        # Where bursts are quick, those from other starts find as much.
        return [*more, *(grown.due() if space.size > QUICK_TASK else ())]

    starts = sorted(((one.layout.step_ms(), one) for one in (*own, *read)), key=lambda start: start[0])
    if not starts and not found:
        raise _why(request, space, limits, search)
    left_s = max(0.0, deadline_s - time.perf_counter())
    best = min((*found, *_other_groups(plans, request, search)), key=lambda one: one.cost_ms, default=None)
    if best is not None and best.plan.replica_groups.num_groups > 1 and (not starts or best.cost_ms < starts[0][0]):
        found += _within_groups(best.plan, request, search, _GROUPS_SHARE * left_s)
    if starts:
        chosen = [start for _, start in starts]
        least_s = min(_LEAST_SEARCH_S + _LEAST_SEARCH_TABLE_S * len(request.tables.tables), _MOST_LEAST_S)
        now_s = time.perf_counter()
        if not offers.is_large:
            deadline_s = max(deadline_s, now_s + least_s)
        elif deadline_s < now_s + _SEARCH_TABLE_S * len(request.tables.tables):
            deadline_s = now_s
        improved = improve(
            chosen,
            seed=request.seed,
            deadline_s=deadline_s,
            max_steps=search.steps or None,
            floor_ms=_slowest_alone_ms(space) if search.by_kernels else 0.0,
            offers=offers,
            more_starts=more_starts,
            is_stopped=request.is_stopped,
        )
        status = (
            f"stopped by {improved.stopped} after {improved.num_steps} steps: {starts[0][0]:.6g} ms ({chosen[0].name}) "
            f"-> {improved.step_ms:.6g} ms"
        )
        on_the_way: list[FoundPlan] = []
        if recorded_errors(request.costs.kernel) is not None:
            found[:0] = _to_beat(plans, read, request, search)
            on_the_way = _on_the_way(improved, request, search)
        found += [*on_the_way, _priced(with_grown_caches(improved.layout), status, request, search)]
    best = choose(found, request.costs, by_kernels=search.by_kernels)
    return best if asked is None else replace(best, models={_POLICY: asked[1]})


def _policy(request: PlanRequest) -> tuple[ScoreWays, str] | None:
    """The trained policy that says which options are worth pricing, and its name; None if there is none to be used."""
    if _POLICY not in planner_names():
        return None
    score_ways = getattr(get_planner(_POLICY), "score_ways", None)
    try:
        return None if score_ways is None else score_ways(request)
    except AutoshardError as error:
        _log.warning("auto: no options are named by the policy: %s", error)
        return None


def _slowest_alone_ms(space: PlannerSpace) -> float:
    """What the costliest shard takes alone where its item is held at its best: no rank that holds it is faster."""
    forward_1V, backward_1V = space.prices.kernels_ms(space.kinds.codes_VH[None].astype(np.float32))
    alone_V = (forward_1V + backward_1V)[0]
    flat = FlatOptions.of(space)
    return float(np.minimum.reduceat(flat.largest(alone_V[flat.kind_E]), flat.first_I).max())


def _limits(space: PlannerSpace, search: StepSearch) -> Limits:
    return Limits.of(space, search.reserved_bytes, with_activations=search.count_activations)


def _priced(plan: ShardingPlan, status: str, request: PlanRequest, search: StepSearch) -> FoundPlan:
    priced = price_with_kernels(plan, request.costs)
    cost_ms = priced.kernels.costs.kernel_ms_S.max() if search.by_kernels else priced.step.step_ms.value
    return FoundPlan(plan=plan, priced=priced, cost_ms=float(cost_ms), status=status)


def _to_beat(
    plans: Mapping[str, ShardingPlan], starts: Sequence[Start], request: PlanRequest, search: StepSearch
) -> list[FoundPlan]:
    """The plan to improve on: the one given, else `cost-greedy`'s, else the fastest start of whole tables."""
    whole_ms = {start.name: start.layout.step_ms() for start in starts if num_cuts(plans[start.name]) == 0}
    if any(start.name == _GIVEN for start in starts):
        name = _GIVEN
    elif _GIVEN in plans and (given := _as_it_is(_GIVEN, plans[_GIVEN], request, search)):
        return given
    elif whole_ms:
        name = _PLAINEST if _PLAINEST in whole_ms else min(whole_ms, key=lambda name: whole_ms[name])
    else:
        return []
    return [_priced(replace(plans[name], predicted=None, provenance=None), f"as {name} has it", request, search)]


def _on_the_way(improved: SearchOutcome, request: PlanRequest, search: StepSearch) -> list[FoundPlan]:
    """The plans that shorter searches would have ended with."""
    layouts = [
        Layout(improved.layout.space, improved.layout.limits, chosen)
        for chosen in improved.trail
        if chosen != improved.layout.chosen
    ]
    return [_priced(with_grown_caches(layout), "as a shorter search has it", request, search) for layout in layouts]


def _best_start(request: PlanRequest, search: StepSearch) -> FoundPlan:
    """The best plan of the other planners, for a world that is too large to be searched."""
    plans = _plans(request, search, _planners(search), request.deadline_s(), is_needed=True)
    names = list(plans)
    if recorded_errors(request.costs.kernel) is not None:
        names.sort(key=lambda name: (name != _GIVEN, name != _PLAINEST))
    found = [one for name in names for one in _as_it_is(name, plans[name], request, search)]
    if not found:
        raise InvalidTopologyError(
            f"must be at most {_MAX_RANKS:,} for a search by the planner auto, got {request.topology.world_size:,}, "
            "and no other planner's plan is at hand: name another planner",
            field="world_size",
        )
    _log.warning("auto: worlds of more than %s ranks are not searched; the best plan of others is taken", _MAX_RANKS)
    best = choose(found, request.costs, by_kernels=search.by_kernels)
    return replace(best, status=f"not searched, over {_MAX_RANKS:,} ranks: {best.status}")


def _within_groups(plan: ShardingPlan, request: PlanRequest, search: StepSearch, seconds: float) -> list[FoundPlan]:
    """The same replica groups with what the search finds for one of them."""
    group = plan.of_one_group()
    asked = replace(
        request,
        tables=group.tables,
        topology=group.topology,
        time_limit_s=max(seconds, _LEAST_SECONDS),
        started_s=None,
        options={},
        start=None,
    )
    try:
        found = search_steps(asked, replace(search, with_groups=False, with_policy=False))
    except InfeasiblePlanError:
        return []
    whole = replace(plan, shards=found.plan.shards, predicted=None, provenance=None)
    whole = with_cheaper_sync(whole, request.costs.comm)
    status = f"{plan.replica_groups.num_groups} replica groups, in one of them: {found.status}"
    return [_priced(whole, status, request, search)] if is_valid(whole) else []


def _planners(search: StepSearch) -> list[StartSpec]:
    """Planners whose plans may be starts, but for those of whole tables."""
    planners = [one for one in _PLANNERS if search.with_groups or one.name != _OF_GROUPS]
    if search.names <= _ON_SINGLE_RANKS:
        known = {_OF_GROUPS, *(_CUT_COLUMNS if search.names == _ON_SINGLE_RANKS else ())}
        planners = [one for one in planners if one.name in known]
    return [_with_width(one, search.min_partition) for one in planners]


def _plans(
    request: PlanRequest, search: StepSearch, planners: Sequence[StartSpec], until_s: float, *, is_needed: bool
) -> dict[str, ShardingPlan]:
    """The start that was given, and plans of whole tables and of some other planners that are quick enough.

    Plans of whole tables are made in any case where a start is needed.
    """
    start = start_of(request)
    heuristics = [replace(one, share=math.inf) for one in _HEURISTICS] if is_needed else _HEURISTICS
    plans = {} if start is None else {_GIVEN: start}
    plans |= warm_starts(request, heuristics, math.inf if is_needed else until_s)
    plans |= warm_starts(request, planners, until_s)
    wide = _wide(plans, search)
    if start is not None and _GIVEN not in wide:
        _log.warning("auto: the start is left out, it has column shards of less than %d columns", search.min_partition)
    return wide


def _with_width(asked: StartSpec, min_partition: int) -> StartSpec:
    """The planner asked for column shards of at least so many columns, if it cuts any."""
    if not min_partition or asked.name not in _CUT_COLUMNS:
        return asked
    return replace(asked, options={**asked.options, "min_partition": min_partition})


def _wide(plans: Mapping[str, ShardingPlan], search: StepSearch) -> dict[str, ShardingPlan]:
    """Those whose column shards are as wide as they have to be."""
    return {
        name: plan
        for name, plan in plans.items()
        if all(keeps_width(placed.shard, search.min_partition) for placed in plan.shards)
    }


def _read(
    plans: Mapping[str, ShardingPlan], space: PlannerSpace, limits: Limits, request: PlanRequest, search: StepSearch
) -> tuple[list[Start], list[FoundPlan]]:
    """Plans that may be searched from, and the others as they are."""
    starts: list[Start] = []
    found: list[FoundPlan] = []
    for name, plan in plans.items():
        layout = layout_of(space, limits, plan, search.names) if is_searchable(plan) else None
        if layout is not None and layout.fits():
            starts.append(Start(layout=layout, name=name))
            continue
        taken = _as_it_is(name, plan, request, search)
        found += taken
        if name == _GIVEN and not taken:
            why = "it leaves no room for training on a batch"
            if layout is None:
                why = f"it does not hold every table as one of {', '.join(sorted(search.names))}"
            _log.warning("auto: the start is left out, %s", why)
    return starts, found


def _as_it_is(name: str, plan: ShardingPlan, request: PlanRequest, search: StepSearch) -> list[FoundPlan]:
    """A plan that the search cannot work on, if it may be the answer as it is and the models have its price."""
    is_of_groups = plan.replica_groups.num_groups > 1
    if not _is_of(plan, search.names) or (is_of_groups and not search.with_groups):
        return []
    if not has_room(plan, search.reserved_bytes, count_activations=search.count_activations):
        return []
    try:
        return [_priced(plan, f"as {name} has it", request, search)] if is_valid(plan) else []
    except ModelError:
        return []


def _is_of(plan: ShardingPlan, names: frozenset[ShardingType]) -> bool:
    """Whether a plan holds all tables in ways that they may be held."""
    if names == frozenset(ShardingType):
        return True
    group = plan.of_one_group()
    found = [option_of_placed(held, group.topology) for held in by_table(group).values()]
    return all(one is not None and one[0].name in names for one in found)


def _other_groups(plans: Mapping[str, ShardingPlan], request: PlanRequest, search: StepSearch) -> list[FoundPlan]:
    """Plans of replica groups whose tables may not be held so: groups within which the search may do better."""
    grouped = [one for one in plans.values() if one.replica_groups.num_groups > 1 and search.with_groups]
    return [
        _priced(one, "as it may not be", request, search)
        for one in grouped
        if is_valid(one) and not _is_of(one, search.names)
    ]


def _why(request: PlanRequest, space: PlannerSpace, limits: Limits, search: StepSearch) -> AutoshardError:
    """Why there is no start: what whole tables lack if they have to be in devices, whole, else all ranks' memory."""
    if search.names == {ShardingType.TABLE_WISE} and not limits.capacity_RM[:, 1:].any():
        try:
            PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel)
        except InfeasiblePlanError as error:
            return error
    return no_room(space, limits)
