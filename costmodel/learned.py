"""The learned cost model at work: numpy only, so that planners and services need no torch.

Shape suffixes: N shards, S sets of shards, F features, H width of a code, O outputs (forward, backward).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core import KernelCosts, LocalShard
from autoshard.core.costs import CodeArray, MsArray
from costmodel.card import CostModelCard
from costmodel.features import shard_features
from costmodel.registry import Registry, StoredModel
from costmodel.weights import CODE_WIDTH, HEADS, check_weights

#: What the encoder learned, then a 1: the sum of codes tells how many shards there are (above all: none).
FULL_CODE_WIDTH = CODE_WIDTH + 1
COST_KIND = "cost"
_SETS_AT_ONCE = 1 << 16

_Layer = tuple[NDArray[np.float32], NDArray[np.float32]]


class LearnedCostModel:
    """Prices sets of shards with a trained network: encode each shard, add the codes up, price the sum.

    Source:
        AutoShard Sec. 4.2. Differs: codes carry a count, so that an empty set costs 0, and predictions are
        never negative.

    Args:
        weights: Tensors named and shaped as `costmodel.weights.weight_shapes` says.
        card: What the weights are of.
        source: Where they come from, for error messages.

    Raises:
        ModelError: If a tensor is missing, of another shape, or not finite.
    """

    def __init__(
        self, weights: Mapping[str, NDArray[Any]], card: CostModelCard, source: str = "weights"
    ) -> None:
        self.card = card
        check_weights(weights, source)

        def layer(block: str, index: int) -> _Layer:
            weight = np.ascontiguousarray(weights[f"{block}.{index}.weight"].T, dtype=np.float32)
            return weight, weights[f"{block}.{index}.bias"].astype(np.float32)

        self._encoder = (layer("encoder", 0), layer("encoder", 2))
        self._heads = tuple((layer(head, 0), layer(head, 2)) for head in HEADS)

    @classmethod
    def load(cls, registry: Registry, device: str, version: str = "production") -> LearnedCostModel:
        """The model of a device from a registry.

        Raises:
            ModelError: If it is missing, damaged, or of another schema; the text names the file.
        """
        stored = registry.load(COST_KIND, device, version)
        return cls.from_stored(stored, source=str(registry.root / COST_KIND / device / stored.id))

    @classmethod
    def from_stored(cls, stored: StoredModel, source: str) -> LearnedCostModel:
        """The model of a registry's version."""
        return cls(stored.tensors, CostModelCard.from_json(stored.card, source), source)

    @property
    def name(self) -> str:
        """`learned:<device>`."""
        return f"learned:{self.card.device}"

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of single shards, shape (N, H): what the encoder learned, then a 1.

        Raises:
            ModelError: If a shard is of a kind that the training samples did not cover.
        """
        for shard in shards:
            self.card.coverage.check(shard)
        codes_NH = np.ones((len(shards), FULL_CODE_WIDTH), dtype=np.float32)
        codes_NH[:, :CODE_WIDTH] = _mlp(self.card.scaling.apply(shard_features(shards)), *self._encoder)
        return codes_NH

    def price(self, codes_SH: CodeArray) -> MsArray:
        """Kernel time in milliseconds, forward plus backward, of sets given by the sums of their codes."""
        return self._parts(codes_SH).sum(axis=1)

    def price_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """As `price`, with forward and backward apart, and the 90% interval of held-out samples."""
        parts_SO = self._parts(codes_SH)
        kernel_ms_S = parts_SO.sum(axis=1)
        return KernelCosts(
            forward_ms_S=parts_SO[:, 0],
            backward_ms_S=parts_SO[:, 1],
            low_ms_S=kernel_ms_S * min(self.card.metrics.low_ratio, 1.0),
            high_ms_S=kernel_ms_S * max(self.card.metrics.high_ratio, 1.0),
        )

    def _parts(self, codes_SH: CodeArray) -> NDArray[np.float64]:
        parts_SO = np.empty((len(codes_SH), len(HEADS)))
        for start in range(0, len(codes_SH), _SETS_AT_ONCE):
            chunk = slice(start, start + _SETS_AT_ONCE)
            learned_SH = codes_SH[chunk, :CODE_WIDTH]
            for output, head in enumerate(self._heads):
                parts_SO[chunk, output] = _mlp(learned_SH, *head)[:, 0]
        is_empty_S = codes_SH[:, CODE_WIDTH] < 0.5
        parts_SO[is_empty_S] = 0.0
        return np.maximum(parts_SO * self.card.scale_ms, 0.0)


def _mlp(inputs: NDArray[np.float32], hidden: _Layer, output: _Layer) -> NDArray[np.float32]:
    activations: NDArray[np.float32] = inputs @ hidden[0]
    activations += hidden[1]
    np.maximum(activations, np.float32(0), out=activations)
    outputs: NDArray[np.float32] = activations @ output[0]
    outputs += output[1]
    return outputs
