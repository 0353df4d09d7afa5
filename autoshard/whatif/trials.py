"""Runs of drawn plans on processes of this machine, and what their parts took: the ground truth of predicted steps.

Shape suffixes: R ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.core import (
    DenseLayers,
    Level,
    Link,
    MemoryBytes,
    PlacedShard,
    Shard,
    ShardingPlan,
    TableSet,
    Topology,
)
from autoshard.core.errors import InvalidOptionError
from autoshard.core.step import StepPart
from autoshard.formats import write_plan
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_costs, make_plan
from autoshard.runtime.processes.launch import DEFAULT_TIMEOUT_S, LOCAL, Launcher, run_requests
from autoshard.runtime.results import RunRequest, RunResult

#: Most of the tables on the first rank: a plan that no planner makes.
LOPSIDED = "lopsided"
DEFAULT_PLANNERS = ("random", "size-greedy", "lookup-greedy", "cost-greedy", LOPSIDED)
_LOPSIDED_SHARE = 0.8
_SMALLEST_TASK, _LARGEST_TASK = 8, 80
_BATCH_SIZES = (256, 512, 1024, 2048)
_DENSE_FEATURES = 13
_TOP_WIDTHS = ((64,), (256, 64), (512, 256))
_BOTTOM_WIDTHS = ((64,), (256,), (512, 128))
#: Of the link between processes of one machine, until collectives were measured: assumptions.
_LOCAL_LINK = Link(bytes_per_s=2e9, latency_s=2e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run: a task drawn from a pool, and who plans it.

    Attributes:
        seed: Of the task, the plan and the run.
        num_tables: Tables of the task.
        batch_size: Samples per step over all ranks.
        planner: Name of a planner, or `LOPSIDED`.
        dense: Dense layers; the bottom perceptron ends as wide as most of the tables.
    """

    seed: int
    num_tables: int
    batch_size: int
    planner: str
    dense: DenseLayers

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What a run's step took, in milliseconds; waiting for other ranks counts to no part.

    Attributes:
        step_ms: Median over steps of the slowest rank.
        part_ms: Parts that the runtime times, and `dense` for all that is left.
        work_ms_R: What each rank took for parts that it works through by itself: kernels and, in virtual time, all
            parts without their collectives.
        spread: How much longer the slowest of several runs of the plan took than the quickest, which this is, as a
            share of it; 0 for a single run.
    """

    step_ms: float
    part_ms: Mapping[StepPart, float] = field(default_factory=dict)
    work_ms_R: tuple[Mapping[StepPart, float], ...] = ()
    spread: float = 0.0

    @classmethod
    def of(cls, result: RunResult) -> MeasuredStep:
        """Reads the parts of a run.

        Kernels count at the slowest rank. Exchanges count at the quickest: it comes last, so that it waits least.
        Where messages differ much, that is less than the step waits, and the rest counts to `dense`.
        """
        ranks = result.ranks
        parts = {
            StepPart.INPUT: min(rank.input_ms for rank in ranks),
            StepPart.FORWARD_KERNEL: max(rank.forward_kernel_ms for rank in ranks),
            StepPart.FORWARD_EXCHANGE: min(rank.forward_exchange_ms for rank in ranks),
            StepPart.BACKWARD_EXCHANGE: min(rank.backward_exchange_ms for rank in ranks),
            StepPart.BACKWARD_KERNEL: max(rank.backward_kernel_ms for rank in ranks),
        }
        parts[StepPart.DENSE] = max(0.0, result.step_ms - sum(parts.values()))
        kernels = [
            {StepPart.FORWARD_KERNEL: rank.forward_kernel_ms, StepPart.BACKWARD_KERNEL: rank.backward_kernel_ms}
            for rank in ranks
        ]
        alone = [{} if result.virtual is None else rank.work_ms for rank in ranks]
        work = tuple({**by_work, **by_kernel} for by_work, by_kernel in zip(alone, kernels, strict=True))
        return cls(step_ms=result.step_ms, part_ms=parts, work_ms_R=work)

    @classmethod
    def quickest(cls, runs: Sequence[MeasuredStep]) -> MeasuredStep:
        """The run of one plan that other processes of the machine disturbed least."""
        quickest, slowest = (choose(runs, key=lambda run: run.step_ms) for choose in (min, max))
        return replace(quickest, spread=slowest.step_ms / quickest.step_ms - 1.0)


def draw_trials(
    count: int,
    *,
    seed: int,
    planners: Sequence[str] = DEFAULT_PLANNERS,
    num_tables: tuple[int, int] = (_SMALLEST_TASK, _LARGEST_TASK),
    batch_sizes: Sequence[int] = _BATCH_SIZES,
) -> tuple[Trial, ...]:
    """Draws trials: planners and batch sizes take turns, all else is random; the same seed gives the same ones.

    The first trials of a longer list are those of a shorter one.

    Raises:
        InvalidOptionError: If there is nothing to draw from.
    """
    if count < 1 or not planners or not batch_sizes or not 1 <= num_tables[0] <= num_tables[1]:
        raise InvalidOptionError("needs at least one trial, planner, batch size and table", field="trials")
    trials = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        low, high = np.log(num_tables[0]), np.log(num_tables[1])
        bottom, top = rng.choice(len(_BOTTOM_WIDTHS)), rng.choice(len(_TOP_WIDTHS))
        layers = DenseLayers(
            num_dense_features=_DENSE_FEATURES,
            bottom_mlp=(*_BOTTOM_WIDTHS[bottom], int(rng.choice((16, 32)))),
            top_mlp=(*_TOP_WIDTHS[top], 1),
        )
        trials.append(
            Trial(
                seed=int(rng.integers(2**31)),
                num_tables=round(float(np.exp(rng.uniform(low, high)))),
                batch_size=int(batch_sizes[int(rng.integers(len(batch_sizes)))]),
                planner=planners[number % len(planners)],
                dense=layers,
            )
        )
    return tuple(trials)


def local_topology(device: str, num_ranks: int, hbm_bytes: int) -> Topology:
    """As many ranks as processes run on this machine, on one level.

    Args:
        device: Key of the device kind.
        num_ranks: Ranks.
        hbm_bytes: Memory of each for embeddings.
    """
    level = Level(name="node", size=num_ranks, all_to_all=_LOCAL_LINK, all_reduce=_LOCAL_LINK)
    return Topology(world_size=num_ranks, device=device, memory_bytes=MemoryBytes(hbm=hbm_bytes), levels=(level,))


def plan_trial(trial: Trial, pool: TableSet, topology: Topology, registry: Path | None = None) -> ShardingPlan:
    """The plan of a trial, priced with what the registry has.

    Raises:
        AutoshardError: If it cannot be planned, as `make_plan` says.
    """
    tables = replace(pool.sample(trial.num_tables, trial.seed), batch_size=trial.batch_size, dense=trial.dense)
    return plan_task(trial.planner, tables, topology, trial.seed, registry)


def plan_task(
    planner: str, tables: TableSet, topology: Topology, seed: int, registry: Path | None = None
) -> ShardingPlan:
    """A plan by a planner or by `LOPSIDED`, priced with what the registry has.

    Raises:
        AutoshardError: If it cannot be planned, as `make_plan` says.
    """
    if planner == LOPSIDED:
        is_elsewhere_T = np.random.default_rng(seed).random(len(tables.tables)) >= _LOPSIDED_SHARE
        shards = tuple(
            PlacedShard.table_wise(Shard.whole(table), 1 + index % (topology.world_size - 1) if elsewhere else 0)
            for index, (table, elsewhere) in enumerate(zip(tables.tables, is_elsewhere_T, strict=True))
        )
        return ShardingPlan(tables=tables, topology=topology, shards=shards)
    costs = make_costs(tables, topology, registry)
    request = PlanRequest(tables=tables, topology=topology, costs=costs, seed=seed, registry=registry)
    return make_plan(planner, request)


def execute_plans(
    plans: Sequence[ShardingPlan],
    each: Sequence[Mapping[str, Any]] = (),
    *,
    repeats: int = 1,
    rounds: int = 1,
    orders_folder: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_step: Callable[[int, int], None] | None = None,
    launcher: Launcher = LOCAL,
    **settings: Any,
) -> tuple[tuple[RunResult, ...], ...]:
    """Executes plans in one start of the processes, a process for each rank, by files that are there meanwhile.

    Args:
        plans: Of as many ranks each.
        each: Fields of `RunRequest` by plan, such as its `engine` or `seed`; left out, all plans have the same.
        repeats: Times that all plans are executed, one after the other; each time their tables are made anew.
        rounds: As `run_requests` has it: times that plans make their steps in turn, with all tables in memory.
        orders_folder: Where the row orders lie that plans name; None where they name none.
        timeout_s: Time for all of it.
        on_step: Told how many steps are done, and of how many.
        launcher: Nodes that the processes run on.
        settings: Fields of `RunRequest` that all plans have, such as `steps`, or `virtual_time=True`.

    Returns:
        For each plan, what was measured each of `repeats` times.

    Raises:
        AutoshardError: As `run_requests`.
    """
    with tempfile.TemporaryDirectory(prefix="autoshard-plans-") as folder:
        requests = []
        for number, plan in enumerate(plans):
            file = Path(folder, f"plan-{number}.json")
            write_plan(plan, file)
            if orders_folder is not None:
                for order in plan.row_orders.values():
                    link = Path(folder, order.file)
                    if not link.exists():
                        link.symlink_to((orders_folder / order.file).absolute())
            requests.append(RunRequest(plan_path=str(file), **{**settings, **(each[number] if each else {})}))
        results = run_requests(
            requests * repeats,
            plans[0].topology.world_size,
            timeout_s=timeout_s,
            on_progress=None if on_step is None else lambda progress: on_step(progress.done, progress.total),
            launcher=launcher,
            rounds=rounds,
        )
    return tuple(results[index :: len(plans)] for index in range(len(plans)))


def run_trials(
    plans: Sequence[ShardingPlan],
    seeds: Sequence[int],
    *,
    steps: int = 20,
    warmup_steps: int = 3,
    repeats: int = 1,
    device: str = "auto",
    on_step: Callable[[int, int], None] | None = None,
    launcher: Launcher = LOCAL,
) -> tuple[MeasuredStep, ...]:
    """Runs plans one after the other in the same processes, one process per rank.

    Args:
        plans: Of as many ranks each.
        seeds: Of weights and batches, one per plan.
        steps: Measured steps of each.
        warmup_steps: Steps before them.
        repeats: Times that all plans are run, one round after the other; the quickest run of each counts.
        device: `cpu`, `cuda` or `auto`, as `RunRequest` takes it.
        on_step: Told how many steps are done, and of how many.
        launcher: Nodes that the processes run on.

    Raises:
        AutoshardError: As `run_requests`.
    """
    executed = execute_plans(
        plans,
        [{"seed": seed} for seed in seeds],
        repeats=repeats,
        on_step=on_step,
        launcher=launcher,
        steps=steps,
        warmup_steps=warmup_steps,
        device=device,
    )
    return tuple(MeasuredStep.quickest([MeasuredStep.of(result) for result in of_plan]) for of_plan in executed)
