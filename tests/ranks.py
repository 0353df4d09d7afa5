"""Processes that execute together, for tests: forked from one that has imported what takes seconds (`preloaded`)."""

import multiprocessing
import pickle
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from autoshard.runtime import run_requests


def on_ranks(work, num_processes, *arguments):
    """What a function of a module returns on each of some processes over gloo, by rank.

    The first error of a process ends all of them, and is raised with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = _started(folder, work, num_processes, arguments)
        while not job.join():
            pass
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(num_processes)]


def started(work, num_processes, folder, *arguments):
    """The same in processes that the caller ends, which meet in a folder; their context."""
    return _started(tempfile.mkdtemp(dir=folder), work, num_processes, (folder, *arguments))


def _started(place, work, num_processes, arguments):
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    job = (work, num_processes, place, arguments)
    return start_processes(_do, job, num_processes, join=False, daemon=True, start_method="forkserver")


def executed(requests, num_processes):
    """The results of `run_requests`; on CPUs without torchrun, which imports torch anew for every process."""
    if any(request.device != "cpu" for request in requests):
        return run_requests(requests, num_processes)
    return on_ranks(_executed, num_processes, requests)[0]


def _do(rank, work, num_processes, folder, arguments):
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=num_processes)
    dist.barrier()  # one that ends at once would close connections which others are still making
    found = work(*arguments)
    dist.destroy_process_group()
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))


def _executed(requests):
    from autoshard.runtime.processes.session import Session

    return Session(requests, torch.device("cpu"), lambda *_: None).run_all()
