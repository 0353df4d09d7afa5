"""A trained policy against greedy planning and against other versions, on the same held-out tasks.

Shape suffixes: P tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.core import CostModel, CostModels
from autoshard.core.costs import MsArray
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planners.space.step_cost import StepCost
from costmodel.registry.promotion import HeldOutComparison, TrainedVersion
from costmodel.registry.versions import StoredModel
from env import FinishedEpisodes, Objective, PlacementTask
from policies.planning.decoding import decode
from policies.planning.trained import TrainedPolicy
from policies.training.scores import cost_greedy_ms

#: Makes the held-out tasks, as a cost model prices and encodes them.
MakeTasks = Callable[[CostModel, Objective], Sequence[PlacementTask]]


def policy_version(
    policy: TrainedPolicy, tasks: Sequence[PlacementTask], make_tasks: MakeTasks, costs: CostModels | None = None
) -> TrainedVersion:
    """A policy that is compared by its objective: the predicted step, else the predicted slowest rank.

    Another policy sees the tasks as in its own training, by its own cost model and for its own objective. All
    placements are priced by the cost model of the policy that is to be published.

    Args:
        policy: The policy.
        tasks: Held-out tasks, made with its cost model and objective.
        make_tasks: Makes them for other policies.
        costs: Models of steps, if these are the objective; kernels aside.
    """
    model = policy.cost
    ours_ms_P = decode(policy.network, tasks).objective_ms_D

    def compared(others_ms_P: MsArray, against: str) -> HeldOutComparison:
        measure = "slowest rank" if policy.card.objective is not Objective.STEP else "step"
        return HeldOutComparison.paired(
            ours_ms_P / others_ms_P - 1, against=against, measure=measure, of="held-out tasks"
        )

    def compare(stored: StoredModel) -> HeldOutComparison:
        other = TrainedPolicy.from_stored(stored, items=policy.card.items)
        placements = decode(other.network, make_tasks(other.cost, other.card.objective))
        step_costs = replace(costs, kernel=model) if costs is not None else None
        return compared(placed_ms(placements, model, step_costs), f"version {stored.label}")

    return TrainedVersion.of(policy, compare, (compared(cost_greedy_ms(tasks), "cost-greedy"),))


def placed_ms(placements: FinishedEpisodes, model: CostModel, costs: CostModels | None) -> MsArray:
    """Predicted steps of placements by `costs`, or kernel times of their slowest ranks by a model, shape (P,).

    Raises:
        ModelError: If the model cannot price a shard of theirs.
    """
    found = []
    for problem, ranks_N in zip(placements.problems, placements.ranks, strict=True):
        priced = PlacementProblem.of(
            problem.tables, problem.topology, model, problem.shards, problem.tiers, problem.payload
        )
        if costs is None:
            found.append(float(priced.rank_ms(ranks_N).max()))
        else:
            step = StepCost(priced, costs)
            found.append(float(step.step_ms(step.sums(ranks_N))[0]))
    return np.array(found)
