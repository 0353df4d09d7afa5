"""Which of several finished plans to take: by draws of what they take, not by their predicted times alone.

Shape suffixes: P plans, X ranks of all plans, R ranks, N items, E draws.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModels, ShardingPlan, Tier
from autoshard.core.costs import KernelErrors, MsArray, recorded_errors
from autoshard.evaluation.evaluate import PricedPlan
from autoshard.evaluation.uncertainty.plan_draws import step_draws
from autoshard.evaluation.uncertainty.set_errors import SetErrors, half_widths
from autoshard.planners.space.placement import PlacementProblem, RankArray

#: Standard deviations of the difference of two plans above which it counts: where one of them cuts tables, and where
#: both hold whole tables and differ in how level they are. True slowest ranks over those of `cost-greedy`, after 300
#: steps with models of 100 and 1,000 samples (30 tasks): -4.8% with 0.25, -5.0% with 0.5, -4.6% with 0.75, -2.9% with
#: 1, -1.0% with 1.5. Of whole tables, after 1,000 steps with models of 100 to 3,000 samples (24 or 36 tasks of each of
#: eight qualities): +0.42% with 0.25, +0.13% with 0.5, +0.04% with 0.75, +0.02% with 1 (November 2026, docs/results).
TELLING, TELLING_WHOLE = 0.5, 1.0

#: A placement, and the problem whose items it places.
Placed: TypeAlias = tuple[PlacementProblem, RankArray]


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


def best_plan(plans: Sequence[ShardingPlan], priced: Sequence[PricedPlan], costs: CostModels) -> int | None:
    """Index of the plan to take by draws of its step; None where the kernel model has no errors on record.

    Args:
        plans: In the order of `last_told`.
        priced: The same plans, by these models.
        costs: The models.
    """
    errors = recorded_errors(costs.kernel)
    if errors is None:
        return None
    return last_told(step_draws(priced, costs, errors), [num_cuts(plan) for plan in plans])


def best_placement(placed: Sequence[Placed]) -> int | None:
    """Index of the placement to take by draws of its slowest rank; None where the model has no errors on record.

    Args:
        placed: Placements of one task's tables, cut alike or not, all priced by one model; in the order of `last_told`.
    """
    errors = recorded_errors(placed[0][0].model)
    if errors is None:
        return None
    num_cuts_P = [len(problem.shards) - len(problem.tables.tables) for problem, _ in placed]
    return last_told(PricedPlacements.of(placed).slowest_draws(errors), num_cuts_P)


def num_cuts(plan: ShardingPlan) -> int:
    """Pieces of tables that ranks hold, over all replica groups, beyond one for each table; 0 for whole tables."""
    pieces = sum(len(replica) for placed in plan.shards for replica in placed.replicas)
    return pieces * plan.replica_groups.num_groups - len(plan.tables.tables)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedPlacements:
    """Several placements of one task's tables, rank by rank.

    Attributes:
        num_ranks: Of each of them.
        rank_ms_X: Kernel times of the ranks of all placements, one placement after the other.
        errors: Of these.
    """

    num_ranks: int
    rank_ms_X: MsArray
    errors: SetErrors

    @classmethod
    def of(cls, placed: Sequence[Placed]) -> PricedPlacements:
        """Prices placements of items on single ranks, all by one model."""
        num_ranks = placed[0][0].num_ranks
        codes_XH = np.concatenate([problem.rank_codes(ranks_N) for problem, ranks_N in placed])
        known = {id(problem): _Items.of(problem) for problem, _ in placed}
        items_P = [known[id(problem)] for problem, _ in placed]
        return cls(
            num_ranks=num_ranks,
            rank_ms_X=np.concatenate([problem.rank_ms(ranks_N) for problem, ranks_N in placed]),
            errors=SetErrors.of(
                owner_M=np.concatenate([number * num_ranks + ranks_N for number, (_, ranks_N) in enumerate(placed)]),
                tables_M=[label for items in items_P for label in items.labels_N],
                kinds_M=[kind for items in items_P for kind in items.kinds_N],
                alone_ms_M=np.concatenate([problem.kernel_ms_N for problem, _ in placed]),
                half_width_X=half_widths(placed[0][0].model.predict_parts(codes_XH)),
                sets_X=[
                    tuple(items.keys_N[item] for item in np.flatnonzero(ranks_N == rank).tolist())
                    for items, (_, ranks_N) in zip(items_P, placed, strict=True)
                    for rank in range(num_ranks)
                ],
            ),
        )

    def slowest_draws(self, errors: KernelErrors) -> NDArray[np.float64]:
        """Kernel times of each placement's slowest rank, shape (P, E)."""
        drawn_ms_XE = self.rank_ms_X[:, None] * np.exp(self.errors.drawn(errors))
        slowest_PE: NDArray[np.float64] = np.maximum.reduceat(
            drawn_ms_XE, np.arange(0, len(drawn_ms_XE), self.num_ranks), axis=0
        )
        return slowest_PE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Items:
    """What the errors of a problem's items depend on.

    Attributes:
        labels_N: Their tables.
        kinds_N: Their kinds of kernels.
        keys_N: What equal items of several problems have alike.
    """

    labels_N: list[str]
    kinds_N: list[str]
    keys_N: list[Hashable]

    @classmethod
    def of(cls, problem: PlacementProblem) -> _Items:
        keys_U = [(shard.table.name, shard.rows, shard.columns) for shard in problem.shards]
        return cls(
            labels_N=[problem.label(item) for item in range(problem.num_items)],
            kinds_N=item_kinds(problem),
            keys_N=[tuple(keys_U[index] for index in group) for group in problem.members],
        )


def item_kinds(problem: PlacementProblem) -> list[str]:
    """Kind of kernel of each item; of several shards that must share a rank, the first one's."""
    kind_U = [local.kernel_kind for local in problem.locals_by(Tier.TABLE_WISE)]
    return [kind_U[group[0]] for group in problem.members]
