"""What runs of the runtime said about steps, as a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from autoshard.core.errors import ModelError
from autoshard.core.step import PART_FEATURES, Coefficients, Overlap, StepPart
from costmodel.registry.card_fields import check_tensor, metrics, read_card
from costmodel.registry.versions import PRODUCTION, Registry, StoredModel
from costmodel.step.regression import FloatArray

STEP_KIND: Final = "step"
STEP_SCHEMA: Final = "autoshard.step-model/1"
#: Milliseconds for one unit of a feature.
_MAX_COEFFICIENT = 1e6

#: By part, and by the model whose milliseconds its first feature is (`learned:cpu`).
Fitted = Mapping[tuple[StepPart, str], Coefficients]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCard:
    """All of a step model but its coefficients.

    Attributes:
        device: Key of the device kind that plans ran on.
        engine: What executed them.
        overlap: What that engine overlaps.
        interval_scale: The parts' combined intervals times this hold nine of ten held-out runs.
        metrics: Accuracy on held-out runs, for information.
        training: Counts and options, for information.
    """

    device: str
    engine: str
    overlap: Overlap
    interval_scale: float
    metrics: dict[str, float]
    training: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As the JSON object that is stored beside the coefficients."""
        return {
            "schema": STEP_SCHEMA,
            "device": self.device,
            "engine": self.engine,
            "overlap": str(self.overlap),
            "features": {part.value: list(names) for part, names in PART_FEATURES.items()},
            "interval_scale": self.interval_scale,
            "metrics": self.metrics,
            "training": self.training,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> StepCard:
        """Reads what `to_json` wrote.

        Raises:
            ModelError: If it is of another schema, has other features, or lacks a field.
        """
        return read_card(
            data,
            source,
            schema=STEP_SCHEMA,
            fixed={"features": {part.value: list(names) for part, names in PART_FEATURES.items()}},
            required=("device", "engine", "overlap", "interval_scale", "metrics", "training"),
            read=lambda fields: cls(
                device=fields.text("device"),
                engine=fields.text("engine"),
                overlap=fields.choice("overlap", Overlap, Overlap.NONE),
                interval_scale=fields.number("interval_scale", maximum=1e6),
                metrics=metrics(fields),
                training=fields.mapping("training"),
            ),
        )


class CalibratedStep:
    """Weights of the parts' features that runs of the runtime showed.

    Args:
        fitted: Weights by part and model.
        card: What they are of.
        version: Of the registry that they come from, if they do, and whether that came with this package.

    Raises:
        ModelError: If there are other weights than a part has features, or one is not finite or below 0.
    """

    def __init__(self, fitted: Fitted, card: StepCard, version: str = "") -> None:
        for (part, basis), weights in fitted.items():
            if len(weights) != len(PART_FEATURES[part]) or not all(0 <= one < float("inf") for one in weights):
                raise ModelError(
                    f"must be {len(PART_FEATURES[part])} numbers of at least 0", field=f"{part.value}/{basis}"
                )
        self.card = card
        self.version = version
        self.fitted = dict(fitted)

    @classmethod
    def load(cls, registry: Registry, device: str, version: str = PRODUCTION) -> CalibratedStep:
        """The model of a device from a registry.

        Raises:
            ModelError: If it is missing, damaged, of another schema or of another device.
        """
        return cls.from_stored(registry.load(STEP_KIND, device, version))

    @classmethod
    def from_stored(cls, stored: StoredModel) -> CalibratedStep:
        """The model of a registry's version."""
        card = StepCard.from_json(stored.card, stored.source)
        fitted: dict[tuple[StepPart, str], Coefficients] = {}
        for key, tensor in stored.tensors.items():
            part, _, basis = key.partition("/")
            if part not in {str(one) for one in StepPart} or not basis:
                raise ModelError("is no part of a step", field=key, source=stored.source)
            check_tensor(tensor, key, stored.source, dtype="float64", limit=_MAX_COEFFICIENT)
            fitted[StepPart(part), basis] = tuple(float(value) for value in np.ravel(tensor))
        try:
            return cls(fitted, card, stored.label)
        except ModelError as error:
            raise error.in_source(stored.source) from error

    def tensors(self) -> dict[str, FloatArray]:
        """What is stored of the weights."""
        return {f"{part.value}/{basis}": np.array(weights) for (part, basis), weights in self.fitted.items()}

    @property
    def name(self) -> str:
        """`calibrated:<device>`, its version, and what the engine overlaps."""
        version = f"@{self.version}" if self.version else ""
        return f"calibrated:{self.card.device}{version} (overlap: {self.card.overlap})"

    @property
    def overlap(self) -> Overlap:
        """What the engine overlaps."""
        return self.card.overlap

    def coefficients(self, part: StepPart, basis: str) -> Coefficients | None:
        """Weights of a part's features; None if no run was priced with the model."""
        return self.fitted.get((part, basis))

    def interval_ms(self, value_ms: float, below_ms: float, above_ms: float) -> tuple[float, float]:
        """Ends of the 90% interval."""
        scale = self.card.interval_scale
        return max(0.0, value_ms - scale * below_ms), value_ms + scale * above_ms
