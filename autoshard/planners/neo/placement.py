"""Where shards go by Neo's cost function: nodes first, then ranks, greedily or by largest differencing.

Shape suffixes: N options or shards to be placed, I items, R ranks, M memory levels, S sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import MemoryLevel
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.heuristics.karmarkar_karp import partition
from autoshard.planners.neo.cost import CostFunction
from autoshard.planners.space.feasibility import Filling, repair
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.placement import Packing
from autoshard.planners.space.planner_space import BoolArray, IndexArray, ItemOption, ItemShard, PlannerSpace

GREEDY, KARMARKAR_KARP = "greedy", "karmarkar_karp"


class Arranger:
    """Places options of all items.

    Those on all ranks come first, since they leave nothing to choose. Then those of nodes, as Neo's hierarchical
    sharding types say: tables to nodes, and within nodes their columns to ranks. Those on single ranks come last, with
    rows on other memory levels before the rest.

    Args:
        space: The space of the options.
        limits: Memory.
        cost: Prices shards.
        method: `greedy` or `karmarkar_karp`.

    Source:
        Neo Sec. 4.1: by falling cost, each on the worker with the smallest sum; or Karmarkar and Karp's largest
        differencing (see `partition`), which here knows more than two workers. Differs: memory limits hold, on every
        level, and constraints.
    """

    def __init__(self, space: PlannerSpace, limits: Limits, cost: CostFunction, method: str) -> None:
        self.space, self.limits, self.method = space, limits, method
        self._cost = cost
        self._cost_s: dict[int, float] = {}

    def arrange(self, numbers_I: IndexArray, seed: int) -> Layout | None:
        """All items at their places; None if one of them finds no room.

        Args:
            numbers_I: The option of each item.
            seed: Source of chance where memory is short.
        """
        numbers = numbers_I.tolist()
        options = [item.options[number] for item, number in zip(self.space.items, numbers, strict=True)]
        self._learn([shard for option in options for shard in option.shards])
        ranks = _Ranks(self, options)
        in_turn: tuple[list[_Unit], ...] = ([], [], [], [])
        for unit in _units(options):
            in_turn[unit.turn].append(unit)
        everywhere, of_nodes, far, near = in_turn
        put = ranks.put_everywhere(everywhere) and ranks.put_on_nodes(of_nodes) and ranks.put_far(far)
        if not put or not ranks.put_near(near, seed):
            return None
        return Layout(self.space, self.limits, list(zip(numbers, map(tuple, ranks.sites), strict=True)))

    def cost_s(self, shard: ItemShard) -> float:
        """Weighted cost on each rank that holds a shard of an option that was arranged."""
        return self._cost_s[shard.kind]

    def _learn(self, shards: Sequence[ItemShard]) -> None:
        new = {shard.kind: shard for shard in shards if shard.kind not in self._cost_s}
        placed = [(kind, part.placed(0, self.space.topology)) for kind, shard in new.items() for part in shard.parts]
        for (kind, _), cost_s in zip(placed, self._cost.of([one for _, one in placed]), strict=True):
            self._cost_s[kind] = self._cost_s.get(kind, 0.0) + cost_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Unit:
    """Shards that are placed together: all of an option that must be in one node, else a single one.

    Attributes:
        item: Their item.
        first: Number of the first among the shards of its option.
        option: The option, with these shards only.
    """

    item: int
    first: int
    option: ItemOption

    @property
    def shards(self) -> tuple[ItemShard, ...]:
        """The shards."""
        return self.option.shards

    @property
    def turn(self) -> int:
        """When they are placed: 0 on all ranks, 1 on nodes, 2 on single ranks with rows on other levels, 3 without."""
        shard = self.shards[0]
        if shard.is_everywhere:
            return 0
        if shard.num_holders > 1 or shard.in_one_node:
            return 1
        return 2 if shard.parts[0].memory.level is not MemoryLevel.HBM else 3


def _units(options: Sequence[ItemOption]) -> Iterator[_Unit]:
    for item, option in enumerate(options):
        if len(option.shards) == 1 or option.shards[0].in_one_node:
            yield _Unit(item=item, first=0, option=option)
        else:
            for number, shard in enumerate(option.shards):
                yield _Unit(item=item, first=number, option=replace(option, shards=(shard,)))


class _Ranks:
    """Ranks being filled with an option of each item."""

    def __init__(self, task: Arranger, options: Sequence[ItemOption]) -> None:
        self.task, self.space = task, task.space
        self.node_size = task.space.topology.local_world_size
        self.free_RM: FloatArray = task.limits.capacity_RM.copy()
        self.cost_s_R: FloatArray = np.zeros(len(self.free_RM))
        self.sites = [[0] * len(option.shards) for option in options]

    def put_everywhere(self, units: Sequence[_Unit]) -> bool:
        """Shards on all ranks; whether these have room for them."""
        for unit in units:
            self._hold(unit, (0,))
        return bool((self.free_RM >= 0).all())

    def put_on_nodes(self, units: Sequence[_Unit]) -> bool:
        """By falling cost, each on the node of the method, or else on the cheapest with room; whether all are."""
        cost_s_N = np.array([self._cost_s(unit) / self.node_size for unit in units])
        wanted_N, node_R = self._wanted(cost_s_N, self._node_cost_s()), np.arange(len(self.cost_s_R)) // self.node_size
        for index in np.argsort(-cost_s_N, kind="stable").tolist():
            cost_s_S = self._node_cost_s()
            if wanted_N is not None:
                cost_s_S[wanted_N[index]] = -np.inf
            nodes = np.argsort(cost_s_S, kind="stable").tolist()
            if not any(self._put(units[index], node_R == node) for node in nodes):
                return False
        return True

    def put_far(self, units: Sequence[_Unit]) -> bool:
        """By falling cost, each on the cheapest rank with room on all memory levels; whether all are."""
        may_R = np.ones(len(self.cost_s_R), dtype=np.bool_)
        return all(self._put(unit, may_R) for unit in sorted(units, key=lambda unit: -self._cost_s(unit)))

    def put_near(self, units: Sequence[_Unit], seed: int) -> bool:
        """In device memory only, by the method, or as near to it as memory allows; whether all are."""
        if not units:
            return True
        packing = self._packing([unit.shards[0] for unit in units])
        cost_s_N = np.array(list(map(self._cost_s, units)))
        wanted_N = self._wanted(cost_s_N, self.cost_s_R)
        filling, cost_s_R = Filling(packing), self.cost_s_R.copy()
        for index in np.argsort(-cost_s_N, kind="stable").tolist():
            scores_R = cost_s_R.copy()
            if wanted_N is not None:
                scores_R[wanted_N[index]] = -np.inf
            cost_s_R[filling.put(index, scores_R)] += cost_s_N[index]
        try:
            ranks_N = repair(packing, filling.ranks_N, seed)
        except InfeasiblePlanError:
            return False
        for unit, rank in zip(units, ranks_N.tolist(), strict=True):
            self._hold(unit, (rank,))
        return True

    def _packing(self, shards: Sequence[ItemShard]) -> Packing:
        """Shards on single ranks, to be packed into the memory that is left."""
        ends = np.cumsum([len(shard.parts) for shard in shards]).tolist()
        return Packing(
            shards=tuple(part.shard for shard in shards for part in shard.parts),
            members=tuple(tuple(range(end - len(one.parts), end)) for end, one in zip(ends, shards, strict=True)),
            bytes_N=self.space.kinds.bytes_VM[[shard.kind for shard in shards], 0].astype(np.int64),
            capacity_R=self.free_RM[:, 0].astype(np.int64),
            allowed_NR=np.array([shard.allowed_S for shard in shards]),
        )

    def _wanted(self, cost_s_N: FloatArray, so_far_s_S: FloatArray) -> IntArray | None:
        """Sites by largest differencing: the costliest subset goes where least is so far. None for greedy."""
        if self.task.method == GREEDY or not len(cost_s_N):
            return None
        subsets_N = partition(cost_s_N, len(so_far_s_S))
        cost_s_S = np.bincount(subsets_N, weights=cost_s_N, minlength=len(so_far_s_S))
        site_of_S = np.empty(len(so_far_s_S), dtype=np.int64)
        site_of_S[np.argsort(-cost_s_S, kind="stable")] = np.argsort(so_far_s_S, kind="stable")
        return np.asarray(site_of_S[subsets_N])

    def _put(self, unit: _Unit, may_R: BoolArray) -> bool:
        """Places shards on the cheapest of some ranks; False, and nothing is placed, if one of them finds no room."""
        cost_s_R = self.cost_s_R.copy()

        def cheapest(shard: ItemShard, open_S: BoolArray) -> int:
            cost_s_S = shard.by_site(cost_s_R).mean(axis=1)
            site = int(np.where(open_S, cost_s_S, np.inf).argmin())
            cost_s_R[shard.ranks(site)] += self.task.cost_s(shard)
            return site

        sites = self.space.take_sites(unit.option, np.where(may_R[:, None], self.free_RM, -1.0), cheapest)
        if sites is not None:
            self._hold(unit, sites)
        return sites is not None

    def _hold(self, unit: _Unit, sites: Sequence[int]) -> None:
        for shard, site in zip(unit.shards, sites, strict=True):
            self.free_RM[shard.ranks(site)] -= self.space.kinds.bytes_VM[shard.kind]
            self.cost_s_R[shard.ranks(site)] += self.task.cost_s(shard)
        self.sites[unit.item][unit.first : unit.first + len(sites)] = sites

    def _cost_s(self, unit: _Unit) -> float:
        """On all of its ranks together."""
        return sum(shard.num_holders * self.task.cost_s(shard) for shard in unit.shards)

    def _node_cost_s(self) -> FloatArray:
        return np.asarray(self.cost_s_R.reshape(-1, self.node_size).mean(axis=1))
