"""One process of the study `host-time`: `torchrun -m studies.engines.host_worker FOLDER`.

The folder holds `job.json`; the process of rank 0 writes `results.json` into it.

Shape suffixes: S steps, P processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autoshard.core import ShardingPlan
from autoshard.formats import read_plan
from autoshard.runtime.batch import Embedded
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.releases import all_gather
from autoshard.runtime.training.synthetic import draw_samples
from studies.frame.jobs import do_job

_NUM_BATCHES = 4


def main() -> None:
    """Measures the plan in the folder that the command line names."""
    do_job(_measured)


def _measured(job: Mapping[str, Any]) -> dict[str, float]:
    ms_PS = measured_steps(read_plan(job["plan_path"]), job["steps"])
    return {"median_ms": ms_PS.median().item(), "slowest_ms": ms_PS.median(dim=1).values.max().item()}


def measured_steps(plan: ShardingPlan, steps: int) -> torch.Tensor:
    """Processor time of this thread in every step of every process, in milliseconds, shape (P, S)."""
    engine = ShardedEmbeddings(plan, FusedSettings(learning_rate=0.05))
    B, rank = engine.local_batch_size, dist.get_rank()
    batches = [draw_samples(plan.tables, 0, B, (0, number, rank)).ids for number in range(_NUM_BATCHES)]
    gradients_BC = torch.ones(B, sum(engine.feature_dims))
    ms: list[float] = []
    for step in range(_NUM_BATCHES + steps):
        begun = time.thread_time()
        embedded = engine(batches[step % _NUM_BATCHES])
        assert isinstance(embedded, Embedded), "the batch has no keys"
        # On a CPU, the backward pass runs on the thread that asks for it.
        embedded.pooled_BC.backward(gradients_BC)
        engine.end_step()
        ms.append((time.thread_time() - begun) * 1e3)
    engine.close()
    own_S = torch.tensor(ms[_NUM_BATCHES:], dtype=torch.float64)
    ms_PS = own_S.new_empty(dist.get_world_size(), steps)
    all_gather(ms_PS.view(-1), own_S)
    return ms_PS


if __name__ == "__main__":
    main()
