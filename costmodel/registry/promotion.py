"""Which of the versions that training makes become production ones: those that are not worse than what they replace.

Shape suffixes: P pairs, which are samples or tasks that both sides were measured on.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard import console
from autoshard.api import AliasChange
from autoshard.core.errors import ModelError
from costmodel.registry.models import LearnedModel
from costmodel.registry.objects import BASELINES
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import PRODUCTION, Registry, StoredModel, Tensors, shipped_models

FloatArray = NDArray[np.float64]
ModelT = TypeVar("ModelT", bound=LearnedModel[Any])

#: Differences up to this share count as none, however small their standard error is.
LEAST_TOLERANCE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutComparison:
    """A trained version against another one, or a planner, on the same held-out samples or tasks.

    Attributes:
        against: What it is compared with.
        measure: What is compared, the lower the better.
        difference: Mean over pairs of how much higher the version's measure is, as a share; below 0 if it is lower.
        tolerance: Difference up to which the version counts as not worse.
        num_pairs: Samples or tasks.
        of: What these are.
        unit: Of the difference and the tolerance, when they are shown.
    """

    against: str
    measure: str
    difference: float
    tolerance: float
    num_pairs: int
    of: str
    unit: str = "%"

    @classmethod
    def paired(
        cls, difference_P: FloatArray, *, against: str, measure: str, of: str, unit: str = "%"
    ) -> HeldOutComparison:
        """The comparison of pairs; its tolerance is the mean's standard error, but at least `LEAST_TOLERANCE`."""
        count = len(difference_P)
        error = float(difference_P.std(ddof=1)) / count**0.5 if count > 1 else 0.0
        return cls(
            against=against,
            measure=measure,
            difference=float(difference_P.mean()),
            tolerance=max(error, LEAST_TOLERANCE),
            num_pairs=count,
            of=of,
            unit=unit,
        )

    @property
    def is_worse(self) -> bool:
        """Whether the version is worse by more than the tolerance."""
        return not self.difference <= self.tolerance  # not a number is worse, too

    def __str__(self) -> str:
        side = "above" if self.difference > 0 else "below"
        return (
            f"{self.measure} {100 * abs(self.difference):.2f}{self.unit} {side} that of {self.against} on "
            f"{self.num_pairs} {self.of} (tolerance {100 * self.tolerance:.2f}{self.unit})"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedVersion:
    """What a training made, and how it compares.

    Attributes:
        kind: What the model is for.
        name: Which one of its kind, such as the device.
        tensors: Weights by name.
        card: What they are.
        compare: Compares it with another version of the kind; raises ModelError if that one cannot price the samples.
        baselines: Comparisons with what needs no training.
    """

    kind: str
    name: str
    tensors: Tensors
    card: Mapping[str, Any]
    compare: Callable[[StoredModel], HeldOutComparison]
    baselines: tuple[HeldOutComparison, ...] = ()

    @classmethod
    def by_errors(cls, model: ModelT, difference: Callable[[ModelT], FloatArray], of: str) -> TrainedVersion:
        """A model that is compared by relative errors.

        Args:
            model: The model.
            difference: The model's errors less those of another one on the same samples or runs, shape (P,).
            of: What these are.
        """

        def compare(stored: StoredModel) -> HeldOutComparison:
            return HeldOutComparison.paired(
                difference(type(model).from_stored(stored)),
                against=f"version {stored.label}",
                measure="mean relative error",
                of=of,
                unit=" points",
            )

        return cls.of(model, compare)

    @classmethod
    def of(
        cls,
        model: LearnedModel[Any],
        compare: Callable[[StoredModel], HeldOutComparison],
        baselines: tuple[HeldOutComparison, ...] = (),
    ) -> TrainedVersion:
        """What there is to publish of a model."""
        return cls(
            kind=model.kind,
            name=model.card.device,
            tensors=model.tensors(),
            card=model.card.to_json(),
            compare=compare,
            baselines=baselines,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What became of a trained version.

    Attributes:
        id: Its version in the registry; None if it was not published.
        alias: What names it; None for nothing.
        registry: The registry's folder; None if it was not published.
        comparisons: What it was compared with.
        notes: Why it was not compared with the production version, if it was not.
    """

    id: str | None = None
    alias: str | None = None
    registry: Path | None = None
    comparisons: tuple[HeldOutComparison, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def worse(self) -> tuple[HeldOutComparison, ...]:
        """The comparisons in which it is worse: if it has no alias, these kept it from production."""
        return tuple(one for one in self.comparisons if one.is_worse)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "id": self.id,
            "alias": self.alias,
            "promoted": self.alias == PRODUCTION,
            "registry": None if self.registry is None else str(self.registry),
            "comparisons": [{**asdict(one), "worse": one.is_worse} for one in self.comparisons],
            "notes": list(self.notes),
        }


def publish_version(models: Registry, trained: TrainedVersion, options: PublishOptions) -> Published:
    """Stores a trained version, and makes it the production one if it is not worse than that, nor than the baselines.

    The version that is refused stays in the registry, which keeps the comparison, and `Registry.promote` may still make
    it the production one. If another process changes the production version meanwhile, the comparison is made again,
    with the new one. A candidate is compared alike, and becomes the candidate whatever comes of it.

    Args:
        models: The registry; where it has no production version, the shipped one is what is replaced.
        trained: The version.
        options: What to do with it.

    Raises:
        ModelError: If the registry cannot be written.
    """
    if not options.publish:
        return Published()
    is_decided = options.alias == PRODUCTION and not options.force
    alias = None if is_decided else options.alias
    kind, name = trained.kind, trained.name
    version = models.publish(kind, name, trained.tensors, trained.card, alias=alias)
    published = Published(id=version, alias=alias, registry=models.root)
    if options.force:
        return published
    while True:
        seen, compared, notes = _compare(models, trained, version)
        for than, comparisons in compared.items():
            if worse := [str(one) for one in comparisons if one.is_worse]:
                models.note_worse(kind, name, version, than, "; ".join(worse))
        published = replace(published, comparisons=tuple(chain.from_iterable(compared.values())), notes=notes)
        if not is_decided or published.worse:
            return published
        if models.replace_production(kind, name, version, seen):
            return replace(published, alias=PRODUCTION)


def _compare(
    models: Registry, trained: TrainedVersion, version: str
) -> tuple[tuple[AliasChange, ...], dict[str, tuple[HeldOutComparison, ...]], tuple[str, ...]]:
    """The production alias as it is, comparisons, and why the production version is in none of them.

    Comparisons are by the id of the version that they are with, or `BASELINES`.
    """
    seen: tuple[AliasChange, ...] = ()
    baselines = {BASELINES: trained.baselines}
    try:
        seen = models.history(trained.kind, trained.name)
        shipped = shipped_models()
        replaced = (models if seen else shipped).production_id(trained.kind, trained.name)
        if replaced is None:
            return seen, baselines, ()
        if replaced == version:
            return seen, {}, ()
        stored = (models if seen else shipped).load(trained.kind, trained.name, replaced)
        return seen, {**baselines, replaced: (trained.compare(stored),)}, ()
    except ModelError as error:
        return seen, baselines, (f"not compared with the production version: {error}",)


def report_published(published: Published, kind: str, name: str) -> None:
    """Prints on standard error that a version is worse, or why it was not compared; nothing if all went as usual."""
    for note in published.notes:
        console.log(f"{kind} {name}: {note}")
    if not published.worse:
        return
    reasons = "; ".join(map(str, published.worse))
    if published.alias is not None:
        console.log(f"{kind} {name}: {published.id} is the {published.alias}, and worse: {reasons}")
        return
    command = f"autoshard models promote {published.id} --registry {shlex.quote(str(published.registry))}"
    console.log(f"{kind} {name}: {published.id} is not promoted: {reasons}. To promote it anyway: {command}")


def status_of(published: Published) -> str:
    """The version, and what became of it unless it is the production one, for titles of tables."""
    if published.id is None:
        return "not published"
    if published.alias == PRODUCTION:
        return f"version {published.id}"
    return f"version {published.id} ({published.alias or 'not promoted'})"
