"""Where the search starts: plans of other planners, and items at what would cost least if all ranks were alike."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.core import PlacedShard, ShardingPlan, Tier
from autoshard.core.errors import AutoshardError, InfeasiblePlanError
from autoshard.core.quoting import write_bytes
from autoshard.planners.hybrid.balanced import BalancedOptions, placed_options
from autoshard.planners.hybrid.descent import Start
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner, planner_names
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.kinds import LEVELS
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.options import ShardingType, option_of_placed
from autoshard.planners.space.placement import exceeds_total, write_memory
from autoshard.planners.space.planner_space import IndexArray, PlannerSpace

#: Largest shard on one rank, over the mean of what ranks have, for which balanced starts are made: of all tiers, and
#: of few.
_LUMPS, _FEW_LUMPS = (1.0, 0.5, 0.25, math.inf), (math.inf, 0.5)
#: Finer limits, where a policy has named cuts for more tables than the costliest; a start takes 1 ms (metasyn, 160
#: tables on 32 A100).
FINE_LUMPS = (0.6, 0.5, 0.45, 0.4, 0.35, 0.3)
#: Limits above which tables that are whole otherwise are cut.
_WHOLE_LUMPS = (0.5, 0.25, 1.0)
#: Balanced starts that are made whatever the time, the likeliest by their estimates: the best of all was among them or
#: 1% better (metasyn, 80 tables on 8 A100, 200 on 16, 800 on 80 A100 and on 80 CPU ranks); one takes 35 us for each
#: table.
_NUM_MADE = 2
#: Of more tables than this, one is made: it takes a tenth of a second.
_MOST_MADE = 2_000
#: Of few tables more starts are made whatever the time, as many as place so many tables in all: the likeliest two of
#: 80 tables on 8 A100 were 8% above the best.
_NUM_PLACED = 640
#: Options over those of the last balanced starts with which they are made anew: plans of 49 tasks on 16 to 64 ranks, as
#: training draws them, were 0.27% shorter after 1 s with an error of 0.18% (16 shorter, 8 longer), those of 160 tables
#: on 32 A100 0.08% with 0.05% (14 draws), after 3 s 0.01% longer with 0.09%. Chosen on these tasks: with 1.3 they were
#: 0.56% shorter, 0.15% and 0.22% longer, with 2 level (CPU time, one core of an EPYC, November 2026). And the share of
#: the time left that making them may take.
_GROWN, _GROWN_SHARE = 1.5, 0.1
#: Placements, each around the one before, of options that leave no room for training.
_NUM_ANEW = 2
#: Tiers that balanced starts may use, besides all: where kernels are short, each further kind of them counts.
FEW_TIERS = (
    (Tier.TABLE_WISE,),
    (Tier.TABLE_WISE, Tier.TABLE_ROW_WISE, Tier.ROW_WISE),
    (Tier.TABLE_WISE, Tier.DATA_PARALLEL),
)
#: Shards of plans that are searched from, over tables, or in all.
_MAX_SHARDS = 8
_FEWEST_SHARDS = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSpec:
    """Another planner whose plan may be a start.

    Attributes:
        name: Of the planner.
        base_s: Seconds that it takes whatever the task: CPU time of one core of a Xeon, November 2026.
        table_s: And for each table.
        rank_s: And for each rank.
        table_rank_s: And for each table and rank.
        share: Share of the time limit that it may be thought to take.
        options: Its own options.
    """

    name: str
    base_s: float = 0.0
    table_s: float = 0.0
    rank_s: float = 0.0
    table_rank_s: float = 0.0
    share: float = 0.2
    options: Mapping[str, object] = field(default_factory=dict)

    def seconds(self, num_tables: int, num_ranks: int) -> float:
        """About what it takes for a task."""
        per_table = num_tables * (self.table_s + num_ranks * self.table_rank_s)
        return self.base_s + num_ranks * self.rank_s + per_table


def warm_starts(request: PlanRequest, asked: Sequence[StartSpec], until_s: float = math.inf) -> dict[str, ShardingPlan]:
    """Plans of other planners, of those that are thought to be done in time.

    Args:
        request: The task; its options are not used.
        asked: The planners, one after the other; each may take its share of the time limit. Of several plans of one
            planner, the last counts.
        until_s: When all of them have to be done, by `time.perf_counter`; if it is infinite, the clock does not decide
            who is asked.
    """
    num_tables, num_ranks = len(request.tables.tables), request.topology.world_size
    known = planner_names()
    plans: dict[str, ShardingPlan] = {}
    for one in asked:
        needed_s = one.seconds(num_tables, num_ranks)
        most_s = min(one.share * request.time_limit_s, until_s - time.perf_counter())
        if one.name not in known or needed_s > most_s or (plans and request.is_stopped()):
            _log.info("no start from %s: it takes about %.2g s", one.name, needed_s)
            continue
        try:
            asked_for = replace(request, options=one.options, started_s=None, start=None)
            plans[one.name] = get_planner(one.name).plan(asked_for)
        except AutoshardError as error:
            _log.info("no start from %s: %s", one.name, error)
    return plans


class LaterStarts:
    """Other planners, each asked as soon as what it takes is no more than its share of the time that is over.

    So a longer search asks those that a shorter one has asked, and when that did.

    Args:
        request: The task.
        asked: The planners.
        began_s: When the time began, by `time.perf_counter`.
        deadline_s: When it is over.
    """

    def __init__(self, request: PlanRequest, asked: Sequence[StartSpec], began_s: float, deadline_s: float) -> None:
        self._request, self._deadline_s = request, deadline_s
        num_tables, num_ranks = len(request.tables.tables), request.topology.world_size
        needed_s = [one.seconds(num_tables, num_ranks) for one in asked]
        self._waiting = [(began_s + seconds / one.share, one) for one, seconds in zip(asked, needed_s, strict=True)]

    def due(self) -> dict[str, ShardingPlan]:
        """Plans of those whose time has come, by their names."""
        now_s = time.perf_counter()
        due = [one for due_s, one in self._waiting if due_s <= now_s]
        if not due:
            return {}
        self._waiting = [(due_s, one) for due_s, one in self._waiting if due_s > now_s]
        return warm_starts(self._request, due, self._deadline_s)


def layout_of(
    space: PlannerSpace, limits: Limits, plan: ShardingPlan, names: Collection[ShardingType] = tuple(ShardingType)
) -> Layout | None:
    """A plan as a layout; None if it holds tables in ways that layouts do not have.

    Args:
        space: Gets the plan's ways to hold tables as options.
        limits: Memory.
        plan: Of the same task.
        names: Ways that tables may be held.
    """
    if plan.replica_groups.num_groups > 1:
        return None
    held: dict[str, list[PlacedShard]] = {}
    for placed in plan.shards:
        held.setdefault(placed.shard.table.name, []).append(placed)
    options_I, sites_I = [], []
    for item in space.items:
        read = [option_of_placed(held[table.name], space.topology) for table in item.tables]
        found = [one for one in read if one is not None]
        options = [option for option, _ in found]
        if len(found) < len(read):
            return None
        # A whole table may be what the space has as one column shard.
        if any(option.name not in names for option in options) and space.number(item, options) is None:
            return None
        is_everywhere = all(option.is_everywhere for option in options)
        # Tables that share their ranks are cut alike, unless all ranks hold all of them.
        alike = {(tuple(part.tier for part in option.parts), sites) for option, sites in found}
        if len(alike) > 1 and not is_everywhere:
            return None
        options_I.append(options)
        sites_I.append(tuple(0 for option in options for _ in option.parts) if is_everywhere else found[0][1])
    chosen = list(zip(space.add(options_I), sites_I, strict=True))
    known = [(number, sites) for number, sites in chosen if number is not None]
    if len(known) < len(chosen):
        return None
    return Layout(space, limits, known)


def is_searchable(plan: ShardingPlan) -> bool:
    """Whether a plan has few enough shards to be searched from; plans of more row groups are only compared with."""
    return len(plan.shards) <= max(_FEWEST_SHARDS, _MAX_SHARDS * len(plan.tables.tables))


def balanced_starts(
    space: PlannerSpace, limits: Limits, until_s: float = math.inf, more_lumps: Sequence[float] = ()
) -> list[Start]:
    """Items at what would cost least if all ranks were alike, for several limits of what is in one shard.

    Args:
        space: What there is to choose from.
        limits: Memory.
        until_s: When to end, by `time.perf_counter`; the likeliest few are made all the same, and one, if any has room.
        more_lumps: Further limits, of which a start is made in any case.
    """
    rates, flat = CostGradient.of(space), FlatOptions.of(space)
    starts = _starts_of(space, flat, rates, limits, until_s, with_uneven=False)
    balanced = BalancedOptions(space, flat, rates, limits, with_uneven=False)
    for lump in more_lumps:
        layout = _with_room(space, flat, rates, limits, balanced.cheapest(lump), with_uneven=False)
        starts += [] if layout is None else [Start(layout=layout)]
    if flat.is_uneven_O.any():
        # Uneven shares take room of all ranks, which others may need: these are starts besides, not instead.
        more = _starts_of(space, flat, rates, limits, until_s, with_uneven=True)
        starts += [start for start in more if _is_uneven(flat, start.layout)]
    return starts


class GrownStarts:
    """The best of the likeliest balanced starts, made anew each time there are so many more options.

    Args:
        space: What there is to choose from; options are added to it.
        limits: Memory.
        made_s: Seconds that the last ones took.
        deadline_s: When the search ends, by `time.perf_counter`; none is made where that would take more than a share
            of what is left. If it is infinite, the clock decides nothing.
    """

    def __init__(self, space: PlannerSpace, limits: Limits, made_s: float, deadline_s: float) -> None:
        self._space, self._limits, self._made_s, self._deadline_s = space, limits, made_s, deadline_s
        self._num_options = space.num_options

    def due(self) -> list[Start]:
        """The start, if there is a new one."""
        num_options, began_s = self._space.num_options, time.perf_counter()
        if num_options < _GROWN * self._num_options or self._made_s > _GROWN_SHARE * (self._deadline_s - began_s):
            return []
        self._num_options = num_options
        starts = balanced_starts(self._space, self._limits, -math.inf)
        self._made_s = time.perf_counter() - began_s
        return [min(starts, key=lambda start: start.layout.step_ms())] if starts else []


def _is_uneven(flat: FlatOptions, layout: Layout) -> bool:
    """Whether a layout has rows of any item in uneven shares."""
    return bool(flat.is_uneven_O[flat.first_I + layout.numbers_I].any())


def _starts_of(
    space: PlannerSpace, flat: FlatOptions, rates: CostGradient, limits: Limits, until_s: float, *, with_uneven: bool
) -> list[Start]:
    """As `balanced_starts`, with uneven shares of rows or without."""
    balanced = BalancedOptions(space, flat, rates, limits, with_uneven=with_uneven)
    distinct: dict[tuple[int, ...], list[tuple[Tier, ...] | None]] = {}
    for numbers_I, tiers in _choices(balanced):
        distinct.setdefault(tuple(numbers_I.tolist()), []).append(tiers)
    starts: list[Start] = []
    num_made = max(_NUM_MADE if len(space.items) <= _MOST_MADE else 1, _NUM_PLACED // len(space.items))
    likeliest = sorted(distinct.items(), key=lambda one: balanced.likely_ms(np.array(one[0])))
    for count, (numbers, of_tiers) in enumerate(likeliest):
        if starts and count >= num_made and time.perf_counter() >= until_s:
            break
        layout = _with_room(space, flat, rates, limits, np.array(numbers), with_uneven=with_uneven)
        if layout is not None:
            starts += [Start(layout=layout, tiers=tiers) for tiers in dict.fromkeys(of_tiers)]
    return starts


def _choices(balanced: BalancedOptions) -> list[tuple[IndexArray, tuple[Tier, ...] | None]]:
    """Options of all items, in several ways; and the few tiers that some of them keep to."""
    cheapest = [(balanced.cheapest(lump), None) for lump in _LUMPS]
    of_few = [(balanced.cheapest(lump, tiers), tiers) for tiers in FEW_TIERS for lump in _FEW_LUMPS]
    whole = [(balanced.whole(lump), None) for lump in _WHOLE_LUMPS]
    return [*whole, *cheapest, *of_few, (balanced.leanest(), None)]


def _with_room(
    space: PlannerSpace,
    flat: FlatOptions,
    rates: CostGradient,
    limits: Limits,
    numbers: IndexArray,
    *,
    with_uneven: bool,
) -> Layout | None:
    """Items with their options placed, where the memory leaves room for what training needs; None if it does not.

    What that is depends on where items are: it is taken from ranks' memory once it is known, and items placed anew.
    Where that does not do, shards are placed by what each needs for it, as linear around where they were.
    """
    of_tables = replace(limits, with_activations=False)
    layout = placed_options(space, flat, rates, of_tables, numbers, with_uneven=with_uneven)
    if layout is None or not limits.with_activations:
        return layout
    placed = Layout(space, limits, layout.chosen, layout.sums_RX)
    if placed.fits():
        return placed
    less_RM = limits.capacity_RM.copy()
    less_RM[:, 0] -= space.prices.training_bytes(layout.moved_RC[None])[0]
    less = replace(of_tables, capacity_RM=less_RM)
    anew = placed_options(space, flat, rates, less, numbers, with_uneven=with_uneven)
    for count in range(_NUM_ANEW + 1):
        if count:
            anew = placed_options(space, flat, rates, of_tables, numbers, with_uneven=with_uneven, around=layout)
        if anew is not None:
            placed = Layout(space, limits, anew.chosen, anew.sums_RX)
            if placed.fits():
                return placed
            layout = anew
        elif count:
            break
    return None


def no_room(space: PlannerSpace, limits: Limits) -> InfeasiblePlanError:
    """The error for tables that no start found room for."""
    needed, room_RM = space.tables.storage_bytes, np.maximum(limits.capacity_RM, 0.0)
    room_M = dict(zip(LEVELS, map(int, room_RM.sum(axis=0).tolist()), strict=True))
    if needed > sum(room_M.values()):
        return exceeds_total(needed, room_M, len(room_RM), limits.less)
    most, memory = int(room_RM.sum(axis=1).max()), write_memory(room_M, len(room_RM), limits.less)
    for item in space.items:
        option = min(item.options, key=space.largest_bytes)
        if (least := space.largest_bytes(option)) > most:
            return InfeasiblePlanError(
                f"{item.label} needs {write_bytes(least)} of a rank as {option.label}, the sharding type that needs "
                f"least there, and {memory} is at most {write_bytes(most)} a rank"
            )
    bytes_of = {item.label: sum(table.storage_bytes for table in item.tables) for item in space.items}
    largest = max(bytes_of, key=bytes_of.__getitem__)
    beside = ", and leave room for training on a batch" if limits.with_activations else ""
    return InfeasiblePlanError(
        f"no way was found to hold all tables{beside}, {write_bytes(needed)} in {memory}; "
        f"the largest is {largest} with {write_bytes(bytes_of[largest])}"
    )
