"""The learned cost model, as planners see it.

Shape suffixes: N shards, S sets of shards, H width of a code.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.core import KernelCosts, LocalShard
from autoshard.core.costs import CodeArray, MsArray
from costmodel.card import CostModelCard
from costmodel.features import shard_features
from costmodel.predictor import CostPredictor
from costmodel.registry import PRODUCTION, Registry, StoredModel
from costmodel.weights import Weights

COST_KIND = "cost"


class LearnedCostModel:
    """Prices sets of shards with a trained network: encode each shard, add the codes up, price the sum.

    Source:
        AutoShard Sec. 4.2. Differs: codes carry a count, so that an empty set costs 0, and predictions are never
        negative.

    Args:
        weights: Tensors named and shaped as `costmodel.weights.weight_shapes` says.
        card: What the weights are of.
        source: Where they come from, for error messages.

    Raises:
        ModelError: If a tensor is missing, of another shape, or not finite.
    """

    def __init__(self, weights: Weights, card: CostModelCard, source: str = "weights") -> None:
        self.card = card
        self._predictor = CostPredictor(
            weights,
            encoder_hidden=card.encoder_hidden,
            scaling=card.scaling,
            scale_ms=card.scale_ms,
            source=source,
        )

    @classmethod
    def load(cls, registry: Registry, device: str, version: str = PRODUCTION) -> LearnedCostModel:
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
        """Codes of single shards, shape (N, H): the encoder's CODE_WIDTH numbers, then a 1.

        Raises:
            ModelError: If a shard is of a kind that the training samples did not cover.
        """
        for shard in shards:
            self.card.coverage.check(shard)
        return self._predictor.encode(shard_features(shards))

    def price(self, codes_SH: CodeArray) -> MsArray:
        """Kernel time in milliseconds, forward plus backward, of sets given by the sums of their codes."""
        kernel_ms_S: MsArray = self._predictor.predict(codes_SH).sum(axis=1)
        return kernel_ms_S

    def price_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """As `price`, with forward and backward apart, and the 90% interval of held-out samples."""
        parts_SO = self._predictor.predict(codes_SH)
        kernel_ms_S = parts_SO.sum(axis=1)
        return KernelCosts(
            forward_ms_S=parts_SO[:, 0],
            backward_ms_S=parts_SO[:, 1],
            low_ms_S=kernel_ms_S * min(self.card.metrics.low_ratio, 1.0),
            high_ms_S=kernel_ms_S * max(self.card.metrics.high_ratio, 1.0),
        )
