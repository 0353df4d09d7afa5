"""Tables that stay whole beside those in tiers: which, and where they go.

Shape suffixes: R ranks, N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import EmbeddingTable, PlacedShard, Shard, TableSet, Tier
from autoshard.core.access import FloatArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.batch_memory import gradient_ratio
from autoshard.evaluation.traffic import cheaper_exchange
from autoshard.planners.flexshard.equations import FlexMachine
from autoshard.planners.flexshard.memory import pair_bytes
from autoshard.planners.flexshard.tier_costs import tiers_of
from autoshard.planners.heuristics.greedy import place_by_cost
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.constraints import allowed_ranks, colocated
from autoshard.planners.space.feasibility import repair
from autoshard.planners.space.placement import PlacementProblem


def unsplit(tables: TableSet, machine: FlexMachine, num_tiers: int, below_rows: int) -> frozenset[str]:
    """Names of the tables that are not split over all ranks.

    Those that are pinned to some of the ranks or have no tier left, those that may not be row-wise or have fewer than
    `below_rows` rows and may be on one rank, and all that share their ranks.
    """
    return frozenset(
        table.name
        for group in colocated(tables)
        if any(_stays_whole(table, machine, num_tiers, below_rows) for table in group)
        for table in group
    )


def _stays_whole(table: EmbeddingTable, machine: FlexMachine, num_tiers: int, below_rows: int) -> bool:
    forbidden, world_size = table.constraints.forbidden_tiers, machine.world_size
    is_pinned = not allowed_ranks(table, world_size).all()
    is_better_whole = world_size == 1 or Tier.ROW_WISE in forbidden or table.num_embeddings < below_rows
    may_be_whole = Tier.TABLE_WISE not in forbidden
    return is_pinned or (may_be_whole and is_better_whole) or not tiers_of(table, machine, num_tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTables:
    """Places whole tables by the cost model in the memory that tables in tiers leave.

    Attributes:
        request: The request.
        machine: Of the request.
        count_activations: Whether inputs and outputs must fit beside the tables.
    """

    request: PlanRequest
    machine: FlexMachine
    count_activations: bool

    @property
    def capacity_R(self) -> FloatArray:  # noqa: N802 - a shape suffix
        """Bytes of each rank, shape (R,)."""
        topology = self.request.topology
        return np.array(topology.hbm_bytes, dtype=np.float64)

    def place(self, tables: Sequence[EmbeddingTable], held_bytes: float = 0.0) -> tuple[PlacedShard, ...]:
        """Places tables on one rank each, beside `held_bytes` on every rank.

        Raises:
            InfeasiblePlanError: If no placement was found.
        """
        request = self.request
        subset = TableSet(batch_size=request.tables.batch_size, tables=tuple(tables))
        problem = PlacementProblem.table_wise(subset, request.topology, request.costs.kernel)
        active = [self._activations(table) for table in tables]
        free_R = self.capacity_R - held_bytes - sum(received for _, received in active)
        if free_R.min() < 0:
            raise InfeasiblePlanError(
                f"tables that all ranks share, and what comes back from the others, take {-free_R.min():,.0f} bytes "
                f"more than rank {free_R.argmin()} has"
            )
        served_N = [sum(active[index][0] for index in group) for group in problem.members]
        problem = replace(
            problem,
            bytes_WN=problem.bytes_WN + np.ceil(np.array(served_N)).astype(np.int64),
            capacity_R=np.floor(free_R).astype(np.int64),
        )
        ranks_N = place_by_cost(problem, np.argsort(-problem.kernel_ms_N, kind="stable"))
        return problem.to_plan(repair(problem, ranks_N, request.seed)).shards

    def _activations(self, table: EmbeddingTable) -> tuple[float, float]:
        """Bytes of a whole table's inputs and outputs on its rank, and of what every rank gets back, with gradients.

        Outputs count with their gradients or before those are there, whichever is more.
        """
        if not self.count_activations:
            return 0.0, 0.0
        exchange = cheaper_exchange(Shard.whole(table), 1)
        asked, answered = pair_bytes(table, 1.0, 1, exchange, self.machine, self.request.payload)
        ratio = gradient_ratio(self.request.payload)
        return self.machine.world_size * (asked + max(1.0, ratio) * answered), (1.0 + ratio) * answered
