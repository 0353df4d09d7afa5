"""The card of a learned cost model: what it is of, what it covers, how well it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from autoshard.core import LocalShard
from autoshard.core.costs import OutsideRange
from autoshard.core.errors import FormatError, ModelError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.fields import Fields, text
from costmodel.kernel.features import FEATURE_NAMES, NUM_FEATURES, FeatureScaling
from costmodel.registry.card_fields import MAX_METRIC, not_within, numbers, optional_number, read_card

CARD_SCHEMA = "autoshard.cost-model/2"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The shards that a model has seen.

    Attributes:
        kinds: Kinds of kernels (`LocalShard.kernel_kind`); others cannot be priced.
        num_tables: Fewest and most tables of a sample, for information: sets of other sizes are priced well.
        ranges: Smallest and largest value of some fields; shards beyond them are priced, with wider intervals.
    """

    kinds: tuple[str, ...]
    num_tables: tuple[int, int]
    ranges: dict[str, tuple[float, float]]

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

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "kinds": list(self.kinds),
            "num_tables": list(self.num_tables),
            "ranges": {name: list(ends) for name, ends in self.ranges.items()},
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Coverage:
        """Reads what `to_json` wrote.

        Raises:
            FormatError: If a field cannot be used.
        """
        kinds = fields.at("kinds")
        fewest, most = fields.whole_numbers("num_tables")[:2] if len(fields.items("num_tables")) == 2 else (1, 0)
        if fewest > most:
            raise FormatError("must be the fewest and the most tables", field=fields.at("num_tables"))
        found = fields.fields("ranges", required=_RANGED)
        ranges = {}
        for name in _RANGED:
            low, high = numbers(found, name, length=2, minimum=0.0, maximum=1e30)
            if low > high:
                raise not_within(low, high, found.at(name))
            ranges[name] = (low, high)
        return cls(
            kinds=tuple(text(value, f"{kinds}[{index}]") for index, value in enumerate(fields.items("kinds"))),
            num_tables=(fewest, most),
            ranges=ranges,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutMetrics:
    """How predictions of forward plus backward compare with samples that were kept from training."""

    num_samples: int
    mae_ms: float
    mse_ms2: float
    relative_error: float
    """Mean of |predicted - measured| / measured."""
    kendall_tau: float
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

    low: float
    high: float
    coverage: float | None = None
    half_width: float | None = None

    def factors(self, spread_S: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Ends of the interval over the prediction, of shape (S,) each, by the predictions' spreads."""
        low_S, high_S = (np.clip(end * spread_S, -_MAX_EXPONENT, _MAX_EXPONENT) for end in (self.low, self.high))
        return np.exp(low_S), np.exp(high_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModelCard:
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

    device: str
    coverage: Coverage
    encoder_hidden: tuple[int, ...]
    scaling: FeatureScaling
    scale_ms: float
    metrics: HeldOutMetrics
    interval: Interval
    training: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As the JSON object that is stored beside the weights."""
        return {
            "schema": CARD_SCHEMA,
            "device": self.device,
            "features": list(FEATURE_NAMES),
            "coverage": self.coverage.to_json(),
            "encoder_hidden": list(self.encoder_hidden),
            "scaling": {"mean": list(self.scaling.mean_F), "std": list(self.scaling.std_F)},
            "scale_ms": self.scale_ms,
            "metrics": {name: getattr(self.metrics, name) for name in get_type_hints(HeldOutMetrics)},
            "interval": {name: getattr(self.interval, name) for name in get_type_hints(Interval)},
            "training": self.training,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> CostModelCard:
        """Reads what `to_json` wrote.

        Raises:
            ModelError: If it is of another schema, has other features, or a field cannot be used; the text names it.
        """
        return read_card(
            data,
            source,
            schema=CARD_SCHEMA,
            fixed={"features": list(FEATURE_NAMES)},
            required=("device", "coverage", "encoder_hidden", "scaling", "scale_ms", "metrics", "interval", "training"),
            read=_card_of,
        )


def _card_of(fields: Fields) -> CostModelCard:
    hidden = fields.whole_numbers("encoder_hidden", minimum=1, maximum=_MAX_WIDTH)
    if len(hidden) > _MAX_LAYERS:
        raise FormatError(f"must hold 1 to {_MAX_LAYERS} widths, got {len(hidden)}", field="encoder_hidden")
    return CostModelCard(
        device=fields.text("device"),
        coverage=Coverage.from_fields(fields.fields("coverage", required=("kinds", "num_tables", "ranges"))),
        encoder_hidden=hidden,
        scaling=_scaling_of(fields.fields("scaling", required=("mean", "std"))),
        scale_ms=fields.number("scale_ms", minimum=1e-9, maximum=1e9),
        metrics=_metrics_of(fields.fields("metrics", required=tuple(get_type_hints(HeldOutMetrics)))),
        interval=_interval_of(fields.fields("interval", required=tuple(get_type_hints(Interval)))),
        training=fields.mapping("training"),
    )


def _scaling_of(fields: Fields) -> FeatureScaling:
    return FeatureScaling(
        mean_F=numbers(fields, "mean", length=NUM_FEATURES),
        std_F=numbers(fields, "std", length=NUM_FEATURES, minimum=1e-12),
    )


def _metrics_of(fields: Fields) -> HeldOutMetrics:
    return HeldOutMetrics(
        num_samples=fields.whole("num_samples"),
        mae_ms=fields.number("mae_ms", maximum=MAX_METRIC),
        mse_ms2=fields.number("mse_ms2", maximum=MAX_METRIC),
        relative_error=fields.number("relative_error", maximum=MAX_METRIC),
        kendall_tau=fields.number("kendall_tau", minimum=-1.0, maximum=1.0),
    )


def _interval_of(fields: Fields) -> Interval:
    return Interval(
        low=fields.number("low", minimum=-_MAX_QUANTILE, maximum=0.0),
        high=fields.number("high", maximum=_MAX_QUANTILE),
        coverage=optional_number(fields, "coverage", maximum=1.0),
        half_width=optional_number(fields, "half_width", maximum=MAX_METRIC),
    )
