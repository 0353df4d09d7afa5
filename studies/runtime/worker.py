"""One process of `training.train_runs`: `torchrun -m studies.runtime.worker FOLDER`.

Shape suffixes: B samples of a local batch, P processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.formats import atomic_write, read_plan
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.processes.job import JOB_FILE, RESULTS_FILE
from autoshard.runtime.processes.worker import run_worker
from autoshard.runtime.training.dense import DenseModel
from autoshard.runtime.training.step import distributed_step
from studies.runtime.clicks import ClickModel
from studies.runtime.held_out import Purpose, batches, entropy_of, held_out_entropy, planted


def main() -> None:
    """Trains the runs of the job in the folder that the command line names."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])

    def work() -> None:
        job = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        results = [_trained(ClickModel(**job["model"]), **run) for run in job["runs"]]
        dist.destroy_process_group()
        if rank == 0:
            atomic_write(folder / RESULTS_FILE, json.dumps(results, allow_nan=False))

    run_worker(work, folder, rank)


def _trained(
    model: ClickModel,
    *,
    plan_path: str,
    seed: int,
    weights_seed: int,
    steps: int,
    held_out: int,
    learning_rate: float,
) -> dict[str, Any]:
    plan = read_plan(plan_path)
    assert plan.tables.dense is not None, "clicks come with dense layers"
    settings = FusedSettings(learning_rate=learning_rate, seed=weights_seed)
    embeddings = ShardedEmbeddings(plan, settings)
    dense = DenseModel(plan.tables.dense, embeddings.feature_dims, weights_seed)
    training = distributed_step(embeddings, plan.tables, dense, learning_rate)
    B = embeddings.local_batch_size
    for samples in batches(model, seed, B, Purpose.TRAINING, steps):
        training(samples)
    own_bytes = torch.tensor([value / steps for value in embeddings.sent_bytes().values()], dtype=torch.float64)
    dist.all_reduce(own_bytes)
    tested = batches(model, seed, B, Purpose.HELD_OUT, held_out)
    found = held_out_entropy(embeddings, dense, tested)
    sent_bytes = dict(zip(embeddings.sent_bytes(), own_bytes.tolist(), strict=True))
    embeddings.close()
    best_B = torch.cat([planted(model, seed).logits(samples) for samples in tested])
    return {"normalised_entropy": found, "best_entropy": entropy_of(best_B, tested), "sent_bytes": sent_bytes}


if __name__ == "__main__":
    main()
