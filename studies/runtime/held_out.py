"""A process's batches of planted clicks, and how a trained model does on those that it has not seen.

Shape suffixes: B samples of this process, G samples of all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import torch
import torch.distributed as dist

from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.releases import all_gather
from autoshard.runtime.training.dense import DenseModel
from autoshard.runtime.training.step import FeatureVectors
from autoshard.runtime.training.synthetic import Samples
from studies.runtime.clicks import ClickModel, PlantedClicks, normalised_entropy


class Purpose(IntEnum):
    """What batches are for; the first part of their keys."""

    TRAINING = 0
    HELD_OUT = 1


@lru_cache(maxsize=1)
def planted(model: ClickModel, seed: int) -> PlantedClicks:
    """The planted model; runs of one seed share it."""
    return PlantedClicks(model, seed)


@lru_cache(maxsize=2)
def batches(model: ClickModel, seed: int, batch_size: int, purpose: Purpose, count: int) -> list[Samples]:
    """Batches of this process; runs of one seed share them.

    Args:
        model: Sizes of the planted model.
        seed: Of the planted model and of all batches.
        batch_size: Samples of each, of this process.
        purpose: What they are for.
        count: How many.
    """
    clicks = planted(model, seed)
    return [clicks.draw(batch_size, (purpose, number, dist.get_rank())) for number in range(count)]


@torch.no_grad()
def held_out_entropy(embeddings: ShardedEmbeddings, dense: DenseModel, tested: Sequence[Samples]) -> float:
    """Normalised entropy of a trained model over the held-out samples of all processes."""
    vectors = FeatureVectors(embeddings.owners.tables)
    logits = [dense(dense.bottom(one.dense_BN), vectors(embeddings(one.ids), one.ids)) for one in tested]
    return entropy_of(torch.cat(logits), tested)


def entropy_of(logits_B: torch.Tensor, tested: Sequence[Samples]) -> float:
    """Normalised entropy of logits of this process's held-out samples, over those of all processes."""
    labels_B = torch.cat([one.labels_B for one in tested])
    own = torch.stack([logits_B, labels_B])
    everybody = own.new_empty(dist.get_world_size() * len(own), own.shape[1])
    all_gather(everybody, own)
    logits_G, labels_G = everybody.view(-1, *own.shape).unbind(1)
    return normalised_entropy(logits_G.flatten(), labels_G.flatten())
