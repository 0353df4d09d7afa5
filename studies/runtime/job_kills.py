"""Kills processes of training jobs at random moments: `python -m studies job-kills`.

A part of the study is one job, whose processes are killed and started again until so many kills were made. At its end
it must have the state of the job that nobody disturbed, to the last bit.
"""

from __future__ import annotations

import math
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from autoshard.commands.options import command_options
from autoshard.core import DenseLayers, PlacedShard, Shard, ShardingPlan, Topology
from autoshard.core.choices import Device
from autoshard.core.step import Overlap
from autoshard.formats import load_tables, write_plan
from autoshard.runtime import RunRequest, run_requests
from autoshard.runtime.checkpoints.manifest import MANIFEST, MANIFEST_NAME, committed_folders
from autoshard.runtime.processes.job import worker_pids
from autoshard.runtime.processes.launch import Restart, RunProgress
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from bench.measuring.devices import find_device
from studies.frame import Machine, OutputOptions, PartsOption, PartStore, StudyResult, command_line, to_document

SCHEMA: Final = "autoshard.job_kills/1"
#: One kill in so many comes while processes start, the others while they train or save.
_STARTING_EVERY: Final = 4
#: Latest moments after the processes are there, and after their first step.
_STARTING_S, _TRAINING_S = 6.0, 3.0
_POLL_S: Final = 0.02
_NUM_TABLES, _SCALE, _BATCH_SIZE, _NUM_SAMPLES = 8, 4096, 256, 20_000
_CHECKPOINT_EVERY: Final = 10
_NUM_PROCESSES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPart:
    """Kills of the processes of one job.

    Attributes:
        num_starting: Kills while processes started.
        num_training: Kills while they trained or saved.
        steps_again: Steps that were made again after each kill.
        faults: Checkpoints that were lost, processes that were not named, and states that differ.
    """

    num_starting: int
    num_training: int
    steps_again: tuple[int, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRuns:
    """All parts."""

    parts: tuple[JobPart, ...]


class _Killer:
    """Kills processes of a job until it has made so many kills, in a thread; and hears of what follows.

    Args:
        runs: Folder in which runs make theirs.
        checkpoints: Folder of the job's checkpoints.
        kills: Kills.
        seed: Of the moments.
    """

    def __init__(self, runs: Path, checkpoints: Path, kills: int, seed: int) -> None:
        self._runs, self._checkpoints, self._kills, self._rng = runs, checkpoints, kills, random.Random(seed)
        self.num_starting = self.num_training = 0
        self.steps_again: list[int] = []
        self.faults: list[str] = []
        self._done, self._saved, self._killed = 0, 0, -1
        self._stepped, self._is_over = threading.Event(), threading.Event()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While the job runs."""
        thread = threading.Thread(target=self._kill_all)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def on_progress(self, progress: RunProgress) -> None:
        """Hears of a step."""
        self._done = progress.done
        self._stepped.set()

    def on_restart(self, restart: Restart) -> None:
        """Hears of the end of processes: the killed one must be named, and no checkpoint lost."""
        expected = f"process {self._killed} was killed by signal 9 (SIGKILL)"
        if str(restart.error) != expected:
            self.faults.append(f"{expected}, and {restart.error} was said")
        saved = self._last_saved()
        if saved < self._saved:
            self.faults.append(f"the checkpoint of step {self._saved} was lost, the last one is of step {saved}")
        self.steps_again.append(max(0, self._done - saved))

    def _last_saved(self) -> int:
        folders = committed_folders(self._checkpoints) if self._checkpoints.is_dir() else []
        return MANIFEST.read(folders[-1] / MANIFEST_NAME).step if folders else 0

    def _kill_all(self) -> None:
        known: set[Path] = set()
        for number in range(1, self._kills + 1):
            while not (found := self._started(known)):
                if self._is_over.wait(_POLL_S):
                    return
            known.add(found)
            is_starting = number % _STARTING_EVERY == 0
            if not is_starting:
                self._stepped.clear()
                while not self._stepped.wait(_POLL_S):
                    if self._is_over.is_set():
                        return
            if self._is_over.wait(self._rng.uniform(0.0, _STARTING_S if is_starting else _TRAINING_S)):
                return
            pids = worker_pids(found)
            self._saved = self._last_saved()
            if pids:
                self._killed = self._rng.choice(sorted(pids))
                os.kill(pids[self._killed], signal.SIGKILL)
                self.num_starting += is_starting
                self.num_training += not is_starting

    def _started(self, known: set[Path]) -> Path | None:
        """The folder of processes that are all there, and were not killed before."""
        folders = set(self._runs.glob("autoshard-run-*")) - known
        return next((folder for folder in folders if len(list(folder.glob("pid.*"))) == _NUM_PROCESSES), None)


def _plan() -> ShardingPlan:
    """A plan of the first tables of metasyn on four ranks."""
    topology: Topology = local_topology("cpu", _NUM_PROCESSES, 1 << 30)
    dense = DenseLayers(num_dense_features=4, bottom_mlp=(32, 16), top_mlp=(32, 1))
    pool = load_tables("metasyn").scaled(_SCALE)
    tables = replace(pool, tables=pool.tables[:_NUM_TABLES], batch_size=_BATCH_SIZE, dense=dense)
    shards = [
        PlacedShard.table_wise(Shard.whole(table), index % topology.world_size)
        for index, table in enumerate(tables.tables)
    ]
    return ShardingPlan(tables=tables, topology=topology, shards=tuple(shards))


def _write_samples(plan: ShardingPlan, file: Path) -> None:
    rng = np.random.default_rng(0)
    columns: dict[str, np.ndarray] = {"label": rng.integers(0, 2, _NUM_SAMPLES)}
    columns |= {f"int_{index}": rng.standard_normal(_NUM_SAMPLES) for index in range(4)}
    for table in plan.tables.tables:
        columns |= {feature.name: rng.integers(0, table.num_embeddings, _NUM_SAMPLES) for feature in table.features}
    pq.write_table(pa.table(columns), file, row_group_size=3_000)


def _last_state(checkpoints: Path) -> dict[str, tuple[str, ...]]:
    """Hashes of the files of the last checkpoint that hold state."""
    manifest = MANIFEST.read(committed_folders(checkpoints)[-1] / MANIFEST_NAME)
    return {file.name: file.sha256 for file in manifest.files if file.name.startswith("__")}


@command_options()
class JobKillOptions:
    """Options of the study `job-kills`."""

    kills: Annotated[int, typer.Option(min=1, help="Kills.")] = 200
    per_part: Annotated[int, typer.Option(min=1, help="Kills of the processes of one job.")] = 10
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of 78 steps and a smaller one that a job trains.")] = 10
    seed: Annotated[int, typer.Option(min=0, help="Of the moments.")] = 0
    parts: PartsOption = None


def run_part(options: JobKillOptions, number: int) -> JobPart:
    """One job that is killed, and one that is not.

    Raises:
        AutoshardError: If the job cannot be executed.
    """
    with tempfile.TemporaryDirectory(prefix="job-kills-") as name:
        folder = Path(name)
        runs = folder / "runs"
        runs.mkdir()
        plan = _plan()
        write_plan(plan, folder / "plan.json")
        _write_samples(plan, folder / "samples.parquet")
        request = RunRequest(
            plan_path=str(folder / "plan.json"),
            data_path=str(folder / "samples.parquet"),
            epochs=options.epochs,
            steps=None,
            shuffle=5_000,
            seed=options.seed + number,
            device=Device.CPU,
            overlap=Overlap.PIPELINED,
            checkpoints_path=str(folder / "undisturbed"),
            checkpoint_every=_CHECKPOINT_EVERY,
        )
        run_requests([request], _NUM_PROCESSES, timeout_s=math.inf)
        kills = min(options.per_part, options.kills - number * options.per_part)
        killer = _Killer(runs, folder / "killed", kills, options.seed + number)
        before, tempfile.tempdir = tempfile.tempdir, str(runs)
        try:
            with killer.at_work():
                run_requests(
                    [replace(request, checkpoints_path=str(folder / "killed"))],
                    _NUM_PROCESSES,
                    timeout_s=math.inf,
                    on_progress=killer.on_progress,
                    on_restart=killer.on_restart,
                    max_restarts=kills + 1,
                )
        finally:
            tempfile.tempdir = before
        faults = list(killer.faults)
        if _last_state(folder / "killed") != _last_state(folder / "undisturbed"):
            faults.append("the job ended with another state than the undisturbed one")
        return JobPart(
            num_starting=killer.num_starting,
            num_training=killer.num_training,
            steps_again=tuple(killer.steps_again),
            faults=tuple(faults),
        )


def part_table(runs: JobRuns) -> Table:
    """A line for each job."""
    return Table.of(
        enumerate(runs.parts, start=1),
        (
            ("job", lambda row: str(row[0])),
            ("killed while starting", lambda row: str(row[1].num_starting)),
            ("killed while training", lambda row: str(row[1].num_training)),
            ("steps made again, at most", lambda row: str(max(row[1].steps_again, default=0))),
            ("faults", lambda row: str(len(row[1].faults))),
        ),
        caption=f"SIGKILLs of processes of jobs on {_NUM_PROCESSES} processes, checkpoints every "
        f"{_CHECKPOINT_EVERY} steps",
    )


def main(options: JobKillOptions, output: OutputOptions) -> None:
    """Kills processes of training jobs with SIGKILL and compares what they end with.

    Jobs train four processes on a shuffled file, pipelined, with checkpoints. A quarter of the kills comes while
    processes start. After each, the killed process must be named, and the last checkpoint that was there must still
    be; at the end, the job's weights, moments, dense layers, position and random states must be those of a job that
    nobody disturbed, to the last bit.

    Exit code: 0 no fault, 1 otherwise.

    Example:
        python -m studies job-kills --kills 20
    """
    store = PartStore(options.parts)
    store.check_identity({name: getattr(options, name) for name in ("per_part", "epochs", "seed")})
    count = -(-options.kills // options.per_part)
    makers = {f"{number:03d}": partial(run_part, options, number) for number in range(count)}
    runs = JobRuns(parts=tuple(store.find_all("Killing jobs", JobPart, makers)))
    on = Machine.this(find_device("cpu"), command_line("job-kills", options))
    document = {**to_document(runs, SCHEMA), "machine": on.to_json()}
    output.write(StudyResult(name="job-kills", document=document, tables=(part_table(runs),), notes=(_note(runs),)))
    if any(part.faults for part in runs.parts):
        raise typer.Exit(1)


def _note(runs: JobRuns) -> str:
    kills = sum(part.num_starting + part.num_training for part in runs.parts)
    again = [steps for part in runs.parts for steps in part.steps_again] or [0]
    faults = [fault for part in runs.parts for fault in part.faults]
    steps = f"a median of {median(again):g} and at most {max(again)} steps made again"
    return "\n".join([f"{kills} kills, {steps}, {len(faults)} faults", *faults])
