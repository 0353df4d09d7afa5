"""A placement problem made ready to be played: items in falling price, codes and prices without units.

Shape suffixes: N items, M parts of items, R ranks, A choices, H width of a code, C columns of what is moved, Z
kinds of choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModels
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.space.placement import PlacementProblem, RankArray, rank_sums
from autoshard.planners.space.step_cost import StepCost, StepSums
from env.feasible_placement import feasible_placement
from env.observation import choice_kinds
from env.parts import Parts
from env.reward import Objective
from env.splits import SplitBy, most_splits

#: Kernel time in milliseconds of every rank (shape (R,)) once item n lies on rank `ranks_N[n]`.
RewardMs = Callable[[PlacementProblem, RankArray], NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementTask:
    """A placement problem with the order of its items and the units that observations are given in.

    Attributes:
        problem: What is to be placed.
        objective: What for.
        max_splits: How often an item may be split, one split within the other; 0 for never.
        split_by: What splits cut.
        order_N: Items in the order in which they come up: falling price, then as listed.
        parts: The items and the parts that they may be split into.
        feasible_N: A placement of the items within the memory limits, whatever it costs.
        even_ms: Unit of kernel times: the price of a rank that holds an even share of all codes.
        item_scale: Unit of the codes of single items: their root mean square.
        rank_scale: Unit of the codes of ranks: the root mean square of an even share's.
        step_cost: Prices steps from sums of `parts`; None unless steps are the objective.
        even_objective_ms: Unit of the objective: its milliseconds if every rank had an even share of everything.
    """

    problem: PlacementProblem
    objective: Objective
    max_splits: int
    split_by: SplitBy
    order_N: RankArray
    parts: Parts
    feasible_N: RankArray
    even_ms: float
    item_scale: float
    rank_scale: float
    step_cost: StepCost | None
    even_objective_ms: float

    @classmethod
    def of(
        cls,
        problem: PlacementProblem,
        *,
        objective: Objective = Objective.BALANCE,
        costs: CostModels | None = None,
        max_splits: int = 0,
        split_by: SplitBy = SplitBy.COLUMNS,
    ) -> PlacementTask:
        """The task of a problem.

        Args:
            problem: The problem.
            objective: What it is played for.
            costs: Models of all parts of a step, for `Objective.STEP`; its kernel model is the problem's.
            max_splits: How often an item may be split, one split within the other; 0 for never.
            split_by: What splits cut.

        Raises:
            InfeasiblePlanError: If no placement within the memory limits was found.
            InvalidOptionError: If an option is out of range, or steps lack their costs.
            InvalidPlanError: If steps are priced and the dense layers make no model.
        """
        _check_splits(max_splits, split_by)
        order_N = np.argsort(-problem.kernel_ms_N, kind="stable")
        parts = Parts.of(problem, order_N, max_splits, split_by)
        share_H = problem.codes_NH.sum(axis=0, dtype=np.float64) / problem.num_ranks
        even_ms = _positive(float(problem.model.predict_ms(share_H[None].astype(np.float32))[0]))
        step_cost = _step_cost(parts.problem, costs) if objective is Objective.STEP else None
        return cls(
            problem=problem,
            objective=objective,
            max_splits=max_splits,
            split_by=split_by,
            order_N=order_N,
            parts=parts,
            feasible_N=feasible_placement(problem),
            even_ms=even_ms,
            item_scale=_positive(_root_mean_square(problem.codes_NH)),
            rank_scale=_positive(_root_mean_square(share_H)),
            step_cost=step_cost,
            even_objective_ms=_even_step_ms(problem, parts, step_cost) if step_cost is not None else even_ms,
        )

    @property
    def num_items(self) -> int:
        """N."""
        return self.problem.num_items

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.problem.num_ranks

    @property
    def num_tiers(self) -> int:
        """K."""
        return len(self.problem.tiers)

    @property
    def may_split(self) -> bool:
        """Whether the last action is to split the upcoming item."""
        return self.max_splits > 0

    @property
    def num_actions(self) -> int:
        """A: ranks, shared tiers, and the split if there is one."""
        return self.problem.num_choices + self.may_split

    @property
    def code_width(self) -> int:
        """H."""
        return self.problem.codes_NH.shape[1]

    def moved(self, choice_M: RankArray) -> NDArray[np.float64]:
        """What each rank moves, added up from all parts that were placed, shape (R, C); -1 for those that were not."""
        assert self.step_cost is not None, "steps are not the objective"
        return rank_sums(self.step_cost.moved_WNC, choice_M, self.num_ranks)

    def step_ms(self, ranks_N: RankArray) -> float:
        """Time of the step of a placement of whole items; for tasks whose objective it is."""
        assert self.step_cost is not None, "steps are not the objective"
        choice_M = np.full(self.parts.num_parts, -1, dtype=np.int64)
        choice_M[self.parts.root_N] = ranks_N
        codes_RH = self.problem.rank_codes(ranks_N)
        sums = StepSums(codes_BRH=codes_RH[None], moved_BRC=self.moved(choice_M)[None])
        return float(self.step_cost.step_ms(sums)[0])

    @property
    def kinds_AZ(self) -> NDArray[np.float32]:  # noqa: N802 - a shape suffix
        """One-hot kinds of the actions, shape (A, Z)."""
        return choice_kinds(self.num_ranks, self.problem.tiers, may_split=self.may_split)


def _check_splits(max_splits: int, by: SplitBy) -> None:
    most = most_splits(by)
    if max_splits < 0 or (most is not None and max_splits > most):
        accepted = "at least 0" if most is None else f"in [0, {most}] for {by}"
        raise InvalidOptionError(f"must be {accepted}, got {max_splits}", field="max_splits")


def check_alike(tasks: Sequence[PlacementTask]) -> None:
    """Raises InvalidOptionError unless the tasks can share spaces and a batch."""
    if not tasks:
        raise InvalidOptionError("needs at least one placement problem", field="problems")
    first = tasks[0]
    for index, task in enumerate(tasks):
        if task.num_ranks != first.num_ranks:
            raise InvalidOptionError(
                f"must have as many ranks as the first ({first.num_ranks}), got {task.num_ranks}",
                field=f"problems[{index}]",
            )
        if task.problem.model is not first.problem.model:
            raise InvalidOptionError("must have the cost model of the first", field=f"problems[{index}]")
        if task.problem.tiers != first.problem.tiers:
            raise InvalidOptionError("must have the shared tiers of the first", field=f"problems[{index}]")
        if (task.objective, task.may_split, task.split_by) != (first.objective, first.may_split, first.split_by):
            raise InvalidOptionError("must have the objective and the splits of the first", field=f"problems[{index}]")


def check_reward(tasks: Sequence[PlacementTask], reward_ms: RewardMs | None) -> None:
    """Raises InvalidOptionError where kernel times are measured but make no reward."""
    if reward_ms is not None and tasks[0].objective is Objective.STEP:
        raise InvalidOptionError("gives kernel times, which are not what steps are made of alone", field="reward_ms")


def _step_cost(problem: PlacementProblem, costs: CostModels | None) -> StepCost:
    if costs is None or costs.kernel is not problem.model:
        raise InvalidOptionError(
            f"objective {Objective.STEP} needs them, with the problem's kernel model", field="costs"
        )
    return StepCost(problem, costs)


def _even_step_ms(problem: PlacementProblem, parts: Parts, step_cost: StepCost) -> float:
    shape = (1, problem.num_ranks, 1)
    sums = StepSums(
        codes_BRH=np.tile(problem.codes_NH.sum(axis=0) / np.float32(problem.num_ranks), shape),
        moved_BRC=np.tile(step_cost.moved_WNC[0, parts.root_N].sum(axis=0) / problem.num_ranks, shape),
    )
    return _positive(float(step_cost.step_ms(sums)[0]))


def _root_mean_square(values: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def _positive(value: float) -> float:
    # A task without any cost has nothing to compare with: any unit will do.
    return value if value > 0 else 1.0
