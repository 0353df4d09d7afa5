"""The learned cost model, as planners see it.

Shape suffixes: N shards, S sets of shards, H width of a code.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import KernelCosts, LocalShard
from autoshard.core.costs import CodeArray, KernelErrors, KernelFloor, MsArray, OutsideRange
from autoshard.core.errors import ModelError
from costmodel.kernel.card import CostModelCard
from costmodel.kernel.features import shard_features
from costmodel.kernel.predictor import NUM_OUTSIDE, CostPredictor, SetHead
from costmodel.kernel.weights import Weights
from costmodel.registry.models import LearnedModel
from costmodel.registry.versions import StoredModel, Tensors

#: How much wider intervals are where a shard is unlike all that were measured.
_OUTSIDE_FACTOR = 3.0


class LearnedCostModel(LearnedModel[CostModelCard]):
    """Prices sets of shards with a trained network: encode each shard, add the codes up, price the sum.

    Source:
        AutoShard Sec. 4.2; what differs, see `CostNetwork`.

    Args:
        weights: Tensors named and shaped as `costmodel.kernel.weights.weight_shapes` says.
        card: What the weights are of.
        version: What answers say besides the device: the id in the registry, and whether the model came with this
            package; empty for a model that was not published.
        takes_nearest: Whether kernels that were not measured are taken for the most similar ones that were.

    Raises:
        ModelError: If a tensor is missing, of another shape, or not finite.

    Attributes:
        predictor: The network's arithmetic alone, which prices kinds of kernels that were not measured, too.
    """

    kind = "cost"
    card_type = CostModelCard

    def __init__(
        self, weights: Weights, card: CostModelCard, version: str = "", *, takes_nearest: bool = False
    ) -> None:
        super().__init__(card, version)
        self._weights, self._takes_nearest = weights, takes_nearest
        self.predictor = CostPredictor(
            weights, encoder_hidden=card.encoder_hidden, scaling=card.scaling, scale_ms=card.scale_ms
        )

    @classmethod
    def restored(cls, stored: StoredModel, card: CostModelCard) -> LearnedCostModel:
        """See `LearnedModel.restored`."""
        return cls(stored.tensors, card, stored.label)

    def with_nearest_kernels(self) -> LearnedCostModel:
        """The same model, for tables that have to be seen by it: it takes kernels for the nearest that it knows."""
        return LearnedCostModel(self._weights, self.card, self.version, takes_nearest=True)

    @property
    def errors(self) -> KernelErrors | None:
        """What its errors have in common; None if its card does not say."""
        errors = self.card.errors
        return None if errors is None else replace(errors, drift=self.card.interval.drift)

    def tensors(self) -> Tensors:
        """Its weights."""
        return self._weights

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of single shards, shape (N, H): see `FULL_CODE_WIDTH`.

        Raises:
            ModelError: If no kernel of a shard's kind was measured, unless the nearest ones are taken.
        """
        if self._takes_nearest:
            shards = [self.card.coverage.nearest(shard) for shard in shards]
        first: dict[str, LocalShard] = {}
        for shard in shards:
            first.setdefault(shard.kernel_kind, shard)
        for shard in first.values():
            self.card.coverage.check(shard)
        codes_NH = self.predictor.encode(shard_features(shards))
        self._check_finite(codes_NH)
        codes_NH[:, NUM_OUTSIDE] = self.card.coverage.are_outside(shards)
        return codes_NH

    @property
    def set_head(self) -> SetHead:
        """What `predict_ms` works with."""
        return self.predictor.set_head

    def notes(self, shards: Sequence[LocalShard]) -> tuple[OutsideRange, ...]:
        """Which of the shards lie outside the range that the model was trained on, and how; each once."""
        coverage = self.card.coverage
        beyond = itertools.compress(shards, coverage.are_outside(shards))
        found = (coverage.outside(shard) for shard in beyond)
        return tuple(dict.fromkeys(note for note in found if note is not None))

    def predict_ms(self, codes_SH: CodeArray) -> MsArray:
        """Kernel time in milliseconds, forward plus backward, of sets given by the sums of their codes."""
        kernel_ms_S: MsArray = self.predictor.predict(codes_SH).sum(axis=1)
        self._check_finite(kernel_ms_S)
        return kernel_ms_S

    def predict_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """As `predict_ms`, with forward and backward apart, and the 90% interval."""
        parts_SO = self.predictor.predict(codes_SH)
        kernel_ms_S = parts_SO.sum(axis=1)
        self._check_finite(kernel_ms_S)
        spread_S = self.predictor.spread(codes_SH)
        spread_S *= np.where(codes_SH[:, NUM_OUTSIDE] > 0.5, _OUTSIDE_FACTOR, 1.0)
        low_S, high_S = self.card.interval.factors(spread_S)
        return KernelCosts(
            forward_ms_S=parts_SO[:, 0],
            backward_ms_S=parts_SO[:, 1],
            low_ms_S=kernel_ms_S * low_S,
            high_ms_S=kernel_ms_S * high_S,
        )

    def floor(self, codes_NH: CodeArray) -> KernelFloor:
        """What shards add at least, see `CostPredictor.floor`; sets cost up to four times as much."""
        return self.predictor.floor(codes_NH)

    def _check_finite(self, values: NDArray[np.floating]) -> None:
        # The limits of cards and weights leave room for this only with tables far beyond any that were measured.
        if not np.isfinite(values).all():
            raise ModelError(f"{self.name} gives no finite time for these tables; train it anew", field="weights")
