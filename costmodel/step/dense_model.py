"""The learned model of dense layers: a fitted roofline per kind of part, and what it gets wrong.

Shape suffixes: N parts, F terms of the roofline, Q numbers that its residual sees, C columns of the residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np

from autoshard.core.costs import DenseCosts
from autoshard.core.dense import DENSE_DTYPES, DenseKind, DenseShape
from autoshard.core.errors import ModelError
from autoshard.core.machine import MeasuredMachine
from autoshard.evaluation.dense_time import AnalyticDenseModel
from autoshard.formats.documents.kinds import ANY_OBJECT, TEXT, Field, number_in, optional, record, tuple_of
from autoshard.formats.documents.machine_json import MACHINE
from costmodel.registry.card_fields import MAX_BOUND, METRICS, ModelCard, check_tensor
from costmodel.registry.models import LearnedModel
from costmodel.registry.versions import StoredModel, Tensors
from costmodel.step.dense_features import RESIDUAL_NAMES, TERM_NAMES, residual_features, term_features
from costmodel.step.regression import FloatArray

PASSES: Final = ("forward", "backward")
#: The residual is a factor, at most this either way.
MAX_LOG_RESIDUAL = 0.7
#: Of a fit: milliseconds for one unit of a term, and what residuals are made of.
_MAX_NUMBER = 1e6
#: What may have a fit of its own, as `fit_key` names it.
_FIT_KEYS = tuple(f"{kind.value}.{dtype.value}" for kind in DenseKind for dtype in DENSE_DTYPES)
_NUM_COLUMNS = 1 + 2 * len(RESIDUAL_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseFit:
    """One kind of part in one number format, one pass.

    Attributes:
        terms_F: Milliseconds per term of the roofline, at least 0.
        residual_C: Weights of the logarithm of the factor on it: a constant, scaled logarithms of sizes, squares.
        middle_Q: Means of the logarithms.
        spread_Q: Their standard deviations, above 0.
        low_Q: Smallest logarithms that were measured.
        high_Q: Largest.
    """

    terms_F: FloatArray
    residual_C: FloatArray
    middle_Q: FloatArray
    spread_Q: FloatArray
    low_Q: FloatArray
    high_Q: FloatArray

    def __post_init__(self) -> None:
        widths = {"terms_F": len(TERM_NAMES), "residual_C": _NUM_COLUMNS}
        for name in self.__slots__:
            tensor, width = getattr(self, name), widths.get(name, len(RESIDUAL_NAMES))
            if tensor.shape != (width,) or not np.isfinite(tensor).all():
                raise ModelError(f"must be {width} finite numbers, got shape {tensor.shape}", field=name)
        if (self.terms_F < 0).any() or not self.terms_F.any() or (self.spread_Q < 1e-9).any():
            raise ModelError("must be at least 0, and not all 0", field="terms_F")

    @classmethod
    def restored(cls, tensors: Tensors, prefix: str) -> DenseFit:
        """The fit of the tensors whose names begin with a prefix.

        Raises:
            ModelError: If one is missing or impossible.
        """
        parts = {}
        for name in cls.__slots__:
            tensor = tensors.get(f"{prefix}{name}")
            if tensor is None:
                raise ModelError("needs a tensor", field=f"{prefix}{name}")
            check_tensor(tensor, f"{prefix}{name}", dtype="float64", limit=_MAX_NUMBER)
            parts[name] = np.asarray(tensor, dtype=np.float64)
        return cls(**parts)

    def ms(self, shapes: Sequence[DenseShape], *, backward: bool) -> FloatArray:
        """Predicted times, shape (N,), above 0."""
        base_N = term_features(shapes, backward=backward) @ self.terms_F
        return np.asarray(np.maximum(base_N * np.exp(self.log_residual(residual_features(shapes))), 1e-6))

    def log_residual(self, logs_NQ: FloatArray) -> FloatArray:
        """Logarithm of the factor, shape (N,); fades to 0 one e-fold outside of what was measured."""
        raw_N = residual_columns((logs_NQ - self.middle_Q) / self.spread_Q) @ self.residual_C
        outside_N = np.maximum(np.maximum(self.low_Q - logs_NQ, logs_NQ - self.high_Q), 0.0).max(axis=1)
        kept_N = np.clip(1.0 - outside_N, 0.0, 1.0)
        return np.asarray(np.clip(raw_N, -MAX_LOG_RESIDUAL, MAX_LOG_RESIDUAL) * kept_N)


def residual_columns(scaled_NQ: FloatArray) -> FloatArray:
    """A constant, the scaled logarithms and their squares, shape (N, C)."""
    return np.concatenate([np.ones((len(scaled_NQ), 1)), scaled_NQ, scaled_NQ**2], axis=1)


#: Ends of an interval over the prediction.
_BOUNDS: Final = tuple_of(number_in(0, 1), number_in(1, MAX_BOUND))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCard(ModelCard):
    """All of a model of dense layers but its fits.

    Attributes:
        device: Key of the device kind that was measured.
        bounds: For each kind and number format (`dot.fp32`), ends of the 90% interval of forward plus backward over
            the prediction.
        metrics: Accuracy on held-out samples, for information.
        training: Counts and options, and `samples_until`, the time of the newest sample.
        measured_on: The machine of the samples, as far as they say; None on older cards.
    """

    schema: ClassVar[str] = "autoshard.dense-model/1"
    fixed: ClassVar[Mapping[str, object]] = {"terms": list(TERM_NAMES), "residual": list(RESIDUAL_NAMES)}
    fields: ClassVar[tuple[Field, ...]] = (
        Field("device", TEXT),
        Field("bounds", record(dict, *(optional(key, _BOUNDS) for key in _FIT_KEYS), parts=dict)),
        Field("metrics", METRICS, "Accuracy, by the name of the measure."),
        Field("training", ANY_OBJECT, "Options, seeds and counts of the training."),
        optional("measured_on", MACHINE, "The machine of the samples.", default=None),
    )

    device: str
    bounds: dict[str, tuple[float, float]]
    metrics: dict[str, float]
    training: dict[str, Any]
    measured_on: MeasuredMachine | None = None


class LearnedDense(LearnedModel[DenseCard]):
    """Prices dense layers with rooflines fitted to measured ones; kinds that were not measured, analytically.

    Args:
        fits: By kind, number format and pass: `dot.fp32.forward`.
        card: What they are of.
        version: Of the registry that they come from, if they do, and whether that came with this package.
    """

    kind = "dense"
    card_type = DenseCard

    def __init__(self, fits: Mapping[str, DenseFit], card: DenseCard, version: str = "") -> None:
        super().__init__(card, version)
        self._fits = dict(fits)
        self._analytic = AnalyticDenseModel.for_device(card.device)

    @classmethod
    def restored(cls, stored: StoredModel, card: DenseCard) -> LearnedDense:
        """See `LearnedModel.restored`."""
        keys = [f"{key}.{name}" for key in card.bounds for name in PASSES]
        return cls({key: DenseFit.restored(stored.tensors, f"{key}.") for key in keys}, card, stored.label)

    def tensors(self) -> dict[str, FloatArray]:
        """What is stored of the fits."""
        return {f"{key}.{name}": getattr(fit, name) for key, fit in self._fits.items() for name in DenseFit.__slots__}

    def completed_by(self, other: LearnedDense) -> LearnedDense:
        """The model with another one's fits of the kinds and number formats that it has none of itself."""
        lacking = sorted(other.card.bounds.keys() - self.card.bounds.keys())
        if not lacking:
            return self
        card = replace(
            self.card,
            bounds={**self.card.bounds, **{key: other.card.bounds[key] for key in lacking}},
            training={**self.card.training, "carried_over": lacking},
        )
        return LearnedDense({**other._fits, **self._fits}, card)

    def predict_parts(self, shapes: Sequence[DenseShape]) -> DenseCosts:
        """Forward and backward of each part."""
        priced = [self._price(shape) for shape in shapes]
        parts = ("forward_ms_N", "backward_ms_N", "low_ms_N", "high_ms_N")
        return DenseCosts(
            **{name: np.concatenate([getattr(one, name) for one in priced] or [np.zeros(0)]) for name in parts}
        )

    def _price(self, shape: DenseShape) -> DenseCosts:
        key = fit_key(shape)
        if key not in self.card.bounds:
            return self._analytic.predict_parts([shape])
        forward_ms, backward_ms = (
            self._fits[f"{key}.{name}"].ms([shape], backward=name == "backward") for name in PASSES
        )
        low, high = self.card.bounds[key]
        total = forward_ms + backward_ms
        return DenseCosts(
            forward_ms_N=forward_ms, backward_ms_N=backward_ms, low_ms_N=total * low, high_ms_N=total * high
        )


def fit_key(shape: DenseShape) -> str:
    """Kind and number format: what has a fit of its own."""
    return f"{shape.kind.value}.{shape.dtype.value}"
