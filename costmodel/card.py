"""The card of a learned cost model: what it is of, what it covers, how well it does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np

from autoshard.core import LocalShard
from autoshard.core.costs import OutsideRange
from autoshard.core.errors import ModelError
from autoshard.core.quoting import shown
from costmodel.features import FEATURE_NAMES, NUM_FEATURES, FeatureScaling

CARD_SCHEMA = "autoshard.cost-model/2"

#: Fields of a shard whose trained range is remembered.
_RANGED = ("num_bags", "embedding_dim", "num_embeddings", "pooling_factor")
#: Where little of something costs next to nothing, whatever is predicted, only the upper end counts.
_UPPER_ONLY = ("num_embeddings", "pooling_factor")


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
            raise ModelError(
                f"the learned cost model has seen {', '.join(self.kinds)}; table {shown(shard.table)} needs "
                f"{shard.kernel_kind}",
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
    def from_json(cls, data: Mapping[str, Any]) -> Coverage:
        """Reads what `to_json` wrote."""
        fewest, most = data["num_tables"]
        ranges = {}
        for name in _RANGED:
            low, high = data["ranges"][name]
            ranges[name] = (float(low), float(high))
        return cls(kinds=tuple(str(item) for item in data["kinds"]), num_tables=(int(fewest), int(most)), ranges=ranges)


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
            ModelError: If it is of another schema, has other features, or lacks a field.
        """
        if data.get("schema") != CARD_SCHEMA:
            raise ModelError(
                f"must be {CARD_SCHEMA}, got {shown(data.get('schema'))}; train it anew", field="schema", source=source
            )
        if tuple(data.get("features", ())) != FEATURE_NAMES:
            raise ModelError("was trained on other features; train it anew", field="features", source=source)
        try:
            scaling = FeatureScaling(
                mean_F=tuple(float(item) for item in data["scaling"]["mean"]),
                std_F=tuple(float(item) for item in data["scaling"]["std"]),
            )
            interval = data["interval"]
            card = cls(
                device=str(data["device"]),
                coverage=Coverage.from_json(data["coverage"]),
                encoder_hidden=tuple(int(item) for item in data["encoder_hidden"]),
                scaling=scaling,
                scale_ms=float(data["scale_ms"]),
                metrics=HeldOutMetrics(
                    **{name: kind(data["metrics"][name]) for name, kind in get_type_hints(HeldOutMetrics).items()}
                ),
                interval=Interval(
                    low=float(interval["low"]),
                    high=float(interval["high"]),
                    coverage=None if interval["coverage"] is None else float(interval["coverage"]),
                    half_width=None if interval["half_width"] is None else float(interval["half_width"]),
                ),
                training=dict(data["training"]),
            )
        except KeyError as error:
            raise ModelError("is missing", field=str(error.args[0]), source=source) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"has a field of a wrong kind: {error}", source=source) from error
        _check_numbers(card, source)
        return card


def _check_numbers(card: CostModelCard, source: str) -> None:
    mean_F, std_F = card.scaling.mean_F, card.scaling.std_F
    if not len(mean_F) == len(std_F) == NUM_FEATURES:
        raise ModelError(f"needs {NUM_FEATURES} numbers each", field="scaling", source=source)
    if not (np.isfinite(mean_F).all() and np.isfinite(std_F).all() and min(std_F) > 0):
        raise ModelError("must be finite, and deviations above 0", field="scaling", source=source)
    if not 0 < card.scale_ms < math.inf:
        raise ModelError(f"must be finite and above 0, got {card.scale_ms}", field="scale_ms", source=source)
    if not -math.inf < card.interval.low <= 0 <= card.interval.high < math.inf:
        raise ModelError("must be finite, low at most 0 and high at least 0", field="interval", source=source)
