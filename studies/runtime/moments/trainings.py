"""What is trained, the runs of it that are compared, and the start of the processes that train."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from autoshard.core import PlacedShard, ReplicaGroups, Shard, ShardingPlan
from autoshard.formats import write_plan
from autoshard.runtime import RunRequest, Verification, run_requests
from autoshard.runtime.processes.launch import running_workers
from autoshard.whatif.trials import local_topology
from studies.frame.documents import read_as
from studies.frame.jobs import STUDIES_PATH
from studies.runtime.clicks import ClickModel

_HBM_BYTES = 1 << 30
#: Seed of the learning rate's search: none that runs are compared with.
TUNING_SEED = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs have in common.

    Attributes:
        model: The trained model and the clicks.
        num_processes: Processes, of which replica groups are made.
        batch_size: Samples per step over all processes.
        num_steps: Training steps.
        num_evaluations: Times that the held-out samples are predicted, evenly spread over the steps.
        num_held_out: Held-out samples, a multiple of the batch.
        dense_rate: Learning rate of the dense layers.
        eps: Added to the root of the moments.
    """

    model: ClickModel = field(default_factory=ClickModel)
    num_processes: int = 8
    batch_size: int = 512
    num_steps: int = 1000
    num_evaluations: int = 5
    num_held_out: int = 32_768
    dense_rate: float = 0.1
    eps: float = 1e-8

    @property
    def local_batch_size(self) -> int:
        """Samples per step and process."""
        return self.batch_size // self.num_processes

    @property
    def evaluated_steps(self) -> tuple[int, ...]:
        """Numbers of steps after which the held-out samples are predicted."""
        count = self.num_evaluations
        return tuple(self.num_steps * (index + 1) // count for index in range(count))

    def plan(self, num_groups: int, moment_scale: float, *, sync_every: int = 1) -> ShardingPlan:
        """Whole tables, dealt in turn to the ranks of a replica group."""
        tables = self.model.tables(self.batch_size)
        group_size = self.num_processes // num_groups
        shards = (
            PlacedShard.table_wise(Shard.whole(table), index % group_size) for index, table in enumerate(tables.tables)
        )
        return ShardingPlan(
            tables=tables,
            topology=local_topology("cpu", self.num_processes, _HBM_BYTES),
            shards=tuple(shards),
            replica_groups=ReplicaGroups(num_groups=num_groups, moment_scale=moment_scale, sync_every=sync_every),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        seed: Of the planted model, the initial weights and the samples: runs of one seed are paired.
        num_groups: Replica groups, M.
        moment_scale: By which moments are divided under the root, c.
        learning_rate: Of the tables.
    """

    seed: int
    num_groups: int
    moment_scale: int
    learning_rate: float

    @property
    def name(self) -> str:
        """Name of its part."""
        return f"seed-{self.seed}-groups-{self.num_groups}-scale-{self.moment_scale}-rate-{self.learning_rate:g}"


def compared_runs(
    seeds: Sequence[int], groups: Sequence[int], learning_rate: float, *, all_scales: bool = False
) -> tuple[Run, ...]:
    """All runs, seed by seed: each number of groups with c = 1 and c = M.

    Args:
        seeds: Seeds.
        groups: Numbers of replica groups.
        learning_rate: Of the tables.
        all_scales: Whether also with the powers of 2 in between (2D Fig. 4b).
    """
    return tuple(
        Run(seed=seed, num_groups=num_groups, moment_scale=scale, learning_rate=learning_rate)
        for seed in seeds
        for num_groups in groups
        for scale in (1 << power for power in range(num_groups.bit_length()))
        if all_scales or scale in (1, num_groups)
    )


def tuning_runs(rates: Sequence[float]) -> tuple[Run, ...]:
    """One group with each learning rate."""
    return tuple(Run(seed=TUNING_SEED, num_groups=1, moment_scale=1, learning_rate=rate) for rate in rates)


_WORKER = "studies.runtime.moments.worker"
_STALL_TIMEOUT_S = 300.0

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """Trainings on the same processes, one after the other."""

    setting: Setting
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """What a training found.

    Attributes:
        run: The training.
        entropies: Normalised entropy of the held-out samples, at each of the setting's `evaluated_steps`.
        is_identical: Whether all groups' weights and moments are bit-identical after the last step.
    """

    run: Run
    entropies: tuple[float, ...]
    is_identical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseJob:
    """Trainings on gradients that are noise.

    Attributes:
        setting: Tables, batch and steps.
        groups: Numbers of replica groups, each of which is trained.
        sync_every: Steps from one synchronisation to the next; divides the steps.
        seed: Of ids and gradients, which are the same for every number of groups.
    """

    setting: Setting
    groups: tuple[int, ...]
    sync_every: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseResult:
    """Moments of one training on noise.

    Attributes:
        num_groups: Replica groups, M.
        num_states: After each step up to the first synchronisation, how many different states the groups have.
        moment: Sum of the moments of all rows after the last step.
    """

    num_groups: int
    num_states: tuple[int, ...]
    moment: float


def trained(job: TrainingJob) -> Generator[TrainedRun]:
    """Trains, and gives the result of each run when it is there.

    Raises:
        ExecutionError: If a process fails or hangs.
    """
    return _results(TrainedRun, {"training": asdict(job)}, job.setting.num_processes)


def moments_of_noise(job: NoiseJob) -> tuple[NoiseResult, ...]:
    """Results of all numbers of groups.

    Raises:
        ExecutionError: If a process fails or hangs.
    """
    return tuple(_results(NoiseResult, {"noise": asdict(job)}, job.setting.num_processes))


def verified(setting: Setting, groups: Sequence[int], *, steps: int) -> tuple[Verification, ...]:
    """Errors of each number of groups against unsharded tables, one copy per group, with c = M.

    With one group the reference is plain row-wise AdaGrad.

    Raises:
        ExecutionError: If a process fails.
    """
    with tempfile.TemporaryDirectory(prefix="autoshard-moments-") as folder:
        requests = []
        for num_groups in groups:
            file = Path(folder, f"{num_groups}.json")
            write_plan(setting.plan(num_groups, num_groups), file)
            request = RunRequest(plan_path=str(file), steps=1, warmup_steps=0, verify_steps=steps, eps=setting.eps)
            requests.append(request)
        results = run_requests(requests, setting.num_processes)
    return tuple(result.verification for result in results if result.verification is not None)


def _results(kind: type[_Result], job: Any, num_processes: int) -> Generator[_Result]:
    workers = running_workers(_WORKER, job, num_processes, stall_timeout_s=_STALL_TIMEOUT_S, path=STUDIES_PATH)
    with workers as (_, documents):
        for document in documents:
            if isinstance(document, dict) and "result" in document:
                yield read_as(kind, document["result"], _WORKER)
