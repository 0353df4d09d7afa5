"""The card of a learned cost model: what it is of, what it covers, how well it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from autoshard.core import DType, Exchange, LocalShard, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.costs import KernelErrors, OutsideRange
from autoshard.core.errors import FormatError, ModelError
from autoshard.core.machine import MeasuredMachine
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.kinds import (
    ANY_OBJECT,
    TEXT,
    Field,
    list_of,
    number_in,
    optional,
    or_null,
    record,
    tuple_of,
    whole_number,
)
from autoshard.formats.documents.machine_json import MACHINE
from costmodel.kernel.features import FEATURE_NAMES, SCALING, FeatureScaling
from costmodel.registry.card_fields import MAX_METRIC, ModelCard

#: Fields of a shard whose trained range is remembered.
_RANGED = ("num_bags", "embedding_dim", "num_embeddings", "pooling_factor")
#: Where little of something costs next to nothing, whatever is predicted, only the upper end counts.
_UPPER_ONLY = ("num_embeddings", "pooling_factor")
#: Of a network; each layer must be small enough that its weights can be held.
_MAX_LAYERS, _MAX_WIDTH = 8, 4096
#: Upper end of a trained range.
_MAX_RANGE = 1e30
#: Of intervals, in spreads: trained ones have about 2, and tens where few samples were kept from training.
_MAX_QUANTILE = 1e6
#: Largest exponent of an interval's end over its prediction, so that both are finite.
_MAX_EXPONENT = 300.0
#: Characters of the kinds that a message has room for: all that one machine's store has.
_KINDS_ROOM = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCoverage:
    """The shards that a model has seen.

    Attributes:
        kinds: Kinds of kernels (`LocalShard.kernel_kind`); others cannot be priced.
        num_tables: Fewest and most tables of a sample, for information: sets of other sizes are priced well.
        ranges: Smallest and largest value of some fields; shards beyond them are priced, with wider intervals.
    """

    kinds: tuple[str, ...]
    num_tables: tuple[int, int]
    ranges: dict[str, tuple[float, float]]

    def __post_init__(self) -> None:
        ends = {"num_tables": self.num_tables, **{f"ranges.{name}": ends for name, ends in self.ranges.items()}}
        for field, (low, high) in ends.items():
            if low > high:
                raise FormatError(f"must rise, got {low:g} to {high:g}", field=field)

    @classmethod
    def of(cls, shards: Iterable[LocalShard], *, num_tables: tuple[int, int]) -> TrainedCoverage:
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

    def nearest(self, shard: LocalShard) -> LocalShard:
        """The shard in the measured kernel whose kind has most in common with its own; itself if that was measured."""
        if shard.kernel_kind in self.kinds:
            return shard
        own = shard.kernel_kind.split("/")
        kinds = [kind.split("/") for kind in self.kinds]
        update, _, dtype, optimizer, pooling = max(
            kinds, key=lambda kind: sum(mine == theirs for mine, theirs in zip(own, kind, strict=True))
        )
        gives_rows = pooling == "rows"
        return replace(
            shard,
            update=Update(update),
            dtype=DType(dtype),
            optimizer=shard.optimizer if optimizer == "none" else Optimizer(optimizer),
            pooling=shard.pooling if gives_rows else Pooling(pooling),
            output=Exchange.ROWS if gives_rows else Exchange.PARTIAL_SUMS,
            level=MemoryLevel.HBM,
            cache_bytes=0,
        )

    def outside(self, shard: LocalShard) -> OutsideRange | None:
        """The field by which the shard lies furthest outside the trained range; None if it is inside."""
        found = []
        for name in _RANGED:
            low, high = self.ranges[name]
            value = float(getattr(shard, name))
            if self._are_beyond(name, np.array(value)):
                found.append(OutsideRange(table=shard.table, field=name, value=value, low=low, high=high))
        return max(found, key=lambda one: one.excess, default=None)

    def are_outside(self, shards: Sequence[LocalShard]) -> NDArray[np.bool_]:
        """Whether each shard lies outside the trained range, shape (N,)."""
        values = {name: np.array([getattr(shard, name) for shard in shards], dtype=np.float64) for name in _RANGED}
        return np.logical_or.reduce([self._are_beyond(name, values_N) for name, values_N in values.items()])

    def _are_beyond(self, name: str, values_N: NDArray[np.float64]) -> NDArray[np.bool_]:
        low, high = self.ranges[name]
        return (values_N > high) | ((values_N < low) & (name not in _UPPER_ONLY))


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
    """The 90% interval of a prediction p with spread s, p / exp(hypot(low s, drift)) to p exp(hypot(high s, drift)).

    Attributes:
        low: 5% quantile of log(measured / predicted) / s on samples kept from training, at most 0.
        high: The 95% quantile, at least 0.
        coverage: Share of other kept samples that lie within; None where there were too few to tell.
        half_width: Median over these of half the interval's width over the prediction; likewise.
        drift: Half the width of the logarithm of the 90% interval of all kernels' common factor at other hours; 0 where
            the prediction is of the hours of the samples.
    """

    low: float
    high: float
    coverage: float | None = None
    half_width: float | None = None
    drift: float = 0.0

    def factors(self, spread_S: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Ends of the interval over the prediction, of shape (S,) each, by the predictions' spreads."""
        low_S, high_S = (
            np.minimum(np.hypot(end * spread_S, self.drift), _MAX_EXPONENT) for end in (self.low, self.high)
        )
        return np.exp(-low_S), np.exp(high_S)


_RANGE: Final = tuple_of(number_in(0, _MAX_RANGE), number_in(0, _MAX_RANGE))
_RANGES: Final = record(dict, *(Field(name, _RANGE, f"Of `{name}`, over all shards.") for name in _RANGED), parts=dict)
_METRIC: Final = number_in(0, MAX_METRIC)
_COVERAGE: Final = record(
    TrainedCoverage,
    Field("kinds", list_of(TEXT), "Kinds of kernels that it prices."),
    Field("num_tables", tuple_of(whole_number(), whole_number()), "Fewest and most tables of a sample."),
    Field("ranges", _RANGES, "Smallest and largest value of some fields of shards."),
)
_HELD_OUT: Final = record(
    HeldOutMetrics,
    Field("num_samples", whole_number(), "Held-out samples."),
    Field("mae_ms", _METRIC, "Mean absolute error."),
    Field("mse_ms2", _METRIC, "Mean squared error."),
    Field("relative_error", _METRIC, "Mean of |predicted - measured| / measured."),
    Field("kendall_tau", number_in(-1, 1), "Agreement of the order of samples."),
)
_INTERVAL: Final = record(
    Interval,
    Field("low", number_in(-_MAX_QUANTILE, 0), "5% quantile of log(measured / predicted) over the spread."),
    Field("high", number_in(0, _MAX_QUANTILE), "95% quantile of it."),
    Field("coverage", or_null(number_in(0, 1)), "Share of held-out samples within; null where there were too few."),
    Field("half_width", or_null(_METRIC), "Median of half the interval's width over the prediction."),
    optional("drift", number_in(0, _MAX_EXPONENT), "What the machine's speed at other hours adds.", default=0.0),
)
_DEVIATION: Final = number_in(0, _MAX_QUANTILE)
_ERRORS: Final = record(
    KernelErrors, Field("table", _DEVIATION), Field("kind", _DEVIATION), Field("company", _DEVIATION)
)


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
        measured_on: The machine of the samples; may be left out where they did not say.
        errors: What errors have in common; may be left out where nobody fitted it.
    """

    schema: ClassVar[str] = "autoshard.cost-model/2"
    fixed: ClassVar[Mapping[str, object]] = {"features": list(FEATURE_NAMES)}
    fields: ClassVar[tuple[Field, ...]] = (
        Field("device", TEXT),
        Field("coverage", _COVERAGE, "The shards that it has seen."),
        Field("encoder_hidden", list_of(whole_number(1, _MAX_WIDTH), 1, _MAX_LAYERS)),
        Field("scaling", SCALING),
        Field("scale_ms", number_in(1e-9, 1e9)),
        Field("metrics", _HELD_OUT, "Accuracy on held-out samples."),
        Field("interval", _INTERVAL, "The 90% interval of a prediction."),
        Field("training", ANY_OBJECT, "Options, seed and counts of the training."),
        optional("measured_on", MACHINE, "The machine of the samples.", default=None),
        optional("errors", _ERRORS, default=None),
    )

    device: str
    coverage: TrainedCoverage
    encoder_hidden: tuple[int, ...]
    scaling: FeatureScaling
    scale_ms: float
    metrics: HeldOutMetrics
    interval: Interval
    training: dict[str, Any]
    measured_on: MeasuredMachine | None = None
    errors: KernelErrors | None = None
