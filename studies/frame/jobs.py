"""Jobs that studies give to gloo processes: a file to read, a measurement of all, a file of results of the first."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.formats.files import atomic_write
from autoshard.runtime.processes.job import JOB_FILE, RESULTS_FILE
from autoshard.runtime.processes.worker import run_worker


def do_job(measure: Callable[[Mapping[str, Any]], object]) -> None:
    """Does the job in the folder that the command line names, on one thread of each process.

    Args:
        measure: Given the job, returns what can be written as JSON; all processes call it, and process 0 writes.
    """
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])

    def work() -> None:
        job = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        results = measure(job)
        dist.destroy_process_group()
        if rank == 0:
            atomic_write(folder / RESULTS_FILE, json.dumps(results, allow_nan=False))

    run_worker(work, folder, rank)
