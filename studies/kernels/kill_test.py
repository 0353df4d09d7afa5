"""Kills collectors at random moments and checks after every kill that the store has lost nothing.

Two collectors add to one store at a time. Half of the kills come when a file is seen being written, the others at a
random moment after the start or after the first file.

Example:
    python -m studies kill-test --times 50
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core.errors import AutoshardError, ExecutionError, InvalidOptionError
from autoshard.formats.stores.sample_store import damaged_samples
from autoshard.formats.stores.samples import read_sample_file, read_samples
from autoshard.table import Table
from studies.frame import OutputOptions, StudyResult
from studies.kernels.kill_target import collect_endlessly

_NUM_COLLECTORS = 2
#: When kills come, in turn: at a random moment after the start, or after the first file, or while a file is written.
_MOMENTS = ("starting", "writing", "running", "writing")
#: Latest random moment.
_LATEST_S = 2.0
_STARTED_TIMEOUT_S = 180.0
_PART = re.compile(r"part-\d{8}T\d{12}-[0-9a-f]{12}\.parquet")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill and what the store was like after it.

    Attributes:
        moment: `starting`, before the collector had written its first file; `running`; or `writing`, while a
            temporary file was seen.
        lived_s: Age of the killed collector.
        num_files: Files in the store.
        num_samples: Samples in them.
        num_leftovers: Temporary files that killed collectors have left.
        faults: Lost or damaged files; empty when nothing was lost.
    """

    moment: str
    lived_s: float
    num_files: int
    num_samples: int
    num_leftovers: int
    faults: tuple[str, ...]


class StoreWatch:
    """Files and samples that a store has ever held or was promised.

    Args of the constructor:
        store: The store's folder.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._samples_of: dict[str, tuple[str, ...]] = {}
        self._promised: set[str] = set()

    @property
    def num_files(self) -> int:
        """Files seen so far."""
        return len(self._samples_of)

    @property
    def num_samples(self) -> int:
        """Samples seen so far."""
        return sum(map(len, self._samples_of.values()))

    def promise(self, file: str) -> None:
        """Notes a file that a collector has reported as written."""
        self._promised.add(file)

    def check(self) -> tuple[tuple[str, ...], int]:
        """Faults of the store now, and the number of temporary files in it."""
        faults: list[str] = []
        leftovers = 0
        present: set[str] = set()
        for file in sorted(self._store.glob("device=*/*")):
            if _TEMPORARY.fullmatch(file.name):
                leftovers += 1
            elif not _PART.fullmatch(file.name):
                faults.append(f"{file.name} is no file of a store")
            else:
                present.add(file.name)
                faults += self._check_file(file)
        faults += [f"{name} was lost" for name in sorted((self._samples_of.keys() | self._promised) - present)]
        return tuple(faults), leftovers

    def check_as_read(self) -> tuple[str, ...]:
        """Faults of the samples, all read anew as every user of a store does."""
        table = read_samples(self._store)
        ids = {sample.sample_id for sample in table.samples}
        expected = {sample for samples in self._samples_of.values() for sample in samples}
        faults = (
            [f"{len(expected ^ ids)} samples are missing, or are read that no file held"] if expected != ids else []
        )
        return (*faults, *(f"sample {sample.sample_id} is damaged" for sample in damaged_samples(table.samples)))

    def _check_file(self, file: Path) -> list[str]:
        if file.name in self._samples_of:  # written once, and never changed: looked at in `check_as_read` again
            return []
        try:
            samples = read_sample_file(file)
        except AutoshardError as error:
            return [str(error)]
        self._samples_of[file.name] = tuple(sample.sample_id for sample in samples)
        is_whole = [sample.identified() == sample for sample in samples]
        return [] if all(is_whole) and samples else [f"{file.name} holds {is_whole.count(False)} damaged samples"]


@dataclass(slots=True)
class _Collector:
    """A running collector."""

    process: Any
    written: Connection
    started: float
    files: list[str] = field(default_factory=list)

    def read_written(self, watch: StoreWatch) -> None:
        """Takes in which files it has written."""
        while True:
            try:
                text = os.read(self.written.fileno(), 65536).decode()
            except BlockingIOError:
                return
            if not text:
                return
            for name in text.split():
                self.files.append(name)
                watch.promise(name)


class KillTest:
    """Runs and kills collectors.

    Args of the constructor:
        store: The store's folder.
        seed: Of the moments.
    """

    def __init__(self, store: Path, seed: int) -> None:
        self._store, self._rng = store, random.Random(seed)
        self._watch = StoreWatch(store)
        self._context = multiprocessing.get_context("forkserver")
        # Torch and FBGEMM are imported once; collectors are forked from there, before any thread is started.
        self._context.set_forkserver_preload(["studies.kernels.kill_target"])

    def run(self, times: int, advance: console.Advance = lambda _: None) -> list[Kill]:
        """Kills so many times.

        Raises:
            ExecutionError: If a collector ends by itself, or does not start.
        """
        collectors = [self._start(slot) for slot in range(_NUM_COLLECTORS)]
        kills: list[Kill] = []
        try:
            for number in range(times):
                slot = self._rng.randrange(_NUM_COLLECTORS)
                kills.append(self._kill(collectors[slot], _MOMENTS[number % len(_MOMENTS)]))
                collectors[slot] = self._start(slot)
                advance(1)
        finally:
            for collector in collectors:
                collector.process.kill()
                collector.process.join()
                collector.written.close()
        return kills

    def faults_at_the_end(self) -> tuple[str, ...]:
        """Faults of the store when it is read from the start."""
        faults, _ = self._watch.check()
        return (*faults, *self._watch.check_as_read())

    def _start(self, slot: int) -> _Collector:
        reader, writer = self._context.Pipe(duplex=False)
        os.set_blocking(reader.fileno(), False)
        seed = self._rng.randrange(2**31)
        process = self._context.Process(target=collect_endlessly, args=(str(self._store), str(slot), seed, writer))
        process.start()
        writer.close()
        return _Collector(process=process, written=reader, started=time.monotonic())

    def _kill(self, collector: _Collector, moment: str) -> Kill:
        is_writing = self._wait(collector, moment)
        lived_s = time.monotonic() - collector.started
        collector.process.kill()
        collector.process.join()
        collector.read_written(self._watch)
        collector.written.close()
        faults, leftovers = self._watch.check()
        return Kill(
            moment="writing" if is_writing else "running" if collector.files else "starting",
            lived_s=lived_s,
            num_files=self._watch.num_files,
            num_samples=self._watch.num_samples,
            num_leftovers=leftovers,
            faults=faults,
        )

    def _wait(self, collector: _Collector, moment: str) -> bool:
        """Waits for the moment of the kill; whether a file was being written then."""
        if moment != "starting":
            self._wait_for_first_file(collector)
        if moment != "writing":
            time.sleep(self._rng.uniform(0.0, _LATEST_S))
            return False
        old = self._temporaries()
        latest = time.monotonic() + _STARTED_TIMEOUT_S
        while time.monotonic() < latest:
            # Either collector's file will do: the kill comes while the store is being changed.
            if self._temporaries() - old:
                return True
        raise ExecutionError(f"no collector has written anything within {_STARTED_TIMEOUT_S:g} s")

    def _wait_for_first_file(self, collector: _Collector) -> None:
        latest = time.monotonic() + _STARTED_TIMEOUT_S
        while not collector.files:
            if collector.process.exitcode is not None:
                raise ExecutionError(f"a collector ended by itself, with exit code {collector.process.exitcode}")
            if time.monotonic() > latest:
                raise ExecutionError(f"a collector has written nothing within {_STARTED_TIMEOUT_S:g} s")
            time.sleep(0.01)
            collector.read_written(self._watch)

    def _temporaries(self) -> set[str]:
        try:
            return {entry.name for entry in os.scandir(self._store / "device=cpu") if entry.name.endswith(".tmp")}
        except FileNotFoundError:
            return set()


def kill_table(kills: Sequence[Kill]) -> Table:
    """A line for each kill."""
    return Table.of(
        enumerate(kills, start=1),
        (
            ("kill", lambda row: str(row[0])),
            ("moment", lambda row: row[1].moment),
            ("lived s", lambda row: f"{row[1].lived_s:.2f}"),
            ("files", lambda row: str(row[1].num_files)),
            ("samples", lambda row: str(row[1].num_samples)),
            ("left behind", lambda row: str(row[1].num_leftovers)),
            ("faults", lambda row: "; ".join(row[1].faults) or "none"),
        ),
        caption="Kills, and the store after each of them",
    )


@command_options()
class KillTestOptions:
    """Options of the study `kill-test`."""

    times: Annotated[int, typer.Option(min=1, help="Kills.")] = 50
    store: Annotated[
        Path | None, typer.Option(help="An empty or missing folder for the store.", show_default="a temporary one")
    ] = None
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0

    def __post_init__(self) -> None:
        if self.store is not None and self.store.exists() and (not self.store.is_dir() or any(self.store.iterdir())):
            raise InvalidOptionError("must be missing or an empty folder", field="store", source=str(self.store))


def main(options: KillTestOptions, output: OutputOptions) -> None:
    """Kills collectors with SIGKILL and checks after every kill that the store has lost nothing.

    Two collectors write to one store. After each kill every file must be readable, every sample whole, and nothing
    missing that was there, or that a collector had reported as written. Exit code: 0 nothing lost, 1 otherwise.

    Example:
        python -m studies kill-test --times 50
    """
    with tempfile.TemporaryDirectory(prefix="autoshard-kills-") as folder:
        test = KillTest(options.store or Path(folder), options.seed)
        with console.progress("Killing collectors", options.times) as advance:
            kills = test.run(options.times, advance)
        at_the_end = test.faults_at_the_end()
    faults = [*(fault for kill in kills for fault in kill.faults), *at_the_end]
    moments = Counter(kill.moment for kill in kills)
    document = {
        "kills": [asdict(kill) for kill in kills],
        "moments": dict(moments),
        "num_samples": kills[-1].num_samples,
        "faults": faults,
    }
    counts = ", ".join(f"{number} {moment}" for moment, number in sorted(moments.items()))
    note = f"{options.times} kills ({counts}); {kills[-1].num_samples} samples; {len(faults)} faults"
    output.write(StudyResult(name="kill-test", document=document, tables=(kill_table(kills),), notes=(note,)))
    if faults:
        raise typer.Exit(1)
