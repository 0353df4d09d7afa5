"""Where the parts of tables go: nodes first, then ranks, by the greedy heuristic or by largest differencing.

Shape suffixes: N items, R ranks, S sites, L memory levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModel, MemoryLevel, Shard, TableSet, Tier, Topology
from autoshard.core.access import FloatArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.heuristics.karmarkar_karp import partition
from autoshard.planners.neo.choice import Choice
from autoshard.planners.space.feasibility import Filling, repair
from autoshard.planners.space.options import UnplacedShard
from autoshard.planners.space.placement import PlacementProblem, RankArray

GREEDY, KARMARKAR_KARP = "greedy", "karmarkar_karp"
_LEVELS = tuple(MemoryLevel)

SiteArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What is placed as one.

    Attributes:
        choice: Index of its choice.
        part: Index of its part; -1 for all parts of a scheme that has to stay in one node.
        cost_s: Cost on each of its ranks; for a whole scheme, the mean over the ranks of its node.
        held: Bytes on each of its ranks; for a whole scheme, of its largest part.
        sites: Where it may go: ranks, or nodes.
    """

    choice: int
    part: int
    cost_s: float
    held: Mapping[MemoryLevel, int]
    sites: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Sites of all parts, and the cost that ranks have then.

    Attributes:
        choices: How each unit is held.
        sites: For each choice, the site of every part.
        sums_R: Weighted cost of each rank, shape (R,), in seconds.
    """

    choices: tuple[Choice, ...]
    sites: tuple[tuple[int, ...], ...]
    sums_R: FloatArray

    def parts(self) -> list[tuple[UnplacedShard, int]]:
        """All parts with their sites."""
        return [
            (part, site)
            for choice, sites in zip(self.choices, self.sites, strict=True)
            for scheme in choice.schemes
            for part, site in zip(scheme.parts, sites, strict=True)
        ]


class Arranger:
    """Places the parts of chosen schemes.

    Parts on all ranks come first, since they leave nothing to choose. Then parts of nodes, as Neo's hierarchical
    schemes say: tables to nodes, and within nodes their columns to ranks. Parts on single ranks come last, those with
    rows on other levels before the rest.

    Args:
        tables: All tables.
        topology: The machine.
        capacity: For each memory level, bytes of every rank that may be used.
        method: `greedy` or `karmarkar_karp`.
        model: Stands in placement problems; nothing is priced by it.

    Source:
        Neo Sec. 4.1: items by falling cost, each on the worker with the smallest sum; or Karmarkar and Karp's largest
        differencing (see `partition`), which here knows more than two workers. Differs: memory limits hold, on every
        level, and constraints.
    """

    def __init__(
        self,
        tables: TableSet,
        topology: Topology,
        capacity: Mapping[MemoryLevel, Sequence[int]],
        method: str,
        model: CostModel,
    ) -> None:
        self._tables, self._topology, self._model = tables, topology, model
        self._method = method
        self._capacity_LR = np.array([capacity[level] for level in _LEVELS], dtype=np.int64)

    def arrange(self, choices: Sequence[Choice], seed: int) -> Arrangement:
        """Places all parts.

        Raises:
            InfeasiblePlanError: If some part finds no room.
        """
        return _Arranging(
            self._tables, self._topology, self._capacity_LR, self._method, self._model, tuple(choices)
        ).run(seed)


class _Arranging:
    """Ranks being filled."""

    def __init__(
        self,
        tables: TableSet,
        topology: Topology,
        capacity_LR: NDArray[np.int64],
        method: str,
        model: CostModel,
        choices: tuple[Choice, ...],
    ) -> None:
        self.tables, self.topology, self.method, self.model, self.choices = tables, topology, method, model, choices
        self.free_LR = capacity_LR.copy()
        self.sums_R: FloatArray = np.zeros(topology.world_size)
        self.sites = [[0] * len(choice.schemes[0].parts) for choice in choices]

    def run(self, seed: int) -> Arrangement:
        for index, choice in enumerate(self.choices):
            if choice.tier in (Tier.ROW_WISE, Tier.DATA_PARALLEL):
                for part, held in enumerate(choice.part_bytes):
                    self._put(index, part, np.arange(self.topology.world_size), choice.part_s[part], held)
        self._place_on_nodes(self._node_items())
        near, far = self._rank_items()
        self._place_far(far)
        self._place_near(near, seed)
        return Arrangement(choices=self.choices, sites=tuple(map(tuple, self.sites)), sums_R=self.sums_R)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _node_items(self) -> list[Item]:
        items = []
        for index, choice in enumerate(self.choices):
            if choice.tier is Tier.TABLE_ROW_WISE:
                items += [
                    Item(choice=index, part=part, cost_s=choice.part_s[part], held=held, sites=choice.sites[part])
                    for part, held in enumerate(choice.part_bytes)
                ]
            elif choice.schemes[0].in_one_node:
                size = self.topology.local_world_size
                nodes = [{self.topology.node_of(rank) for rank in sites} for sites in choice.sites]
                items.append(
                    Item(
                        choice=index,
                        part=-1,
                        cost_s=sum(choice.part_s) / size,
                        held=max(choice.part_bytes, key=lambda held: sum(held.values())),
                        sites=tuple(sorted(set.intersection(*nodes))),
                    )
                )
        return items

    def _place_on_nodes(self, items: Sequence[Item]) -> None:
        """Items by falling cost, each on the node that the method says, or else on the cheapest one with room."""
        size, num_nodes = self.topology.local_world_size, self.topology.num_nodes
        if not items:
            return
        costs_N = np.array([item.cost_s for item in items])
        wanted_N = self._wanted(costs_N, self.sums_R.reshape(num_nodes, size).mean(axis=1))
        for at in np.argsort(-costs_N, kind="stable").tolist():
            item = items[at]
            sums_S = self.sums_R.reshape(num_nodes, size).mean(axis=1)
            if wanted_N is not None:
                sums_S = np.where(np.arange(num_nodes) == wanted_N[at], -np.inf, sums_S)
            nodes = sorted(item.sites, key=lambda node: (sums_S[node], node))
            if not any(self._put_in_node(item, node) for node in nodes):
                raise self._no_room(item)

    def _put_in_node(self, item: Item, node: int) -> bool:
        size = self.topology.local_world_size
        ranks = np.arange(node * size, (node + 1) * size)
        choice = self.choices[item.choice]
        if item.part >= 0:
            if not self._has_room(ranks, item.held):
                return False
            self._put(item.choice, item.part, ranks, item.cost_s, item.held, site=node)
            return True
        before = self.free_LR.copy(), self.sums_R.copy()
        for part in np.argsort(-np.array(choice.part_s), kind="stable").tolist():
            held, may = choice.part_bytes[part], set(choice.sites[part])
            fitting = [rank for rank in ranks.tolist() if rank in may and self._has_room(np.array([rank]), held)]
            if not fitting:
                self.free_LR, self.sums_R = before
                return False
            rank = min(fitting, key=lambda rank: (self.sums_R[rank], rank))
            self._put(item.choice, part, np.array([rank]), choice.part_s[part], held, site=rank)
        return True

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _rank_items(self) -> tuple[list[Item], list[Item]]:
        """Parts on single ranks: those whose rows are all in the device's memory, and the others."""
        near: list[Item] = []
        far: list[Item] = []
        for index, choice in enumerate(self.choices):
            if choice.tier is not Tier.TABLE_WISE or choice.schemes[0].in_one_node:
                continue
            for part, held in enumerate(choice.part_bytes):
                item = Item(choice=index, part=part, cost_s=choice.part_s[part], held=held, sites=choice.sites[part])
                is_far = any(held[level] for level in _LEVELS if level is not MemoryLevel.HBM)
                (far if is_far else near).append(item)
        return near, far

    def _place_far(self, items: Sequence[Item]) -> None:
        """Parts with bytes on several levels, by falling cost on the cheapest rank with room on all of them."""
        for item in sorted(items, key=lambda item: -item.cost_s):
            sites = np.array(item.sites)
            needs_L = np.array([item.held[level] for level in _LEVELS])
            fits = (self.free_LR[:, sites] >= needs_L[:, None]).all(axis=0)
            if not fits.any():
                raise self._no_room(item)
            rank = int(sites[np.where(fits, self.sums_R[sites], np.inf).argmin()])
            self._put(item.choice, item.part, np.array([rank]), item.cost_s, item.held, site=rank)

    def _place_near(self, items: Sequence[Item], seed: int) -> None:
        """All other parts, by the method; where memory does not allow that, as near to it as can be."""
        if not items:
            return
        problem = self._problem(items)
        ranks_N = repair(problem, self._start(problem), seed)
        for item, rank in zip(items, ranks_N.tolist(), strict=True):
            self._put(item.choice, item.part, np.array([rank]), item.cost_s, item.held, site=rank)

    def _problem(self, items: Sequence[Item]) -> PlacementProblem:
        shards: list[Shard] = []
        members: list[tuple[int, ...]] = []
        for item in items:
            parts = [scheme.parts[item.part].shard for scheme in self.choices[item.choice].schemes]
            members.append(tuple(range(len(shards), len(shards) + len(parts))))
            shards += parts
        allowed_NR = np.zeros((len(items), self.topology.world_size), dtype=np.bool_)
        for index, item in enumerate(items):
            allowed_NR[index, list(item.sites)] = True
        return PlacementProblem(
            tables=self.tables,
            topology=self.topology,
            shards=tuple(shards),
            members=tuple(members),
            codes_WNH=np.zeros((1, len(items), 0), dtype=np.float32),
            kernel_ms_N=np.array([item.cost_s * 1e3 for item in items]),
            bytes_WN=np.array([[item.held[MemoryLevel.HBM] for item in items]], dtype=np.int64),
            capacity_R=self.free_LR[_LEVELS.index(MemoryLevel.HBM)],
            allowed_NA=allowed_NR,
            model=self.model,
        )

    def _start(self, problem: PlacementProblem) -> RankArray:
        """Ranks by the method, all allowed; memory may be exceeded."""
        costs_N = problem.kernel_ms_N / 1e3
        wanted_N = self._wanted(costs_N, self.sums_R)
        filling, sums_R = Filling(problem), self.sums_R.copy()
        for item in np.argsort(-costs_N, kind="stable").tolist():
            scores_R = sums_R
            if wanted_N is not None and problem.allowed_NR[item, wanted_N[item]]:
                scores_R = np.where(np.arange(problem.num_ranks) == wanted_N[item], -np.inf, sums_R)
            sums_R[filling.put(item, scores_R)] += costs_N[item]
        return filling.ranks_N

    # -- what they share ----------------------------------------------------------------------------------------------

    def _wanted(self, costs_N: FloatArray, base_S: FloatArray) -> SiteArray | None:
        """Sites by largest differencing: the costliest subset goes where least is so far. None for greedy."""
        if self.method == GREEDY:
            return None
        subsets_N = partition(costs_N, len(base_S))
        sums_S = np.bincount(subsets_N, weights=costs_N, minlength=len(base_S))
        site_of_S = np.empty(len(base_S), dtype=np.int64)
        site_of_S[np.argsort(-sums_S, kind="stable")] = np.argsort(base_S, kind="stable")
        return np.asarray(site_of_S[subsets_N])

    def _has_room(self, ranks: NDArray[np.int64], held: Mapping[MemoryLevel, int]) -> bool:
        needs_L = np.array([held[level] for level in _LEVELS])
        return bool((self.free_LR[:, ranks] >= needs_L[:, None]).all())

    def _put(
        self,
        choice: int,
        part: int,
        ranks: NDArray[np.int64],
        cost_s: float,
        held: Mapping[MemoryLevel, int],
        site: int = 0,
    ) -> None:
        self.free_LR[:, ranks] -= np.array([held[level] for level in _LEVELS])[:, None]
        self.sums_R[ranks] += cost_s
        self.sites[choice][part] = site
        worst = int(self.free_LR.min())
        if worst < 0:
            level, rank = np.unravel_index(self.free_LR.argmin(), self.free_LR.shape)
            names = "+".join(scheme.table.name for scheme in self.choices[choice].schemes)
            raise InfeasiblePlanError(
                f"{names}: held by all ranks, it takes {-worst:,} bytes of {_LEVELS[level]} more than rank {rank} has "
                "left"
            )

    def _no_room(self, item: Item) -> InfeasiblePlanError:
        names = "+".join(scheme.table.name for scheme in self.choices[item.choice].schemes)
        needs = ", ".join(f"{held:,} bytes of {level}" for level, held in item.held.items() if held)
        left = ", ".join(
            f"{int(free_R.max()):,} of {level}" for level, free_R in zip(_LEVELS, self.free_LR, strict=True)
        )
        return InfeasiblePlanError(f"{names} needs {needs} on a rank, and ranks have {left} left at most")
