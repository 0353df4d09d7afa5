"""A planner's plan against others of the same task, executed in virtual time: `autoshard plan --run-off`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from autoshard.core import ShardingPlan
from autoshard.core.errors import AutoshardError
from autoshard.core.step import Overlap
from autoshard.evaluation.executable import plan_note
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_plan
from autoshard.runtime.results import OVERLAPS, RunResult
from autoshard.whatif.trials import execute_plans

#: Who makes the plans besides: `auto` with fewer ways to hold tables, with all that prices promise, and from other
#: seeds, and planners whose plans differ from its own: executed, the policy's were over 2% shorter than `auto`'s in 5
#: of 20 tasks (docs/results/virtual-time.md). Options that are given for `auto` stay.
_OTHERS: Final[tuple[tuple[str, Mapping[str, object]], ...]] = (
    ("auto", {"sharding_types": "table_wise"}),
    ("auto", {"prefer_whole": False}),
    ("policy", {}),
    ("cost-greedy", {}),
    ("auto", {"sharding_types": "table_wise,column_wise,row_wise"}),
    ("torchrec", {}),
    ("neo", {}),
    ("replica-groups", {}),
)
#: Share of the time limit that the planner itself has; the others share the rest.
_OWN_SHARE: Final = 0.5
_STEPS, _WARMUP_STEPS, _ROUNDS = 8, 2, 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan of a run-off.

    Attributes:
        name: Who made it, and with which options.
        plan: The plan, with its prediction.
        executed: What it took.
    """

    name: str
    plan: ShardingPlan
    executed: RunResult

    @property
    def predicted_ms(self) -> float:
        """Its predicted step."""
        return self.plan.prices.step_ms.value


def contenders(planner: str, request: PlanRequest, count: int) -> list[tuple[str, ShardingPlan]]:
    """A planner's plan, and the best others of the same task by their predictions, no two of which are alike.

    Args:
        planner: Its name.
        request: The task; its time is that of all plans together.
        count: Most plans.

    Raises:
        AutoshardError: If the planner itself finds no plan; others that find none are left out.
    """
    deadline_s = request.deadline_s()
    own = make_plan(planner, _within(request, deadline_s, _OWN_SHARE))
    # What is asked of one planner says nothing to another.
    others = [one for one in _OTHERS if one[0] == planner or (not request.options and one != (planner, {}))]
    found = [(planner, own)]
    for index, (name, options) in enumerate(others):
        asked = {**options, **request.options} if name == planner else options
        try:
            one = make_plan(name, replace(_within(request, deadline_s, 1 / (len(others) - index)), options=asked))
        except AutoshardError as error:
            _log.info("%s is not in the run-off: %s", name, error)
            continue
        label = name if not options else f"{name} ({', '.join(f'{key}={value}' for key, value in options.items())})"
        if not plan_note(one) and not any(_is_alike(one, other) for _, other in found):
            found.append((label, one))
    first, *more = found
    return [first, *sorted(more, key=lambda one: one[1].prices.step_ms.value)[: count - 1]]


def run_off(
    plans: Sequence[tuple[str, ShardingPlan]],
    registry: str | None = None,
    on_step: Callable[[int, int], None] | None = None,
    orders_folder: Path | None = None,
) -> list[Contender]:
    """Executes plans in virtual time, in turn on the same processes; the one with the shortest step comes first.

    Args:
        plans: At least one, by name.
        registry: Folder of trained models of collectives; None for the default.
        on_step: Told how many steps are done, and of how many.
        orders_folder: As `execute_plans` has it.

    Raises:
        AutoshardError: If a plan cannot be executed here.
    """
    each: list[dict[str, Any]] = []
    for _, plan in plans:
        overlap = plan.predicted.overlap if plan.predicted else None
        each.append({"overlap": overlap if overlap in OVERLAPS else Overlap.NONE})
    executed = execute_plans(
        [plan for _, plan in plans],
        each,
        rounds=_ROUNDS,
        on_step=on_step,
        orders_folder=orders_folder,
        steps=_STEPS,
        warmup_steps=_WARMUP_STEPS,
        virtual_time=True,
        registry_path=registry,
        device="cpu",
    )
    found = [
        Contender(name=name, plan=plan, executed=result)
        for (name, plan), (result,) in zip(plans, executed, strict=True)
    ]
    return sorted(found, key=lambda one: one.executed.step_ms)


def with_outcome(found: Sequence[Contender]) -> ShardingPlan:
    """The best plan of a run-off, whose provenance says what all of them took."""
    best = found[0].plan
    told = "; ".join(f"{one.name} {one.executed.step_ms:.3g} ms ({one.predicted_ms:.3g} predicted)" for one in found)
    if best.provenance is None:
        return best
    models = {**best.provenance.models, "run_off": f"executed in virtual time: {told}"}
    return replace(best, provenance=replace(best.provenance, models=models))


def _within(request: PlanRequest, deadline_s: float, share: float) -> PlanRequest:
    """A request that begins now, and has a share of the time that is left."""
    now_s = time.perf_counter()
    return replace(request, started_s=now_s, time_limit_s=max(1e-3, share * (deadline_s - now_s)))


def _is_alike(one: ShardingPlan, other: ShardingPlan) -> bool:
    """Whether two plans are the same, but for the names of ranks that are alike."""
    is_same = set(one.shards) == set(other.shards) and one.replica_groups == other.replica_groups
    return is_same or abs(one.prices.step_ms.value / other.prices.step_ms.value - 1) < 1e-9
