"""Shared by all figures: tasks of a pool, the models that price, trained policies, and plans with their scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from autoshard.core import CostModel, CostModels, ShardingPlan, TableSet, Topology
from autoshard.core.errors import AutoshardError
from autoshard.formats import load_tables
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planning import make_costs, make_plan
from autoshard.plugins import ReplayProtocol, find_replay
from costmodel import Registry
from costmodel.kernel.learned import LearnedCostModel
from env import Objective
from policies.choices import Items
from policies.network.network import PlacementNetwork
from policies.planning.tasks import TaskKind, TaskSplit, sample_problems, task_seeds, training_topology
from policies.planning.trained import TrainedPolicy, load_cost_model
from studies.frame import Numbers, PartStore
from studies.policies.settings import EvaluationSettings, Size
from studies.policies.trained import NetworkPart, train_network

#: Targets and training curves have tasks of their own, which no seed's tests have.
_FIRST_SEED_TASK: Final = 1 << 12

RANDOM, COST_GREEDY, LOOKUP_GREEDY, POLICY, SAMPLED, AUTO = (
    *("random", "cost-greedy", "lookup-greedy", "policy"),
    *("policy, several samples", "auto"),
)
HEURISTICS: Final = (RANDOM, "size-greedy", "dim-greedy", LOOKUP_GREEDY, COST_GREEDY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A plan and what it took to make it.

    Attributes:
        plan: With its prediction; None if there is none.
        seconds: Seconds that planning took, pricing of the finished plan included.
        failure: Why there is no plan.
    """

    plan: ShardingPlan | None
    seconds: float
    failure: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; `failure` alone when there is no plan."""
        if self.plan is None or self.plan.predicted is None:
            return {"failure": self.failure}
        predicted = self.plan.predicted
        return {
            "max_ms": predicted.max_kernel_ms,
            "balance": predicted.balance,
            "step_ms": predicted.step_ms.value,
            "planning_s": self.seconds,
        }


class Lab:
    """Tasks, models, policies and plans of one evaluation.

    Args:
        settings: Size and subject of the evaluation.
        folder: Folder of finished parts, checkpoints and trained policies.

    Raises:
        InputError: If the pool cannot be read, or the folder is of another evaluation.
        ModelError: If the registry has no cost model of the device, or one that does not cover the pool.
    """

    def __init__(self, settings: EvaluationSettings, folder: Path) -> None:
        self.settings = settings
        self.parts = PartStore(folder)
        self.pool = load_tables(settings.tables).scaled(settings.scale)
        self.cost = load_cost_model(Registry(settings.registry), settings.device)
        self.folder = folder
        self.parts.check_identity({**settings.identity(), "cost_model": self.cost.version})

    @cached_property
    def model(self) -> LearnedCostModel:
        """The model that all kernels are priced with, and all policies are trained on."""
        return self.cost

    @cached_property
    def costs(self) -> CostModels:
        """The models that price whole plans."""
        costs = make_costs(self.pool, self.topology(self.settings.num_ranks), self.settings.registry)
        return replace(costs, kernel=self.model)

    @cached_property
    def alone_ms(self) -> Sequence[float]:
        """Price of each of the pool's tables alone."""
        alone_ms: list[float] = PlacementProblem.table_wise(
            self.pool, self.topology(1), self.model
        ).kernel_ms_N.tolist()
        return alone_ms

    def topology(self, num_ranks: int, hbm_bytes: int | None = None) -> Topology:
        """Ranks of the device, by default with memory for the whole pool each."""
        whole = sum(table.storage_bytes for table in self.pool.tables)
        return training_topology(self.settings.device, num_ranks, whole if hbm_bytes is None else hbm_bytes)

    def train_seeds(self, seed: int) -> range:
        """Seeds of the tasks that the policies of a seed learn from."""
        return task_seeds(TaskSplit.TRAIN, self.settings.num_train_tasks, seed)

    def validation_seeds(self) -> range:
        """Seeds of the tasks that their best weights are chosen by."""
        return task_seeds(TaskSplit.VALIDATION, self.settings.num_validation_tasks)

    def test_seeds(self, seed: int) -> range:
        """Seeds of the tasks that the plans of a seed are compared on."""
        count = self.settings.num_test_tasks
        return task_seeds(TaskSplit.TEST, _FIRST_SEED_TASK + count * (seed + 1))[-count:]

    def target_seeds(self) -> range:
        """Seeds of the tasks for what has to be reached."""
        return task_seeds(TaskSplit.TEST, self.settings.num_target_tasks)

    def problems(
        self,
        seeds: range,
        pool: TableSet | None = None,
        *,
        items: Items = Items.TABLES,
        memory_fill: float | None = None,
        model: CostModel | None = None,
    ) -> tuple[PlacementProblem, ...]:
        """Problems of the size that policies are trained on.

        Args:
            seeds: One per problem.
            pool: Where tables are drawn from; the whole pool when left out.
            items: Kind of the placed items.
            memory_fill: Share of all memory that a problem's tables take; None for unlimited memory.
            model: Prices the tables; the lab's model when left out.
        """
        num_tables, num_ranks = self.settings.size
        kind = TaskKind(
            device=self.settings.device,
            num_tables=num_tables,
            num_ranks=num_ranks,
            items=items,
            memory_fill=memory_fill,
        )
        return sample_problems(pool or self.pool, model or self.model, kind, seeds)

    def policy_registry(
        self, seed: int, *, pool: TableSet | None = None, name: str = "whole", without: NetworkPart | None = None
    ) -> Path:
        """The registry of a policy, trained if it is not there yet.

        Args:
            seed: Of the training and of its tasks.
            pool: Tables that it learns from; the whole pool when left out.
            name: Distinguishes policies of one seed.
            without: A part of the network that it lacks.
        """

        def train() -> PlacementNetwork:
            return train_network(
                self.problems(self.train_seeds(seed), pool),
                self.problems(self.validation_seeds(), pool),
                seed=seed,
                num_updates=self.settings.num_updates,
                folder=self.checkpoints(f"{name}-{seed}"),
                without=without,
            )

        return self.published(f"{name}-{seed}", train)

    def published(
        self,
        name: str,
        train: Callable[[], PlacementNetwork],
        *,
        items: Items = Items.TABLES,
        objective: Objective = Objective.BALANCE,
        memory_fill: float | None = None,
    ) -> Path:
        """The registry of a policy of the lab's cost model, trained and published if it is not there yet.

        Args:
            name: Distinguishes policies.
            train: Makes its network.
            items: Kind of items that it places.
            objective: Objective of its training.
            memory_fill: Share of all memory that tables of its training take; None for unlimited memory.
        """
        registry = Registry(self.folder / "policies" / name)
        if registry.production_id(items.policy_kind, self.settings.device) is None:
            policy = TrainedPolicy(
                network=train(),
                cost=self.cost,
                training={"name": name},
                items=items,
                objective=objective,
                memory_fill=memory_fill,
            )
            policy.publish(registry)
        return registry.root

    def checkpoints(self, name: str) -> Path:
        """A folder for checkpoints of a training."""
        return self.folder / "checkpoints" / name

    def network(self, policies: Path) -> PlacementNetwork:
        """The network of a registry's policy of whole tables."""
        return TrainedPolicy.load(Registry(policies), self.settings.device).network

    def request(
        self,
        tables: TableSet,
        topology: Topology,
        *,
        policies: Path | None = None,
        seed: int = 0,
        time_limit_s: float | None = None,
    ) -> PlanRequest:
        """A task as planners get it; `policies` is the registry of the policy that they use."""
        return PlanRequest(
            tables=tables,
            topology=topology,
            costs=self.costs,
            seed=seed,
            time_limit_s=time_limit_s or self.settings.auto_s,
            registry=policies or self.settings.registry,
        )

    def plan(self, name: str, request: PlanRequest, options: Mapping[str, object] | None = None) -> Scored:
        """One planner's plan; `name` is a planner's, or `SAMPLED`."""
        planner, usual = self.planner_of(name)
        started_s = time.perf_counter()
        try:
            plan = make_plan(planner, replace(request, options=options or usual))
        except AutoshardError as error:
            return Scored(plan=None, seconds=time.perf_counter() - started_s, failure=str(error))
        return Scored(plan=plan, seconds=time.perf_counter() - started_s)

    def planner_of(self, name: str) -> tuple[str, Mapping[str, object]]:
        """A planner's registered name, and its options."""
        if name == SAMPLED:
            return POLICY, {"num_samples": self.settings.num_samples}
        # Kernels of the slowest rank are compared here, of whole tables.
        return name, {"objective": "kernel", "sharding_types": "table_wise"} if name == AUTO else {}

    def plan_all(self, names: Sequence[str], request: PlanRequest) -> dict[str, Numbers]:
        """Scores of the plans of several planners."""
        return {name: self.plan(name, request).to_json() for name in names}

    def plan_tests(
        self, names: Sequence[str], seed: int, num_ranks: int, policies: Path, draw: Callable[[int], TableSet]
    ) -> Numbers:
        """Scores of the plans of several planners on the test tasks of a seed.

        Args:
            names: The planners.
            seed: Of the tests.
            num_ranks: Ranks of each task.
            policies: Registry of the policy that the planners use.
            draw: Makes the tables of a task from its seed.
        """
        tasks = []
        for index, task in enumerate(self.test_seeds(seed)):
            request = self.request(draw(task), self.topology(num_ranks), policies=policies, seed=index)
            tasks.append(self.plan_all(names, request))
        return {"tasks": tasks}

    def test_request(self, seed: int, index: int, size: Size) -> PlanRequest:
        """A test task of a seed, of any size, for planners that use the policy of that seed."""
        num_tables, num_ranks = size
        tables = self.pool.sample(num_tables, self.test_seeds(seed)[index])
        return self.request(tables, self.topology(num_ranks), policies=self.policy_registry(seed), seed=index)

    def time_planner(self, name: str, request: PlanRequest) -> float:
        """Seconds from request to plan, the median of several runs, models loaded before."""
        planner, options = self.planner_of(name)
        timed, found = replace(request, options=options), get_planner(planner)
        found.plan(timed)
        times = []
        for _ in range(self.settings.num_timed):
            started_s = time.perf_counter()
            found.plan(timed)
            times.append(time.perf_counter() - started_s)
        return sorted(times)[len(times) // 2]

    def best_known(self, seed: int, size: Size) -> dict[str, float]:
        """Scores of the best plan known of a task: `auto` with a long time limit."""
        num_tables, num_ranks = size

        def search() -> Numbers:
            request = self.request(
                self.pool.sample(num_tables, seed), self.topology(num_ranks), time_limit_s=self.settings.search_s
            )
            found = self.plan(AUTO, request)
            if found.plan is None:
                raise AutoshardError(f"found no plan of task {seed}: {found.failure}", source=AUTO)
            return found.to_json()

        return self.parts.find(f"best/{num_tables}-{num_ranks}-{seed}", search)

    def replay(self, plans: Sequence[ShardingPlan]) -> ReplayProtocol:
        """Measures all plans on this machine in the same interleaved rounds, and its ceiling.

        Raises:
            InvalidOptionError: If nothing that replays plans is installed.
            AutoshardError: If the plans cannot be replayed.
        """
        replay_plans = find_replay("--replay")
        device = "cpu" if self.settings.device.startswith("cpu") else "cuda"
        return replay_plans(plans, device=device, advance=lambda _: None)
