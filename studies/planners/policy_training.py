"""What stages of the policy's training add, and how it transfers: `python -m studies policy-training`.

Small trainings, each with a seed of its own for tasks, weights and choices, are measured on the same held-out tasks:
how far above a search of some seconds the planner `policy` ends with one decode, and that decode alone. Transfer
compares trainings that leave a device, large worlds or a pool of tables out with those that do not, on tasks of what
was left out. Fine-tuning begins with the policy that is in use, and learns from tasks of one device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from safetensors.numpy import load_file, save

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.console import log
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.evaluate import evaluate
from autoshard.formats import load_topology
from autoshard.formats.files import atomic_write
from autoshard.planning import get_planner
from autoshard.runtime.processes.threads import intra_op_threads
from autoshard.table import Table
from policies.planning.decoding import decoded
from policies.planning.planner import named_task
from policies.planning.trained import ANY_DEVICE, TrainedPolicy
from policies.training.drawn_tasks import MACHINES, POOLS, TaskKind, TaskSplit, machines_of, task_seeds, warnings_once
from policies.training.run_options import LearningOptions, PolicyRunOptions, TaskOptions
from policies.training.runs import PolicyTraining, Progress
from studies.frame import (
    OutputOptions,
    PartsOption,
    PartStore,
    RegistryOption,
    StudyResult,
    names_in,
    options_without,
)

#: What is measured.
_STAGES, _TRANSFER, _FINE_TUNE = "stages", "transfer", "fine-tune"
_ALL = "all"
#: Numbers of tables of all tasks.
_NUM_TABLES = (24, 40, 80)
#: Number of the weights that a training ends with: those of the least loss on its validation tasks.
_BEST = "best"
#: Names of trainings, and of the policy in use.
_WHOLE, _VTRACE_ONLY, _TUNED, _IN_USE = "imitation and on", "V-trace only", "fine-tuned", "in use"
#: What is left out of trainings, and measured on.
_CPU, _LARGE, _METASYN = "cpu", 32, "metasyn"
_CUTS = ("CPUs", "32 and 64 ranks", "MetaSyn's tables")
#: Tasks that V-trace alone plays, and seconds that their unused labels take.
_NUM_PLAYED, _LEAST_SEARCH_S = 24, 0.02


@command_options()
class TrainingStudyOptions:
    """Options of the study `policy-training`."""

    measure: Annotated[str, typer.Option(help=f"With commas: any of {_STAGES}, {_TRANSFER}, {_FINE_TUNE}.")] = (
        f"{_STAGES},{_TRANSFER},{_FINE_TUNE}"
    )
    seeds: Annotated[int, typer.Option(min=1, help="Trainings through all stages.")] = 3
    other_seeds: Annotated[int, typer.Option(min=1, help="Trainings by V-trace alone, and of each transfer.")] = 1
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks of a training.")] = 64
    search_seconds: Annotated[float, positive_option("Seconds of the search of each task.")] = 0.6
    updates: Annotated[int, typer.Option(min=1, help="Updates by imitation.")] = 400
    vtrace_updates: Annotated[int, typer.Option(min=1, help="Updates by V-trace; three times as many alone.")] = 100
    tuning_seconds: Annotated[float, positive_option("Seconds of a fine-tuning.")] = 300.0
    num_held_out: Annotated[int, typer.Option(min=1, help="Held-out tasks of each kind.")] = 20
    best_s: Annotated[float, positive_option("Seconds of the search that held-out tasks are compared with.")] = 3.0
    registry: RegistryOption = None
    parts: PartsOption = None

    def __post_init__(self) -> None:
        _ = self.chosen

    @property
    def chosen(self) -> tuple[str, ...]:
        """What is measured."""
        return names_in(self.measure, "--measure", (_STAGES, _TRANSFER, _FINE_TUNE))

    def settings(self) -> dict[str, object]:
        """What parts depend on."""
        return options_without(self, ("measure", "seeds", "other_seeds", "registry", "parts"))


class _Trainings:
    """Trains and measures, part by part.

    Args:
        options: Of the study.
        folder: For the folders of trainings.
    """

    def __init__(self, options: TrainingStudyOptions, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._store = PartStore.of(options.parts, options.settings())
        self._all = TaskKind(num_tables=_NUM_TABLES, registry=options.registry)

    def stages(self, seed: int) -> list[dict[str, Any]]:
        """What checkpoints of the training through all stages reach on held-out tasks of all kinds."""
        options = self._options
        self._train(
            _WHOLE,
            seed,
            self._all,
            self._run(seed),
            self._run(seed, improvements=1),
            self._run(seed, improvements=1, vtrace_updates=options.vtrace_updates),
        )
        return self._curve(_WHOLE, seed)

    def vtrace_alone(self, seed: int) -> list[dict[str, Any]]:
        """What checkpoints of V-trace from random weights reach there."""
        options = self._options
        tasks = TaskOptions(num_tasks=min(_NUM_PLAYED, options.num_tasks), search_seconds=_LEAST_SEARCH_S)
        learning = LearningOptions(updates=0, improvements=0, vtrace_updates=3 * options.vtrace_updates, seed=seed)
        self._train(_VTRACE_ONLY, seed, self._all, PolicyRunOptions(tasks=tasks, learning=learning))
        return self._curve(_VTRACE_ONLY, seed)

    def in_use(self) -> dict[str, Any]:
        """What the policy in use reaches there."""
        policy = TrainedPolicy.for_device(self._options.registry, ANY_DEVICE)
        measured = self._store.find(f"measured-{_IN_USE}-on-{_ALL}", lambda: self._measure(policy, self._all, _ALL))
        return {"training": _IN_USE, "stage": "", "done": 1.0, **measured}

    def _curve(self, name: str, seed: int) -> list[dict[str, Any]]:
        return [
            {"training": name, "seed": seed, **one, **self._measured(name, seed, one["number"], self._all, _ALL)}
            for one in self._checkpoints(name, seed)
        ]

    def transfer(self, cut: str, seed: int) -> list[dict[str, Any]]:
        """What a training without tasks of some kind reaches on these, and the one with them; both by imitation."""
        inside, left_out = halves(cut, self._all)
        self._train(_WHOLE, seed, self._all, self._run(seed))
        self._train(f"without {cut}", seed, inside, self._run(seed))
        found = []
        for name in (_WHOLE, f"without {cut}"):
            number = [one["number"] for one in self._checkpoints(name, seed) if one["stage"] == "imitation"][-1]
            measured = self._measured(name, seed, number, left_out, cut)
            found.append({"left_out": cut, "training": name, "seed": seed, **measured})
        return found

    def fine_tuned(self) -> list[dict[str, Any]]:
        """What the policy in use reaches on a device, and what it does after its fine-tuning."""
        kind = replace(self._all, machines=machines_of(_CPU))
        run = PolicyRunOptions(
            tasks=TaskOptions(device=_CPU), learning=LearningOptions(), seconds=self._options.tuning_seconds
        )
        policy = TrainedPolicy.for_device(self._options.registry, _CPU)
        self._train(_TUNED, 0, kind, run, begin=policy)
        before = self._store.find(f"measured-{_IN_USE}-on-{_CPU}", lambda: self._measure(policy, kind, _CPU))
        after = self._measured(_TUNED, 0, _BEST, kind, _CPU)
        return [{"training": _IN_USE, **before}, {"training": _TUNED, **after}]

    def _run(self, seed: int, *, improvements: int = 0, vtrace_updates: int = 0) -> PolicyRunOptions:
        options = self._options
        learning = LearningOptions(
            updates=options.updates, improvements=improvements, vtrace_updates=vtrace_updates, seed=seed
        )
        tasks = TaskOptions(num_tasks=options.num_tasks, search_seconds=options.search_seconds)
        return PolicyRunOptions(tasks=tasks, learning=learning)

    def _train(
        self, name: str, seed: int, kind: TaskKind, *runs: PolicyRunOptions, begin: TrainedPolicy | None = None
    ) -> None:
        """Makes a training's runs, each of which goes on where the one before ended, and keeps its checkpoints."""
        folder = self._folder / "trainings" / f"{name}-{seed}"
        for number, run in enumerate(runs):
            self._store.find(
                f"trained-{name}-{seed}-{number}", partial(self._trained, kind, folder, number, run, begin)
            )

    def _trained(
        self, kind: TaskKind, folder: Path, number: int, run: PolicyRunOptions, begin: TrainedPolicy | None
    ) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def keep(progress: Progress) -> None:
            if progress.loss is None:
                return
            of = f"{number}-{len(found)}"
            found.append({"number": of, "stage": progress.stage, "done": progress.done, "loss": progress.loss})
            atomic_write(folder / f"{of}.safetensors", save(training.latest))
            log(f"{folder.name}: {progress.stage} {progress.done:.0%}, loss {progress.loss:.3f}")

        weights = None if begin is None else dict(begin.network.weights)
        began_s = time.process_time()
        training = PolicyTraining(run, kind, folder, begin=weights, report=keep)
        atomic_write(folder / f"{_BEST}.safetensors", save(training.run()))
        return {"checkpoints": found, "cpu_s": round(time.process_time() - began_s, 1)}

    def _checkpoints(self, name: str, seed: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while self._store.has(part := f"trained-{name}-{seed}-{len(found)}"):
            found.append(self._store.read(part))
        return [one for of_run in found for one in of_run["checkpoints"]]

    def _measured(self, name: str, seed: int, number: str, kind: TaskKind, of: str) -> dict[str, Any]:
        """A checkpoint on held-out tasks of a kind."""

        def measure() -> dict[str, Any]:
            weights = load_file(self._folder / "trainings" / f"{name}-{seed}" / f"{number}.safetensors")
            return self._measure(TrainedPolicy(weights=weights, training={}), kind, of)

        return self._store.find(f"measured-{name}-{seed}-{number}-on-{of}", measure)

    def _measure(self, policy: TrainedPolicy, kind: TaskKind, of: str) -> dict[str, Any]:
        """Steps on held-out tasks over what a search of each finds, less 1: as planned, and of the decode alone."""
        best = self._store.find(f"best-{of}", partial(self._best, kind))
        planned, decodes = [], []
        for seed, best_ms in zip(best["seeds"], best["best_ms"], strict=True):
            task = named_task(policy, kind.request(seed))
            decode_ms = decoded(policy.network, task).layout(0).step_ms()
            planned.append(min(decode_ms, task.witness_ms) / best_ms - 1)
            decodes.append(decode_ms / best_ms - 1)
        return {"planned": planned, "decode": decodes}

    def _best(self, kind: TaskKind) -> dict[str, Any]:
        """Seeds of held-out tasks that have a plan, and the steps of searches."""
        found = {}
        for seed in task_seeds(TaskSplit.TEST, self._options.num_held_out):
            request = replace(kind.request(seed), time_limit_s=self._options.best_s)
            try:
                plan = get_planner("auto").plan(request)
            except InfeasiblePlanError:
                continue
            found[seed] = evaluate(plan, request.costs).step_ms.value
        return {"seeds": list(found), "best_ms": list(found.values())}


def halves(cut: str, kind: TaskKind) -> list[TaskKind]:
    """What is left of a kind of tasks without some, and these."""
    if cut == _CUTS[2]:
        pools = [tuple(pool for pool in POOLS if (pool == _METASYN) == is_out) for is_out in (False, True)]
        return [replace(kind, pools=one) for one in pools]
    machines = {name: load_topology(name) for name in MACHINES}
    is_out = {
        name: one.device == _CPU if cut == _CUTS[0] else one.world_size >= _LARGE for name, one in machines.items()
    }
    of = [tuple(name for name in MACHINES if is_out[name] == wanted) for wanted in (False, True)]
    return [replace(kind, machines=one) for one in of]


def main(options: TrainingStudyOptions, output: OutputOptions) -> None:
    """Measures what imitation, self-improvement and V-trace add, what transfers, and what fine-tuning gains.

    Example:
        OMP_NUM_THREADS=1 python -m studies policy-training --seeds 3 --parts trainings -o docs/figures
    """
    with ExitStack() as stack:
        folder = options.parts or Path(stack.enter_context(TemporaryDirectory()))
        stack.enter_context(intra_op_threads(1))
        stack.enter_context(warnings_once())
        trainings = _Trainings(options, folder)
        chosen, found, tables = options.chosen, dict[str, Any](), []
        if _STAGES in chosen:
            found[_STAGES] = [one for seed in range(options.seeds) for one in trainings.stages(seed)]
            found[_STAGES] += [one for seed in range(options.other_seeds) for one in trainings.vtrace_alone(seed)]
            found[_STAGES].append(trainings.in_use())
            tables += [trainings_table(found[_STAGES], ("training", "stage", "done"), "Stages of the training")]
        if _TRANSFER in chosen:
            seeds = range(options.other_seeds)
            found[_TRANSFER] = [one for seed in seeds for cut in _CUTS for one in trainings.transfer(cut, seed)]
            tables += [trainings_table(found[_TRANSFER], ("left_out", "training"), "Tasks of what was left out")]
        if _FINE_TUNE in chosen:
            found[_FINE_TUNE] = trainings.fine_tuned()
            tables += [trainings_table(found[_FINE_TUNE], ("training",), f"Fine-tuning to {_CPU}")]
    document = {**options.settings(), **found}
    output.write(StudyResult(name="policy-training", document=document, tables=tuple(tables)))


def trainings_table(found: Sequence[Mapping[str, Any]], keys: Sequence[str], caption: str) -> Table:
    """Mean excesses of trainings that differ in nothing but their seed, the least and the largest, and their losses."""
    lines = []
    for key in dict.fromkeys(tuple(one[key] for key in keys) for one in found):
        mine = [one for one in found if tuple(one[name] for name in keys) == key]
        words = [f"{word:.0%}" if isinstance(word, float) else str(word) for word in key]
        of_seeds = [[fmean(one[name]) for one in mine] for name in ("planned", "decode")]
        excesses = [f"{fmean(means):.2%} ({min(means):.2%} to {max(means):.2%})" for means in of_seeds]
        losses = [one["loss"] for one in mine if "loss" in one]
        lines.append((*words, str(len(mine)), *excesses, f"{fmean(losses):.3f}" if losses else ""))
    columns = (*(key.replace("_", " ") for key in keys), "seeds", "planned", "decode alone", "loss")
    return Table(columns=columns, rows=tuple(lines), caption=caption)
