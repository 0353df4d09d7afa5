"""The study `hours`: a model calibrated in one hour, tried on what the same machine measured in later ones.

Shape suffixes: S samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from autoshard.commands.options import command_options
from autoshard.core.errors import SampleStoreError
from autoshard.formats.stores.samples import Sample, SampleTable, read_samples
from autoshard.table import Table
from costmodel.kernel.calibration import CalibrationOptions, calibrate, refreshed
from costmodel.kernel.dataset import CostDataset, IndexArray
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import MsArray, PricedSamples
from costmodel.kernel.training import train_cost_model
from costmodel.registry.versions import shipped_models
from studies.cost_models.calibration import DEVICE, PAUSE_S, judged, seconds_of
from studies.frame import FromOption, Machine, OutputOptions, PartsOption, PartStore, StudyResult
from studies.frame.documents import read_document, to_document

SCHEMA: Final = "autoshard.hours/1"
#: Runs of the collector are cut into stretches of this length, each of which has a level of its own.
_STRETCH_S: Final = 600.0
#: Stretches with fewer samples say nothing of coverage.
_FEWEST: Final = 60
#: Minutes between two stretches that count as an hour.
_AN_HOUR: Final = (30.0, 90.0)
_SHIPPED: Final = "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model of one stretch on what was measured in a later one, or in the rest of its own.

    Attributes:
        calibrated_at: Middle of the stretch of the model's samples.
        tried_at: Middle of the other one.
        is_refreshed: Whether the model was scaled to some seconds of the other stretch.
        num_samples: Samples that it was tried on.
        factor: What the median sample took over its prediction.
        relative_error: Mean of |predicted - measured| / measured.
        factored_error: The same of predictions times the factor.
        coverage: Share of samples within the 90% interval.
        hour_coverage: Share within the interval that leaves the machine's drift between hours out.
        half_width: Median over samples of half the interval's width over the prediction.
    """

    calibrated_at: datetime
    tried_at: datetime
    is_refreshed: bool
    num_samples: int
    factor: float
    relative_error: float
    factored_error: float
    coverage: float
    hour_coverage: float
    half_width: float

    @property
    def minutes(self) -> float:
        """Time between the two."""
        return (self.tried_at - self.calibrated_at).total_seconds() / 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """All trials of one model."""

    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """All trials of a store, and where they were computed."""

    machine: Machine
    store: str
    measured_on: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Samples of some minutes of one machine, with its speed in these minutes.

    Attributes:
        middle_at: The middle of these minutes.
        dataset: The samples; the machine's drift within the minutes is divided out, that between stretches is not.
        seconds_S: Time that each takes to measure.
    """

    middle_at: datetime
    dataset: CostDataset
    seconds_S: MsArray

    def drawn(self, seconds: float, rng: np.random.Generator) -> tuple[IndexArray, IndexArray]:
        """Samples that take so long to measure, by chance, and the others."""
        order_S = rng.permutation(len(self.dataset))
        is_drawn_S = np.cumsum(self.seconds_S[order_S]) <= seconds
        return order_S[is_drawn_S], order_S[~is_drawn_S]


def stretches_of(table: SampleTable) -> tuple[Stretch, ...]:
    """The stretches of a store, in the order of time; a pause of the collector ends one, too."""
    samples = sorted(table.samples, key=lambda one: one.collected_at)
    found: list[list[Sample]] = [[samples[0]]]
    for before, sample in pairwise(samples):
        is_pause = (sample.collected_at - before.collected_at).total_seconds() > PAUSE_S
        if is_pause or (sample.collected_at - found[-1][0].collected_at).total_seconds() > _STRETCH_S:
            found.append([])
        found[-1].append(sample)
    return tuple(stretch for part in found if (stretch := _stretch(table, part)) is not None)


def _stretch(table: SampleTable, samples: Sequence[Sample]) -> Stretch | None:
    kept = [sample for sample in samples if sample.shards and not sample.is_noisy]
    if len(kept) < _FEWEST:
        return None
    middle_at = samples[0].collected_at + (samples[-1].collected_at - samples[0].collected_at) / 2
    dataset = CostDataset.from_samples(replace(table, samples=tuple(samples)))
    return Stretch(middle_at=middle_at, dataset=dataset, seconds_S=seconds_of(samples, kept))


def trial(
    model: LearnedCostModel, dataset: CostDataset, calibrated: Stretch, tried: Stretch, *, is_refreshed: bool = False
) -> Trial:
    """A model on samples of a stretch."""
    priced, interval = PricedSamples.of(model.predictor, dataset), model.card.interval
    return Trial(
        calibrated_at=calibrated.middle_at,
        tried_at=tried.middle_at,
        is_refreshed=is_refreshed,
        num_samples=len(dataset),
        factor=float(np.median(priced.ratio_S)),
        hour_coverage=judged(priced, replace(interval, drift=0.0))["coverage"],
        **judged(priced, interval),
    )


@command_options()
class HoursOptions:
    """Options of the study `hours`."""

    store: Annotated[Path, typer.Option(help="Folder of samples of one machine, measured over hours.")] = Path(
        "docs/data/samples"
    )
    base: Annotated[
        str, typer.Option(help="Folder of samples of another machine, whose model is calibrated, or `shipped`.")
    ] = "docs/data/samples-epyc"
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of measuring that a model is calibrated on.")] = 60.0
    refresh_seconds: Annotated[float, typer.Option(min=1, help="Seconds of measuring that it is refreshed on.")] = 5.0
    updates: Annotated[int | None, typer.Option(min=1, help="Updates of each calibration; the usual ones.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Of draws and training.")] = 0
    parts: PartsOption = None
    from_file: FromOption = None

    @property
    def fitting(self) -> CalibrationOptions:
        """How models are calibrated."""
        return CalibrationOptions.of_updates(self.updates)


def run_study(options: HoursOptions) -> tuple[str, tuple[Trial, ...]]:
    """The machine, and all trials: of a model of each stretch on its own rest and on each later one.

    Raises:
        SampleStoreError: If the store has fewer than two stretches.
    """
    parts = PartStore.of(
        options.parts,
        {
            "store": str(options.store),
            "base": options.base,
            "seconds": [options.seconds, options.refresh_seconds],
            "seed": options.seed,
            "calibration": asdict(options.fitting),
        },
    )
    table = read_samples(options.store, DEVICE)
    stretches = stretches_of(table)
    if len(stretches) < 2:
        raise SampleStoreError(
            f"has {len(stretches)} stretches of {_FEWEST} steady samples or more, two are needed",
            source=str(options.store),
        )
    base = _base(options)
    makers = {f"stretch-{index}": partial(_tried, options, base, stretches[index:]) for index in range(len(stretches))}
    found = parts.find_all("Stretches", Tried, makers)
    return str(table.machine), tuple(itertools.chain.from_iterable(one.trials for one in found))


def _base(options: HoursOptions) -> LearnedCostModel:
    if options.base == _SHIPPED:
        return LearnedCostModel.load(shipped_models(), DEVICE)
    dataset = CostDataset.from_samples(read_samples(options.base, DEVICE))
    return train_cost_model(dataset, device=DEVICE, seed=options.seed).model


def _tried(options: HoursOptions, base: LearnedCostModel, stretches: Sequence[Stretch]) -> Tried:
    """Trials of a model of the first stretch."""
    first, rng = stretches[0], np.random.default_rng(options.seed)
    drawn_S, rest_S = first.drawn(options.seconds, rng)
    model = calibrate(base, first.dataset.take(drawn_S), options=options.fitting, seed=options.seed).model
    found = [trial(model, first.dataset.take(rest_S), first, first)] if len(rest_S) >= _FEWEST else []
    for later in stretches[1:]:
        now_S, rest_S = later.drawn(options.refresh_seconds, rng)
        own = refreshed(model, later.dataset.take(now_S))
        found.append(trial(model, later.dataset, first, later))
        found.append(trial(own, later.dataset.take(rest_S), first, later, is_refreshed=True))
    return Tried(trials=tuple(found))


def trials_table(trials: Sequence[Trial]) -> Table:
    """A line for each span of time between calibration and trial: means over pairs of stretches."""
    spans = {"in the same minutes": (0.0, 1.0), "up to half an hour later": (1.0, _AN_HOUR[0])}
    spans |= {"an hour later": _AN_HOUR, "later": (_AN_HOUR[1], float("inf"))}
    groups = [
        (name + (", refreshed" if is_refreshed else ""), group)
        for name, (least, most) in spans.items()
        for is_refreshed in (False, True)
        if (group := [one for one in trials if one.is_refreshed == is_refreshed and least <= one.minutes < most])
    ]

    def mean(group: Sequence[Trial], field: str) -> str:
        return f"{np.mean([getattr(one, field) for one in group]):.1%}"

    return Table.of(
        groups,
        (
            ("tried", lambda item: item[0]),
            ("pairs", lambda item: str(len(item[1]))),
            (
                "farthest factor",
                lambda item: f"{max((one.factor for one in item[1]), key=lambda x: abs(np.log(x))):.3f}",
            ),
            ("error", lambda item: mean(item[1], "relative_error")),
            ("after one factor", lambda item: mean(item[1], "factored_error")),
            ("90% interval holds", lambda item: mean(item[1], "coverage")),
            ("least", lambda item: f"{min(one.coverage for one in item[1]):.1%}"),
            ("without drift", lambda item: mean(item[1], "hour_coverage")),
            ("half width", lambda item: mean(item[1], "half_width")),
        ),
        caption="Models calibrated on a minute of a stretch; means over pairs of stretches",
    )


def main(options: HoursOptions, output: OutputOptions) -> None:
    """Tries models calibrated in one hour on what the same machine measured in later ones, as they are and refreshed.

    Example:
        python -m studies hours --parts hours-parts -o docs/figures
    """
    if options.from_file is not None:
        numbers = read_document(options.from_file, Hours, SCHEMA)
    else:
        measured_on, trials = run_study(options)
        machine = Machine.of("hours", options)
        numbers = Hours(machine=machine, store=str(options.store), measured_on=measured_on, trials=trials)
    notes = (f"Samples of {numbers.measured_on}", *(f"{name}: {value}" for name, value in numbers.machine.described()))
    output.write(
        StudyResult(
            name="hours",
            document=to_document(numbers, SCHEMA),
            tables=(trials_table(numbers.trials),),
            notes=notes,
        )
    )
