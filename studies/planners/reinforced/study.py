"""AutoShard and DreamShard beside the policy: `python -m studies reinforced`.

Each is trained on tasks of one kind, on prices of the cost models that all planners are judged by, as long as was
published and longer, and then places the tables of the tasks of the study `policy`, which it has not seen: once by its
best scores, and by the best of some samples, each of which is priced. Steps are over the best one known of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.core.accepted import WHOLE_AT_LEAST_1
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.planner import PlanRequest
from autoshard.runtime.processes.threads import intra_op_threads
from studies.frame import OutputOptions, PartsOption, PartStore, RegistryOption, StudyResult, numbers_in
from studies.planners.limit_runs import TASKS
from studies.planners.policy_runs import PolicyRun, PolicyStudyOptions, policy_table, run
from studies.planners.reinforced.autoshard import AutoShard
from studies.planners.reinforced.dreamshard import DreamShard
from studies.planners.reinforced.games import Chooser, Game, Scaling, play

_ALGORITHMS: Mapping[str, Callable[[], Chooser]] = {"AutoShard": AutoShard, "DreamShard": DreamShard}
#: Samples, as the policy's row of the study `policy`.
_SAMPLES = 64


@command_options()
class ReinforcedOptions:
    """Options of the study `reinforced`."""

    tasks: Annotated[str, typer.Option(help=f"Tasks, with commas: any of {', '.join(TASKS)}.")] = "80-cpu,80-a100"
    seeds: Annotated[int, typer.Option(min=1, help="Draws of each task.")] = 10
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first draw's tables.")] = 7100
    efforts: Annotated[str, typer.Option(help="Times the published amount of training, with commas.")] = "1,4"
    num_trained: Annotated[int, typer.Option(min=1, help="Tasks that are trained on.")] = 50
    training_seed: Annotated[int, typer.Option(min=0, help="Of the first of these, of weights and choices.")] = 500
    best_s: Annotated[float, positive_option("Seconds of the search for the best plan known.")] = 20.0
    registry: RegistryOption = None
    parts: PartsOption = None

    def __post_init__(self) -> None:
        _ = self.times
        if set(range(self.training_seed, self.training_seed + self.num_trained)) & set(self.held_out):
            raise InvalidOptionError("must not be a task that is trained on", field="--first-seed")

    @property
    def times(self) -> tuple[int, ...]:
        """Times the published amount of training."""
        return numbers_in(self.efforts, "--efforts", int, WHOLE_AT_LEAST_1)

    @property
    def held_out(self) -> range:
        """Seeds of the tasks that are planned."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def others(self) -> PolicyStudyOptions:
        """Who plans these tasks, too."""
        return PolicyStudyOptions(
            tasks=self.tasks,
            seeds=self.seeds,
            first_seed=self.first_seed,
            limits="0.05,0.2",
            best_s=self.best_s,
            registry=self.registry,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Plans of an algorithm for the tasks of one kind.

    Attributes:
        task: Its name.
        trained_s: CPU seconds of its training.
        steps_ms: Steps of its plans, by row of the table and, as text, by seed.
        cpu_s: CPU seconds that each took, from the request to the priced plan.
    """

    task: str
    trained_s: float
    steps_ms: Mapping[str, Mapping[str, float]]
    cpu_s: Mapping[str, Mapping[str, float]]


def trained(algorithm: str, task: str, effort: int, options: ReinforcedOptions) -> Trained:
    """Trains on tasks of a kind, and plans those that are held out."""

    def request(seed: int) -> PlanRequest:
        return TASKS[task].request(seed, options.registry)

    seed = options.training_seed
    games = [Game.of(request(seed + number)) for number in range(options.num_trained)]
    began_s = time.process_time()
    torch.manual_seed(seed)
    net, scaling = _ALGORITHMS[algorithm](), Scaling.of(games)
    net.learn(games, scaling, effort, np.random.default_rng(seed))
    trained_s = time.process_time() - began_s
    name = f"{algorithm}, {effort} x"
    ways = {name: (1, True), f"{name}, {_SAMPLES} samples": (_SAMPLES, False)}
    steps_ms: dict[str, dict[str, float]] = {way: {} for way in ways}
    cpu_s: dict[str, dict[str, float]] = {way: {} for way in ways}
    for seed in options.held_out:
        torch.manual_seed(seed)
        asked = request(seed)
        for way, (episodes, is_greedy) in ways.items():
            began_s = time.process_time()
            played = play(net, Game.of(asked), scaling, episodes, greedy=is_greedy)
            steps_ms[way][str(seed)] = min(played.measured(episode).step_ms for episode in range(episodes))
            cpu_s[way][str(seed)] = time.process_time() - began_s
    return Trained(task=task, trained_s=trained_s, steps_ms=steps_ms, cpu_s=cpu_s)


def main(options: ReinforcedOptions, output: OutputOptions) -> None:
    """Trains AutoShard's and DreamShard's algorithms on this project's prices, and plans held-out tasks with them.

    Example:
        OMP_NUM_THREADS=1 python -m studies reinforced --tasks 80-cpu --parts runs -o docs/figures
    """
    others = options.others
    settings = {
        **others.settings(),
        "num_trained": options.num_trained,
        "training_seed": options.training_seed,
        "first_seed": options.first_seed,
        "seeds": options.seeds,
    }
    store = PartStore.of(options.parts, settings)
    plans = {f"{task}-{seed}": partial(run, task, seed, others) for seed in options.held_out for task in others.chosen}
    trainings = {
        f"{task}-{algorithm}-{effort}": partial(trained, algorithm, task, effort, options)
        for effort in options.times
        for task in others.chosen
        for algorithm in _ALGORITHMS
    }
    with intra_op_threads(1):
        learned = dict(zip(trainings, store.find_all("Training", Trained, trainings), strict=True))
        found = store.find_all("Planning", PolicyRun, plans, lambda one: one.line)
    by_task = [
        [_with(one, [of for of in learned.values() if of.task == task]) for one in found if one.task == task]
        for task in others.chosen
    ]
    document: dict[str, Any] = {
        **settings,
        "trainings": {name: one.trained_s for name, one in learned.items()},
        "runs": [asdict(one) for runs in by_task for one in runs],
    }
    output.write(StudyResult(name="reinforced", document=document, tables=tuple(map(policy_table, by_task))))


def _with(one: PolicyRun, learned: Sequence[Trained]) -> PolicyRun:
    """Plans of a task, and those of the algorithms that have learned its kind."""
    steps_ms = {name: of[str(one.seed)] for each in learned for name, of in each.steps_ms.items()}
    cpu_s = {name: of[str(one.seed)] for each in learned for name, of in each.cpu_s.items()}
    return replace(
        one,
        steps_ms={**one.steps_ms, **steps_ms},
        cpu_s={**one.cpu_s, **cpu_s},
        best_ms=min(one.best_ms, *steps_ms.values()),
    )
