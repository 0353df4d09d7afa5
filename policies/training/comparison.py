"""A trained policy against greedy planning and against other versions, on the same held-out tasks.

Shape suffixes: P tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.core.costs import MsArray
from autoshard.core.errors import AutoshardError, ExecutionError, InfeasiblePlanError
from autoshard.evaluation.evaluate import evaluate
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner
from costmodel.registry.promotion import HeldOutComparison, TrainedVersion
from costmodel.registry.versions import StoredModel
from policies.planning.planner import PolicyOptions, planned
from policies.planning.trained import TrainedPolicy
from policies.training.drawn_tasks import TaskKind, TaskSplit, task_seeds

NUM_TEST = 20
_GREEDY = "cost-greedy"


class TestTasks:
    """Tasks that no training has seen, and what cost-greedy makes of them.

    Args:
        kind: What they are drawn from.
        num_tasks: How many; those that cost-greedy has no plan for are left out.

    Raises:
        ExecutionError: If these are all of them.
    """

    __test__ = False

    def __init__(self, kind: TaskKind, num_tasks: int = NUM_TEST) -> None:
        self.requests: list[PlanRequest] = []
        steps_ms: list[float] = []
        for seed in task_seeds(TaskSplit.TEST, num_tasks):
            request = kind.request(seed)
            try:
                plan = get_planner(_GREEDY).plan(request)
            except InfeasiblePlanError:
                continue
            self.requests.append(request)
            steps_ms.append(evaluate(plan, request.costs).step_ms.value)
        if not steps_ms:
            raise ExecutionError(f"{_GREEDY} has a plan for none of {num_tasks} held-out tasks to compare with")
        self.greedy_ms_P: MsArray = np.array(steps_ms)

    def steps_ms(self, policy: TrainedPolicy) -> MsArray:
        """Predicted steps of a policy's likeliest placements, not searched, shape (P,); infinite where it has none."""
        return np.array([_step_ms(policy, request) for request in self.requests])


def _step_ms(policy: TrainedPolicy, request: PlanRequest) -> float:
    try:
        return planned(policy, request, PolicyOptions(bursts=0))[0].step_ms()
    except AutoshardError:
        return float("inf")


def policy_version(policy: TrainedPolicy, tasks: TestTasks, steps_ms_P: MsArray) -> TrainedVersion:
    """A policy that is compared by the predicted steps of its placements.

    Args:
        policy: The policy.
        tasks: Held-out tasks.
        steps_ms_P: Its steps there.
    """

    def compared(others_ms_P: Sequence[float] | MsArray, against: str) -> HeldOutComparison:
        difference_P = steps_ms_P / np.asarray(others_ms_P) - 1
        return HeldOutComparison.paired(difference_P, against=against, measure="step", of="held-out tasks")

    def compare(stored: StoredModel) -> HeldOutComparison:
        return compared(tasks.steps_ms(TrainedPolicy.from_stored(stored)), f"version {stored.label}")

    return TrainedVersion.of(policy, compare, (compared(tasks.greedy_ms_P, _GREEDY),))
