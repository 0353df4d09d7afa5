"""Which of several finished plans to take: the plainest, unless the models can tell that another one is faster.

Shape suffixes: P plans, E draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan that may be taken.

    Attributes:
        plan: The plan.
        priced: Its step and kernels, as `evaluate` has them.
        cost_ms: What is to be short of them.
        status: How the search for it ended.
        models: Names of trained models that a start came from.
    """

    plan: ShardingPlan
    priced: PricedPlan
    cost_ms: float
    status: str
    models: dict[str, str] = field(default_factory=dict)


def choose(
    found: Sequence[FoundPlan], costs: CostModels, *, by_kernels: bool = False, margin: float = 0.0
) -> FoundPlan:
    """The plan to take, see `last_told`; its status says so if that is not the fastest.

    Plans are compared by draws of what they take where the kernel model has its errors on record, else by what they
    are predicted to take.

    Args:
        found: At least one: the plainest first, then as a search met them.
        costs: The models.
        by_kernels: Whether the kernels of the slowest rank are to be short, in place of the step.
        margin: Share by which plans have to be faster in place of draws: the error of a calibrated model of steps.
    """
    drawn_PE = np.array([[one.cost_ms] for one in found])
    errors = recorded_errors(costs.kernel)
    if errors is not None and len(found) > 1 and not margin:
        priced = [one.priced for one in found]
        drawn_PE = slowest_draws(priced, errors) if by_kernels else step_draws(priced, errors)
    taken = found[last_told(drawn_PE, [num_cuts(one.plan) for one in found], margin)]
    fastest_ms = min(one.cost_ms for one in found)
    if taken.cost_ms <= fastest_ms:
        return taken
    why = f"since the model cannot tell {fastest_ms:.6g} ms from {taken.cost_ms:.6g} ms"
    return replace(taken, status=f"{taken.status}, {why}")


def last_told(drawn_ms_PE: NDArray[np.float64], num_cuts_P: Sequence[int], margin: float = 0.0) -> int:
    """Index of the plan to take: the first, or the last one that can be told from the plan taken before it.

    A plan replaces the one taken so far where it is faster by a mean of more than `TELLING` standard deviations of
    their difference, draw by draw (`TELLING_WHOLE` where neither cuts tables). The best of many candidates is one
    whose price is too low (the optimiser's curse). So a longer search adds plans to the end of the row, and has to
    show a gain over the plan of the shorter one. Of one draw each, the fastest is taken.

    Args:
        drawn_ms_PE: What each plan takes, in the same draws: the plainest first, then as a search met them.
        num_cuts_P: See `num_cuts`.
        margin: Share of what the plan taken so far takes by which another one has to be faster besides.

    Source:
        Smith and Winkler, The Optimizer's Curse (Management Science, 2006), for why the best candidate disappoints.
    """
    taken = 0
    for index in range(1, len(drawn_ms_PE)):
        gain_ms_E = drawn_ms_PE[taken] - drawn_ms_PE[index]
        bar = TELLING if num_cuts_P[taken] or num_cuts_P[index] else TELLING_WHOLE
        if gain_ms_E.mean() > bar * gain_ms_E.std() + margin * drawn_ms_PE[taken].mean():
            taken = index
    return taken


def num_cuts(plan: ShardingPlan) -> int:
    """Pieces of tables that ranks hold, over all replica groups, beyond one for each table; 0 for whole tables."""
    num_ranks_L = np.array([len(ranks) for ranks in plan.arrays.ranks_L])
    pieces = int(num_ranks_L[plan.arrays.layout_N].sum())
    return pieces * plan.replica_groups.num_groups - len(plan.tables.tables)
