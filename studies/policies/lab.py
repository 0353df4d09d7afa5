"""Where an evaluation is computed: its size and subject, its tasks, models and parts, and what a figure is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.core import CostModel, CostModels, ShardingPlan, TableSet, Topology
from autoshard.core.accepted import AT_LEAST_1, Range
from autoshard.core.errors import AutoshardError
from autoshard.formats import load_tables
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planning import make_costs, make_plan
from autoshard.plugins import ReplayProtocol, find_replay
from autoshard.report.images import Section
from costmodel import Registry
from costmodel.kernel.learned import LearnedCostModel
from env import Objective
from policies.choices import Items
from policies.network.network import PlacementNetwork
from policies.planning.tasks import TaskKind, TaskSplit, sample_problems, task_seeds, training_topology
from policies.planning.trained import TrainedPolicy, load_cost_model
from studies.frame import Numbers, PartStore, RegistryOption
from studies.policies.trained import NetworkPart, train_network

#: Tables and ranks of a task.
Size = tuple[int, int]

#: Fields that may differ between two runs into one folder: their parts are the same.
_FREE: Final = (
    *("registry", "store", "num_seeds", "num_step_seeds", "num_replayed", "measured_updates"),
    "joint_updates",
    *("transfer", "inference", "unseen_ratios"),
)


@command_options()
class EvaluationSettings:
    """Size of an evaluation. The defaults are the paper's where it names them; fields without help are set in Python.

    Source:
        AutoShard Sec. 5.1 and 5.2.
    """

    registry: RegistryOption = None
    store: Annotated[
        Path | None, typer.Option(help="Folder of samples, for cost models without some features in table2.")
    ] = None
    device: Annotated[str, typer.Option(help="Key of the device whose models price.")] = "cpu"
    tables: Annotated[str, typer.Option(help="Pool that tasks are drawn from.")] = "metasyn"
    scale: Annotated[
        int, typer.Option(min=1, help="Divides rows and batch of the pool; the cost model must cover that batch.")
    ] = 64
    num_seeds: Annotated[int, typer.Option("--seeds", min=1, help="Trainings, each with tasks of its own.")] = 5
    num_updates: Annotated[int, typer.Option("--updates", min=1, help="Updates of each policy.")] = 300
    num_step_seeds: Annotated[int, typer.Option("--step-seeds", min=1, help="As --seeds, of steps.")] = 2
    step_updates: Annotated[int, typer.Option(min=1, help="As --updates, of steps.")] = 100
    auto_s: Annotated[float, positive_option("Seconds that `auto` may search.")] = 1.0
    search_s: Annotated[float, positive_option("Seconds of the search for best known plans.")] = 60.0
    num_replayed: Annotated[
        int,
        typer.Option(
            "--replay", min=0, help="Tasks of each seed of fig8, fig9 and fig11 whose plans are measured here."
        ),
    ] = 0
    measured_updates: Annotated[
        int,
        typer.Option(min=0, help="Updates of one more curve of fig12-training, whose rewards are measured here."),
    ] = 0
    joint_updates: Annotated[
        int, typer.Option(min=0, help="Updates of the policy in figure joint, which also trains its cost model.")
    ] = 100
    num_train_tasks: int = 90
    num_validation_tasks: int = 20
    num_test_tasks: int = 10
    """Per seed."""
    num_target_tasks: int = 20
    """Unseen tasks for the targets and for training curves; the same for all seeds."""
    num_tables: int = 80
    num_ranks: int = 8
    num_samples: int = 64
    """Placements that the policy draws where it may draw."""
    num_random: int = 10_000
    """Random placements per task."""
    cost_updates: int = 3000
    """Updates of each cost model without some features."""
    curve_updates: int = 200
    """Updates of training curves."""
    curve_every: int = 5
    """Updates between two points of a curve."""
    memory_share: float = 0.9
    """Share of all memory that tasks with little memory fill."""
    unseen_ratios: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    transfer: tuple[Size, ...] = ((80, 8), (160, 16), (240, 24), (320, 32), (400, 40), (560, 56), (800, 80))
    """Sizes of tasks that policies of `num_tables` tables are tried on."""
    inference: tuple[Size, ...] = ((20, 2), (40, 4), (80, 8), (160, 16), (320, 32), (480, 48), (800, 80))
    """Sizes of tasks that planners are timed on."""
    num_timed: int = 5
    """Runs of each planner of which the median is taken."""

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(
            self,
            *("num_train_tasks", "num_validation_tasks", "num_test_tasks", "num_target_tasks", "num_tables"),
            *("num_ranks", "num_random", "cost_updates", "curve_updates", "curve_every", "num_timed"),
        )
        Range(at_least=2).check_fields(self, "num_samples")
        Range(above=0, below=1).check_fields(self, "memory_share")

    def quick(self) -> EvaluationSettings:
        """The same, no larger than a first look in minutes allows."""
        return replace(
            self,
            num_seeds=min(self.num_seeds, 2),
            num_step_seeds=1,
            num_train_tasks=8,
            num_validation_tasks=4,
            num_test_tasks=2,
            num_target_tasks=3,
            num_tables=24,
            num_ranks=4,
            num_updates=min(self.num_updates, 8),
            num_samples=8,
            auto_s=min(self.auto_s, 0.1),
            search_s=min(self.search_s, 0.5),
            num_random=300,
            cost_updates=60,
            step_updates=min(self.step_updates, 4),
            joint_updates=min(self.joint_updates, 8),
            curve_updates=8,
            curve_every=2,
            unseen_ratios=(0.0, 0.5, 1.0),
            transfer=((24, 4), (48, 8), (72, 12)),
            inference=((12, 2), (24, 4), (48, 8)),
            num_timed=2,
        )

    @property
    def size(self) -> Size:
        """Tables and ranks of the tasks that policies are trained on."""
        return self.num_tables, self.num_ranks

    @property
    def num_tasks_replayed(self) -> int:
        """Test tasks of each seed that are replayed."""
        return min(self.num_replayed, self.num_test_tasks)

    @property
    def large(self) -> Size:
        """The largest tasks that policies are tried on."""
        return max(self.transfer)

    def identity(self) -> dict[str, Any]:
        """Fields that two evaluations must share for one to continue from the other's parts."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE}


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


#: Numbers by the names of parts.
Found = Mapping[str, Numbers]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of work whose numbers are kept: its name, and what makes them."""

    name: str
    make: Callable[[Lab], Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure or table of the evaluation.

    Attributes:
        name: Name in `--figures` and in files.
        title: Its heading.
        parts: Pieces of work.
        show: The section made of the numbers of all parts.
    """

    name: str
    title: str
    parts: Callable[[EvaluationSettings], Sequence[Part]]
    show: Callable[[Found, EvaluationSettings], Section]

    def part_name(self, part: Part) -> str:
        """A part's name among those of all figures."""
        return f"{self.name}/{part.name}"

    def run(self, lab: Lab, on_part: Callable[[str], None] = lambda _: None) -> None:
        """Computes all parts that are not finished; `on_part` receives the name of each finished part."""
        for part in self.parts(lab.settings):
            lab.parts.find(self.part_name(part), lambda part=part: part.make(lab))  # type: ignore[misc]
            on_part(self.part_name(part))

    def section(self, lab: Lab) -> Section | None:
        """The figure as far as finished parts go; None unless all are finished."""
        parts = self.parts(lab.settings)
        if not parts or not all(lab.parts.has(self.part_name(part)) for part in parts):
            return None
        found = {part.name: lab.parts.read(self.part_name(part)) for part in parts}
        return self.show(found, lab.settings)
