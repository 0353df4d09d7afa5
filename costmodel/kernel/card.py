"""The card of a learned cost model: what it is of, what it covers, how well it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from autoshard.core import LocalShard
from autoshard.core.accepted import Range
from autoshard.core.costs import OutsideRange
from autoshard.core.errors import FormatError, ModelError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.fields import Fields, text
from costmodel.kernel.features import FEATURE_NAMES, FeatureScaling
from costmodel.registry.card_fields import MAX_METRIC, Metric, ModelCard, not_within, numbers

#: Fields of a shard whose trained range is remembered.
_RANGED = ("num_bags", "embedding_dim", "num_embeddings", "pooling_factor")
#: Where little of something costs next to nothing, whatever is predicted, only the upper end counts.
_UPPER_ONLY = ("num_embeddings", "pooling_factor")
#: Of a network; each layer must be small enough that its weights can be held.
_MAX_LAYERS, _MAX_WIDTH = 8, 4096
#: Of intervals, in spreads: trained ones have about 2, and tens where few samples were kept from training.
_MAX_QUANTILE = 1e6
#: Largest exponent of an interval's end over its prediction, so that both are finite.
_MAX_EXPONENT = 300.0
#: Characters of the kinds that a message has room for: all that one machine's store has.
_KINDS_ROOM = 1000


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    path = fields.at(name)
    return tuple(text(value, f"{path}[{index}]") for index, value in enumerate(fields.items(name)))


def _fewest_and_most(fields: Fields, name: str) -> tuple[int, int]:
    fewest, most = fields.whole_numbers(name)[:2] if len(fields.items(name)) == 2 else (1, 0)
    if fewest > most:
        raise FormatError("must be the fewest and the most tables", field=fields.at(name))
    return fewest, most


def _ranges(fields: Fields, name: str) -> dict[str, tuple[float, float]]:
    found, ranges = fields.fields(name, required=_RANGED), {}
    for item in _RANGED:
        low, high = numbers(found, item, length=2, minimum=0.0, maximum=1e30)
        if low > high:
            raise not_within(low, high, found.at(item))
        ranges[item] = (low, high)
    return ranges


def _hidden_widths(fields: Fields, name: str) -> tuple[int, ...]:
    hidden = fields.whole_numbers(name, minimum=1, maximum=_MAX_WIDTH)
    if len(hidden) > _MAX_LAYERS:
        raise FormatError(f"must hold 1 to {_MAX_LAYERS} widths, got {len(hidden)}", field=name)
    return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The shards that a model has seen.

    Attributes:
        kinds: Kinds of kernels (`LocalShard.kernel_kind`); others cannot be priced.
        num_tables: Fewest and most tables of a sample, for information: sets of other sizes are priced well.
        ranges: Smallest and largest value of some fields; shards beyond them are priced, with wider intervals.
    """

    kinds: Annotated[tuple[str, ...], _texts]
    num_tables: Annotated[tuple[int, int], _fewest_and_most]
    ranges: Annotated[dict[str, tuple[float, float]], _ranges]

    @classmethod
    def of(cls, shards: Iterable[LocalShard], *, num_tables: tuple[int, int]) -> Coverage:
        """The coverage of some shards, at least one."""
        held = tuple(shards)
        values = {name: [float(getattr(shard, name)) for shard in held] for name in _RANGED}
        return cls(
            kinds=tuple(sorted({shard.kernel_kind for shard in held})),
            num_tables=num_tables,
            ranges={name: (min(found), max(found)) for name, found in values.items()},
        )

    def check(self, shard: LocalShard) -> None:
        """Raises ModelError if no kernel of the shard's kind was measured; the text says which were."""
        if shard.kernel_kind not in self.kinds:
            seen = shortened(", ".join(self.kinds), _KINDS_ROOM)
            raise ModelError(
                f"the learned cost model has seen {seen}; table {shown(shard.table)} needs {shard.kernel_kind}",
                field="kernel_kind",
            )

    def outside(self, shard: LocalShard) -> OutsideRange | None:
        """The field by which the shard lies furthest outside the trained range; None if it is inside."""
        found = []
        for name in _RANGED:
            low, high = self.ranges[name]
            value = float(getattr(shard, name))
            if value > high or (value < low and name not in _UPPER_ONLY):
                found.append(OutsideRange(table=shard.table, field=name, value=value, low=low, high=high))
        return max(found, key=lambda one: one.excess, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutMetrics:
    """How predictions of forward plus backward compare with samples that were kept from training."""

    num_samples: int
    mae_ms: Metric
    mse_ms2: Metric
    relative_error: Metric
    """Mean of |predicted - measured| / measured."""
    kendall_tau: Annotated[float, Range(at_least=-1.0, at_most=1.0)]
    """Agreement of the order of samples, from -1 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The 90% interval of a prediction p with spread s: from p * exp(low * s) to p * exp(high * s).

    Attributes:
        low: 5% quantile of log(measured / predicted) / s on samples kept from training, at most 0.
        high: The 95% quantile, at least 0.
        coverage: Share of other kept samples that lie within; None where there were too few to tell.
        half_width: Median over these of half the interval's width over the prediction; likewise.
    """

    low: Annotated[float, Range(at_least=-_MAX_QUANTILE, at_most=0.0)]
    high: Annotated[float, Range(at_least=0.0, at_most=_MAX_QUANTILE)]
    coverage: Annotated[float | None, Range(at_least=0.0, at_most=1.0)] = None
    half_width: Annotated[float | None, Range(at_least=0.0, at_most=MAX_METRIC)] = None

    def factors(self, spread_S: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Ends of the interval over the prediction, of shape (S,) each, by the predictions' spreads."""
        low_S, high_S = (np.clip(end * spread_S, -_MAX_EXPONENT, _MAX_EXPONENT) for end in (self.low, self.high))
        return np.exp(low_S), np.exp(high_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModelCard(ModelCard):
    """All of a learned cost model but its weights.

    Attributes:
        device: Key of the device kind that was measured.
        encoder_hidden: Widths of the encoder's hidden layers.
        scaling: How features were brought to a common scale.
        scale_ms: Milliseconds per unit of the network's outputs.
        metrics: Accuracy on held-out samples.
        interval: How far to trust a prediction.
        training: Options, seed and counts of the training, for information.
    """

    schema: ClassVar[str] = "autoshard.cost-model/2"
    fixed: ClassVar[Mapping[str, object]] = {"features": list(FEATURE_NAMES)}

    device: str
    coverage: Coverage
    encoder_hidden: Annotated[tuple[int, ...], _hidden_widths]
    scaling: FeatureScaling
    scale_ms: Annotated[float, Range(at_least=1e-9, at_most=1e9)]
    metrics: HeldOutMetrics
    interval: Interval
    training: dict[str, Any]
