"""The study `moments`: `python -m studies moments`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated

import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core.errors import InvalidOptionError
from autoshard.runtime import Verification
from bench.measuring.devices import find_device
from studies.frame import Machine, OutputOptions, PartsOption, PartStore, StudyResult, command_line
from studies.frame.documents import read_as
from studies.runtime.clicks import ClickModel
from studies.runtime.moments.launching import (
    NoiseJob,
    NoiseResult,
    TrainedRun,
    TrainingJob,
    moments_of_noise,
    trained,
    verified,
)
from studies.runtime.moments.report import document, figures, tables
from studies.runtime.moments.results import MomentResults, best_rate
from studies.runtime.moments.setting import Run, Setting, compared_runs, tuning_runs

#: Learning rates that are tried with one group.
RATES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
_NOISE_STEPS, _VERIFIED_STEPS = 40, 20


@command_options()
class MomentOptions:
    """Options of the study `moments`."""

    seeds: Annotated[int, typer.Option(min=1, help="Seeds: planted models, each with its samples.")] = 5
    max_groups: Annotated[int, typer.Option(min=2, help="Most replica groups; a power of 2.")] = 8
    nproc: Annotated[int, typer.Option(min=2, help="Processes; a power of 2.")] = 8
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 600
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step over all processes.")] = 512
    num_tables: Annotated[int, typer.Option(min=1, help="Tables.")] = 6
    num_rows: Annotated[int, typer.Option(min=2, help="Rows of a table.")] = 4000
    held_out: Annotated[int, typer.Option(min=1, help="Batches of held-out samples.")] = 64
    all_scales: Annotated[bool, typer.Option(help="Also train with moment scales between 1 and M.")] = False
    parts: PartsOption = None

    def __post_init__(self) -> None:
        powers = (("--nproc", self.nproc), ("--max-groups", self.max_groups))
        for field, value in powers:
            if value & (value - 1):
                raise InvalidOptionError(f"must be a power of 2, got {value}", field=field)
        if self.max_groups > self.nproc:
            message = f"must be at most the {self.nproc} processes, got {self.max_groups}"
            raise InvalidOptionError(message, field="--max-groups")
        if self.batch_size % self.nproc:
            message = f"must be a multiple of the {self.nproc} processes, got {self.batch_size}"
            raise InvalidOptionError(message, field="--batch-size")

    def groups(self) -> tuple[int, ...]:
        """Numbers of replica groups: powers of 2 from 1 on."""
        return tuple(1 << power for power in range(self.max_groups.bit_length()))

    def setting(self) -> Setting:
        """What all runs have in common."""
        return Setting(
            model=ClickModel(num_tables=self.num_tables, num_rows=self.num_rows, embedding_dim=8),
            num_processes=self.nproc,
            batch_size=self.batch_size,
            num_steps=self.steps,
            num_held_out=self.held_out * self.batch_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChecks:
    """What the engine computes, without training for a purpose."""

    verifications: tuple[Verification, ...]
    noise: tuple[NoiseResult, ...]


def main(options: MomentOptions, output: OutputOptions) -> None:
    """Trains with replica groups, with and without moment scaling, and draws 2D's Fig. 4 and 5.

    Example:
        python -m studies moments --parts moments -o docs/figures
    """
    setting, groups, parts = options.setting(), options.groups(), PartStore(options.parts)
    parts.check_identity(asdict(setting))
    checks = parts.find_data("engine", EngineChecks, lambda: _engine_checks(setting, groups))
    tuning = _trained(setting, tuning_runs(RATES), parts, "Tuning the learning rate")
    runs = compared_runs(range(options.seeds), groups, best_rate(tuning), all_scales=options.all_scales)
    results = MomentResults(
        groups=groups,
        verifications=checks.verifications,
        noise=checks.noise,
        tuning=tuning,
        runs=_trained(setting, runs, parts, "Training"),
    )
    machine = Machine.this(find_device("cpu"), command_line("moments", options))
    output.write(
        StudyResult(
            name="moments",
            document=document(results, setting, machine.to_json()),
            tables=tables(results),
            images=figures(results, setting),
        )
    )


def _engine_checks(setting: Setting, groups: Sequence[int]) -> EngineChecks:
    return EngineChecks(
        verifications=verified(setting, groups, steps=_VERIFIED_STEPS),
        noise=moments_of_noise(NoiseJob(setting=replace(setting, num_steps=_NOISE_STEPS), groups=tuple(groups))),
    )


def _trained(setting: Setting, runs: Sequence[Run], parts: PartStore, label: str) -> tuple[TrainedRun, ...]:
    """Results of all runs: those that are finished, and the rest from one start of the processes."""
    left = tuple(run for run in runs if not parts.has(run.name))
    found = {run: read_as(TrainedRun, parts.read(run.name), run.name) for run in runs if run not in left}
    with console.progress(label, len(runs)) as advance:
        advance(len(found))
        for result in _kept(setting, left, parts) if left else ():
            found[result.run] = result
            advance(1)
    return tuple(found[run] for run in runs)


def _kept(setting: Setting, runs: tuple[Run, ...], parts: PartStore) -> Iterator[TrainedRun]:
    with closing(trained(TrainingJob(setting=setting, runs=runs))) as results:
        for result in results:
            parts.find(result.run.name, partial(asdict, result))
            yield result
