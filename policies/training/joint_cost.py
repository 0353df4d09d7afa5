"""The cost model in joint training.

Shape suffixes: M tables, B samples of a batch, S samples, L known latencies of a batch, O outputs (forward, backward,
their sum).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from autoshard.core import LocalShard
from autoshard.core.errors import SampleStoreError
from autoshard.runtime.processes.learners import Learners
from costmodel.kernel.card import CostModelCard, HeldOutMetrics, Interval, TrainedCoverage
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import FeatureArray, FeatureScaling, shard_features
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import assess
from costmodel.kernel.network import CostNetwork
from costmodel.kernel.predictor import CostPredictor
from costmodel.kernel.training import MIN_SAMPLES
from costmodel.kernel.updates.batches import uploaded
from costmodel.kernel.weights import ENCODER_HIDDEN, NUM_OUTPUTS
from policies.choices import CostLoss
from policies.network.weights import load_arrays, optimizer_arrays, restore_optimizer, to_arrays, with_prefix
from policies.training.checkpoint import PolicyCheckpoint
from policies.training.cost_buffer import CostBuffer

_HELD_OUT_SHARE = 0.2
#: Of measured samples, every so many are kept from training, for the card's accuracy and interval.
_HELD_OUT_EVERY = 5
#: The card before anything was measured: a prediction may be off by any factor up to e squared, either way.
_UNKNOWN = HeldOutMetrics(num_samples=0, mae_ms=0.0, mse_ms2=0.0, relative_error=1.0, kendall_tau=0.0)
_ANYTHING = Interval(low=-2.0, high=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostUpdates:
    """How the cost model is trained between two updates of the policy.

    Source:
        AutoShard C.2.
    """

    num_updates: int = 20
    batch_size: int = 512
    learning_rate: float = 1e-3
    loss: CostLoss = CostLoss.RELATIVE


class JointCost:
    """A cost network in training, and the samples that it learns from.

    Args:
        samples: Samples of a store, of which a part is held out; or the tables of the tasks, as a rank that holds one
            alone runs it: then nothing is known before the first placements are measured.
        device: Key of the device kind that is measured.
        seed: Source of randomness.
        updates: How to train.
        learners: This process's device; the CPU when left out.

    Raises:
        SampleStoreError: If there are too few samples in a store.

    Attributes:
        num_stored: Samples of a store that it learns from; measured ones come on top.
    """

    def __init__(
        self,
        samples: CostDataset | Iterable[LocalShard],
        *,
        device: str,
        seed: int = 0,
        updates: CostUpdates | None = None,
        learners: Learners | None = None,
    ) -> None:
        self._device, self.learners = device, learners or Learners()
        self._updates = updates or CostUpdates()
        self._rng = np.random.default_rng(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = CostNetwork(ENCODER_HIDDEN)
        self._held_out: list[tuple[FeatureArray, float]] = []
        self._stored_held_out: CostDataset | None = None
        self.num_measured = 0
        if isinstance(samples, CostDataset):
            self._begin_with_store(samples, seed)
        else:
            self._begin_with_nothing(tuple(samples))
        self.num_stored = len(self.buffer)
        self.network.to(self.learners.device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self._updates.learning_rate)
        self._card = self.current().card

    def _begin_with_store(self, dataset: CostDataset, seed: int) -> None:
        if len(dataset) < MIN_SAMPLES:
            raise SampleStoreError(f"training needs at least {MIN_SAMPLES} samples, there are {len(dataset)}")
        train_part, self._stored_held_out = dataset.split(_HELD_OUT_SHARE, seed)
        self.scaling = FeatureScaling.fit(train_part.features_UF[train_part.shard_N])
        self.scale_ms = float(train_part.kernel_ms.mean())
        self.coverage = dataset.coverage
        self.buffer = CostBuffer(self.scaling, self.scale_ms)
        self.buffer.add_dataset(train_part)
        self.network.start_from(train_part.mean_work, train_part.mean_latency_ms / self.scale_ms)
        self.has_level = True

    def _begin_with_nothing(self, tables: tuple[LocalShard, ...]) -> None:
        self.scaling = FeatureScaling.fit(shard_features(tables))
        self.scale_ms = 1.0
        self.coverage = TrainedCoverage.of(tables, num_tables=(1, len(tables)))
        self.buffer = CostBuffer(self.scaling, self.scale_ms)
        self.has_level = False

    def add_measured(self, features_MF: FeatureArray, kernel_ms: float) -> None:
        """Adds a rank's shards and what they took; some samples are held out where no store has any."""
        self.num_measured += 1
        if self._stored_held_out is None and self.num_measured % _HELD_OUT_EVERY == 0:
            self._held_out.append((features_MF, kernel_ms))
        else:
            self.buffer.add_measured(features_MF, kernel_ms)

    def train(self) -> None:
        """Makes the updates that follow one of the policy; none as long as nothing was measured."""
        if not len(self.buffer):
            return
        if not self.has_level:
            self._find_level()
        device = self.learners.device
        for features_MF, starts_B, latency_BO in self.buffer.batches(
            self._updates.num_updates, self._updates.batch_size, self._rng
        ):
            # Measured rewards are of forward and backward together, so only the sum is known.
            known_L = np.flatnonzero(~np.isnan(latency_BO))
            self.update(
                uploaded(features_MF, device),
                uploaded(starts_B, device),
                uploaded(latency_BO, device).nan_to_num(),
                uploaded(known_L, device),
            )

    def update(self, features_MF: Tensor, starts_B: Tensor, latency_BO: Tensor, known_L: Tensor) -> None:
        """Makes one update.

        Args:
            features_MF: Scaled features of all shards.
            starts_B: Where each sample starts among them.
            latency_BO: Latencies in units of `scale_ms`.
            known_L: Which of these, counted row by row, were measured.
        """
        shard_M = torch.arange(len(features_MF), device=features_MF.device)
        parts_BO, _ = self.network(features_MF, shard_M, starts_B)
        predicted_BO = torch.cat([parts_BO, parts_BO.sum(dim=1, keepdim=True)], dim=1)
        error_BO = predicted_BO - latency_BO
        if self._updates.loss is CostLoss.SQUARED:
            loss = error_BO.flatten()[known_L].square().mean()
        else:
            loss = (error_BO / latency_BO[:, 2:]).flatten()[known_L].abs().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _find_level(self) -> None:
        """Begins with prices that suit what was measured first; how it parts into forward and backward is not known."""
        work_K, kernel_units = self.buffer.mean_sample()
        self.network.start_from(work_K, np.full(NUM_OUTPUTS, kernel_units / NUM_OUTPUTS))
        self.has_level = True

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
        held_out = self._all_held_out()
        metrics, interval = (_UNKNOWN, _ANYTHING) if held_out is None else assess(self.predictor(), held_out)
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

    def _all_held_out(self) -> CostDataset | None:
        if self._stored_held_out is not None or not self._held_out:
            return self._stored_held_out
        features, kernel_ms = zip(*self._held_out, strict=True)
        num_shards_S = np.array([len(features_MF) for features_MF in features])
        return CostDataset(
            shards_U=(),
            features_UF=np.concatenate(features),
            shard_N=np.arange(num_shards_S.sum()),
            num_shards_S=num_shards_S,
            set_S=np.arange(len(features)),
            latency_ms_SO=np.array(kernel_ms)[:, None].repeat(NUM_OUTPUTS, axis=1) / NUM_OUTPUTS,
        )

    def model(self) -> LearnedCostModel:
        """The cost model as it is now, with the intervals of the last time that it was measured."""
        return LearnedCostModel(to_arrays(self.network), self._card)

    def checkpoint(self) -> PolicyCheckpoint:
        """What `restore` needs; measured samples are not kept."""
        tensors = {f"network.{name}": value for name, value in to_arrays(self.network).items()}
        return PolicyCheckpoint(
            state={"rng": self._rng.bit_generator.state, "has_level": self.has_level},
            tensors=tensors | optimizer_arrays(self.optimizer),
        )

    def restore(self, checkpoint: PolicyCheckpoint, source: str) -> None:
        """Goes on from a checkpoint."""
        load_arrays(self.network, with_prefix(checkpoint.tensors, "network."), source)
        restore_optimizer(self.optimizer, with_prefix(checkpoint.tensors, "optimizer."))
        self._rng.bit_generator.state = checkpoint.state["rng"]
        self.has_level = bool(checkpoint.state.get("has_level", True))
