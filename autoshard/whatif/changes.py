"""One change of a task at a time, each planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from autoshard.core import MemoryBytes, ShardingPlan, Topology
from autoshard.core.errors import InfeasiblePlanError, InputError, ModelError
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChange:
    """A single change of a task.

    Attributes:
        field: What changes, such as `topology.world_size`.
        text: The change in words.
        planner: Who plans with it.
        make: Makes the changed task; raises an InputError where there is none.
        value: What the field changes to; None where it is no value.
    """

    field: str
    text: str
    planner: str
    make: Callable[[], PlanRequest]
    value: int | str | None = None

    def plan(self) -> ShardingPlan | None:
        """The plan with the change; None if there is none."""
        try:
            return make_plan(self.planner, self.make())
        except (InfeasiblePlanError, InputError, ModelError):
            return None


def planned(
    changes: Iterable[TaskChange], *, budget_s: float, trial_s: float | None = None
) -> Iterator[tuple[TaskChange, ShardingPlan]]:
    """Plans with one change after the other.

    Args:
        changes: The changes; one is only asked for when those before it are planned.
        budget_s: Seconds after which none is begun.
        trial_s: Seconds that one is expected to take, or longer if one took longer: none is begun that would not end
            within the budget. None to begin whatever there is time to begin.

    Yields:
        Those with a plan, and the plan.
    """
    started_s = time.perf_counter()
    for change in changes:
        begun_s = time.perf_counter()
        if begun_s - started_s + (trial_s or 0.0) > budget_s:
            return
        plan = change.plan()
        if trial_s is not None:
            trial_s = max(trial_s, time.perf_counter() - begun_s)
        if plan is not None:
            yield change, plan


def with_hbm(topology: Topology, hbm: Callable[[int], int]) -> Topology:
    """The topology, the device memory of every rank made of what it is."""

    def changed(memory: MemoryBytes) -> MemoryBytes:
        return replace(memory, hbm=hbm(memory.hbm))

    overrides = tuple((rank, changed(memory)) for rank, memory in topology.overrides)
    return replace(topology, memory_bytes=changed(topology.memory_bytes), overrides=overrides)
