"""The study `dlrm`: samples per second of TorchRec's DLRM, by TorchRec and by autoshard's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer

from autoshard.commands.options import command_options
from autoshard.console import progress
from autoshard.core.errors import InvalidOptionError
from autoshard.runtime.processes.launch import running_workers
from autoshard.table import Table
from bench.measuring.devices import find_device
from studies.engines.dlrm.setting import DlrmSetting, Round, TrainedWay, Way
from studies.frame import Machine, OutputOptions, PartsOption, PartStore, StudyResult, command_line, to_document
from studies.frame.documents import read_as

SCHEMA: Final = "autoshard.dlrm/1"
_WORKER: Final = "studies.engines.dlrm.worker"
#: `studies` is a generic name: the one beside this file has to come first where the processes look for it.
_PATH: Final = (str(Path(__file__).resolve().parents[3]),)
_STALL_TIMEOUT_S: Final = 600.0
#: Options that a round's numbers do not depend on.
_FREE: Final = ("rounds", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class WayRate:
    """Samples per second of one way.

    Attributes:
        way: How the model was trained.
        layout: Sharding types of the first round's plan, with the number of tables of each.
        plan_s: Median time of planning, in seconds.
        samples_per_s: Median over rounds.
        low: Of the slowest round.
        high: Of the fastest round.
        ratio: Median over rounds of its samples per second over those of TorchRec in the same round.
        last_loss: Loss of the last step.
        loss_difference: Largest difference of a step's loss from TorchRec's in the same round.
    """

    way: Way
    layout: str
    plan_s: float
    samples_per_s: float
    low: float
    high: float
    ratio: float
    last_loss: float
    loss_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DlrmComparison:
    """All ways over all rounds."""

    setting: DlrmSetting
    num_rounds: int
    ways: tuple[WayRate, ...]


def run_round(setting: DlrmSetting, number: int) -> Round:
    """Trains in all ways on one start of the processes; each round starts with another way.

    Raises:
        ExecutionError: If a process fails or hangs.
    """
    first = number % len(Way)
    ways = [*Way][first:] + [*Way][:first]
    job = {"setting": asdict(setting), "ways": [str(way) for way in ways]}
    workers = running_workers(_WORKER, job, setting.num_processes, stall_timeout_s=_STALL_TIMEOUT_S, path=_PATH)
    with workers as (_, documents):
        found = [read_as(TrainedWay, one["result"], _WORKER) for one in documents if _is_result(one)]
    return Round(number=number, ways=tuple(found))


def _is_result(document: object) -> bool:
    return isinstance(document, dict) and "result" in document


def summed_up(setting: DlrmSetting, rounds: Sequence[Round]) -> DlrmComparison:
    """Medians over rounds."""
    by_way: dict[Way, list[TrainedWay]] = {way: [] for way in Way}
    for one in rounds:
        for trained in one.ways:
            by_way[trained.way].append(trained)
    base = by_way[Way.TORCHREC]
    rates = tuple(_rate(way, found, base) for way, found in by_way.items())
    return DlrmComparison(setting=setting, num_rounds=len(rounds), ways=rates)


def _rate(way: Way, found: Sequence[TrainedWay], base: Sequence[TrainedWay]) -> WayRate:
    speeds = [one.samples_per_s for one in found]
    pairs = list(zip(found, base, strict=True))
    return WayRate(
        way=way,
        layout=found[0].layout,
        plan_s=median(one.plan_s for one in found),
        samples_per_s=median(speeds),
        low=min(speeds),
        high=max(speeds),
        ratio=median(one.samples_per_s / other.samples_per_s for one, other in pairs),
        last_loss=found[-1].losses[-1],
        loss_difference=max(
            abs(ours - theirs) for one, other in pairs for ours, theirs in zip(one.losses, other.losses, strict=True)
        ),
    )


@command_options()
class DlrmOptions:
    """Options of the study `dlrm`."""

    tables: Annotated[str, typer.Option(help="Bundled tables of one feature each.")] = "criteo-kaggle"
    scale: Annotated[int, typer.Option(min=1, help="Divides the rows of each table.")] = 16
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of all processes.")] = 2048
    nproc: Annotated[int, typer.Option(min=2, help="Processes, one per rank.")] = 4
    rounds: Annotated[int, typer.Option(min=1, help="Trainings of each way, in turn; medians are taken.")] = 5
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each training.")] = 50
    plan_s: Annotated[float, typer.Option(min=0.01, help="Time limit of autoshard's planners, in seconds.")] = 5.0
    parts: PartsOption = None

    def setting(self) -> DlrmSetting:
        """The model and its training.

        Raises:
            InvalidOptionError: If the batch cannot be shared evenly.
        """
        if self.batch_size % self.nproc:
            raise InvalidOptionError(f"must be a multiple of the {self.nproc} processes", field="--batch-size")
        return DlrmSetting(
            tables=self.tables,
            scale=self.scale,
            batch_size=self.batch_size,
            num_processes=self.nproc,
            steps=self.steps,
            plan_s=self.plan_s,
        )


def main(options: DlrmOptions, output: OutputOptions) -> None:
    """Trains TorchRec's DLRM on Criteo's tables: by TorchRec, with a plan of autoshard's, and on autoshard's engine.

    Example:
        OMP_NUM_THREADS=1 python -m studies dlrm --rounds 7 --parts dlrm-runs
    """
    setting, parts = options.setting(), PartStore(options.parts)
    parts.check_identity({name: value for name, value in asdict(options).items() if name not in _FREE})
    rounds: list[Round] = []
    with progress("Training", options.rounds) as advance:
        for number in range(options.rounds):
            rounds.append(parts.find_data(f"round-{number}", Round, partial(run_round, setting, number)))
            advance(1)
    found = summed_up(setting, rounds)
    on = Machine.this(find_device("cpu"), command_line("dlrm", options))
    document: dict[str, Any] = {**to_document(found, SCHEMA), "machine": on.to_json()}
    output.write(StudyResult(name="dlrm", document=document, tables=(dlrm_table(found, on),)))


def dlrm_table(found: DlrmComparison, on: Machine) -> Table:
    """A line for each way."""
    setting = found.setting
    caption = (
        f"DLRM of TorchRec on {setting.tables} with rows divided by {setting.scale}, batch {setting.batch_size:,}, "
        f"{setting.num_processes} processes over gloo; medians of {found.num_rounds} rounds of {setting.steps} steps, "
        f"slowest and fastest in brackets; load average {on.load_average:.1f}"
    )
    columns = ("way", "tables", "samples/s", "over TorchRec", "planning s", "last loss", "loss difference")
    lines = [
        (
            str(one.way),
            one.layout,
            f"{one.samples_per_s:,.0f} ({one.low:,.0f} to {one.high:,.0f})",
            f"{one.ratio:.2f}",
            f"{one.plan_s:.1f}",
            f"{one.last_loss:.4f}",
            f"{one.loss_difference:.1e}",
        )
        for one in found.ways
    ]
    return Table(columns=columns, rows=tuple(lines), caption=caption)
