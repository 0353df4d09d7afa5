"""The best plan known: one search over every way to hold the tables, or over tables on single ranks alone."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import ClassVar

from autoshard import __version__
from autoshard.core import Provenance, ShardingPlan
from autoshard.core.accepted import AT_LEAST_0, check_choice, listed
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.evaluation.batch_memory import has_room
from autoshard.evaluation.evaluate import breakdown_of
from autoshard.planners.comparison import FoundPlan, choose
from autoshard.planners.hybrid.step_search import StepSearch, search_steps
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.options import BY_ACCESS_RANK, ShardingType

#: Stands for all sharding types.
ALL = "all"
#: Share of the time and of the steps that a search over whole tables gets, where these may be preferred.
_WHOLE_SHARE = 0.2
#: Time that a search has where nothing is left: its first start is made in any case.
_LEAST_S = 1e-3
_WHOLE = frozenset({ShardingType.TABLE_WISE})
#: Sharding types of plans that are made by kernels alone.
_OF_KERNELS = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)
#: Plans over several replica groups; not a way to hold one table, but to hold all of them several times.
_GROUPS = "replica_groups"
_NAMES = (*map(str, ShardingType), _GROUPS)

_log = logging.getLogger(__name__)


class AutoObjective(StrEnum):
    """What plans are made short."""

    STEP = "step"
    """The predicted step."""
    KERNEL = "kernel"
    """Kernel time of the slowest rank, of tables on single ranks, whole or cut by columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions:
    """Options of the `auto` planner."""

    objective: str = field(
        default="step",
        metadata={
            "help": "What is minimised: step (the predicted step, over all sharding types) or kernel (the "
            "slowest rank's kernels, over table_wise and column_wise)."
        },
    )
    sharding_types: str = field(
        default=ALL,
        metadata={"help": f"Sharding types to choose from, with commas: all, or any of {', '.join(_NAMES)}."},
    )
    reserved_bytes: int = field(
        default=0,
        metadata={"help": "Device memory of every rank that must stay free beside all that counts."},
    )
    steps: int = field(
        default=0,
        metadata={
            "help": "Most steps of the search; 0 for as many as the time limit allows. With a number, the same seed "
            "gives the same plan on every machine that makes them in time."
        },
    )
    prefer_whole: bool = field(
        default=True,
        metadata={
            "help": "Where a calibrated model prices steps, cut tables only if that makes the step shorter by more "
            "than the model's median error."
        },
    )
    policy: bool = field(
        default=True,
        metadata={"help": "Within short limits, ask the trained policy which options to price first, if there is one."},
    )
    count_activations: bool = field(
        default=True,
        metadata={
            "help": "Whether what training needs has to fit beside the tables: inputs, outputs and gradients of a long "
            "batch, and the dense layers. Where objective is kernel, only tables count."
        },
    )
    min_partition: int = field(
        default=0,
        metadata={
            "help": "Least columns of a column shard, at least 4; 0 for 32 bytes of a row. Other planners' plans with "
            "narrower ones are no starts then."
        },
    )

    def __post_init__(self) -> None:
        check_choice(self.objective, AutoObjective, "options.objective")
        AT_LEAST_0.check_fields(self, "reserved_bytes", "steps", "min_partition", within="options.")
        if not set(self._listed) <= set(_NAMES):
            for name in self._listed:
                check_choice(name, (ALL, *_NAMES), "options.sharding_types")
        if self.objective == AutoObjective.KERNEL:
            self._check_kernel()

    def _check_kernel(self) -> None:
        if self.sharding_types != ALL and not {ShardingType.TABLE_WISE} <= set(self._listed) <= set(_OF_KERNELS):
            raise InvalidOptionError(
                f"must be all, table_wise or {','.join(_OF_KERNELS)} where objective is kernel, "
                f"got {shown(self.sharding_types)}",
                field="options.sharding_types",
            )

    @property
    def _listed(self) -> tuple[str, ...]:
        return _NAMES if self.sharding_types == ALL else listed(self.sharding_types)

    @classmethod
    def of_plan(cls, plan: ShardingPlan) -> AutoOptions:
        """Those that a plan of this planner was made with; the usual ones for other plans."""
        made = plan.provenance
        given = made.options if made is not None and made.planner == AutoPlanner.name else {}
        known = {one.name for one in fields(cls)}
        return parse_options(cls, {name: value for name, value in given.items() if name in known})

    @property
    def counts_activations(self) -> bool:
        """Whether what training needs has to fit beside the tables."""
        return self.count_activations and self.objective == AutoObjective.STEP

    def has_room(self, plan: ShardingPlan) -> bool:
        """Whether a plan leaves free what they ask for."""
        return has_room(plan, self.reserved_bytes, count_activations=self.counts_activations)

    @property
    def types(self) -> frozenset[ShardingType]:
        """Ways that tables may be held."""
        names = frozenset(ShardingType(name) for name in self._listed if name != _GROUPS) or frozenset(ShardingType)
        return names & frozenset(_OF_KERNELS) if self.objective == AutoObjective.KERNEL else names

    @property
    def cuts_by_access(self) -> bool:
        """Whether rows may be held by how often they are looked up."""
        return self.objective == AutoObjective.STEP and not self.types.isdisjoint(BY_ACCESS_RANK)

    @property
    def with_groups(self) -> bool:
        """Whether there may be several replica groups."""
        return _GROUPS in self._listed


class AutoPlanner:
    """One search over every way to hold tables, by predicted step; or over single ranks, by the slowest one's kernels.

    It starts from the plans of all planners that are quick enough and from its own, and improves the best of them
    until the time is over: never worse than the best start.
    """

    name: ClassVar[str] = "auto"
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
            with_groups=options.with_groups and not by_kernels,
            min_partition=options.min_partition,
            by_kernels=by_kernels,
        )
        is_preferred = options.prefer_whole and not by_kernels
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
