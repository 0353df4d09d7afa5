"""Planners that place one item after the other: at random, by a cost function, or by the cost model.

Shape suffixes: N items, R ranks, H width of a code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from autoshard.core import Shard, ShardingPlan
from autoshard.planners.planner import NoOptions, PlanRequest, parse_options
from autoshard.planners.space.feasibility import Filling, repair
from autoshard.planners.space.placement import PlacementProblem, RankArray


class PlacementPlanner(ABC):
    """A planner of whole tables that is made of one function from problem to ranks.

    Where that function has to leave an item on a rank without room, `repair` moves as little as it needs to.
    """

    options_type: ClassVar[type] = NoOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction or provenance."""
        parse_options(self.options_type, request.options)
        problem = PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel, request.payload)
        return problem.to_plan(repair(problem, self.place(problem, request.seed), request.seed))

    @abstractmethod
    def place(self, problem: PlacementProblem, seed: int) -> RankArray:
        """Ranks of the items, shape (N,), all allowed; memory limits may be exceeded."""


class RandomPlanner(PlacementPlanner):
    """Every table on a rank drawn evenly from those with room for it (AutoShard Sec. 5.1, `rand`)."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "Each table on a random rank that has room for it."
    when: ClassVar[str] = "comparisons"

    @override
    def place(self, problem: PlacementProblem, seed: int) -> RankArray:
        """Ranks drawn in the order of the tables."""
        rng = np.random.default_rng(seed)
        filling = Filling(problem)
        for item in range(problem.num_items):
            filling.put(item, rng.random(problem.num_ranks))
        return filling.ranks_N


class _SumGreedyPlanner(PlacementPlanner):
    """Tables by falling cost function, each on the rank with the lowest sum so far among those with room.

    Source:
        AutoShard Sec. 5.1. Differs: memory limits hold, and co-located tables count as one.
    """

    @override
    def place(self, problem: PlacementProblem, seed: int) -> RankArray:
        """Ranks in falling order of the cost function; ties keep the order of the tables and go to the first rank."""
        costs = [self.cost(shard) for shard in problem.shards]
        costs_N = np.array([sum(costs[index] for index in group) for group in problem.members])
        filling = Filling(problem)
        sums_R = np.zeros(problem.num_ranks)
        for item in np.argsort(-costs_N, kind="stable"):
            sums_R[filling.put(int(item), sums_R)] += costs_N[item]
        return filling.ranks_N

    @staticmethod
    @abstractmethod
    def cost(shard: Shard) -> float:
        """The cost function of one table, or of a part of it."""


class SizeGreedyPlanner(_SumGreedyPlanner):
    """Balances dimension x rows."""

    name: ClassVar[str] = "size-greedy"
    summary: ClassVar[str] = "Greedy by table size: rows times dimension."
    when: ClassVar[str] = "comparisons"

    @staticmethod
    def cost(shard: Shard) -> float:
        """Values in the table."""
        return float(shard.embedding_dim * shard.num_embeddings)


class DimGreedyPlanner(_SumGreedyPlanner):
    """Balances dimensions, and with them the exchanged bytes."""

    name: ClassVar[str] = "dim-greedy"
    summary: ClassVar[str] = "Greedy by embedding dimension."
    when: ClassVar[str] = "comparisons"

    @staticmethod
    def cost(shard: Shard) -> float:
        """The dimension."""
        return float(shard.embedding_dim)


class LookupGreedyPlanner(_SumGreedyPlanner):
    """Balances dimension x mean pooling factor, the values looked up per sample."""

    name: ClassVar[str] = "lookup-greedy"
    summary: ClassVar[str] = "Greedy by values looked up: dimension times mean pooling factor."
    when: ClassVar[str] = "comparisons"

    @staticmethod
    def cost(shard: Shard) -> float:
        """Values looked up per sample."""
        return shard.embedding_dim * shard.table.pooling_factor * shard.access()[1]


class CostGreedyPlanner(PlacementPlanner):
    """Tables by falling predicted cost, each on the rank that is predicted to be fastest with it."""

    name: ClassVar[str] = "cost-greedy"
    summary: ClassVar[str] = "Greedy on the cost model: each table on the rank that is fastest with it."
    when: ClassVar[str] = "comparisons"
    is_compared: ClassVar[bool] = True

    @override
    def place(self, problem: PlacementProblem, seed: int) -> RankArray:
        """Ranks in falling order of the items' single costs."""
        return place_by_cost(problem, np.argsort(-problem.kernel_ms_N, kind="stable"))


def place_by_cost(problem: PlacementProblem, order: NDArray[np.int64]) -> RankArray:
    """Places items in an order, each on the rank whose price with it is lowest among those with room.

    One addition of codes and one call of the model per item, with the ranks that hold something as candidates; empty
    ones cost what the item costs alone.
    """
    filling = Filling(problem)
    codes_RH = np.zeros((problem.num_ranks, problem.codes_NH.shape[1]), dtype=np.float32)
    is_used_R = np.zeros(problem.num_ranks, dtype=np.bool_)
    for item in order:
        with_item_ms_R = np.full(problem.num_ranks, problem.kernel_ms_N[item])
        if is_used_R.any():
            with_item_ms_R[is_used_R] = problem.model.predict_ms(codes_RH[is_used_R] + problem.codes_NH[item])
        rank = filling.put(int(item), with_item_ms_R)
        codes_RH[rank] += problem.codes_NH[item]
        is_used_R[rank] = True
    return filling.ranks_N
