"""A loop that collects where the cost model is least certain and trains, beside one that collects at random."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import torch
import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.core.errors import FormatError, InvalidOptionError, SampleStoreError
from autoshard.formats.documents.json_document import format_json
from autoshard.formats.files import atomic_write
from autoshard.formats.stores.samples import devices_in, read_samples
from bench.collecting.options import CollectOptions
from bench.collecting.run import run_collection
from bench.collecting.termination import TERMINATED_EXIT_CODE, termination_raised
from costmodel.kernel.metrics import held_out_metrics, predict
from costmodel.kernel.training import MIN_SAMPLES, CostTrainingOptions, TrainedCostModel, train_cost_model
from costmodel.registry.versions import Registry
from studies.cost_models.evidence import Evidence
from studies.frame import read_document, to_document

SCHEMA: Final = "autoshard.active/1"
#: Sets are held out from what was chosen without asking a model; older collectors named placements otherwise.
_HELD_OUT_SOURCES = ("random", "placements", "random_placement", "greedy_placement")
_FIRST_WHERE = "random,placements"
_HELD_OUT_SHARE, _FEWEST_HELD_OUT, _MOST_HELD_OUT = 0.2, 20, 500
#: A collector needs this long to start, and to measure anything.
_SHORTEST_ROUND_S = 20.0

_HOST = "cpu"

Log = Callable[[str], None]


@command_options()
class ActiveOptions:
    """Options of the study `active`; the last three are set in Python only."""

    store: Annotated[Path, typer.Option(help="Folder of samples; made when missing.")]
    seconds: Annotated[float, positive_option("Time for all, training included.")] = 3600.0
    device: Annotated[str | None, typer.Option(help="Key of the device.", show_default="that of this machine")] = None
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of collecting and training.")] = 5
    tables: Annotated[str, typer.Option(help="Tables to measure: a file, or the name of bundled ones.")] = "metasyn"
    scale: Annotated[int, typer.Option(min=1, help="Divides rows and batch.")] = 64
    updates: Annotated[int | None, typer.Option(min=1, help="Updates of each training.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Of held-out sets and of training.")] = 0
    compare_random: bool = True
    """Whether a second store, in which samples are chosen at random, is filled and trained on as well."""
    max_tables: int = 15
    """Largest number of tables in a set."""
    training: CostTrainingOptions = field(default_factory=CostTrainingOptions)
    """Of every model; `updates` take precedence over its schedule."""

    @property
    def updated_training(self) -> CostTrainingOptions:
        """Training options with the number of updates."""
        return self.training if self.updates is None else replace(self.training, num_updates=self.updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A model that was trained after collecting.

    Attributes:
        arm: How samples were chosen: `uncertain` or `random`.
        num_samples: Samples that it was trained on, noisy ones and held-out sets left out.
        relative_error: Mean relative error on the held-out sets.
        collect_s: Time that collecting took in this round.
    """

    arm: str
    num_samples: int
    relative_error: float
    mae_ms: float
    kendall_tau: float
    collect_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Rounds of a loop; a later loop on the same store continues from them.

    Attributes:
        device: Key of the device.
        held_out: Ids of sets that no model of the loop is trained on.
        rounds: In the order in which they ended; the first of each arm has what the store held at the start.
    """

    device: str
    held_out: tuple[str, ...]
    rounds: tuple[Round, ...] = ()

    def with_round(self, found: Round) -> Progress:
        """The same with one more round."""
        return Progress(device=self.device, held_out=self.held_out, rounds=(*self.rounds, found))

    def of(self, arm: str) -> tuple[Round, ...]:
        """The rounds of an arm."""
        return tuple(found for found in self.rounds if found.arm == arm)


def read_progress(file: Path) -> Progress | None:
    """Reads the file of an earlier loop; None if there was none.

    Raises:
        FormatError: If it is not what a loop writes.
    """
    if not file.exists():
        return None
    try:
        return read_document(file, Progress, SCHEMA)
    except FormatError as error:
        message = f"{error.message}; delete it to start the loop anew"
        raise FormatError(message, field=error.field, source=error.source) from error


def active_folder(store: Path, device: str) -> Path:
    """Folder of a loop's progress, its models and the store that it compares with; no part of the samples."""
    return store / f"active-{device}"


def run_active_loop(options: ActiveOptions, log: Log) -> tuple[Progress, TrainedCostModel]:
    """Collects and trains in turn until time is up.

    Rounds are written down as they end, so that a loop that was killed loses one at most; samples of the killed one
    stay.

    Args:
        options: The options.
        log: Receives a line for each round.

    Returns:
        The rounds, also those of earlier loops on the store, and the last model that was trained where uncertain.

    Raises:
        SampleStoreError: If there are too few samples even after the first collection.
        SystemExit: If SIGTERM ended it.
    """
    with termination_raised():
        return _Loop(options, log).run()


class _Loop:
    def __init__(self, options: ActiveOptions, log: Log) -> None:
        self._options, self._log = options, log
        self._deadline = time.monotonic() + options.seconds
        self._training_s = 0.0

    def run(self) -> tuple[Progress, TrainedCostModel]:
        device = self._ensure_samples()
        folder = active_folder(self._options.store, device)
        file = folder / "rounds.json"
        progress = read_progress(file) or Progress(device=device, held_out=self._draw_held_out(device))
        stores = {"uncertain": self._options.store}
        if self._options.compare_random:
            stores["random"] = _store_to_compare(self._options.store, folder / "random")
        models: dict[str, TrainedCostModel] = {}
        for arm, store in stores.items():
            trained, found = self._train(arm, store, progress, collect_s=0.0)
            models[arm] = trained
            if not progress.of(arm) or progress.of(arm)[-1].num_samples != found.num_samples:
                progress = self._keep(progress.with_round(found), file)
        for left in range(self._options.rounds, 0, -1):
            for arm, store in stores.items():
                collect_s = self._share_of_time(left * len(stores))
                if collect_s < _SHORTEST_ROUND_S:
                    return progress, models["uncertain"]
                registry = Registry(folder / "models" / arm)
                models[arm].model.publish(registry)
                collect(store, arm, collect_s, self._options, registry.root)
                models[arm], found = self._train(arm, store, progress, collect_s)
                progress = self._keep(progress.with_round(found), file)
        return progress, models["uncertain"]

    def _share_of_time(self, rounds_left: int) -> float:
        """Seconds to collect for, so that what is left is shared alike by the rounds, their training included."""
        return (self._deadline - time.monotonic()) / rounds_left - self._training_s

    def _ensure_samples(self) -> str:
        """Collects at random if the store holds too little to hold out and to train on; returns the device's key."""
        store = self._options.store
        device = self._key()
        if device is None or not self._is_enough(device):
            self._log(f"Too few samples to start from: collecting {_FIRST_WHERE}")
            seconds = self._share_of_time(self._options.rounds + 1)
            collect(store, _FIRST_WHERE, seconds, self._options, None)
            device = self._key()
        if device is None or not self._is_enough(device):
            raise SampleStoreError(
                f"too few samples: {MIN_SAMPLES} to train on and {_FEWEST_HELD_OUT} of random sets to hold out are "
                "needed; give it more --seconds",
                source=str(store),
            )
        return device

    def _key(self) -> str | None:
        """Key of the device, if the store has samples of it."""
        options = self._options
        held = devices_in(options.store) if options.store.is_dir() else ()
        fitting = [key for key in held if key == options.device or (options.device is None and _is_here(key))]
        if len(fitting) > 1:
            raise InvalidOptionError(f"must be one of {', '.join(fitting)}, as the store has them all", field="device")
        return fitting[0] if fitting else None

    def _is_enough(self, device: str) -> bool:
        num_held_out = len(self._draw_held_out(device))
        evidence = Evidence.of(read_samples(self._options.store, device))
        return num_held_out >= _FEWEST_HELD_OUT and len(evidence.samples) - num_held_out >= MIN_SAMPLES

    def _draw_held_out(self, device: str) -> tuple[str, ...]:
        evidence = Evidence.of(read_samples(self._options.store, device))
        candidates = sorted({sample.set_id for sample in evidence.samples if sample.source in _HELD_OUT_SOURCES})
        number = min(_MOST_HELD_OUT, max(_FEWEST_HELD_OUT, round(len(candidates) * _HELD_OUT_SHARE)), len(candidates))
        rng = np.random.default_rng(self._options.seed)
        return tuple(candidates[index] for index in sorted(rng.permutation(len(candidates))[:number].tolist()))

    def _train(self, arm: str, store: Path, progress: Progress, collect_s: float) -> tuple[TrainedCostModel, Round]:
        started = time.monotonic()
        evidence = Evidence.of(read_samples(store, progress.device))
        is_held_out_S = np.isin([sample.set_id for sample in evidence.samples], progress.held_out)
        train = evidence.dataset.take(np.flatnonzero(~is_held_out_S))
        held_out = evidence.dataset.take(np.flatnonzero(is_held_out_S))
        if not len(held_out):
            raise SampleStoreError("holds none of the sets that an earlier loop held out", source=str(store))
        trained = train_cost_model(
            train, device=progress.device, options=self._options.updated_training, seed=self._options.seed
        )
        metrics = held_out_metrics(predict(trained.model.predictor, held_out).sum(axis=1), held_out.kernel_ms)
        self._training_s = time.monotonic() - started
        return trained, Round(
            arm=arm,
            num_samples=len(train),
            relative_error=metrics.relative_error,
            mae_ms=metrics.mae_ms,
            kendall_tau=metrics.kendall_tau,
            collect_s=collect_s,
        )

    def _keep(self, progress: Progress, file: Path) -> Progress:
        found = progress.rounds[-1]
        atomic_write(file, format_json(to_document(progress, SCHEMA)))
        self._log(
            f"{found.arm}: {found.num_samples:,} samples, held-out error {found.relative_error:.2%}, "
            f"Kendall's tau {found.kendall_tau:.3f}"
        )
        return progress


def collect(store: Path, where: str, seconds: float, options: ActiveOptions, registry: Path | None) -> None:
    """Adds samples to a store.

    Raises:
        AutoshardError: If nothing can be measured.
        SystemExit: If SIGTERM ended it; what was measured stays.
    """
    outcomes = run_collection(
        CollectOptions(
            store=store,
            device=_kind_of(options.device),
            seconds=seconds,
            strategies=where,
            registry=registry,
            tables=options.tables,
            scale=options.scale,
            max_tables=options.max_tables,
        )
    )
    if any(outcome.is_terminated for outcome in outcomes):
        raise SystemExit(TERMINATED_EXIT_CODE)


def _kind_of(device: str | None) -> str:
    """Name of a device for the collector, from its key; that of this machine for None."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else _HOST
    return _HOST if device == _HOST else "cuda"


def _is_here(key: str) -> bool:
    return (key == _HOST) == (_kind_of(None) == _HOST)


def _store_to_compare(store: Path, copy: Path) -> Path:
    """A store with the samples of another; a copy that is there already stays as it is."""
    if not copy.is_dir():
        staging = copy.with_name(f"{copy.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for folder in store.glob("device=*"):
            shutil.copytree(folder, staging / folder.name)
        staging.rename(copy)
    return copy
