"""One process of `training.train_runs`: `torchrun -m studies.runtime.worker FOLDER`.

Shape suffixes: B samples of a local batch, P processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.core import ShardingPlan
from autoshard.formats import atomic_write, read_plan
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.processes.job import JOB_FILE, RESULTS_FILE
from autoshard.runtime.processes.worker import run_worker
from autoshard.runtime.training.dense import DenseModel
from autoshard.runtime.training.step import FeatureVectors, distributed_step
from autoshard.runtime.training.synthetic import Samples
from studies.runtime.clicks import ClickModel, PlantedClicks, normalised_entropy

#: First parts of the keys of batches.
_TRAINING, _HELD_OUT = range(2)


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
    for samples in _batches(model, seed, B, _TRAINING, steps):
        training(samples)
    sent = {stream: value / steps for stream, value in embeddings.sent_bytes().items()}
    tested = _batches(model, seed, B, _HELD_OUT, held_out)
    found = _predicted(plan, embeddings, dense, tested)
    embeddings.close()
    labels = torch.cat([samples.labels_B for samples in tested])
    best = torch.cat([_clicks(model, seed).logits(samples) for samples in tested])
    return {
        "normalised_entropy": normalised_entropy(_gathered(found), _gathered(labels)),
        "best_entropy": normalised_entropy(_gathered(best), _gathered(labels)),
        "sent_bytes": {str(stream): float(_gathered(torch.tensor([value])).sum()) for stream, value in sent.items()},
    }


def _predicted(
    plan: ShardingPlan, embeddings: ShardedEmbeddings, dense: DenseModel, tested: Sequence[Samples]
) -> torch.Tensor:
    """Logits of this process's held-out samples."""
    vectors = FeatureVectors(plan.tables)
    with torch.no_grad():
        return torch.cat(
            [dense(dense.bottom(samples.dense_BN), vectors(embeddings(samples.ids), samples.ids)) for samples in tested]
        )


@lru_cache(maxsize=1)
def _clicks(model: ClickModel, seed: int) -> PlantedClicks:
    return PlantedClicks(model, seed)


@lru_cache(maxsize=2)
def _batches(model: ClickModel, seed: int, batch_size: int, kind: int, count: int) -> list[Samples]:
    """Batches of this process; runs of one seed share them."""
    clicks = _clicks(model, seed)
    return [clicks.draw(batch_size, (kind, number, dist.get_rank())) for number in range(count)]


def _gathered(values_B: torch.Tensor) -> torch.Tensor:
    """Values of all processes."""
    values_B = values_B.contiguous()
    all_PB = values_B.new_empty(dist.get_world_size() * len(values_B))
    dist.all_gather_single(all_PB, values_B)
    return all_PB


if __name__ == "__main__":
    main()
