"""The plan whose slowest rank has the shortest kernels, of tables on single ranks: cuttings, starts, local search."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard import __version__
from autoshard.core import Provenance, Shard, ShardingPlan, Tier
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.comparison import Placed, best_placement
from autoshard.planners.heuristics.greedy import (
    CostGreedyPlanner,
    DimGreedyPlanner,
    LookupGreedyPlanner,
    PlacementPlanner,
    SizeGreedyPlanner,
)
from autoshard.planners.heuristics.karmarkar_karp import KarmarkarKarpPlanner
from autoshard.planners.hybrid.starts import POLICY, warm_starts
from autoshard.planners.kernel_cuts import Cutting, column_cuttings
from autoshard.planners.planner import PlanRequest
from autoshard.planners.search import SearchResult, improve
from autoshard.planners.space.feasibility import repair
from autoshard.planners.space.options import keeps_width
from autoshard.planners.space.placement import PlacementProblem, RankArray, is_table_wise
from autoshard.planners.warm_start import start_of

_HEURISTICS: tuple[PlacementPlanner, ...] = (
    CostGreedyPlanner(),
    KarmarkarKarpPlanner(),
    LookupGreedyPlanner(),
    DimGreedyPlanner(),
    SizeGreedyPlanner(),
)
#: Those that place cut tables: the best start of whole tables is one of them but for few tasks.
_FEW_HEURISTICS = _HEURISTICS[:2]
#: Share of the time left, once tables are priced, in which starts have to be made; the search has the rest.
_STARTS_SHARE = 0.3
#: Share of the search in which all cuttings are tried, each alike; the best of them has the rest.
_TRIAL_SHARE = 0.4
_START_TAKEN = "another is taken, since the model cannot tell the gain of the search from its own errors"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """One way to cut the tables, and placements of its shards.

    Attributes:
        problem: Shards to be placed.
        starts: Placements to search from, at least one.
        models: Names of the trained models that made some of them.
    """

    problem: PlacementProblem
    starts: list[RankArray]
    models: dict[str, str]


def plan_by_kernel(
    request: PlanRequest, *, steps: int, with_policy: bool, with_cuts: bool, min_partition: int = 0
) -> ShardingPlan:
    """Takes the fastest of the heuristics' plans and the trained policy's, and improves it until the time is over.

    Where tables may be cut, several ways to cut them by columns are searched for a while, and the best of them for the
    rest. The policy is asked where it is thought to be done within its share of the time; the plan's provenance names
    it then, and says how the search ended.

    Args:
        request: The task; its options are not used.
        steps: Most steps of the search; 0 for as many as there is time for.
        with_policy: Whether the policy may be asked.
        with_cuts: Whether tables may be cut by columns.
        min_partition: Least columns of a column shard; 0 for 32 bytes of a row.
    """
    deadline_s = request.deadline_s()
    now_s = time.perf_counter()
    # Where steps are counted, the clock decides nothing but the end.
    until_s = math.inf if steps else now_s + _STARTS_SHARE * max(0.0, deadline_s - now_s)
    given = _start(request, with_cuts, min_partition)
    cuttings = _cuttings(request, given, with_cuts, min_partition)
    entries = _entries(request, cuttings, given, with_policy, until_s)
    entry, result, tried = _searched(entries, request.seed, steps, deadline_s)
    placed: list[Placed] = [(one.problem, ranks_N) for one in entries for ranks_N in one.starts]
    placed += [*tried, (entry.problem, result.ranks_N)]
    last = len(placed) - 1
    chosen = best_placement(placed)
    is_other = chosen is not None and chosen < last
    status = f"{_describe(entry, result)}; {_START_TAKEN}" if is_other else _describe(entry, result)
    _log.info("auto: %s", status)
    models = {name: model for one in entries for name, model in one.models.items()}
    provenance = Provenance(planner="auto", version=__version__, seed=request.seed, models={**models, "search": status})
    problem, ranks_N = placed[last if chosen is None else chosen]
    return replace(problem.to_plan(ranks_N), provenance=provenance)


def _describe(entry: _Entry, result: SearchResult) -> str:
    num_cut = len(
        {shard.table.name for shard in entry.problem.shards if shard.embedding_dim < shard.table.embedding_dim}
    )
    cut = f", tables cut by columns: {num_cut}" if num_cut else ""
    return f"stopped by {result.stopped} after {result.num_steps} steps, slowest rank {result.max_ms:.6g} ms{cut}"


def _searched(
    entries: Sequence[_Entry], seed: int, steps: int, deadline_s: float
) -> tuple[_Entry, SearchResult, list[Placed]]:
    """The best entry with what the search made of it, and the placements that trials of all entries led to."""
    if len(entries) == 1:
        only = entries[0]
        return only, improve(only.problem, only.starts, seed=seed, deadline_s=deadline_s, max_steps=steps or None), []
    now_s = time.perf_counter()
    until_s = deadline_s if steps else now_s + _TRIAL_SHARE * max(0.0, deadline_s - now_s)
    most = max(1, round(_TRIAL_SHARE * steps / len(entries))) if steps else None
    trials = []
    for number, entry in enumerate(entries):
        now_s = time.perf_counter()
        end_s = until_s if steps else now_s + max(0.0, until_s - now_s) / (len(entries) - number)
        trials.append(improve(entry.problem, entry.starts, seed=seed, deadline_s=end_s, max_steps=most))
    best = min(range(len(entries)), key=lambda number: trials[number].max_ms)
    entry, num_steps = entries[best], sum(trial.num_steps for trial in trials)
    starts = [trials[best].ranks_N, *entry.starts]
    left = max(0, steps - num_steps) if steps else None
    result = improve(entry.problem, starts, seed=seed, deadline_s=deadline_s, max_steps=left)
    tried = [(one.problem, trial.ranks_N) for one, trial in zip(entries, trials, strict=True)]
    return entry, replace(result, num_steps=num_steps + result.num_steps), tried


def _entries(
    request: PlanRequest,
    cuttings: Iterator[tuple[Cutting, bool]],
    given: ShardingPlan | None,
    with_policy: bool,
    until_s: float,
) -> list[_Entry]:
    """Ways to cut the tables, each with starts; whole tables, if they fit, come first.

    Raises:
        InfeasiblePlanError: If there is none; it says what whole tables lack.
    """
    entries: list[_Entry] = []
    failures: list[InfeasiblePlanError] = []
    for shards, is_needed in cuttings:
        if entries and not is_needed and time.perf_counter() >= until_s:
            break
        try:
            problem = PlacementProblem.of(
                request.tables, request.topology, request.costs.kernel, shards, payload=request.payload
            )
            entries.append(_entry(problem, request, given, with_policy, until_s))
        except InfeasiblePlanError as error:
            failures.append(error)
    if not entries:
        raise failures[0]
    return entries


def _cuttings(
    request: PlanRequest, given: ShardingPlan | None, with_cuts: bool, min_partition: int
) -> Iterator[tuple[Cutting, bool]]:
    """Shards of whole tables, of the start, and of tables cut by columns; and whether they are tried in any case."""
    whole = tuple(Shard.whole(table) for table in request.tables.tables)
    yield whole, True
    started = _shards(given, request) if given is not None else whole
    if started != whole:
        yield started, True
    if with_cuts:
        for shards in column_cuttings(request.tables, request.topology, request.costs.kernel, min_partition):
            if shards not in (whole, started):
                yield shards, False


def _shards(plan: ShardingPlan, request: PlanRequest) -> Cutting:
    """Shards of a plan in the order of the request's tables."""
    of_table: dict[str, list[Shard]] = {table.name: [] for table in request.tables.tables}
    for placed in plan.shards:
        of_table[placed.shard.table.name].append(placed.shard)
    return tuple(shard for shards in of_table.values() for shard in shards)


def _start(request: PlanRequest, with_cuts: bool, min_partition: int) -> ShardingPlan | None:
    """The start, if it places what the search does."""
    given = start_of(request)
    if given is None or is_table_wise(given) or (with_cuts and _is_column_wise(given, min_partition)):
        return given
    wanted = "as column shards on single ranks" if with_cuts else "whole on one rank"
    _log.warning("auto: the start is left out, it does not hold every table %s", wanted)
    return None


def _is_column_wise(plan: ShardingPlan, min_partition: int) -> bool:
    """Whether a plan holds all tables whole or as wide column shards on single ranks, over one replica group."""
    return plan.replica_groups.num_groups == 1 and all(
        placed.tier is Tier.TABLE_WISE
        and placed.shard.num_embeddings == placed.shard.table.num_embeddings
        and keeps_width(placed.shard, min_partition)
        for placed in plan.shards
    )


def _entry(
    problem: PlacementProblem, request: PlanRequest, given: ShardingPlan | None, with_policy: bool, until_s: float
) -> _Entry:
    """Placements to search from, and the names of the trained models that made some of them."""
    is_whole = all(shard == Shard.whole(shard.table) for shard in problem.shards)
    starts: list[RankArray] = []
    failures: list[InfeasiblePlanError] = []
    for heuristic in _HEURISTICS if is_whole else _FEW_HEURISTICS:
        if starts and time.perf_counter() >= until_s:
            break
        try:
            starts.append(repair(problem, heuristic.place(problem, request.seed), request.seed))
        except InfeasiblePlanError as error:
            failures.append(error)
    # Whatever its time, the policy is the last hope where no heuristic found a start.
    share = _STARTS_SHARE if starts else math.inf
    asked = [replace(POLICY, share=share)] if with_policy and is_whole else []
    plan = warm_starts(request, asked, until_s if starts else math.inf).get(POLICY.name)
    if plan is not None:
        starts.append(problem.ranks_of(plan))
    if given is not None and _shards(given, request) == problem.shards:
        starts.insert(0, problem.ranks_of(given))
    if not starts:
        raise failures[0]
    models = dict(plan.provenance.models) if plan is not None and plan.provenance is not None else {}
    return _Entry(problem=problem, starts=starts, models=models)
