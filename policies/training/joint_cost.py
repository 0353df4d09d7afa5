"""The cost model in joint training.

Shape suffixes: M tables, B samples of a batch, S samples, O outputs (forward, backward, their sum).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from autoshard.core.errors import SampleStoreError
from costmodel.kernel.card import CostModelCard
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import FeatureScaling
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import assess
from costmodel.kernel.network import CostNetwork
from costmodel.kernel.predictor import CostPredictor
from costmodel.kernel.training import MIN_SAMPLES
from costmodel.kernel.weights import ENCODER_HIDDEN
from policies.network.weights import load_arrays, optimizer_arrays, restore_optimizer, to_arrays, with_prefix
from policies.training.checkpoint import Checkpoint
from policies.training.cost_buffer import CostBuffer

_HELD_OUT_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CostUpdates:
    """How the cost model is trained between two updates of the policy.

    Source:
        AutoShard C.2.
    """

    num_updates: int = 20
    batch_size: int = 512
    learning_rate: float = 1e-3


class JointCost:
    """A cost network in training, and the samples that it learns from.

    Args:
        dataset: Samples of a store; a part is held out.
        device: Key of the device kind that they were measured on.
        seed: Source of randomness.
        updates: How to train.

    Raises:
        SampleStoreError: If there are too few samples.

    Attributes:
        num_stored: Samples of the dataset that it learns from; measured ones come on top.
    """

    def __init__(self, dataset: CostDataset, *, device: str, seed: int = 0, updates: CostUpdates | None = None) -> None:
        if len(dataset) < MIN_SAMPLES:
            raise SampleStoreError(f"training needs at least {MIN_SAMPLES} samples, there are {len(dataset)}")
        self._device = device
        self._updates = updates or CostUpdates()
        self._rng = np.random.default_rng(seed)
        train_part, self._held_out = dataset.split(_HELD_OUT_SHARE, seed)
        self.scaling = FeatureScaling.fit(train_part.features_UF[train_part.shard_N])
        self.scale_ms = float(train_part.kernel_ms.mean())
        self.coverage = dataset.coverage
        self.buffer = CostBuffer(self.scaling, self.scale_ms)
        self.buffer.add_dataset(train_part)
        self.num_stored = len(self.buffer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = CostNetwork(ENCODER_HIDDEN)
        self.network.start_from(train_part.mean_work, train_part.mean_latency_ms / self.scale_ms)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self._updates.learning_rate)
        self._card = self.current().card

    def train(self) -> None:
        """Makes the updates that follow one of the policy."""
        for features_MF, starts_B, latency_BO in self.buffer.batches(
            self._updates.num_updates, self._updates.batch_size, self._rng
        ):
            parts_BO, _ = self.network(features_MF, torch.arange(len(features_MF)), starts_B)
            predicted_BO = torch.cat([parts_BO, parts_BO.sum(dim=1, keepdim=True)], dim=1)
            error_BO = (predicted_BO - latency_BO) / latency_BO[:, 2:]
            # Measured rewards are of forward and backward together, so only the sum is known.
            loss = error_BO[~latency_BO.isnan()].abs().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @property
    def encoder(self) -> nn.Module:
        """Makes the learned part of a code from scaled features; the policy's learner goes through it too."""
        return self.network.get_submodule("encoder")

    def predictor(self) -> CostPredictor:
        """The cost model as it is now, for features instead of shards."""
        return CostPredictor(
            to_arrays(self.network), encoder_hidden=ENCODER_HIDDEN, scaling=self.scaling, scale_ms=self.scale_ms
        )

    def current(self) -> LearnedCostModel:
        """The cost model as it is now, measured on the samples held out."""
        metrics, interval = assess(self.predictor(), self._held_out)
        self._card = CostModelCard(
            device=self._device,
            coverage=self.coverage,
            encoder_hidden=ENCODER_HIDDEN,
            scaling=self.scaling,
            scale_ms=self.scale_ms,
            metrics=metrics,
            interval=interval,
            training={"joint": True, "num_samples": len(self.buffer)},
        )
        return LearnedCostModel(to_arrays(self.network), self._card)

    def model(self) -> LearnedCostModel:
        """The cost model as it is now, with the intervals of the last time that it was measured."""
        return LearnedCostModel(to_arrays(self.network), self._card)

    def checkpoint(self) -> Checkpoint:
        """What `restore` needs; measured samples are not kept."""
        tensors = {f"network.{name}": value for name, value in to_arrays(self.network).items()}
        return Checkpoint(
            state={"rng": self._rng.bit_generator.state}, tensors=tensors | optimizer_arrays(self.optimizer)
        )

    def restore(self, checkpoint: Checkpoint, source: str) -> None:
        """Goes on from a checkpoint."""
        load_arrays(self.network, with_prefix(checkpoint.tensors, "network."), source)
        restore_optimizer(self.optimizer, with_prefix(checkpoint.tensors, "optimizer."))
        self._rng.bit_generator.state = checkpoint.state["rng"]
