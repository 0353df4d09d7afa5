"""Which of several finished plans to take: by draws of what they take, not by their predicted times alone.

Shape suffixes: P plans, X ranks of all plans, R ranks, N items, E draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModels, ShardingPlan, Tier
from autoshard.core.costs import KernelErrors, MsArray, recorded_errors
from autoshard.evaluation.uncertainty.plan_draws import step_draws
from autoshard.evaluation.uncertainty.set_errors import SetErrors, half_widths
from autoshard.planners.space.placement import PlacementProblem, RankArray

#: Standard deviations of the difference of two plans below which it counts as nothing. With models of 100 samples, the
#: true slowest rank of `auto` is 7.0% below that of `cost-greedy` with up to 0.5, 5.3% with 0.75, 1.6% with 1, where
#: real gains of cuts are given up; with 300 and 1,000 samples, these differ by at most 0.13 points. Ten tasks each on
#: both stores of docs/data, as in `python -m studies fooled`, with 10 steps and 1,500 updates (November 2026).
TELLING = 0.5


def plainest_of_best(drawn_ms_PE: NDArray[np.float64], num_cuts_P: Sequence[int]) -> int:
    """The plan to take: of all that the draws cannot tell from the fastest one, that with the fewest cuts.

    The fastest plan is that with the least mean. A plan is told from it where their difference, draw by draw, has a
    mean of at least `TELLING` of its standard deviations. Of plans with as few cuts, the fastest is taken.

    Args:
        drawn_ms_PE: What each plan takes, in the same draws.
        num_cuts_P: See `num_cuts`.
    """
    mean_ms_P = drawn_ms_PE.mean(axis=1)
    lead_ms_PE = drawn_ms_PE - drawn_ms_PE[int(mean_ms_P.argmin())]
    is_told_P = lead_ms_PE.mean(axis=1) > TELLING * lead_ms_PE.std(axis=1)
    untold = np.flatnonzero(~is_told_P).tolist()
    return min(untold, key=lambda index: (num_cuts_P[index], mean_ms_P[index]))


def best_plan(plans: Sequence[ShardingPlan], costs: CostModels) -> int | None:
    """Index of the plan to take by draws of its step; None where the kernel model has no errors on record."""
    errors = recorded_errors(costs.kernel)
    if errors is None:
        return None
    return plainest_of_best(step_draws(plans, costs, errors), [num_cuts(plan) for plan in plans])


def best_placement(problem: PlacementProblem, placements: Sequence[RankArray]) -> int | None:
    """Index of the placement to take by draws of its slowest rank; None where the model has no errors on record."""
    errors = recorded_errors(problem.model)
    if errors is None:
        return None
    drawn_ms_PE = PricedPlacements.of(problem, placements).slowest_draws(errors)
    return plainest_of_best(drawn_ms_PE, [0] * len(placements))


def num_cuts(plan: ShardingPlan) -> int:
    """Pieces of tables that ranks hold, over all replica groups, beyond one for each table; 0 for whole tables."""
    pieces = sum(len(replica) for placed in plan.shards for replica in placed.replicas)
    return pieces * plan.replica_groups.num_groups - len(plan.tables.tables)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedPlacements:
    """Several placements of one problem, rank by rank.

    Attributes:
        num_ranks: Of each of them.
        rank_ms_X: Kernel times of the ranks of all placements, one placement after the other.
        errors: Of these.
    """

    num_ranks: int
    rank_ms_X: MsArray
    errors: SetErrors

    @classmethod
    def of(cls, problem: PlacementProblem, placements: Sequence[RankArray]) -> PricedPlacements:
        """Prices placements of items on single ranks."""
        num_ranks = problem.num_ranks
        codes_XH = np.concatenate([problem.rank_codes(ranks_N) for ranks_N in placements])
        sets_X = [
            tuple(np.flatnonzero(ranks_N == rank).tolist()) for ranks_N in placements for rank in range(num_ranks)
        ]
        return cls(
            num_ranks=num_ranks,
            rank_ms_X=np.concatenate([problem.rank_ms(ranks_N) for ranks_N in placements]),
            errors=SetErrors.of(
                owner_M=np.concatenate([number * num_ranks + ranks_N for number, ranks_N in enumerate(placements)]),
                tables_M=[problem.label(item) for item in range(problem.num_items)] * len(placements),
                kinds_M=item_kinds(problem) * len(placements),
                alone_ms_M=np.tile(problem.kernel_ms_N, len(placements)),
                half_width_X=half_widths(problem.model.predict_parts(codes_XH)),
                sets_X=sets_X,
            ),
        )

    def slowest_draws(self, errors: KernelErrors) -> NDArray[np.float64]:
        """Kernel times of each placement's slowest rank, shape (P, E)."""
        drawn_ms_XE = self.rank_ms_X[:, None] * np.exp(self.errors.drawn(errors))
        slowest_PE: NDArray[np.float64] = np.maximum.reduceat(
            drawn_ms_XE, np.arange(0, len(drawn_ms_XE), self.num_ranks), axis=0
        )
        return slowest_PE


def item_kinds(problem: PlacementProblem) -> list[str]:
    """Kind of kernel of each item; of several shards that must share a rank, the first one's."""
    kind_U = [local.kernel_kind for local in problem.locals_by(Tier.TABLE_WISE)]
    return [kind_U[group[0]] for group in problem.members]
