"""Jobs that studies give to gloo processes: a file to read, a measurement of all, a file of results of the first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist

from autoshard.core import ShardingPlan
from autoshard.formats import write_plan
from autoshard.runtime.processes.devices import joined
from autoshard.runtime.processes.job import RESULTS_FILE
from autoshard.runtime.processes.launch import LOCAL, Launcher, running_workers
from autoshard.runtime.processes.worker import run_worker

#: Where processes find the studies: `studies` is a generic name, and this one has to come first.
STUDIES_PATH: Final = (str(Path(__file__).resolve().parents[2]),)


def run_job(
    study: str,
    job: Mapping[str, Any],
    plans: Sequence[ShardingPlan],
    num_processes: int,
    launcher: Launcher = LOCAL,
) -> Any:
    """Has processes do a job.

    Args:
        study: Module that calls `do_job` when it is run.
        job: What can be written as JSON.
        plans: Written to files, whose names the job gets as `plan_paths`.
        num_processes: Processes, one per rank.
        launcher: Nodes that they are started on.

    Returns:
        What the process of rank 0 wrote.

    Raises:
        AutoshardError: If a process fails.
    """
    with TemporaryDirectory(prefix="autoshard-study-") as name:
        paths = [str(Path(name, f"{number}.json")) for number in range(len(plans))]
        for plan, path in zip(plans, paths, strict=True):
            write_plan(plan, path)
        whole = {**job, "plan_paths": paths}
        with running_workers(study, whole, num_processes, path=STUDIES_PATH, launcher=launcher) as (folder, documents):
            for _ in documents:
                pass
            return json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))


def do_job(measure: Callable[[Mapping[str, Any]], object]) -> None:
    """Does the job in the folder that the command line names, on one thread of each process.

    Args:
        measure: Given the job, returns what can be written as JSON; all processes call it, and process 0 writes.
    """

    def work(job: Any, _folder: Path, _rank: int) -> object:
        torch.set_num_threads(1)
        with joined(torch.device("cpu")):
            return measure(job)

    run_worker(work)


def slowest_s(act: Callable[[], object]) -> float:
    """Seconds that something takes on the slowest process; all begin it at the same time."""
    dist.barrier()
    begun = time.perf_counter()
    act()
    return greatest(time.perf_counter() - begun)


def greatest(value: float) -> float:
    """The greatest of all processes' values."""
    return _reduced(value, dist.ReduceOp.MAX)


def mean_of(value: float) -> float:
    """The mean of all processes' values."""
    return _reduced(value, dist.ReduceOp.SUM) / dist.get_world_size()


def _reduced(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    values = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(values, op=operation)
    return float(values)
