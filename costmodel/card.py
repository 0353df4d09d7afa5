"""The card of a learned cost model: what it is of, what it covers, how well it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from autoshard.core import DType, Exchange, LocalShard, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.errors import ModelError
from costmodel.features import FEATURE_NAMES, NUM_FEATURES, FeatureScaling

CARD_SCHEMA = "autoshard.cost-model/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The kinds of shards that a model has seen, and may price.

    Attributes:
        num_bags: Bags per step; features do not tell one batch size from another, so only one is covered.
        num_tables: Fewest and most tables of a sample.
        ranges: Smallest and largest value of each feature, for information: shards outside are extrapolated.
    """

    num_bags: int
    dtypes: tuple[DType, ...]
    poolings: tuple[Pooling, ...]
    optimizers: tuple[Optimizer, ...]
    num_tables: tuple[int, int]
    ranges: dict[str, tuple[float, float]]

    def check(self, shard: LocalShard) -> None:
        """Raises ModelError if the shard is of another kind; the text says what is covered."""
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
                accepted = ", ".join(str(item) for item in covered)
                raise ModelError(
                    f"the learned cost model covers {accepted}, table {shard.table!r} has {value}",
                    field=label,
                )

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
            ranges={name: (float(low), float(high)) for name, (low, high) in data["ranges"].items()},
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
                metrics=HeldOutMetrics(**data["metrics"]),
                training=dict(data["training"]),
            )
        except KeyError as error:
            raise ModelError("is missing", field=str(error.args[0]), source=source) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"has a field of a wrong kind: {error}", source=source) from error
        if not len(scaling.mean_F) == len(scaling.std_F) == NUM_FEATURES:
            raise ModelError(f"needs {NUM_FEATURES} numbers each", field="scaling", source=source)
        return card
