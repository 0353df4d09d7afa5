"""Which of several finished plans to take: by draws of what they take, not by their predicted times alone.

Shape suffixes: P plans, E draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModels, ShardingPlan
from autoshard.core.costs import recorded_errors
from autoshard.evaluation.evaluate import PricedPlan
from autoshard.evaluation.uncertainty.plan_draws import slowest_draws, step_draws

#: Standard deviations of the difference of two plans above which it counts: where one of them cuts tables, and where
#: both hold whole tables and differ in how level they are. True slowest ranks over those of `cost-greedy`, after 300
#: steps with models of 100 and 1,000 samples (30 tasks): -4.8% with 0.25, -5.0% with 0.5, -4.6% with 0.75, -2.9% with
#: 1, -1.0% with 1.5. Of whole tables, after 1,000 steps with models of 100 to 3,000 samples (24 or 36 tasks of each of
#: eight qualities): +0.42% with 0.25, +0.13% with 0.5, +0.04% with 0.75, +0.02% with 1 (November 2026, docs/results).
TELLING, TELLING_WHOLE = 0.5, 1.0


def last_told(drawn_ms_PE: NDArray[np.float64], num_cuts_P: Sequence[int]) -> int:
    """The plan to take: the first, or the last one that the draws tell from the plan taken before it.

    A plan replaces the one taken so far where it is faster by a mean of more than `TELLING` standard deviations of
    their difference, draw by draw (`TELLING_WHOLE` where neither cuts tables). The best of many candidates is one
    whose price is too low (the optimiser's curse). So a longer search adds plans to the end of the row, and has to
    show a gain over the plan of the shorter one.

    Args:
        drawn_ms_PE: What each plan takes, in the same draws: the plainest first, then as a search met them.
        num_cuts_P: See `num_cuts`.

    Source:
        Smith and Winkler, The Optimizer's Curse (Management Science, 2006), for why the best candidate disappoints.
    """
    taken = 0
    for index in range(1, len(drawn_ms_PE)):
        gain_ms_E = drawn_ms_PE[taken] - drawn_ms_PE[index]
        bar = TELLING if num_cuts_P[taken] or num_cuts_P[index] else TELLING_WHOLE
        if gain_ms_E.mean() > bar * gain_ms_E.std():
            taken = index
    return taken


def best_plan(
    plans: Sequence[ShardingPlan], priced: Sequence[PricedPlan], costs: CostModels, *, by_kernels: bool = False
) -> int | None:
    """Index of the plan to take by draws of its step; None where the kernel model has no errors on record.

    Args:
        plans: In the order of `last_told`.
        priced: The same plans, by these models.
        costs: The models.
        by_kernels: Whether the kernels of its slowest rank are drawn, in place of the step.
    """
    errors = recorded_errors(costs.kernel)
    if errors is None:
        return None
    drawn_PE = slowest_draws(priced, errors) if by_kernels else step_draws(priced, costs, errors)
    return last_told(drawn_PE, [num_cuts(plan) for plan in plans])


def num_cuts(plan: ShardingPlan) -> int:
    """Pieces of tables that ranks hold, over all replica groups, beyond one for each table; 0 for whole tables."""
    pieces = sum(len(replica) for placed in plan.shards for replica in placed.replicas)
    return pieces * plan.replica_groups.num_groups - len(plan.tables.tables)
