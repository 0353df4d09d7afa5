"""Batches of measured sets on the device that trains, and their loss.

Shape suffixes: S samples, B samples of a batch, U distinct shards, V distinct shards of a batch, N shards of a batch,
F features, O outputs (forward, backward).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from costmodel.kernel.dataset import CostDataset, IndexArray
from costmodel.kernel.loss import drawn_shards, missing_growth, prediction_loss
from costmodel.kernel.network import CostNetwork


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SetBatch:
    """Samples of one update, all on one device.

    Attributes:
        features_VF: Scaled features of the distinct shards.
        shard_N: Which of them the sets hold, set after set.
        start_B: Where each set starts in `shard_N`.
        latency_BO: Measured latency, in units of the card's `scale_ms`.
        is_drawn_N: Shards of the parts that sets are compared with, see `missing_growth`; None for no comparison.
    """

    features_VF: Tensor
    shard_N: Tensor
    start_B: Tensor
    latency_BO: Tensor
    is_drawn_N: Tensor | None

    def loss(self, network: CostNetwork, least_share: float) -> Tensor:
        """What an update makes smaller; see `TrainingOptions.least_share`."""
        codes_VH = network.encoder(self.features_VF)
        predicted_BO, log_spread_B = network.predict_ms(codes_VH, self.shard_N, self.start_B)
        loss = prediction_loss(predicted_BO, log_spread_B, self.latency_BO)
        if self.is_drawn_N is not None:
            loss = loss + missing_growth(
                network, codes_VH, self.shard_N, self.start_B, predicted_BO, least_share, self.is_drawn_N
            )
        return loss


def uploaded(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Numbers of the host on a device, without waiting for what is queued there.

    A plain copy waits for the device's whole queue. This one reads the host's memory before it returns, which may then
    change.
    """
    return torch.from_numpy(values).to(device, non_blocking=True)


class DeviceSamples:
    """Samples whose features and latencies lie on the device that trains.

    Args:
        dataset: The samples.
        features_UF: Scaled features of its distinct shards.
        scale_ms: Unit of latencies.
        device: Where to train.
    """

    def __init__(
        self, dataset: CostDataset, features_UF: NDArray[np.float32], scale_ms: float, device: torch.device
    ) -> None:
        self._dataset, self._device = dataset, device
        self._features_UF = self._upload(features_UF)
        self._latency_SO = self._upload((dataset.latency_ms_SO / scale_ms).astype(np.float32))

    def batch(self, samples_B: IndexArray, rng: np.random.Generator | None) -> SetBatch:
        """The samples with the given indices; `rng` draws the parts that they are compared with, if they are."""
        shard_N, starts_B = self._dataset.shards_of(samples_B)
        used_V, place_N = np.unique(shard_N, return_inverse=True)
        return SetBatch(
            features_VF=self._features_UF[self._upload(used_V)],
            shard_N=self._upload(place_N),
            start_B=self._upload(starts_B),
            latency_BO=self._latency_SO[self._upload(samples_B)],
            is_drawn_N=None if rng is None else self._upload(drawn_shards(starts_B, len(shard_N), rng)),
        )

    def _upload(self, values: NDArray[np.generic]) -> Tensor:
        return uploaded(values, self._device)
