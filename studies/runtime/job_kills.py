"""Kills processes of training jobs at random moments: `python -m studies job-kills`.

A part of the study is one job, whose processes are killed and started again until so many kills were made. At its end
it must have the state of the job that nobody disturbed, to the last bit.

With `--changing`, hot rows of the job change, and its plan with them; kills come while process 0 searches a plan, or
while all processes go over to one. When a plan is found depends on the machine, so that the undisturbed job makes the
same steps under other plans, which add numbers in another order: compared are the weights and moments of all rows, and
the loss of the last step. Nothing behind the tables has a kink in these jobs: where the input of a ReLU is within
rounding of 0, the order decides whether a sample's gradient passes, and row-wise AdaGrad moves a row that is new by the
learning rate, however small its gradient is. Two jobs that nobody disturbed, of 300 steps under two plans with one ReLU
layer there, had weights that differed by 4.8e-3 (one of three seeds); with SiLU in its place, by 2e-6.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer

from autoshard.commands.options import command_options
from autoshard.core import DenseLayers, PlacedShard, Shard, ShardingPlan, Topology
from autoshard.core.choices import Device
from autoshard.core.step import Overlap
from autoshard.formats import load_tables, write_plan
from autoshard.runtime import RunRequest, run_requests
from autoshard.runtime.checkpoints.manifest import MANIFEST, MANIFEST_NAME, Manifest, committed_folders
from autoshard.runtime.checkpoints.sources import stored_tensors
from autoshard.runtime.processes.job import worker_pids
from autoshard.runtime.processes.launch import FORKED, Restart, RunProgress
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.cluster.network import ClusterSpec
from studies.frame import Machine, OutputOptions, PartsOption, PartStore, StudyResult
from studies.runtime.following import FollowingOptions, planned

#: One kill in so many comes while processes start, the others while they train or save.
_STARTING_EVERY: Final = 4
#: Latest moments after the processes are there, and after their first step.
_STARTING_S, _TRAINING_S = 6.0, 3.0
_POLL_S: Final = 0.02
#: One kill in so many comes while a plan is searched after one was adopted and saved, the others while it is changed.
_SEARCHING_EVERY: Final = 4
#: Latest moments after a search has begun, and after process 0 has heard of its plan.
_SEARCHING_S, _CHANGING_S = 4.0, 0.8
_POLL_CHANGE_S: Final = 0.002
#: Steps after the last kill and before the job is told to end.
_STEPS_AFTER: Final = 60
#: Largest differences between jobs under other plans: of a weight or a loss, and of a moment as a share of it.
#: Undisturbed jobs of 300 steps under two plans differed by at most 1.6e-6 and 1.0e-5. Of a row that has had n updates
#: alike, one that is lost or made twice is 1 / n of its moment, and n is at most the steps of a job, several hundred.
_ROUNDING, _MOMENT_ROUNDING = 1e-5, 1e-4
_NUM_TABLES, _SCALE, _BATCH_SIZE, _NUM_SAMPLES = 8, 4096, 256, 20_000
_CHECKPOINT_EVERY: Final = 10
_NUM_PROCESSES: Final = 4
#: Jobs whose plans change: steps at most, and their plan, which is for slow links.
_FOLLOWING: Final = FollowingOptions(rows=50_000, batch_size=256, steps=100_000, drift_every=100, replan_every=10)
#: Their dense layers: one to the logit behind the tables, so that no ReLU is there.
_DENSE: Final = DenseLayers(num_dense_features=4, bottom_mlp=(64,), top_mlp=(1,))
_CLUSTER: Final = ClusterSpec(num_nodes=2, ranks_per_node=2, bits_per_s=25e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPart:
    """Kills of the processes of one job.

    Attributes:
        num_starting: Kills while processes started.
        num_training: Kills while they trained or saved.
        num_searching: Kills while process 0 searched a plan, after it had adopted one.
        num_changing: Kills after process 0 has heard of another plan, before all have adopted it.
        num_adopted: Restarts from a checkpoint with an adopted plan.
        num_steps: Steps of the job.
        steps_again: Steps that were made again after each kill.
        faults: Checkpoints that were lost, processes that were not named, and states that differ.
        weight_difference: Largest of a weight of a table, from the undisturbed job.
        moment_difference: Largest of a row's moment, as a share of it.
        loss_difference: Of the last step's loss.
    """

    num_starting: int
    num_training: int
    num_searching: int
    num_changing: int
    num_adopted: int
    num_steps: int
    steps_again: tuple[int, ...]
    faults: tuple[str, ...]
    weight_difference: float
    moment_difference: float
    loss_difference: float

    @property
    def num_kills(self) -> int:
        """All kills."""
        return self.num_starting + self.num_training + self.num_searching + self.num_changing


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
        is_changing: Whether to kill while a plan is searched or changed.

    Attributes:
        is_enough: Set when the job has made some steps after the last kill.
    """

    def __init__(self, runs: Path, checkpoints: Path, kills: int, seed: int, *, is_changing: bool) -> None:
        self._runs, self._checkpoints, self._kills, self._rng = runs, checkpoints, kills, random.Random(seed)
        self._is_changing = is_changing
        self.num_starting = self.num_training = self.num_searching = self.num_changing = self.num_adopted = 0
        self.is_enough = threading.Event()
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
        if len(self.steps_again) == self._kills and self._done >= self._saved + _STEPS_AFTER:
            self.is_enough.set()

    def on_restart(self, restart: Restart) -> None:
        """Hears of the end of processes: the killed one must be named, and no checkpoint lost."""
        expected = f"process {self._killed} was killed by signal 9 (SIGKILL)"
        if str(restart.error) != expected:
            self.faults.append(f"{expected}, and {restart.error} was said")
        saved = self._last_saved()
        self.num_adopted += saved > 0 and self._manifest().begun_with is not None
        if saved < self._saved:
            self.faults.append(f"the checkpoint of step {self._saved} was lost, the last one is of step {saved}")
        self.steps_again.append(max(0, self._done - saved))

    def _last_saved(self) -> int:
        return self._manifest().step if committed_folders(self._checkpoints) else 0

    def _manifest(self) -> Manifest:
        return MANIFEST.read(committed_folders(self._checkpoints)[-1] / MANIFEST_NAME)

    def _kill_all(self) -> None:
        if self._is_changing:
            self._kill_changing()
        else:
            self._kill_any()

    def _kill_any(self) -> None:
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
            if self._kill(found):
                self.num_starting += is_starting
                self.num_training += not is_starting

    def _kill_changing(self) -> None:
        known: set[Path] = set()
        number = 0
        while number < self._kills:
            while not (found := self._started(known)):
                if self._is_over.wait(_POLL_S):
                    return
            while not (search := _search(found)):
                if self._is_over.wait(_POLL_S):
                    return
            is_searching = number % _SEARCHING_EVERY == 0
            if is_searching:
                # The next start is one under an adopted plan.
                if not committed_folders(self._checkpoints) or self._manifest().begun_with is None:
                    if self._is_over.wait(_POLL_S):
                        return
                    continue
                if self._is_over.wait(self._rng.uniform(0.0, _SEARCHING_S)):
                    return
            else:
                while search in _children(found):
                    if self._is_over.wait(_POLL_CHANGE_S):
                        return
                # Process 0 has heard of the plan, and says that the step is over once all have adopted it.
                done = self._done
                if not _is_another(found):
                    continue
                if self._is_over.wait(self._rng.uniform(0.0, _CHANGING_S)):
                    return
            is_changing = not is_searching and self._done == done
            is_searching = _search(found) == search
            if self._kill(found):
                known.add(found)
                number += 1
                self.num_searching += is_searching
                self.num_changing += is_changing
                self.num_training += not is_searching and not is_changing

    def _kill(self, found: Path) -> bool:
        """Kills one of the processes; whether any was there."""
        pids = worker_pids(found)
        self._saved = self._last_saved()
        if pids:
            self._killed = self._rng.choice(sorted(pids))
            os.kill(pids[self._killed], signal.SIGKILL)
        return bool(pids)

    def _started(self, known: set[Path]) -> Path | None:
        """The folder of processes that are all there, and were not killed before."""
        folders = set(self._runs.glob("autoshard-run-*")) - known
        return next((folder for folder in folders if len(list(folder.glob("pid.*"))) == _NUM_PROCESSES), None)


def _children(found: Path) -> list[int]:
    """Child processes of process 0, also of one that has ended and of which process 0 has not heard."""
    pid = worker_pids(found).get(0)
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def _search(found: Path) -> int | None:
    """The process that searches a plan for a job; None if none does."""
    for pid in _children(found):
        with suppress(OSError):  # it has ended
            if b"replan" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    return None


def _is_another(found: Path) -> bool:
    """Whether the last plan that was found places other rows than the one before."""
    plans = sorted(found.glob("autoshard-replan-*/plan*.json"), key=lambda file: file.stat().st_mtime_ns)
    read = [json.loads(file.read_bytes()) for file in plans[-2:]]
    placed = [
        (one["shards"], [order["digest"] for order in one.get("row_orders", {}).values()])
        for one in (read[0], read[-1])
    ]
    return bool(placed[0] != placed[1])


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


def _tables(checkpoints: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of the tables of the last checkpoint, by their keys there."""
    stored = stored_tensors(committed_folders(checkpoints)[-1])
    return {key: one.read(0, one.shape[0]) for key, one in stored.items() if ".tables." in key}


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
    changing: Annotated[
        bool,
        typer.Option("--changing", help="Kill while a plan is searched or changed, of jobs whose hot rows change."),
    ] = False
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
        request = _request(options, number, folder)
        kills = min(options.per_part, options.kills - number * options.per_part)
        killed, undisturbed = folder / "killed", folder / "undisturbed"
        killer = _Killer(runs, killed, kills, options.seed + number, is_changing=options.changing)
        before, tempfile.tempdir = tempfile.tempdir, str(runs)
        try:
            with killer.at_work():
                (ended,) = run_requests(
                    [replace(request, checkpoints_path=str(killed))],
                    _NUM_PROCESSES,
                    timeout_s=math.inf,
                    on_progress=killer.on_progress,
                    on_restart=killer.on_restart,
                    launcher=FORKED,
                    max_restarts=kills + 1,
                    stop=killer.is_enough if options.changing else None,
                )
        finally:
            tempfile.tempdir = before
        assert ended.job is not None, "it keeps checkpoints"
        if options.changing:
            request = replace(request, steps=ended.job.trained_steps)
        (whole,) = run_requests(
            [replace(request, checkpoints_path=str(undisturbed))], _NUM_PROCESSES, timeout_s=math.inf, launcher=FORKED
        )
        assert whole.last_loss is not None, "it is not resumed"
        faults = list(killer.faults)
        found, expected = _tables(killed), _tables(undisturbed)
        differences, shares = [0.0], [0.0]
        for key, whole_N in expected.items():
            difference_N = (found[key] - whole_N).abs()
            if key.endswith(".weights"):
                differences.append(float(difference_N.max()))
            else:  # rows without an update have 0, and have to have it in both
                shares.append(float((difference_N / whole_N.clamp(min=torch.finfo().tiny)).max()))
        part = JobPart(
            num_starting=killer.num_starting,
            num_training=killer.num_training,
            num_searching=killer.num_searching,
            num_changing=killer.num_changing,
            num_adopted=killer.num_adopted,
            num_steps=ended.job.trained_steps,
            steps_again=tuple(killer.steps_again),
            faults=(),
            weight_difference=max(differences),
            moment_difference=max(shares),
            # A job that was killed after its last checkpoint has no step left to measure.
            loss_difference=0.0 if ended.last_loss is None else abs(ended.last_loss - whole.last_loss),
        )
        if not options.changing and _last_state(killed) != _last_state(undisturbed):
            faults.append("the job ended with another state than the undisturbed one")
        if max(part.weight_difference, part.loss_difference) > _ROUNDING or part.moment_difference > _MOMENT_ROUNDING:
            faults.append(
                f"weights differ from the undisturbed job's by {part.weight_difference:.1e}, moments by "
                f"{part.moment_difference:.1e} of them, losses by {part.loss_difference:.1e}"
            )
        return replace(part, faults=tuple(faults))


def _request(options: JobKillOptions, number: int, folder: Path) -> RunRequest:
    """The job of a part: on a file of samples, or on generated ones whose hot rows change."""
    plan = planned(_FOLLOWING, _CLUSTER) if options.changing else _plan()
    if options.changing:
        plan = replace(plan, tables=replace(plan.tables, dense=_DENSE))
    write_plan(plan, folder / "plan.json")
    request = RunRequest(
        plan_path=str(folder / "plan.json"),
        seed=options.seed + number,
        device=Device.CPU,
        overlap=Overlap.PIPELINED,
        checkpoints_path=str(folder),
        checkpoint_every=_CHECKPOINT_EVERY,
    )
    if options.changing:
        drift, replan = _FOLLOWING.drift_every, _FOLLOWING.replan_every
        return replace(request, steps=_FOLLOWING.steps, warmup_steps=0, drift_every=drift, replan_every=replan)
    _write_samples(plan, folder / "samples.parquet")
    samples = str(folder / "samples.parquet")
    return replace(request, data_path=samples, epochs=options.epochs, steps=None, shuffle=5_000)


def part_table(runs: JobRuns) -> Table:
    """A line for each job."""
    return Table.of(
        enumerate(runs.parts, start=1),
        (
            ("job", lambda row: str(row[0])),
            ("killed while starting", lambda row: str(row[1].num_starting)),
            ("killed while training", lambda row: str(row[1].num_training)),
            ("while searching a plan", lambda row: str(row[1].num_searching)),
            ("while changing it", lambda row: str(row[1].num_changing)),
            ("restarts under an adopted plan", lambda row: str(row[1].num_adopted)),
            ("steps", lambda row: f"{row[1].num_steps:,}"),
            ("steps made again, at most", lambda row: str(max(row[1].steps_again, default=0))),
            ("weights differ by", lambda row: f"{row[1].weight_difference:.1e}"),
            ("moments by, of them", lambda row: f"{row[1].moment_difference:.1e}"),
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
    nobody disturbed, to the last bit. With --changing, jobs train on generated samples whose hot rows change, and their
    weights and moments must be those of a job that makes as many steps undisturbed, to what the order of sums under
    other plans makes of them.

    Exit code: 0 no fault, 1 otherwise.

    Example:
        python -m studies job-kills --kills 20
    """
    identity = {name: getattr(options, name) for name in ("per_part", "epochs", "seed", "changing")}
    store = PartStore.of(options.parts, identity)
    count = -(-options.kills // options.per_part)
    makers = {f"{number:03d}": partial(run_part, options, number) for number in range(count)}
    runs = JobRuns(parts=tuple(store.find_all("Killing jobs", JobPart, makers)))
    document = Machine.of("job-kills", options).document(runs, "autoshard.job_kills/3")
    output.write(StudyResult(name="job-kills", document=document, tables=(part_table(runs),), notes=(_note(runs),)))
    if any(part.faults for part in runs.parts):
        raise typer.Exit(1)


def _note(runs: JobRuns) -> str:
    kills = sum(part.num_kills for part in runs.parts)
    again = [steps for part in runs.parts for steps in part.steps_again] or [0]
    faults = [fault for part in runs.parts for fault in part.faults]
    steps = f"a median of {median(again):g} and at most {max(again)} steps made again"
    count = f"{len(faults)} fault{'' if len(faults) == 1 else 's'}"
    return "\n".join([f"{kills} kills, {steps}, {count}", *faults])
