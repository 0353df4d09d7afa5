"""One process of the trainings: `torchrun -m studies.runtime.moments.worker FOLDER`, started by `trainings`.

The folder holds `job.json`. The process of rank 0 prints each result as a JSON object when it is there.

Shape suffixes: B samples of a local batch, C columns of all features, G samples over all processes, N rows, D embedding
dim.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.batch import Embedded
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.processes.devices import joined
from autoshard.runtime.processes.job import JOB_FILE
from autoshard.runtime.processes.worker import run_worker
from autoshard.runtime.releases import all_gather
from autoshard.runtime.training.dense import DenseModel
from autoshard.runtime.training.step import distributed_step
from autoshard.runtime.training.synthetic import Samples
from studies.frame.documents import read_as
from studies.runtime.clicks import Purpose, batches, held_out_entropy
from studies.runtime.moments.trainings import NoiseJob, NoiseResult, Run, Setting, TrainedRun, TrainingJob

_HEARTBEAT_S = 1.0


def main() -> None:
    """Does what the job in the folder that the command line names asks for."""
    run_worker(_work)


def _work(job: Any, _folder: Path, _rank: int) -> None:
    with joined(torch.device("cpu")):
        if "noise" in job:
            noise = read_as(NoiseJob, job["noise"], JOB_FILE)
            for num_groups in noise.groups:
                _report(result=asdict(noise_result(noise, num_groups)))
        else:
            training = read_as(TrainingJob, job["training"], JOB_FILE)
            for run in training.runs:
                _report(result=asdict(train(training.setting, run)))


def train(setting: Setting, run: Run) -> TrainedRun:
    """Trains once over fresh samples, and predicts the held-out ones now and then."""
    plan = setting.plan(run.num_groups, run.moment_scale)
    settings = FusedSettings(learning_rate=run.learning_rate, eps=setting.eps, seed=run.seed)
    assert plan.tables.dense is not None, "the click model has dense layers"
    held_out = batches(
        setting.model, run.seed, setting.local_batch_size, Purpose.HELD_OUT, setting.num_held_out // setting.batch_size
    )
    heard = time.monotonic()
    with closing(ShardedEmbeddings(plan, settings)) as embeddings:
        dense = DenseModel(plan.tables.dense, embeddings.feature_dims, run.seed)
        step = distributed_step(embeddings, plan.tables, dense, setting.dense_rate)
        entropies = []
        for number, samples in enumerate(_training(setting, run.seed), start=1):
            step(samples)
            if number in setting.evaluated_steps:
                entropies.append(held_out_entropy(embeddings, dense, held_out))
            if time.monotonic() - heard >= _HEARTBEAT_S:
                heard = time.monotonic()
                _report(alive=number)
        is_identical = len(_states(embeddings)) == 1
    return TrainedRun(run=run, entropies=tuple(entropies), is_identical=is_identical)


def noise_result(noise: NoiseJob, num_groups: int) -> NoiseResult:
    """Trains tables on gradients that are noise, and reads their moments.

    Each sample's gradient is drawn from a normal distribution, independent of all weights and of other samples.
    """
    setting = noise.setting
    plan = setting.plan(num_groups, 1, sync_every=noise.sync_every)
    rng = torch.Generator().manual_seed(noise.seed * setting.num_processes + dist.get_rank())
    differences = []
    settings = FusedSettings(learning_rate=0.01, eps=setting.eps, seed=noise.seed)
    with closing(ShardedEmbeddings(plan, settings)) as embeddings:
        for number, samples in enumerate(_training(setting, noise.seed), start=1):
            found = embeddings(samples.ids)
            assert isinstance(found, Embedded), "the batch has no keys"
            noise_BC = torch.randn(found.pooled_BC.shape, generator=rng)
            (found.pooled_BC * noise_BC).sum(dim=1).mean().backward()
            embeddings.end_step()
            if number <= noise.sync_every:
                differences.append(len(_states(embeddings)))
        return NoiseResult(num_groups=num_groups, num_states=tuple(differences), moment=_total_moment(embeddings))


def _training(setting: Setting, seed: int) -> list[Samples]:
    return batches(setting.model, seed, setting.local_batch_size, Purpose.TRAINING, setting.num_steps)


def _states(embeddings: ShardedEmbeddings) -> set[int]:
    """Digests of weights and moments in each replica group: one where all groups are bit-identical."""
    digest = hashlib.sha256()
    for table in embeddings.owners.tables.tables:
        state = embeddings.table_state(table.name)
        for tensor in (state.weights_ND, *state.moments.values()):
            digest.update(tensor.numpy().tobytes())
    own = torch.tensor([int.from_bytes(digest.digest()[:7], "little")])
    everybody = own.new_empty(dist.get_world_size())
    all_gather(everybody, own)
    return set(everybody.tolist())


def _total_moment(embeddings: ShardedEmbeddings) -> float:
    """Sum of the moments of all tables' rows."""
    states = (embeddings.table_state(table.name) for table in embeddings.owners.tables.tables)
    return sum(float(state.expanded().double().sum()) for state in states)


def _report(**document: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(document, allow_nan=False), flush=True)


if __name__ == "__main__":
    main()
