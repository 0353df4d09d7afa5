"""What runs of the runtime said about steps, as a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from autoshard.core import Topology
from autoshard.core.errors import ModelError
from autoshard.core.machine import MeasuredMachine
from autoshard.core.step import PART_FEATURES, WIRE_FEATURES, Coefficients, Overlap, StepPart, plain_coefficients
from autoshard.formats.documents.kinds import ANY_OBJECT, TEXT, Field, list_of, number_in, one_of, optional, tuple_of
from autoshard.formats.documents.machine_json import MACHINE
from costmodel.registry.card_fields import METRICS, ModelCard, check_tensor
from costmodel.registry.models import LearnedModel
from costmodel.registry.versions import StoredModel
from costmodel.step.regression import FloatArray

#: Milliseconds for one unit of a feature.
_MAX_COEFFICIENT = 1e6

#: Bandwidth and latency of a level in an all-to-all, and the same in an all-reduce.
LevelLinks = tuple[float, float, float, float]


def links_of(topology: Topology) -> frozenset[LevelLinks]:
    """Links of a topology's levels, in bytes per second and seconds; none of a topology of one rank."""
    return frozenset(
        (
            *(level.all_to_all.bytes_per_s, level.all_to_all.latency_s),
            *(level.all_reduce.bytes_per_s, level.all_reduce.latency_s),
        )
        for level in topology.levels
        if topology.world_size > 1
    )


#: By part, and by the model whose milliseconds its first feature is (`learned:cpu`).
Fitted = Mapping[tuple[StepPart, str], Coefficients]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCard(ModelCard):
    """All of a step model but its coefficients.

    Attributes:
        device: Key of the device kind that plans ran on.
        engine: What executed them.
        overlap: What that engine overlaps.
        interval_scale: The parts' combined intervals times this hold runs of nine in ten held-out plans.
        metrics: Accuracy on held-out plans, for information.
        training: Counts and options, and `plans`, digests of the plans that were run.
        measured_on: The machine of the runs; None on older cards, and of GPUs.
        links: Of the topologies of the runs, by level: weights of times of collectives count on these alone. Runs in
            virtual time leave these weights at 1.
    """

    schema: ClassVar[str] = "autoshard.step-model/1"
    fixed: ClassVar[Mapping[str, object]] = {
        "features": {part.value: list(names) for part, names in PART_FEATURES.items()}
    }
    fields: ClassVar[tuple[Field, ...]] = (
        Field("device", TEXT),
        Field("engine", TEXT),
        Field("overlap", one_of(Overlap)),
        Field("interval_scale", number_in(0, 1e6)),
        Field("metrics", METRICS, "Accuracy, by the name of the measure."),
        Field("training", ANY_OBJECT, "Options, seeds and counts of the training."),
        optional("measured_on", MACHINE, "The machine of the runs.", default=None),
        optional(
            "links",
            list_of(tuple_of(*[number_in()] * 4), minimum=0),
            "Links of the runs' topologies, by level: bytes per second and latency in s of an all-to-all, then of an "
            "all-reduce. On others, times of collectives are those of their model.",
            default=(),
        ),
    )

    device: str
    engine: str
    overlap: Overlap
    interval_scale: float
    metrics: dict[str, float]
    training: dict[str, Any]
    measured_on: MeasuredMachine | None = None
    links: tuple[LevelLinks, ...] = ()


class CalibratedStep(LearnedModel[StepCard]):
    """Weights of the parts' features that runs of the runtime showed.

    Args:
        fitted: Weights by part and model.
        card: What they are of.
        version: Of the registry that they come from, if they do, and whether that came with this package.

    Raises:
        ModelError: If there are other weights than a part has features, or one is not finite or below 0.
    """

    kind = "step"
    card_type = StepCard
    label = "calibrated"

    def __init__(self, fitted: Fitted, card: StepCard, version: str = "") -> None:
        for (part, basis), weights in fitted.items():
            if len(weights) != len(PART_FEATURES[part]) or not all(0 <= one < float("inf") for one in weights):
                raise ModelError(
                    f"must be {len(PART_FEATURES[part])} numbers of at least 0", field=f"{part.value}/{basis}"
                )
        super().__init__(card, version)
        self.fitted = dict(fitted)

    @classmethod
    def restored(cls, stored: StoredModel, card: StepCard) -> CalibratedStep:
        """See `LearnedModel.restored`."""
        fitted: dict[tuple[StepPart, str], Coefficients] = {}
        for key, tensor in stored.tensors.items():
            part, _, basis = key.partition("/")
            if part not in {str(one) for one in StepPart} or not basis:
                raise ModelError("is no part of a step", field=key)
            check_tensor(tensor, key, dtype="float64", limit=_MAX_COEFFICIENT)
            fitted[StepPart(part), basis] = tuple(float(value) for value in np.ravel(tensor))
        return cls(fitted, card, stored.label)

    def tensors(self) -> dict[str, FloatArray]:
        """What is stored of the weights."""
        return {f"{part.value}/{basis}": np.array(weights) for (part, basis), weights in self.fitted.items()}

    @property
    def name(self) -> str:
        """`calibrated:<device>`, its version, and what the engine overlaps."""
        return f"{super().name} (overlap: {self.card.overlap})"

    @property
    def overlap(self) -> Overlap:
        """What the engine overlaps."""
        return self.card.overlap

    @property
    def relative_error(self) -> float:
        """Median over its plans of the relative error, each predicted by a calibration on the others."""
        return self.card.metrics.get("median_error", 0.0)

    def coefficients(self, part: StepPart, basis: str, topology: Topology) -> Coefficients | None:
        """Weights of a part's features; None if no run was priced with the model.

        Processes of one machine say nothing of the links between nodes: on other links than those of the runs, times of
        collectives are those of their model.
        """
        weights = self.fitted.get((part, basis))
        if weights is None or links_of(topology) <= set(self.card.links):
            return weights
        plain = plain_coefficients(part, topology.device)
        names = PART_FEATURES[part]
        return tuple(
            as_priced if name == WIRE_FEATURES.get(part) else weight
            for name, weight, as_priced in zip(names, weights, plain, strict=True)
        )

    def interval_ms(self, value_ms: float, below_ms: float, above_ms: float) -> tuple[float, float]:
        """Ends of the 90% interval."""
        scale = self.card.interval_scale
        return max(0.0, value_ms - scale * below_ms), value_ms + scale * above_ms
