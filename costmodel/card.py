"""The card of a learned cost model: what it is of, what it covers, how well it does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np

from autoshard.core import DType, Exchange, LocalShard, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.errors import ModelError
from costmodel.features import FEATURE_NAMES, NUM_FEATURES, FeatureScaling

CARD_SCHEMA = "autoshard.cost-model/1"


#: How far beyond the trained range of a feature shards are still priced. Sets with one table whose pooling factor or
#: rows were up to 2 times the trained maximum were predicted with a mean error of 5% to 25%, those beyond with 20% to
#: 60%, always too high (Xeon, 1 thread, 6,000 samples of MetaSyn / 64, trained on those below a cut).
RANGE_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The kinds of shards that a model has seen, and may price.

    Attributes:
        num_bags: Bags per step; features do not tell one batch size from another, so only one is covered.
        num_tables: Fewest and most tables of a sample, for information: sets of other sizes are priced well.
        ranges: Smallest and largest value of each feature.
    """

    num_bags: int
    dtypes: tuple[DType, ...]
    poolings: tuple[Pooling, ...]
    optimizers: tuple[Optimizer, ...]
    num_tables: tuple[int, int]
    ranges: dict[str, tuple[float, float]]

    def check(self, shard: LocalShard) -> None:
        """Raises ModelError if the shard is of another kind, or far larger; the text says what is covered."""
        for label, value, covered in (
            ("num_bags", shard.num_bags, (self.num_bags,)),
            ("dtype", shard.dtype, self.dtypes),
            ("pooling", shard.pooling, self.poolings),
            ("optimizer", shard.optimizer, self.optimizers),
            ("update", shard.update, (Update.FUSED,)),
            ("level", shard.level, (MemoryLevel.HBM,)),
            ("output", shard.output, (Exchange.PARTIAL_SUMS,)),
        ):
            if value not in covered:
                raise _not_covered(shard, label, ", ".join(map(str, covered)), value)
        for label, lowest, highest in self._limits():
            value = getattr(shard, label)
            if not lowest <= value <= highest:
                raise _not_covered(shard, label, f"{lowest:g} to {highest:g}", value)

    def _limits(self) -> Iterator[tuple[str, float, float]]:
        for label in ("embedding_dim", "num_embeddings", "pooling_factor"):
            lowest, highest = self.ranges[label]
            # Small tables and rare lookups cost next to nothing, whatever is predicted; narrow rows do not.
            yield label, lowest / RANGE_FACTOR if label == "embedding_dim" else 0.0, highest * RANGE_FACTOR

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "num_bags": self.num_bags,
            "dtypes": list(self.dtypes),
            "poolings": list(self.poolings),
            "optimizers": list(self.optimizers),
            "num_tables": list(self.num_tables),
            "ranges": {name: list(ends) for name, ends in self.ranges.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Coverage:
        """Reads what `to_json` wrote."""
        fewest, most = data["num_tables"]
        return cls(
            num_bags=int(data["num_bags"]),
            dtypes=tuple(DType(item) for item in data["dtypes"]),
            poolings=tuple(Pooling(item) for item in data["poolings"]),
            optimizers=tuple(Optimizer(item) for item in data["optimizers"]),
            num_tables=(int(fewest), int(most)),
            ranges={name: _ends(data["ranges"][name]) for name in FEATURE_NAMES},
        )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return float(low), float(high)


def _not_covered(shard: LocalShard, label: str, covered: str, value: object) -> ModelError:
    return ModelError(f"the learned cost model covers {covered}, table {shard.table!r} has {value}", field=label)


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
    low_ratio: float
    """5% quantile of measured / predicted."""
    high_ratio: float
    """95% quantile of measured / predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModelCard:
    """All of a learned cost model but its weights.

    Attributes:
        device: Key of the device kind that was measured.
        encoder_hidden: Widths of the encoder's hidden layers.
        scaling: How features were brought to a common scale.
        scale_ms: Milliseconds per unit of the network's outputs.
        metrics: Accuracy on held-out samples.
        training: Options, seed and counts of the training, for information.
    """

    device: str
    coverage: Coverage
    encoder_hidden: tuple[int, ...]
    scaling: FeatureScaling
    scale_ms: float
    metrics: HeldOutMetrics
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
            "training": self.training,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> CostModelCard:
        """Reads what `to_json` wrote.

        Raises:
            ModelError: If it is of another schema, has other features, or lacks a field.
        """
        if data.get("schema") != CARD_SCHEMA:
            raise ModelError(f"must be {CARD_SCHEMA}, got {data.get('schema')!r}", field="schema", source=source)
        if tuple(data.get("features", ())) != FEATURE_NAMES:
            raise ModelError("was trained on other features; train it anew", field="features", source=source)
        try:
            scaling = FeatureScaling(
                mean_F=tuple(float(item) for item in data["scaling"]["mean"]),
                std_F=tuple(float(item) for item in data["scaling"]["std"]),
            )
            card = cls(
                device=str(data["device"]),
                coverage=Coverage.from_json(data["coverage"]),
                encoder_hidden=tuple(int(item) for item in data["encoder_hidden"]),
                scaling=scaling,
                scale_ms=float(data["scale_ms"]),
                metrics=HeldOutMetrics(
                    **{name: kind(data["metrics"][name]) for name, kind in get_type_hints(HeldOutMetrics).items()}
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
    for label, value in (
        ("scale_ms", card.scale_ms),
        ("metrics.low_ratio", card.metrics.low_ratio),
        ("metrics.high_ratio", card.metrics.high_ratio),
    ):
        if not 0 < value < math.inf:
            raise ModelError(f"must be finite and above 0, got {value}", field=label, source=source)
