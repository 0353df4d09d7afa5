"""One process of `training.train_runs`: `torchrun -m studies.runtime.worker FOLDER`.

Shape suffixes: B samples of a local batch, P processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autoshard.formats import read_plan
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.dense import DenseModel
from autoshard.runtime.training.step import distributed_step
from studies.frame.jobs import do_job
from studies.runtime.clicks import ClickModel
from studies.runtime.held_out import Purpose, batches, entropy_of, held_out_entropy, planted


def main() -> None:
    """Trains the runs of the job in the folder that the command line names."""
    do_job(lambda job: [_trained(ClickModel(**job["model"]), **run) for run in job["runs"]])


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
