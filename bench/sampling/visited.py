"""Sets that planners and policies really visit: ranks of their plans, finished and half filled.

Shape suffixes: N shards of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autoshard.core import Constraints, CostModels, Level, Link, MemoryBytes, ShardingPlan, TableSet, Topology
from autoshard.core.errors import InfeasiblePlanError, ModelError
from autoshard.evaluation.analytic import DEVICE_MEMORY, AnalyticCostModel
from autoshard.evaluation.communication import AlphaBetaComm
from autoshard.planners.planner import PlannerProtocol, PlanRequest
from autoshard.planners.registry import get_planner, planner_names
from autoshard.planning import make_costs
from autoshard.validator import validate_plan
from bench.sampling.strategies import SetSource, ShardSet, generator_of

#: Planners whose plans are visited. TorchRec's takes ten seconds for a plan.
PLANNERS: tuple[str, ...] = ("cost-greedy", "random", "auto", "lookup-greedy", "dim-greedy", "size-greedy")
POLICY = "policy"

#: AutoShard's main task (Sec. 5.1), of which half of the plans are.
_MAIN_TABLES, _MAIN_RANKS = 80, 8
_OTHER_RANKS = (2, 4, 16, 32)
_TABLES_PER_RANK = (3, 15)
#: Sets that are taken from one plan, so that planning takes less time than measuring.
SETS_PER_PLAN = 8
_PARTIAL_SHARE = 0.35
#: Plans kept: more than the sets that may come again reach back.
_PLANS_KEPT = 48
#: The search is bounded by steps, so that the same seed gives the same plan on slow machines too.
_SEARCH_S, _SEARCH_STEPS = 60.0, 40
#: Prices on devices that nothing is known of: planners compare prices only.
_STAND_IN = "a100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A set, and where it was met.

    Attributes:
        plan: The plan that holds it.
        rank: The rank that holds it in the plan.
        shards: The rank's costliest shards, or all of them: what it held at some step of a placement that goes by
            falling cost, as cost-greedy and the policy's environment do.
    """

    plan: ShardingPlan
    rank: int
    shards: ShardSet


class Placements:
    """Ranks of plans of the registered planners on tasks drawn from the pool.

    Args of the constructor:
        source: What tasks are drawn from. Its registry's policy is asked too, if it has one.
        seed: Of the tasks, and of the planners.
        planners: Names of the planners to ask in turn; all quick ones when left out.
    """

    def __init__(self, source: SetSource, seed: int, planners: tuple[str, ...] | None = None) -> None:
        # What a model may not do with its tables matters to its own plans, not to sets of a pool.
        pool = tuple(replace(table, constraints=Constraints()) for table, _ in source.whole_tables())
        self._source = source
        self._pool = TableSet(batch_size=source.tables.batch_size, tables=pool)
        self._seed = seed
        self._costs = planning_costs(self._pool, source)
        self.planners = planners if planners is not None else self._registered()
        self._loaded: dict[str, PlannerProtocol] = {name: get_planner(name) for name in self.planners}
        self._plan = lru_cache(maxsize=_PLANS_KEPT)(self._make_plan)

    def draw(self, number: int) -> ShardSet:
        """What a rank of a plan holds."""
        return self.visit(number).shards

    def visit(self, number: int) -> Visit:
        """Set number `number`, with its plan."""
        block, place = divmod(number, SETS_PER_PLAN)
        plan, held = self._plan(block)
        ranks = [rank for rank, shards in enumerate(held) if shards]
        order = generator_of(self._seed, "placements/ranks", block).permutation(len(ranks))
        rank = ranks[int(order[place % len(ranks)])]
        rng = generator_of(self._seed, "placements", number)
        shards = held[rank]
        if rng.random() < _PARTIAL_SHARE:
            shards = shards[: int(rng.integers(1, len(shards) + 1))]
        return Visit(plan=plan, rank=rank, shards=self._source.within_limits(shards))

    def _registered(self) -> tuple[str, ...]:
        """The planners at hand; the policy's if it can plan a task of the pool."""
        names = tuple(name for name in PLANNERS if name in planner_names())
        if self._source.registry is not None and POLICY in planner_names():
            tables = self._pool.sample(min(8, len(self._pool.tables)), 0)
            try:
                get_planner(POLICY).plan(self._request(tables, 2, 0))
            except InfeasiblePlanError:  # it plans, but not this task
                return (*names, POLICY)
            except ModelError:
                return names
            return (*names, POLICY)
        return names

    def _make_plan(self, block: int) -> tuple[ShardingPlan, tuple[ShardSet, ...]]:
        rng = generator_of(self._seed, "placements/plans", block)
        name = self.planners[block % len(self.planners)]
        num_tables, num_ranks = _task_size(len(self._pool.tables), rng)
        task_seed = int(rng.integers(2**32))
        while True:
            request = self._request(self._pool.sample(num_tables, task_seed), num_ranks, task_seed)
            if name == "auto":
                options = {"steps": _SEARCH_STEPS, "policy": POLICY in self.planners}
                request = replace(request, time_limit_s=_SEARCH_S, options=options)
            try:
                plan = self._loaded[name].plan(request)
            except InfeasiblePlanError:
                # Every table fits a rank alone, so in the end a task does.
                num_tables = max(1, num_tables // 2)
                num_ranks = max(num_ranks, 2)
                continue
            except ModelError:
                if name != POLICY:
                    raise
                name = self.planners[0]  # the policy's own cost model knows other tables only
                continue
            validate_plan(plan)
            return plan, self._by_falling_cost(plan)

    def _by_falling_cost(self, plan: ShardingPlan) -> tuple[ShardSet, ...]:
        model = self._costs.kernel
        held = []
        for shards in plan.local_shards():
            ms_N = model.predict_ms(model.encode(shards)) if shards else np.zeros(0)
            held.append(tuple(shards[index] for index in np.argsort(-ms_N, kind="stable")))
        return tuple(held)

    def _request(self, tables: TableSet, num_ranks: int, seed: int) -> PlanRequest:
        limit = self._source.memory_bytes
        hbm_bytes = tables.storage_bytes if limit is None else limit
        topology = single_level(self._source.device, num_ranks, hbm_bytes)
        return PlanRequest(
            tables=tables, topology=topology, costs=self._costs, seed=seed, registry=self._source.registry
        )


def single_level(device: str, num_ranks: int, hbm_bytes: int) -> Topology:
    """Ranks of one node. Sets follow from kernel prices and memory, so its links may be any."""
    link = Link(bytes_per_s=1e10)
    level = Level(name="node", size=num_ranks, all_to_all=link, all_reduce=link)
    return Topology(world_size=num_ranks, device=device, memory_bytes=MemoryBytes(hbm=hbm_bytes), levels=(level,))


def planning_costs(pool: TableSet, source: SetSource) -> CostModels:
    """What planners price a pool with: the registry's model of the device if there is one, else the analytic one."""
    if source.registry is not None:
        try:
            return make_costs(pool, single_level(source.device, 1, 1), source.registry)
        except ModelError:
            if source.device in DEVICE_MEMORY:
                raise
    known = source.device if source.device in DEVICE_MEMORY else _STAND_IN
    return CostModels(kernel=AnalyticCostModel.for_device(known), comm=AlphaBetaComm())


def _task_size(pool_size: int, rng: np.random.Generator) -> tuple[int, int]:
    if rng.random() < 0.5:
        num_tables, num_ranks = _MAIN_TABLES, _MAIN_RANKS
    else:
        num_ranks = int(rng.choice(_OTHER_RANKS))
        num_tables = num_ranks * int(rng.integers(_TABLES_PER_RANK[0], _TABLES_PER_RANK[1] + 1))
    num_tables = min(num_tables, pool_size)
    return num_tables, max(1, min(num_ranks, num_tables // 2))
