"""The study `calibrate`: the model of one machine, calibrated to samples of another.

Shape suffixes: S samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from numpy.typing import NDArray

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core.accepted import FINITE_ABOVE_0
from autoshard.core.errors import InvalidOptionError
from autoshard.formats.stores.samples import Sample, read_samples
from autoshard.table import Table
from bench.sampling.stream import CALIBRATION_WEIGHTS, DEFAULT_WEIGHTS
from costmodel.kernel.calibration import CalibrationOptions, calibrate, scaled_to, uncalibrated
from costmodel.kernel.card import Interval
from costmodel.kernel.dataset import CostDataset, IndexArray
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import MsArray, PricedSamples
from costmodel.kernel.training import CostTrainingOptions, train_cost_model
from studies.frame import FromOption, Machine, OutputOptions, PartsOption, PartStore, StudyResult
from studies.frame.documents import read_document, to_document
from studies.frame.options import names_in, numbers_in

SCHEMA: Final = "autoshard.calibration/1"
DEVICE: Final = "cpu"
HELD_OUT_SHARE: Final = 0.2
#: Added to seeds of training: the same seed would hold out the same sets again, of which the pool has none.
_OWN_SPLIT: Final = 1_000
#: Gaps between samples from which on the collector was not running.
PAUSE_S: Final = 60.0
#: Rounds of each set, as `autoshard calibrate` has them, and one more that does not count.
ROUNDS: Final = 2
_WARMUP: Final = 1
#: Copies of the reference of a group, and sets that share them.
_REFERENCES, _GROUP_SETS = 3, 24
#: What a set takes beside its kernels and the reference, over what it took when the stores were measured. With 0.67, a
#: minute holds as many sets of the usual mixture on the EPYC of docs/data as the command measured on such a machine in
#: the slower of two minutes: 1,334, three rounds each, noisy ones again. Now that sets are measured once, and planners
#: choose fewer of them, it takes 0.83 of that by the process's CPU time: 39 and 47 ms a set.
_REST_SHARE: Final = 0.56
#: Strategies that choose the sets, with their shares: those of `autoshard calibrate`, and those of `autoshard collect`
#: without what needs samples; both without larger batches, of which the stores of docs/data hold none.
MIXTURE: Final = {name: share for name, share in CALIBRATION_WEIGHTS.items() if name not in ("batches", "copies")}
COLLECTED: Final = {
    name: share for name, share in DEFAULT_WEIGHTS.items() if name not in ("uncertain", "batches", "copies")
}
#: The strategy that measures other kinds of kernels than the tables' own.
_OTHER: Final = "kinds"
#: Largest error over that of a model trained on everything, by seconds measured: as they are, and after one factor.
GOALS: Final[Mapping[float, tuple[float, float]]] = {20.0: (1.6, 1.6), 60.0: (1.3, 1.15)}

#: Errors that goals are of, and what notes add to their name.
_JUDGED: Final = {"relative_error": "", "factored_error": " after one factor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A model on the held-out sets of a machine.

    Attributes:
        store: Name of the folder with the machine's samples.
        arm: How it was made, see `ARMS`; `everything` is trained on all samples that are not held out.
        seconds: Time that its samples took to measure.
        repeat: Which draw of samples it is.
        num_samples: Samples that it was made from.
        relative_error: Mean of |predicted - measured| / measured.
        factored_error: The same of predictions times what the median set takes over them.
        coverage: Share of sets within the 90% interval.
        half_width: Median over sets of half the interval's width over the prediction.
    """

    store: str
    arm: str
    seconds: float
    repeat: int
    num_samples: int
    relative_error: float
    factored_error: float
    coverage: float
    half_width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """All outcomes, and where they were computed."""

    machine: Machine
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Store:
    """Samples of a machine, most to draw from and some held out.

    Attributes:
        name: Name of its folder.
        pool: What models are made from.
        held_out: What they are tested on.
        source_S: Strategy that chose each sample of the pool, shape (S,).
        kind_S: Kind of kernel of each one's first shard, shape (S,).
        seconds_S: Time that each sample of the pool takes to measure.
        noise_SO: What fewer rounds add to the relative error of each sample's forward and backward time: a standard
            deviation, shape (S, O).
    """

    name: str
    pool: CostDataset
    held_out: CostDataset
    source_S: NDArray[np.str_]
    kind_S: NDArray[np.str_]
    seconds_S: MsArray
    noise_SO: MsArray

    @classmethod
    def read(cls, folder: Path, seed: int, rounds: int = ROUNDS) -> Store:
        """Reads a folder of samples and holds out a fifth of the sets; time and noise are those of so many rounds."""
        table = read_samples(folder, DEVICE)
        dataset = CostDataset.from_samples(table)
        kept = [sample for sample in table.samples if sample.shards and not sample.is_noisy]
        pool, held_out = dataset.split(HELD_OUT_SHARE, seed)
        is_pool_S = ~np.isin(dataset.set_S, held_out.set_S)
        return cls(
            name=folder.name,
            pool=pool,
            held_out=held_out,
            source_S=np.array([sample.source for sample in kept])[is_pool_S],
            kind_S=np.array([_kind_of(sample) for sample in kept])[is_pool_S],
            seconds_S=seconds_of(table.samples, kept, rounds)[is_pool_S],
            noise_SO=noise_of(kept, rounds)[is_pool_S],
        )

    def drawn(self, seconds: float, shares: Mapping[str, float], rng: np.random.Generator) -> IndexArray:
        """Samples of the pool that take so long to measure, of strategies by their shares.

        Of other kinds of kernels, each comes before any comes again, as `autoshard calibrate` has them.
        """
        order_S = rng.permutation(len(self.pool))
        is_other_S = self.source_S[order_S] == _OTHER
        other_S = order_S[is_other_S]
        order_S[is_other_S] = other_S[np.argsort(_laps(self.kind_S[other_S]), kind="stable")]
        order_S = np.array(list(_dealt(self.source_S[order_S], order_S, shares)))
        within = np.cumsum(self.seconds_S[order_S]) <= seconds
        return order_S[within]

    def measured(self, chosen_S: IndexArray, rng: np.random.Generator) -> CostDataset:
        """Samples of the pool as fewer rounds would have measured them."""
        dataset, noise_SO = self.pool.take(chosen_S), self.noise_SO[chosen_S]
        factor_SO = np.exp(noise_SO * rng.standard_normal(noise_SO.shape))
        return replace(dataset, latency_ms_SO=dataset.latency_ms_SO * factor_SO)


def noise_of(kept: Sequence[Sample], rounds: int) -> MsArray:
    """Relative deviation of forward and backward times that one measurement of so few rounds adds, shape (S, O).

    Single rounds are taken as independent draws with the spread that each sample has on record.
    """
    spread_SO = np.array([(sample.forward_spread, sample.backward_spread) for sample in kept])
    run_S = np.array([sample.num_rounds * sample.num_attempts for sample in kept])
    missing_S = 1 / np.minimum(rounds, run_S) - 1 / run_S
    noise_SO: MsArray = spread_SO * np.sqrt(missing_S)[:, None]
    return noise_SO


def seconds_of(samples: Sequence[Sample], kept: Sequence[Sample], rounds: int = ROUNDS) -> MsArray:
    """Time that each kept sample takes to be measured once in so many rounds, or in its own if these are fewer; (S,).

    That is the runs of its kernels and of its share of the reference, and an equal part of the rest of the time in
    which the collector ran, or of as much of it as a set takes now: caches emptied, inputs made, sets chosen and built.
    """
    stamps = np.sort([sample.collected_at.timestamp() for sample in samples])
    gaps_s = np.diff(stamps)
    run_S = np.array([_run_ms(sample, sample.num_rounds) * sample.num_attempts for sample in samples]) / 1e3
    rest_s = max(0.0, float(gaps_s[gaps_s < PAUSE_S].sum()) - float(run_S.sum()))
    once_S = np.array([_run_ms(sample, min(rounds, sample.num_rounds)) for sample in kept]) / 1e3
    seconds_S: MsArray = once_S + _REST_SHARE * rest_s / len(samples)
    return seconds_S


def _run_ms(sample: Sample, rounds: int) -> float:
    """Runs of a set in so many rounds that count, and its share of those of the reference."""
    reference_ms = sample.reference_forward_ms + sample.reference_backward_ms
    return (rounds + _WARMUP) * (sample.kernel_ms + _REFERENCES * reference_ms / _GROUP_SETS)


def _kind_of(sample: Sample) -> str:
    first = sample.shards[0].shard
    return "/".join((first.dtype, first.pooling, first.optimizer, first.level))


def _laps(kind_S: NDArray[np.str_]) -> IndexArray:
    """How often each one's kind came before it, shape (S,)."""
    order = np.argsort(kind_S, kind="stable")
    _, start_K, count_K = np.unique(kind_S[order], return_index=True, return_counts=True)
    laps = np.empty(len(kind_S), dtype=np.int64)
    laps[order] = np.arange(len(kind_S)) - np.repeat(start_K, count_K)
    return laps


def _dealt(source_S: NDArray[np.str_], order_S: IndexArray, shares: Mapping[str, float]) -> Iterator[int]:
    """Samples in an order in which every strategy has its share, until one of them has no more."""
    waiting = {name: iter(order_S[source_S == name].tolist()) for name in shares}
    given = dict.fromkeys(shares, 0)
    while True:
        name = min(shares, key=lambda one: (given[one] + 1) / shares[one])
        found = next(waiting[name], None)
        if found is None:
            return
        given[name] += 1
        yield found


def outcome(
    model: LearnedCostModel, store: Store, *, arm: str, seconds: float, repeat: int, num_samples: int
) -> Outcome:
    """Error and intervals of a model on the held-out sets."""
    return Outcome(
        store=store.name,
        arm=arm,
        seconds=seconds,
        repeat=repeat,
        num_samples=num_samples,
        **judged(PricedSamples.of(model.predictor, store.held_out), model.card.interval),
    )


def judged(priced: PricedSamples, interval: Interval) -> dict[str, float]:
    """Errors of prices and what their intervals hold: fields of `Outcome`, and of trials at other hours."""
    ratio_S, (low_S, high_S) = priced.ratio_S, interval.factors(priced.spread_S)
    return {
        "relative_error": float(np.mean(priced.errors_S)),
        "factored_error": float(np.mean(np.abs(np.median(ratio_S) / ratio_S - 1))),
        "coverage": float(np.mean((low_S <= ratio_S) & (ratio_S <= high_S))),
        "half_width": float(np.median(high_S - low_S) / 2),
    }


#: Makes a model of a base, the samples drawn and a seed.
MakeModel = Callable[[LearnedCostModel, CostDataset, int], LearnedCostModel]


def _calibrated(base: LearnedCostModel, dataset: CostDataset, seed: int) -> LearnedCostModel:
    return calibrate(base, dataset, seed=seed).model


def _from_scratch(_: LearnedCostModel, dataset: CostDataset, seed: int) -> LearnedCostModel:
    return train_cost_model(dataset, device=DEVICE, seed=seed + _OWN_SPLIT).model


def _scaled(base: LearnedCostModel, dataset: CostDataset, _: int) -> LearnedCostModel:
    return scaled_to(base, dataset)


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to make a model of some seconds of measuring.

    Attributes:
        title: What tables call it.
        shares: Strategies that choose the sets.
        make: Makes the model.
    """

    title: str
    shares: Mapping[str, float]
    make: MakeModel


ARMS: Final[Mapping[str, Arm]] = {
    "calibrated": Arm("calibrated", MIXTURE, _calibrated),
    "collected": Arm("calibrated, sets as `collect` chooses them", COLLECTED, _calibrated),
    "scaled": Arm("one factor each for forward and backward", MIXTURE, _scaled),
    "scratch": Arm("trained from scratch", MIXTURE, _from_scratch),
}


@command_options()
class CalibrationStudyOptions:
    """Options of the study `calibrate`."""

    stores: Annotated[str, typer.Option(help="Two folders of samples, of two machines, with a comma between them.")] = (
        "docs/data/samples,docs/data/samples-epyc"
    )
    seconds: Annotated[str, typer.Option(help="Seconds of measuring, with commas between them.")] = "20,60,240"
    arms: Annotated[str, typer.Option(help=f"Ways to make models: any of {', '.join(ARMS)}.")] = ",".join(ARMS)
    repeats: Annotated[int, typer.Option(min=1, help="Draws of samples.")] = 3
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each set; the stores' samples have 9.")] = ROUNDS
    updates: Annotated[int | None, typer.Option(min=1, help="Updates of models that are trained on everything.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Of held-out sets, draws and training.")] = 0
    parts: PartsOption = None
    from_file: FromOption = None

    def __post_init__(self) -> None:
        if len(names_in(self.stores)) != 2:
            raise InvalidOptionError("must be two folders", field="--stores")
        _ = self.chosen_arms, self.budgets_s

    @property
    def chosen_arms(self) -> tuple[str, ...]:
        """Ways to make models."""
        return names_in(self.arms, "--arms", ARMS)

    @property
    def budgets_s(self) -> tuple[float, ...]:
        """Seconds of measuring."""
        return numbers_in(self.seconds, "--seconds", float, FINITE_ABOVE_0)

    @property
    def training(self) -> CostTrainingOptions:
        """Of models that are trained on everything."""
        usual = CostTrainingOptions()
        return usual if self.updates is None else replace(usual, num_updates=self.updates)


def run_study(options: CalibrationStudyOptions) -> tuple[Outcome, ...]:
    """Calibrates the model of each store to the other one, with each way, time and draw."""
    parts = PartStore.of(
        options.parts,
        {
            "stores": options.stores,
            "seed": options.seed,
            "updates": options.training.num_updates,
            "rounds": options.rounds,
            "shares": {name: arm.shares for name, arm in ARMS.items()},
            "calibration": asdict(CalibrationOptions()),
        },
    )
    first, second = (Store.read(Path(folder), options.seed, options.rounds) for folder in names_in(options.stores))

    @cache
    def trained(store: Store) -> LearnedCostModel:
        """A model of a machine, trained on its samples; the other one's are calibrated from it."""
        seed = options.seed + _OWN_SPLIT
        return train_cost_model(store.pool, device=DEVICE, options=options.training, seed=seed).model

    return tuple(
        found
        for source, target in ((first, second), (second, first))
        for found in _Direction(options, parts, trained, source, target).outcomes()
    )


class _Direction:
    """Calibrates the model of one store to another."""

    def __init__(
        self,
        options: CalibrationStudyOptions,
        parts: PartStore,
        trained: Callable[[Store], LearnedCostModel],
        source: Store,
        target: Store,
    ) -> None:
        self._options, self._parts, self._trained = options, parts, trained
        self._source, self._target = source, target

    def outcomes(self) -> Iterator[Outcome]:
        """That of a model trained on everything, of the model as it is, and of all that are made of samples."""
        yield self._found("everything", 0.0, 0, self._everything)
        yield self._found("calibrated", 0.0, 0, self._unmeasured)
        options = self._options
        for repeat, seconds, arm in itertools.product(range(options.repeats), options.budgets_s, options.chosen_arms):
            yield self._found(arm, seconds, repeat, partial(self._made, arm, seconds, repeat))

    def _found(self, arm: str, seconds: float, repeat: int, make: Callable[[], Outcome]) -> Outcome:
        name = f"{self._target.name}-{arm}-{seconds:g}s-{repeat}"
        found = self._parts.find_data(name, Outcome, make)
        console.log(f"{name}: error {found.relative_error:.2%}, interval holds {found.coverage:.1%}")
        return found

    @property
    def _base(self) -> LearnedCostModel:
        """The model of the other machine, trained on its samples."""
        return self._trained(self._source)

    def _everything(self) -> Outcome:
        pool = self._target.pool
        return outcome(
            self._trained(self._target),
            self._target,
            arm="everything",
            seconds=float(self._target.seconds_S.sum()),
            repeat=0,
            num_samples=len(pool),
        )

    def _unmeasured(self) -> Outcome:
        return outcome(uncalibrated(self._base), self._target, arm="calibrated", seconds=0.0, repeat=0, num_samples=0)

    def _made(self, arm: str, seconds: float, repeat: int) -> Outcome:
        rng = np.random.default_rng((self._options.seed, repeat))
        dataset = self._target.measured(self._target.drawn(seconds, ARMS[arm].shares, rng), rng)
        model = ARMS[arm].make(self._base, dataset, repeat)
        return outcome(model, self._target, arm=arm, seconds=seconds, repeat=repeat, num_samples=len(dataset))


def errors_table(outcomes: Sequence[Outcome]) -> Table:
    """A line for each machine, way and time: means over draws."""
    everything = {one.store: one for one in outcomes if one.arm == "everything"}
    groups: dict[tuple[str, str, float], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.store, one.arm, one.seconds), []).append(one)

    def over(group: Sequence[Outcome], field: str) -> str:
        return f"{_mean(group, field) / getattr(everything[group[0].store], field):.2f}"

    return Table.of(
        list(groups.values()),
        (
            ("calibrated to", lambda group: group[0].store),
            ("how", lambda group: ARMS[group[0].arm].title if group[0].arm in ARMS else group[0].arm),
            ("seconds measured", lambda group: f"{group[0].seconds:,.0f}"),
            ("samples", lambda group: f"{_mean(group, 'num_samples'):,.0f}"),
            ("error", lambda group: f"{_mean(group, 'relative_error'):.2%}"),
            ("over that of everything", lambda group: over(group, "relative_error")),
            ("after one factor", lambda group: over(group, "factored_error")),
            ("90% interval holds", lambda group: f"{_mean(group, 'coverage'):.1%}"),
            ("its half width", lambda group: f"{_mean(group, 'half_width'):.1%}"),
            ("draws", lambda group: str(len(group))),
        ),
        caption="Models of one machine on held-out sets of the other; means over draws of samples",
    )


def goal_notes(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """What was to be reached, and whether it was."""
    everything = {one.store: one for one in outcomes if one.arm == "everything"}
    notes = []
    for store, (seconds, goals) in itertools.product(everything, GOALS.items()):
        group = [one for one in outcomes if (one.store, one.arm, one.seconds) == (store, "calibrated", seconds)]
        for (field, how), goal in zip(_JUDGED.items(), goals, strict=True):
            if group:
                ratio = _mean(group, field) / getattr(everything[store], field)
                verdict = "reached" if ratio <= goal else "missed"
                notes.append(
                    f"{store}, {seconds:g} s: {ratio:.2f} times the error of everything{how}, at most {goal}: {verdict}"
                )
    return tuple(notes)


def _mean(group: Sequence[Outcome], field: str) -> float:
    return float(np.mean([getattr(one, field) for one in group]))


def main(options: CalibrationStudyOptions, output: OutputOptions) -> None:
    """Calibrates the model of one machine to samples of another, both ways, with more and more seconds of measuring.

    Example:
        python -m studies calibrate --parts calibration-parts -o calibration
    """
    if options.from_file is not None:
        numbers = read_document(options.from_file, Numbers, SCHEMA)
    else:
        outcomes = run_study(options)
        machine = Machine.of("calibrate", options)
        numbers = Numbers(machine=machine, outcomes=outcomes)
    notes = (*goal_notes(numbers.outcomes), *(f"{name}: {value}" for name, value in numbers.machine.described()))
    output.write(
        StudyResult(
            name="calibration",
            document=to_document(numbers, SCHEMA),
            tables=(errors_table(numbers.outcomes),),
            notes=notes,
        )
    )
