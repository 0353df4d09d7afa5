"""A placement problem made ready to be played: items in falling price, codes and prices without units.

Shape suffixes: N items, R ranks, H width of a code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import CodeArray
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.placement import PlacementProblem, RankArray

#: Kernel time in milliseconds of every rank (shape (R,)) once item n lies on rank `ranks_N[n]`.
RewardMs = Callable[[PlacementProblem, RankArray], NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementTask:
    """A placement problem with the order of its items and the units that observations are given in.

    Attributes:
        problem: What is to be placed.
        order_N: Items in the order in which they are placed: falling price, then as listed.
        even_ms: Unit of costs: the price of a rank that holds an even share of all codes.
        item_scale: Unit of the codes of single items: their root mean square.
        rank_scale: Unit of the codes of ranks: the root mean square of an even share's.
    """

    problem: PlacementProblem
    order_N: RankArray
    even_ms: float
    item_scale: float
    rank_scale: float

    @classmethod
    def of(cls, problem: PlacementProblem) -> PlacementTask:
        """The task of a problem."""
        share_H = problem.codes_NH.sum(axis=0, dtype=np.float64) / problem.num_ranks
        even_ms = float(problem.model.price(share_H[None].astype(np.float32))[0])
        return cls(
            problem=problem,
            order_N=np.argsort(-problem.kernel_ms_N, kind="stable"),
            even_ms=_positive(even_ms),
            item_scale=_positive(_root_mean_square(problem.codes_NH)),
            rank_scale=_positive(_root_mean_square(share_H)),
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
    def code_width(self) -> int:
        """H."""
        return self.problem.codes_NH.shape[1]

    @property
    def ordered_codes(self) -> CodeArray:
        """The items' codes in the order in which they are placed."""
        return self.problem.codes_NH[self.order_N]

    def to_ranks(self, actions_N: RankArray) -> RankArray:
        """Ranks by item, of ranks in the order in which items are placed."""
        ranks_N = np.empty(self.num_items, dtype=np.int64)
        ranks_N[self.order_N] = actions_N
        return ranks_N


def check_alike(tasks: Sequence[PlacementTask]) -> None:
    """Raises InvalidOptionError unless the tasks can share spaces and a batch."""
    if not tasks:
        raise InvalidOptionError("needs at least one placement problem", field="problems")
    for index, task in enumerate(tasks):
        if task.num_ranks != tasks[0].num_ranks:
            raise InvalidOptionError(
                f"must have as many ranks as the first ({tasks[0].num_ranks}), got {task.num_ranks}",
                field=f"problems[{index}]",
            )
        if task.problem.model is not tasks[0].problem.model:
            raise InvalidOptionError("must have the cost model of the first", field=f"problems[{index}]")


def _root_mean_square(values: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def _positive(value: float) -> float:
    # A task without any cost has nothing to compare with: any unit will do.
    return value if value > 0 else 1.0
