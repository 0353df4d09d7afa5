"""Speed of the environment and of its vectorised twin: `python -m studies env-speed --registry registry`.

Shape suffixes: E episodes, A choices.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from autoshard.commands.options import command_options
from autoshard.core import CostModel, Level, Link, MemoryBytes, TableSet, Topology
from autoshard.evaluation.analytic import AnalyticCostModel
from autoshard.formats import load_tables, load_topology
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planning import kernel_model
from bench.measuring.devices import find_device
from env.observation import ACTION_MASK
from env.placement_env import PlacementEnv
from env.task import PlacementTask
from env.vec_env import PlacementVecEnv
from studies.frame import Machine, OutputOptions, RegistryOption, StudyResult, command_line, to_document

SCHEMA: Final = "autoshard.env_speed/1"
_POOL, _SCALE, _TOPOLOGY, _DEVICE = "metasyn", 64, "cpu-8", "cpu"
# A single environment is slow enough to be timed by few episodes.
_SINGLE_EPISODES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpeed:
    """Tables placed per second, medians of several runs in turn.

    Attributes:
        cost_model: Name of the model that prices.
        num_tasks: Episodes that the twin plays at once, each of a task of its own.
        num_tables: Tables of each task.
        num_ranks: Ranks of each task.
        memory: Memory of a rank, in even shares of all tables.
        num_runs: Runs of each environment.
        single_tables_per_s: Of one PlacementEnv.
        batch_tables_per_s: Of one PlacementVecEnv.
        ratio: Median of the runs' ratios.
    """

    cost_model: str
    num_tasks: int
    num_tables: int
    num_ranks: int
    memory: float
    num_runs: int
    single_tables_per_s: float
    batch_tables_per_s: float
    ratio: float


def draw_problems(
    pool: TableSet, model: CostModel, *, num_tasks: int, num_tables: int, num_ranks: int, memory: float
) -> list[PlacementProblem]:
    """Problems of tables drawn from a pool, whose ranks can hold `memory` even shares each."""
    link = Link(bytes_per_s=1e9)
    level = Level(name="all", size=num_ranks, all_to_all=link, all_reduce=link)
    problems = []
    for seed in range(num_tasks):
        tables = pool.sample(num_tables, seed)
        share = sum(table.storage_bytes for table in tables.tables) / num_ranks
        hbm = max(int(memory * share), max(table.storage_bytes for table in tables.tables))
        topology = Topology(world_size=num_ranks, device=_DEVICE, memory_bytes=MemoryBytes(hbm=hbm), levels=(level,))
        problems.append(PlacementProblem.table_wise(tables, topology, model))
    return problems


def measure(problems: Sequence[PlacementProblem], *, memory: float, num_runs: int) -> EnvSpeed:
    """Plays both environments in turn, on one thread, with actions drawn by the mask; only `step` is timed.

    The clock is the time that this process has run on any core: it stands still while another process has the core.
    The garbage collector is off, as in `timeit`.
    """
    torch.set_num_threads(1)
    venv = PlacementVecEnv([PlacementTask.of(problem) for problem in problems], len(problems), 1)
    env = PlacementEnv(problems[:_SINGLE_EPISODES])
    gc.disable()
    try:
        runs = [(_single_speed(env, seed), _batch_speed(venv, problems, seed)) for seed in range(num_runs + 1)]
    finally:
        gc.enable()
    single, batch = np.array(runs[1:]).T  # the first warms caches and clocks
    return EnvSpeed(
        cost_model=problems[0].model.name,
        num_tasks=len(problems),
        num_tables=problems[0].num_items,
        num_ranks=problems[0].num_ranks,
        memory=memory,
        num_runs=num_runs,
        single_tables_per_s=float(np.median(single)),
        batch_tables_per_s=float(np.median(batch)),
        ratio=float(np.median(batch / single)),
    )


def _single_speed(env: PlacementEnv, seed: int) -> float:
    rng, taken_s, num_tables = np.random.default_rng(seed), 0.0, 0
    for task in range(len(env.tasks)):
        observation, _ = env.reset(options={"task": task})
        done = False
        while not done:
            action = _draw(observation[ACTION_MASK][None], rng)[0]
            started_s = time.process_time()
            observation, _, done, _, _ = env.step(action)
            taken_s += time.process_time() - started_s
            num_tables += 1
    return num_tables / taken_s


def _batch_speed(venv: PlacementVecEnv, problems: Sequence[PlacementProblem], seed: int) -> float:
    rng, taken_s = np.random.default_rng(seed), 0.0
    venv.seed(seed)
    observation = venv.reset()
    num_steps = problems[0].num_items
    for _ in range(num_steps):
        assert isinstance(observation, dict)
        actions_E = _draw(observation[ACTION_MASK], rng)
        started_s = time.process_time()
        observation, _, _, _ = venv.step(actions_E)
        taken_s += time.process_time() - started_s
    return num_steps * venv.num_envs / taken_s


def _draw(mask_EA: NDArray[Any], rng: np.random.Generator) -> NDArray[np.int64]:
    return (rng.random(mask_EA.shape) * mask_EA).argmax(axis=1)


class Pricing(StrEnum):
    """The cost model that gives the rewards."""

    LEARNED = "learned"
    ANALYTIC = "analytic"


@command_options()
class EnvSpeedOptions:
    """Options of the study `env-speed`."""

    registry: RegistryOption = None
    cost: Annotated[Pricing, typer.Option(help="Cost model that gives the rewards.")] = Pricing.LEARNED
    tasks: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 256
    tables: Annotated[int, typer.Option(min=1, help="Tables per task.")] = 80
    ranks: Annotated[int, typer.Option(min=1, help="Ranks per task.")] = 8
    memory: Annotated[float, typer.Option(help="Memory of a rank, in even shares of all tables.")] = 1000.0
    runs: Annotated[int, typer.Option(min=1, help="Runs of each; medians are taken.")] = 5

    def model(self) -> CostModel:
        """The cost model that gives the rewards."""
        if self.cost is Pricing.LEARNED:
            return kernel_model(load_topology(_TOPOLOGY), self.registry)
        return AnalyticCostModel.for_device(_DEVICE)


def main(options: EnvSpeedOptions, output: OutputOptions) -> None:
    """Times the single environment and the vectorised one, in tables placed per second.

    Example:
        python -m studies env-speed --runs 7 --tasks 256
    """
    problems = draw_problems(
        load_tables(_POOL).scaled(_SCALE),
        options.model(),
        num_tasks=options.tasks,
        num_tables=options.tables,
        num_ranks=options.ranks,
        memory=options.memory,
    )
    speed = measure(problems, memory=options.memory, num_runs=options.runs)
    on = Machine.this(find_device(_DEVICE), command_line("env-speed", options))
    text = (
        f"{speed.cost_model}, {speed.num_tables} tables on {speed.num_ranks} ranks: {speed.single_tables_per_s:,.0f} "
        f"tables/s one at a time, {speed.batch_tables_per_s:,.0f} tables/s with {speed.num_tasks} tasks at once, "
        f"ratio {speed.ratio:.0f} (medians of {speed.num_runs} runs)"
    )
    document = {**to_document(speed, SCHEMA), "machine": on.to_json()}
    output.write(StudyResult(name="env-speed", document=document, notes=(text,)))
