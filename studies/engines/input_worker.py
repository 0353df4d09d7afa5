"""One process of the study `input-work`: `torchrun -m studies.engines.input_worker FOLDER`.

The folder holds `job.json`; the process of rank 0 writes `results.json` into it: of every plan the mean over processes.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from autoshard.core import ShardingPlan
from autoshard.formats import read_plan
from autoshard.runtime.engine.ids.requests import InputExchange
from autoshard.runtime.participation import Participation
from autoshard.runtime.training.synthetic import draw_samples, ranked_rows
from studies.frame.jobs import do_job

_WARM_UP = 2
_FLUSHED_BYTES = 64 << 20


def main() -> None:
    """Measures the plans in the folder that the command line names."""
    do_job(
        lambda job: [_mean_over_processes(median(input_ms(read_plan(path), job["runs"]))) for path in job["plan_paths"]]
    )


def input_ms(plan: ShardingPlan, runs: int) -> list[float]:
    """Processor time of this thread for each of several batches, in milliseconds."""
    part = Participation.agree(plan, None)
    exchange = InputExchange(part.owners, {}, part.local_batch_size, part.groups, part.device)
    ranked = ranked_rows(plan, {})
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8)
    times_ms = []
    for number in range(_WARM_UP + runs):
        batch = draw_samples(plan.tables, 0, part.local_batch_size, (0, number, part.process), ranked).ids
        flushed.fill_(number % 2)
        dist.barrier()
        begun_s = time.thread_time()
        exchange(batch)
        times_ms.append((time.thread_time() - begun_s) * 1e3)
    return times_ms[_WARM_UP:]


def _mean_over_processes(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


if __name__ == "__main__":
    main()
