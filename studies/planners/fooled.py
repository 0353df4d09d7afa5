"""Plans made with a wrong model, priced by a right one: `python -m studies fooled`.

A model that is trained on all samples of a store stands for the machine: what it says of a plan is taken for true.
Planners work with models of few of these samples, with noise on them or not. Each planner's regret is how much longer
the true slowest rank of its plan takes than that of the best plan known of the task: the plans of all models, and those
that `auto` makes with the true one. `auto` plans with and without the errors of its model on record. It makes steps
short, of which kernels are a part: true steps stand beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Annotated, Final

import numpy as np
import typer
from numpy.typing import NDArray

from autoshard.commands.options import command_options
from autoshard.core import CostModels, TableSet, Topology
from autoshard.core.accepted import FINITE_AT_LEAST_0, WHOLE, WHOLE_AT_LEAST_0, Range
from autoshard.evaluation import AlphaBetaComm, evaluate
from autoshard.formats import load_tables, load_topology
from autoshard.formats.stores.samples import read_samples
from autoshard.planning import PlanRequest, get_planner
from autoshard.table import Table
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.training import MIN_SAMPLES, CostTrainingOptions, train_cost_model
from studies.frame import OutputOptions, PartsOption, PartStore, StudyResult, names_in, numbers_in, options_without

_FIRST_SEED: Final = 1000
#: Samples that a model is made of.
_ENOUGH: Final = Range(at_least=MIN_SAMPLES, kind=WHOLE)
#: Time limits that no search reaches: steps decide.
_NO_LIMIT_S: Final = 3600.0
#: Planners whose plans do not depend on steps.
HEURISTICS: Final = ("lookup-greedy", "karmarkar-karp", "cost-greedy")
#: Ways in which `auto` searches, by the ends of their names.
_OBJECTIVES: Final[Mapping[str, Mapping[str, object]]] = {
    "": {},
    "+whole": {"objective": "kernel", "sharding_types": "table_wise"},
}
#: With and without the errors of the model on record.
_MEANS, _DRAWS = "means", "draws"
_BASELINE: Final = "cost-greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What a model was made of.

    Attributes:
        store: Name of the folder of samples.
        num_samples: Samples, some of which are held out.
        noise: Standard deviation of the logarithm of what every latency was multiplied by.
    """

    store: str
    num_samples: int
    noise: float

    def __str__(self) -> str:
        return f"{self.store}-{self.num_samples}-{self.noise:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FooledTask:
    """True slowest ranks of the plans of one task, in milliseconds.

    Attributes:
        quality: Of the model that plans were made with.
        seed: Seed that the tables are drawn with.
        slowest_ms: By planner.
        step_ms: True steps of the same plans.
        true_ms: Of plans that `auto` makes with the true model, by planner.
    """

    quality: Quality
    seed: int
    slowest_ms: dict[str, float]
    step_ms: dict[str, float]
    true_ms: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrets:
    """One planner with models of one quality, over tasks and both stores."""

    num_samples: int
    noise: float
    planner: str
    num_tasks: int
    slowest_ms: float
    regret: float
    """Mean of the true slowest rank over that of the best plan known, minus 1."""
    over_greedy: float
    """Mean of the true slowest rank over that of `cost-greedy`, minus 1."""
    over_greedy_error: float
    """Standard error of this mean."""
    step_over_greedy: float
    """Mean of the true step over that of `cost-greedy`, minus 1."""


@command_options()
class FooledOptions:
    """Options of the study `fooled`."""

    stores: Annotated[str, typer.Option(help="Folders of samples, with commas between them.")] = (
        "docs/data/samples,docs/data/samples-epyc"
    )
    samples: Annotated[str, typer.Option(help="Samples that models are made of, with commas between them.")] = (
        "100,300,1000,3000"
    )
    noise: Annotated[str, typer.Option(help="Noise on the samples, as a share, with commas between them.")] = "0,0.1"
    steps: Annotated[str, typer.Option(help="Steps of the search, with commas between them.")] = "10,100"
    tables: Annotated[str, typer.Option(help="Pool that tasks are drawn from.")] = "metasyn"
    scale: Annotated[int, typer.Option(min=1, help="Divides rows and batch of the pool.")] = 64
    topology: Annotated[str, typer.Option(help="Ranks to plan for.")] = "cpu-8"
    num_tables: Annotated[int, typer.Option(min=1, help="Tables per task.")] = 80
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks, with seeds 1000, 1001, ...")] = 30
    updates: Annotated[int, typer.Option(min=1, help="Updates of every training.")] = CostTrainingOptions().num_updates
    seed: Annotated[int, typer.Option(min=0, help="Of draws of samples, noise and training.")] = 0
    parts: PartsOption = None

    def __post_init__(self) -> None:
        _ = self.qualities, self.num_steps

    @property
    def num_steps(self) -> tuple[int, ...]:
        """Steps of the searches."""
        return numbers_in(self.steps, "--steps", int, WHOLE_AT_LEAST_0)

    @property
    def qualities(self) -> tuple[tuple[int, float], ...]:
        """Numbers of samples, and noise."""
        counts = numbers_in(self.samples, "--samples", int, _ENOUGH)
        return tuple(product(counts, numbers_in(self.noise, "--noise", float, FINITE_AT_LEAST_0)))


@dataclass(frozen=True, eq=False)
class _Machine:
    """A store, the model that stands for its machine, and tasks for it."""

    options: FooledOptions
    folder: Path
    _models: dict[tuple[int, float], LearnedCostModel] = field(default_factory=dict)
    _true_ms: dict[int, dict[str, float]] = field(default_factory=dict)

    @cached_property
    def dataset(self) -> CostDataset:
        """All samples."""
        return CostDataset.from_samples(read_samples(self.folder, self.topology.device))

    @cached_property
    def topology(self) -> Topology:
        """The ranks."""
        return load_topology(self.options.topology)

    @cached_property
    def pool(self) -> TableSet:
        """Tables that tasks are drawn from."""
        return load_tables(self.options.tables).scaled(self.options.scale)

    @cached_property
    def truth(self) -> LearnedCostModel:
        """Trained on everything; a fifth measures how good it is."""
        return self._trained(self.dataset)

    def model(self, num_samples: int, noise: float) -> LearnedCostModel:
        """A model of few samples."""
        if (num_samples, noise) not in self._models:
            rng = np.random.default_rng((self.options.seed, num_samples, round(1e6 * noise)))
            drawn = self.dataset.take(whole_sets(self.dataset, num_samples, rng))
            factors_SO = np.exp(noise * rng.standard_normal((len(drawn), 1)))
            noisy = replace(drawn, latency_ms_SO=drawn.latency_ms_SO * factors_SO)
            self._models[num_samples, noise] = self._trained(noisy)
        return self._models[num_samples, noise]

    def task(self, num_samples: int, noise: float, seed: int) -> FooledTask:
        """Plans a task with all planners."""
        quality = Quality(store=self.folder.name, num_samples=num_samples, noise=noise)
        tables = self.pool.sample(self.options.num_tables, seed)
        model = self.model(num_samples, noise)
        plain = LearnedCostModel(model.tensors(), replace(model.card, errors=None))
        true = {name: self._true(name, {}, tables, model) for name in HEURISTICS}
        true |= self._searched(tables, plain, _MEANS) | self._searched(tables, model, _DRAWS)
        if seed not in self._true_ms:
            exact = LearnedCostModel(self.truth.tensors(), replace(self.truth.card, errors=None))
            searched = self._searched(tables, exact, "true")
            self._true_ms[seed] = {name: slowest_ms for name, (slowest_ms, _) in searched.items()}
        return FooledTask(
            quality=quality,
            seed=seed,
            slowest_ms={name: slowest_ms for name, (slowest_ms, _) in true.items()},
            step_ms={name: step_ms for name, (_, step_ms) in true.items()},
            true_ms=self._true_ms[seed],
        )

    def _searched(self, tables: TableSet, model: LearnedCostModel, how: str) -> dict[str, tuple[float, float]]:
        """Of `auto`, with each objective and number of steps."""
        return {
            f"auto{end}, {how}, {steps} steps": self._true("auto", {**options, "steps": steps}, tables, model)
            for (end, options), steps in product(_OBJECTIVES.items(), self.options.num_steps)
        }

    def _true(
        self, planner: str, options: Mapping[str, object], tables: TableSet, model: LearnedCostModel
    ) -> tuple[float, float]:
        """The true slowest rank of a planner's plan, and its true step, in milliseconds."""
        costs = CostModels(kernel=model, comm=AlphaBetaComm())
        # A trained policy has prices of its own.
        no_policy = {"policy": False} if planner == "auto" else {}
        request = PlanRequest(
            tables=tables,
            topology=self.topology,
            costs=costs,
            time_limit_s=_NO_LIMIT_S,
            options={**options, **no_policy},
        )
        plan = get_planner(planner).plan(request)
        true = evaluate(plan, replace(costs, kernel=self.truth))
        return true.max_kernel_ms, true.step_ms.value

    def _trained(self, dataset: CostDataset) -> LearnedCostModel:
        options = CostTrainingOptions(num_updates=self.options.updates)
        return train_cost_model(dataset, device=self.topology.device, options=options, seed=self.options.seed).model


def whole_sets(dataset: CostDataset, num_samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Indices of the samples of random sets, each with all its measurements, until there are enough."""
    sets, set_S = np.unique(dataset.set_S, return_inverse=True)
    place_S = rng.permutation(len(sets))[set_S]
    return np.argsort(place_S, kind="stable")[:num_samples]


def run_study(options: FooledOptions) -> tuple[FooledTask, ...]:
    """All tasks with models of every quality."""
    parts = PartStore.of(options.parts, options_without(options, _FREE))
    machines = [_Machine(options, Path(folder)) for folder in names_in(options.stores)]
    seeds = range(_FIRST_SEED, _FIRST_SEED + options.num_tasks)
    makers = {
        f"{Quality(store=machine.folder.name, num_samples=num_samples, noise=noise)}-{seed}": partial(
            machine.task, num_samples, noise, seed
        )
        for machine, (num_samples, noise), seed in product(machines, options.qualities, seeds)
    }
    return tuple(parts.find_all("Tasks", FooledTask, makers, lambda task: f"{task.quality}-{task.seed} is done"))


#: Options that a finished part does not depend on.
_FREE: Final = {"parts", "num_tasks", "stores", "samples", "noise"}


def regrets(tasks: Sequence[FooledTask]) -> tuple[Regrets, ...]:
    """Means by quality and planner."""
    best_ms: dict[tuple[str, int], float] = {}
    for task in tasks:
        known = best_ms.get((task.quality.store, task.seed), np.inf)
        best_ms[task.quality.store, task.seed] = min(known, *task.slowest_ms.values(), *task.true_ms.values())
    groups: dict[tuple[int, float], list[FooledTask]] = {}
    for task in tasks:
        groups.setdefault((task.quality.num_samples, task.quality.noise), []).append(task)
    found = []
    for (num_samples, noise), group in groups.items():
        for planner in group[0].slowest_ms:
            over = [task.slowest_ms[planner] / task.slowest_ms[_BASELINE] - 1 for task in group]
            step_over = mean(task.step_ms[planner] / task.step_ms[_BASELINE] - 1 for task in group)
            found.append(
                Regrets(
                    num_samples=num_samples,
                    noise=noise,
                    planner=planner,
                    num_tasks=len(group),
                    slowest_ms=mean(task.slowest_ms[planner] for task in group),
                    regret=mean(
                        task.slowest_ms[planner] / best_ms[task.quality.store, task.seed] - 1 for task in group
                    ),
                    over_greedy=mean(over),
                    over_greedy_error=float(np.std(over) / np.sqrt(len(over))),
                    step_over_greedy=step_over,
                )
            )
    return tuple(found)


def main(options: FooledOptions, output: OutputOptions) -> None:
    """Measures how far plans of models of few or noisy samples are from the best, with and without their errors.

    Example:
        OMP_NUM_THREADS=1 python -m studies fooled --parts fooled-parts -o docs/figures
    """
    tasks = run_study(options)
    rows = regrets(tasks)
    document = {
        "options": options_without(options, ("parts",)),
        "regrets": [asdict(row) for row in rows],
        "tasks": [asdict(task) for task in tasks],
    }
    output.write(StudyResult(name="fooled", document=document, tables=(regrets_table(rows),)))


def regrets_table(rows: Sequence[Regrets]) -> Table:
    """A line for each quality and planner."""
    return Table.of(
        rows,
        (
            ("samples", lambda row: f"{row.num_samples:,}"),
            ("noise", lambda row: f"{row.noise:.0%}"),
            ("planner", lambda row: row.planner),
            ("tasks", lambda row: str(row.num_tasks)),
            ("true slowest rank, ms", lambda row: f"{row.slowest_ms:.3f}"),
            ("above the best known", lambda row: f"{row.regret:.2%}"),
            ("over cost-greedy", lambda row: f"{row.over_greedy:+.2%}"),
            ("its standard error", lambda row: f"{row.over_greedy_error:.2%}"),
            ("true step over cost-greedy", lambda row: f"{row.step_over_greedy:+.2%}"),
        ),
        caption="True slowest ranks of plans made with models of few or noisy samples",
    )
