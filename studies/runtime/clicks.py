"""Click data with a known model behind it, and how well a trained model predicts it.

Ids follow the tables' access profiles. Labels are drawn from the click probabilities of a planted model, so that
trained models have something to learn, and the best possible prediction is known.

Shape suffixes: B samples, G samples of all processes, F features, N rows, K latent dim, L lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

from autoshard.core import AccessProfile, DenseLayers, EmbeddingTable, Feature, Pooling, TableSet
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.releases import all_gather
from autoshard.runtime.training.dense import DenseModel
from autoshard.runtime.training.step import FeatureVectors
from autoshard.runtime.training.synthetic import Samples, draw_samples


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


#: Samples by which logits of the planted model are scaled.
_NUM_CALIBRATED = 1 << 16
#: First parts of keys, so that weights, calibration and batches never share random numbers.
_WEIGHTS, _CALIBRATION, _BATCHES = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickModel:
    """A small DLRM, and the clicks that it is trained on.

    Attributes:
        num_tables: Tables, of one feature each.
        num_rows: Rows of a table.
        embedding_dim: Columns of a table, D.
        pooling_factor: Lookups per sample and table.
        alpha: Zipf exponent of the ids.
        num_dense: Dense features per sample.
        latent_dim: Columns of the planted model's tables, K.
        click_rate: Share of samples with label 1.
        logit_deviation: Standard deviation of the planted logits: the strength of what can be learned.
    """

    num_tables: int = 8
    num_rows: int = 2_000
    embedding_dim: int = 16
    pooling_factor: float = 2.0
    alpha: float = 1.05
    num_dense: int = 8
    latent_dim: int = 4
    click_rate: float = 0.2
    logit_deviation: float = 1.5

    def tables(self, batch_size: int) -> TableSet:
        """Tables and dense layers of the trained model, for a global batch size."""
        access = AccessProfile.zipf(self.num_rows, self.alpha)
        tables = tuple(
            EmbeddingTable(
                name=f"t{index}",
                num_embeddings=self.num_rows,
                embedding_dim=self.embedding_dim,
                features=(Feature(name=f"f{index}", pooling_factor=self.pooling_factor),),
                access=access,
            )
            for index in range(self.num_tables)
        )
        dense = DenseLayers(num_dense_features=self.num_dense, bottom_mlp=(64, self.embedding_dim), top_mlp=(64, 32, 1))
        return TableSet(batch_size=batch_size, tables=tables, dense=dense)


class PlantedClicks:
    """Draws samples whose labels follow a hidden model.

    The hidden model has a latent vector and an effect for each row and each dense feature. Its logit is the sum of
    the pooled effects and of the dot products of all pairs of pooled vectors, both scaled to the same variance, as
    in a factorisation machine; the dot products are those of a DLRM.

    Args:
        model: Sizes, click rate and strength of the logits.
        seed: Seed of the hidden model and of all batches: same seed, same model and same batches.

    Source:
        Rendle, "Factorization machines" (2010), Eq. 1 and Lemma 3.1, for the planted logit.
    """

    def __init__(self, model: ClickModel, seed: int) -> None:
        self._model, self._seed = model, seed
        self._tables = model.tables(1)
        rng = np.random.default_rng([_WEIGHTS, seed])

        def drawn(num_rows: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal((num_rows, model.latent_dim + 1), dtype=np.float32))

        # The last column holds the effects.
        self._latent = [drawn(table.num_embeddings) for table in self._tables.tables]
        self._dense = drawn(model.num_dense) / model.num_dense**0.5
        effects_B, pairs_B = self._parts(self._unlabelled(_NUM_CALIBRATED, (_CALIBRATION, seed)))
        self._scales = tuple((float(part_B.mean()), float(part_B.std())) for part_B in (effects_B, pairs_B))
        self._bias = 0.0
        self._bias = _bias_for(self._scaled(effects_B, pairs_B), model.click_rate)

    def draw(self, batch_size: int, key: Sequence[int]) -> Samples:
        """One batch of B samples.

        Args:
            batch_size: B.
            key: Same key, same batch: for instance the number of the batch and the rank of the process.
        """
        samples = self._unlabelled(batch_size, (_BATCHES, self._seed, *key))
        rng = np.random.default_rng([_BATCHES, self._seed, *key, 1])
        uniform_B = torch.from_numpy(rng.random(batch_size, dtype=np.float32))
        return replace(samples, labels_B=(uniform_B < torch.sigmoid(self.logits(samples))).float())

    def logits(self, samples: Samples) -> torch.Tensor:
        """Logits of the hidden model, shape (B,): no model predicts the labels better than they do."""
        return self._scaled(*self._parts(samples))

    def _unlabelled(self, batch_size: int, key: Sequence[int]) -> Samples:
        return draw_samples(self._tables, self._model.num_dense, batch_size, key)

    def _parts(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Pooled effects, and dot products of all pairs of pooled vectors; shape (B,) each."""
        fields_FBK = torch.stack([*self._pooled(samples.ids), samples.dense_BN @ self._dense])
        vectors_FBK, effects_FB = fields_FBK[:, :, :-1], fields_FBK[:, :, -1]
        pairs_B = (vectors_FBK.sum(0).square() - vectors_FBK.square().sum(0)).sum(1) / 2
        return effects_FB.sum(0), pairs_B

    def _pooled(self, batch: BatchOfIds) -> list[torch.Tensor]:
        features = zip(self._tables.tables, self._latent, batch.per_feature(batch.ids_L), batch.lengths_FB, strict=True)
        return [
            embedding_bag(ids_L, latent_NK, lengths_B.cumsum(0) - lengths_B, mode=_mode(table.pooling))
            for table, latent_NK, ids_L, lengths_B in features
        ]

    def _scaled(self, *parts: torch.Tensor) -> torch.Tensor:
        standard = [(part_B - mean) / deviation for part_B, (mean, deviation) in zip(parts, self._scales, strict=True)]
        return self._bias + self._model.logit_deviation / len(parts) ** 0.5 * torch.stack(standard).sum(0)


def normalised_entropy(logits_B: torch.Tensor, labels_B: torch.Tensor) -> float:
    """Mean log loss over that of a model that knows the click rate alone; smaller is better, 1 is no better.

    Args:
        logits_B: Predictions.
        labels_B: Labels of 0 and 1, of both kinds.

    Source:
        He et al., "Practical lessons from predicting clicks on ads at Facebook" (2014), Eq. 3.
    """
    rate_B = labels_B.double().mean().expand(len(labels_B))
    loss = binary_cross_entropy_with_logits(logits_B.double(), labels_B.double())
    return float(loss / binary_cross_entropy_with_logits(torch.logit(rate_B), labels_B.double()))


def _mode(pooling: Pooling) -> str:
    return "mean" if pooling is Pooling.MEAN else "sum"


def _bias_for(logits_B: torch.Tensor, click_rate: float) -> float:
    """What is added to logits so that their mean probability is a click rate, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        is_low = float(torch.sigmoid(logits_B + middle).mean()) < click_rate
        low, high = (middle, high) if is_low else (low, middle)
    return (low + high) / 2
