"""Starts the processes that train, and takes their results one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from autoshard.formats import write_plan
from autoshard.runtime import RunRequest, Verification, run_requests
from autoshard.runtime.processes.launch import running_workers
from studies.frame.documents import read_as
from studies.frame.jobs import STUDIES_PATH
from studies.runtime.moments.setting import Run, Setting

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
