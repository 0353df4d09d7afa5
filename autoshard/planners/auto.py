"""The best plan known: one search over every way to hold the tables, or over tables on single ranks alone."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import ClassVar

from autoshard import __version__
from autoshard.core import Provenance, ShardingPlan
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.evaluate import breakdown_of
from autoshard.planners.auto_options import AUTO, AutoObjective, AutoOptions
from autoshard.planners.comparison import FoundPlan, choose
from autoshard.planners.hybrid.step_search import StepSearch, search_steps
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.options import ShardingType

#: Share of the time and of the steps that a search over whole tables gets, where these may be preferred.
_WHOLE_SHARE = 0.2
#: Time that a search has where nothing is left: its first start is made in any case.
_LEAST_S = 1e-3
_WHOLE = frozenset({ShardingType.TABLE_WISE})
_log = logging.getLogger(__name__)


class AutoPlanner:
    """One search over every way to hold tables, by predicted step; or over single ranks, by the slowest one's kernels.

    It starts from the plans of all planners that are quick enough and from its own, and improves the best of them
    until the time is over: never worse than the best start.
    """

    name: ClassVar[str] = AUTO
    summary: ClassVar[str] = (
        "Searches all sharding types for every table, starting from the best of the other planners' plans."
    )
    when: ClassVar[str] = "the default"
    is_compared: ClassVar[bool] = True
    cuts_tables: ClassVar[bool] = True
    options_type: ClassVar[type] = AutoOptions
    takes_start: ClassVar[bool] = True

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan; its provenance says how the search ended.

        Raises:
            InfeasiblePlanError: If no plan within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
            InvalidPlanError: If a constraint names a table or rank that is not there, or the start is of other tables.
        """
        options = parse_options(AutoOptions, request.options)
        by_kernels = options.objective == AutoObjective.KERNEL
        search = StepSearch(
            names=options.types,
            steps=options.steps,
            reserved_bytes=options.reserved_bytes,
            count_activations=options.counts_activations,
            with_policy=options.policy,
            with_groups=options.with_groups,
            min_partition=options.min_partition,
            by_kernels=by_kernels,
        )
        # From a given plan, the next one is no slower.
        is_preferred = options.prefer_whole and not by_kernels and request.start is None
        found = _preferred(request, search) if is_preferred else search_steps(request, search)
        _log.info("auto: %s", found.status)
        provenance = Provenance(
            planner=self.name, version=__version__, seed=request.seed, models={**found.models, "search": found.status}
        )
        predicted = breakdown_of(found.plan, found.priced)
        return replace(found.plan, predicted=predicted, provenance=provenance)


def _preferred(request: PlanRequest, search: StepSearch) -> FoundPlan:
    """The best plan, or the best one of whole tables if cutting them gains less than the step model can tell.

    What a cut costs beside its bytes and kernels is what step models know least of: the predicted gain of the best of
    many plans is too high by up to the model's error (the optimiser's curse).
    """
    margin = request.costs.step.relative_error if request.costs.step else 0.0
    if not margin or search.names <= _WHOLE:
        return search_steps(request, search)
    # The second search has what the first one leaves of the time, whichever of them encodes the task.
    deadline_s = request.deadline_s()
    whole = _best_whole(_until(request, deadline_s, _WHOLE_SHARE), search)
    found = search_steps(_until(request, deadline_s), _with_share(search, 1.0 - _WHOLE_SHARE))
    return found if whole is None else choose([whole, found], request.costs, margin=margin)


def _until(request: PlanRequest, deadline_s: float, share: float = 1.0) -> PlanRequest:
    """A request that begins now and has a share of the time left until then."""
    now_s = time.perf_counter()
    return replace(request, started_s=now_s, time_limit_s=max(_LEAST_S, share * (deadline_s - now_s)))


def _with_share(search: StepSearch, share: float) -> StepSearch:
    """A search that may make a share of the steps, if they are counted."""
    return replace(search, steps=max(1, round(share * search.steps)) if search.steps else 0)


def _best_whole(request: PlanRequest, search: StepSearch) -> FoundPlan | None:
    """The best plan of whole tables; None if there is none."""
    if not search.names >= _WHOLE:
        return None
    only_whole = replace(_with_share(search, _WHOLE_SHARE), names=_WHOLE, with_groups=False)
    try:
        return search_steps(request, only_whole)
    except InfeasiblePlanError:
        return None
