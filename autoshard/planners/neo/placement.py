"""Where the parts of tables go: nodes first, then ranks, by the greedy heuristic or by largest differencing.

Shape suffixes: N items, R ranks, S sites, L memory levels (`LEVELS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModel, TableSet, Tier, Topology
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.heuristics.karmarkar_karp import partition
from autoshard.planners.neo.choice import HBM, LEVELS, Choice, NeoItem
from autoshard.planners.space.feasibility import Filling, repair
from autoshard.planners.space.options import UnplacedShard
from autoshard.planners.space.placement import PlacementProblem, RankArray

GREEDY, KARMARKAR_KARP = "greedy", "karmarkar_karp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """All parts with their sites, and the cost that ranks have then.

    Attributes:
        parts: Parts of all tables, each with its site.
        cost_s_R: Weighted cost of each rank, shape (R,), in seconds.
    """

    parts: tuple[tuple[UnplacedShard, int], ...]
    cost_s_R: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranger:
    """Places the items of choices.

    Items on all ranks come first, since they leave nothing to choose. Then those of nodes, as Neo's hierarchical
    sharding types say: tables to nodes, and within nodes their columns to ranks. Items on single ranks come last, those
    with rows on other levels before the rest.

    Attributes:
        tables: All tables.
        topology: The machine.
        capacity_LR: Bytes that may be used.
        method: `greedy` or `karmarkar_karp`.
        model: Stands in placement problems; nothing is priced by it.

    Source:
        Neo Sec. 4.1: items by falling cost, each on the worker with the smallest sum; or Karmarkar and Karp's largest
        differencing (see `partition`), which here knows more than two workers. Differs: memory limits hold, on every
        level, and constraints.
    """

    tables: TableSet
    topology: Topology
    capacity_LR: IntArray
    method: str
    model: CostModel

    def arrange(self, choices: Sequence[Choice], seed: int) -> Arrangement:
        """Places all items.

        Raises:
            InfeasiblePlanError: If some item finds no room.
        """
        ranks = _Ranks(self)
        for choice in choices:
            if choice.tier in (Tier.ROW_WISE, Tier.DATA_PARALLEL):
                ranks.put_everywhere(choice.items)
        ranks.put_on_nodes([items for choice in choices for items in _of_nodes(choice)])
        alone = [
            item
            for choice in choices
            if choice.tier is Tier.TABLE_WISE and not choice.in_one_node
            for item in choice.items
        ]
        ranks.put_far([item for item in alone if item.held_L[HBM + 1 :].any()])
        ranks.put_near([item for item in alone if not item.held_L[HBM + 1 :].any()], seed)
        items = [item for choice in choices for item in choice.items]
        parts = tuple((part, ranks.site_of[item]) for item in items for part in item.parts)
        return Arrangement(parts=parts, cost_s_R=ranks.cost_s_R)


def _of_nodes(choice: Choice) -> list[tuple[NeoItem, ...]]:
    """Items that go to one node: one over its ranks, or all of a choice on single ranks of it."""
    if choice.tier is Tier.TABLE_ROW_WISE:
        return [(item,) for item in choice.items]
    return [choice.items] if choice.in_one_node else []


class _Ranks:
    """Ranks being filled."""

    def __init__(self, task: Arranger) -> None:
        self.task, self.node_size = task, task.topology.local_world_size
        self.free_LR = task.capacity_LR.copy()
        self.cost_s_R: FloatArray = np.zeros(task.topology.world_size)
        self.site_of: dict[NeoItem, int] = {}

    def put_everywhere(self, items: Sequence[NeoItem]) -> None:
        """Items on all ranks."""
        for item in items:
            self._put(item, 0)
            level, rank = np.unravel_index(self.free_LR.argmin(), self.free_LR.shape)
            if (missing := -self.free_LR[level, rank]) > 0:
                raise InfeasiblePlanError(
                    f"{item.label}: held by all ranks, it takes {missing:,} bytes of {LEVELS[level]} more than rank "
                    f"{rank} has left"
                )

    def put_on_nodes(self, groups: Sequence[Sequence[NeoItem]]) -> None:
        """By falling cost, each group on the node that the method says, or else on the cheapest one with room."""
        if not groups:
            return
        cost_s_N = np.array([sum(item.cost_s for item in items) for items in groups])
        # Of a rank of the node, on average.
        cost_s_N /= [1 if items[0].tier is Tier.TABLE_ROW_WISE else self.node_size for items in groups]
        wanted_N = self._wanted(cost_s_N, self._node_cost_s())
        for index in np.argsort(-cost_s_N, kind="stable").tolist():
            items, cost_s_S = groups[index], self._node_cost_s()
            if wanted_N is not None:
                cost_s_S[wanted_N[index]] = -np.inf
            nodes = np.flatnonzero(np.all([self._allowed_nodes(item) for item in items], axis=0)).tolist()
            if not any(self._put_in_node(items, node) for node in sorted(nodes, key=cost_s_S.__getitem__)):
                raise self._no_room(max(items, key=lambda item: item.held_L.sum()))

    def put_far(self, items: Sequence[NeoItem]) -> None:
        """Items with bytes on several levels, by falling cost on the cheapest rank with room on all of them."""
        for item in sorted(items, key=lambda item: -item.cost_s):
            fits_R = item.allowed_S & (self.free_LR >= item.held_L[:, None]).all(axis=0)
            if not fits_R.any():
                raise self._no_room(item)
            self._put(item, int(np.where(fits_R, self.cost_s_R, np.inf).argmin()))

    def put_near(self, items: Sequence[NeoItem], seed: int) -> None:
        """Items in device memory only, by the method; where memory does not allow that, as near to it as can be."""
        if items:
            problem = self._problem(items)
            ranks_N = repair(problem, self._start(problem), seed)
            for item, rank in zip(items, ranks_N.tolist(), strict=True):
                self._put(item, rank)

    def _allowed_nodes(self, item: NeoItem) -> NDArray[np.bool_]:
        """Whether a node has a site of the item."""
        sites_per_node = 1 if item.tier is Tier.TABLE_ROW_WISE else self.node_size
        return np.asarray(item.allowed_S.reshape(-1, sites_per_node).any(axis=1))

    def _put_in_node(self, items: Sequence[NeoItem], node: int) -> bool:
        """Places items on a node or its ranks; False, and nothing is placed, if one of them has no room."""
        before = self.free_LR.copy(), self.cost_s_R.copy()
        ranks = range(node * self.node_size, (node + 1) * self.node_size)
        for item in sorted(items, key=lambda item: -item.cost_s):
            sites = [node] if item.tier is Tier.TABLE_ROW_WISE else ranks
            fitting = [site for site in sites if item.allowed_S[site] and self._has_room(item, site)]
            if not fitting:
                self.free_LR, self.cost_s_R = before
                return False
            self._put(item, min(fitting, key=self.cost_s_R.__getitem__))
        return True

    def _problem(self, items: Sequence[NeoItem]) -> PlacementProblem:
        members: list[tuple[int, ...]] = []
        for item in items:
            first = members[-1][-1] + 1 if members else 0
            members.append(tuple(range(first, first + len(item.parts))))
        return PlacementProblem(
            tables=self.task.tables,
            topology=self.task.topology,
            shards=tuple(part.shard for item in items for part in item.parts),
            members=tuple(members),
            codes_WNH=np.zeros((1, len(items), 0), dtype=np.float32),
            kernel_ms_N=np.array([item.cost_s * 1e3 for item in items]),
            bytes_WN=np.array([[item.held_L[HBM] for item in items]]),
            capacity_R=self.free_LR[HBM],
            allowed_NA=np.array([item.allowed_S for item in items]),
            model=self.task.model,
        )

    def _start(self, problem: PlacementProblem) -> RankArray:
        """Ranks by the method, all allowed; memory may be exceeded."""
        cost_s_N = problem.kernel_ms_N / 1e3
        wanted_N = self._wanted(cost_s_N, self.cost_s_R)
        filling, cost_s_R = Filling(problem), self.cost_s_R.copy()
        for item in np.argsort(-cost_s_N, kind="stable").tolist():
            scores_R = cost_s_R.copy()
            if wanted_N is not None:
                scores_R[wanted_N[item]] = -np.inf
            cost_s_R[filling.put(item, scores_R)] += cost_s_N[item]
        return filling.ranks_N

    def _wanted(self, cost_s_N: FloatArray, so_far_s_S: FloatArray) -> IntArray | None:
        """Sites by largest differencing: the costliest subset goes where least is so far. None for greedy."""
        if self.task.method == GREEDY:
            return None
        subsets_N = partition(cost_s_N, len(so_far_s_S))
        cost_s_S = np.bincount(subsets_N, weights=cost_s_N, minlength=len(so_far_s_S))
        site_of_S = np.empty(len(so_far_s_S), dtype=np.int64)
        site_of_S[np.argsort(-cost_s_S, kind="stable")] = np.argsort(so_far_s_S, kind="stable")
        return np.asarray(site_of_S[subsets_N])

    def _node_cost_s(self) -> FloatArray:
        return np.asarray(self.cost_s_R.reshape(-1, self.node_size).mean(axis=1))

    def _ranks(self, item: NeoItem, site: int) -> slice:
        size = {Tier.TABLE_WISE: 1, Tier.TABLE_ROW_WISE: self.node_size}.get(item.tier, len(self.cost_s_R))
        return slice(site * size, (site + 1) * size)

    def _has_room(self, item: NeoItem, site: int) -> bool:
        return bool((self.free_LR[:, self._ranks(item, site)] >= item.held_L[:, None]).all())

    def _put(self, item: NeoItem, site: int) -> None:
        ranks = self._ranks(item, site)
        self.free_LR[:, ranks] -= item.held_L[:, None]
        self.cost_s_R[ranks] += item.cost_s
        self.site_of[item] = site

    def _no_room(self, item: NeoItem) -> InfeasiblePlanError:
        levels = list(zip(LEVELS, item.held_L.tolist(), self.free_LR.max(axis=1).tolist(), strict=True))
        needs = ", ".join(f"{held:,} bytes of {level}" for level, held, _ in levels if held)
        left = ", ".join(f"{free:,} of {level}" for level, _, free in levels)
        return InfeasiblePlanError(f"{item.label} needs {needs} on a rank, and ranks have {left} left at most")
