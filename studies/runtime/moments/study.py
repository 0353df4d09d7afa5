"""The study `moments`: gaps of normalised entropy to one replica group, and growth of moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated

import plotly.graph_objects as go
import typer
from plotly.subplots import make_subplots

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core.errors import InvalidOptionError
from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, in_house_style
from autoshard.runtime import Verification
from autoshard.table import Table
from studies.frame import Machine, OutputOptions, PartsOption, PartStore, StudyResult, Summary
from studies.frame.documents import read_as
from studies.runtime.clicks import ClickModel
from studies.runtime.moments.trainings import (
    NoiseJob,
    NoiseResult,
    Run,
    Setting,
    TrainedRun,
    TrainingJob,
    compared_runs,
    moments_of_noise,
    trained,
    tuning_runs,
    verified,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Gaps of one number of groups and moment scale to one group, over paired seeds.

    Attributes:
        num_groups: Replica groups, M.
        moment_scale: c.
        percent: For each seed, the gap after each evaluation: 100 (NE / NE of one group - 1).
    """

    num_groups: int
    moment_scale: int
    percent: tuple[tuple[float, ...], ...]

    def at(self, evaluation: int) -> Summary:
        """Mean and deviation over seeds at one evaluation."""
        return Summary.of([of_seed[evaluation] for of_seed in self.percent])

    @property
    def last(self) -> Summary:
        """Of the last evaluation."""
        return self.at(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Gaps of one number of groups with and without moment scaling, seed by seed.

    Attributes:
        num_groups: Replica groups, M.
        num_seeds: Pairs.
        num_smaller: Pairs whose gap is smaller with c = M than with c = 1; below 0 it is better than one group.
        num_nearer: Pairs whose gap is nearer to 0 with c = M.
    """

    num_groups: int
    num_seeds: int
    num_smaller: int
    num_nearer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of moments on noise.

    Attributes:
        num_groups: Replica groups, M.
        ratio: Sum of all moments over that of one group; Proposition 1 expects M.
        num_states: Different states among groups after each step up to the first synchronisation.
    """

    num_groups: int
    ratio: float
    num_states: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentResults:
    """All numbers of the study.

    Attributes:
        groups: Numbers of replica groups; the first is 1.
        verifications: For each of them, errors against unsharded tables with c = M.
        noise: For each of them, moments on noise.
        tuning: One group with each learning rate.
        runs: The compared trainings.
    """

    groups: tuple[int, ...]
    verifications: tuple[Verification, ...]
    noise: tuple[NoiseResult, ...]
    tuning: tuple[TrainedRun, ...]
    runs: tuple[TrainedRun, ...]

    def gaps(self, num_groups: int, moment_scale: int) -> Gaps:
        """Gaps to one group."""
        found = {(one.run.seed, one.run.num_groups, one.run.moment_scale): one.entropies for one in self.runs}
        seeds = dict.fromkeys(one.run.seed for one in self.runs)
        percent = tuple(
            tuple(
                100 * (own / base - 1.0)
                for own, base in zip(found[seed, num_groups, moment_scale], found[seed, 1, 1], strict=True)
            )
            for seed in seeds
        )
        return Gaps(num_groups=num_groups, moment_scale=moment_scale, percent=percent)

    def scales(self, num_groups: int) -> tuple[int, ...]:
        """Moment scales that a number of groups was trained with, rising."""
        return tuple(sorted({one.run.moment_scale for one in self.runs if one.run.num_groups == num_groups}))

    def all_gaps(self) -> tuple[Gaps, ...]:
        """Gaps of all numbers of groups but 1, with all their scales."""
        return tuple(self.gaps(groups, scale) for groups in self.groups[1:] for scale in self.scales(groups))

    def pairs(self) -> tuple[Pairs, ...]:
        """Pairs of all numbers of groups but 1."""
        return tuple(self._pairs(num_groups) for num_groups in self.groups[1:])

    def growth(self) -> tuple[Growth, ...]:
        """Growth of moments of all numbers of groups."""
        base = self.noise[0].moment
        return tuple(
            Growth(num_groups=one.num_groups, ratio=one.moment / base, num_states=one.num_states) for one in self.noise
        )

    def _pairs(self, num_groups: int) -> Pairs:
        scaled, plain = (self.gaps(num_groups, scale).percent for scale in (num_groups, 1))
        last = [(one[-1], other[-1]) for one, other in zip(scaled, plain, strict=True)]
        return Pairs(
            num_groups=num_groups,
            num_seeds=len(last),
            num_smaller=sum(one < other for one, other in last),
            num_nearer=sum(abs(one) < abs(other) for one, other in last),
        )


def best_rate(tuning: Sequence[TrainedRun]) -> float:
    """Learning rate of the run with the least normalised entropy at the end."""
    return min(tuning, key=lambda one: one.entropies[-1]).run.learning_rate


#: Groups of 2D's Fig. 5.
FIG5_GROUPS = 4
_HEIGHT = 480
_COLOURS = (BLUE, GREEN, ORANGE, GREY)


def numbers(results: MomentResults, setting: Setting) -> dict[str, object]:
    """The numbers behind tables and figures."""
    return {
        "setting": asdict(setting),
        "learning_rate": best_rate(results.tuning),
        "tuning": [asdict(one) for one in results.tuning],
        "verifications": [asdict(one) for one in results.verifications],
        "growth": [asdict(one) for one in results.growth()],
        "pairs": [asdict(one) for one in results.pairs()],
        "gaps": [{**asdict(one), "last": asdict(one.last)} for one in results.all_gaps()],
        "runs": [asdict(one) for one in results.runs],
    }


def tables(results: MomentResults) -> tuple[Table, ...]:
    """Checks of the engine, the tuned learning rate, and gaps by groups and moment scale."""
    return _checks(results), _tuning(results), _gaps(results)


def figures(results: MomentResults, setting: Setting) -> dict[str, go.Figure]:
    """2D's Fig. 4 and 5, by the ends of their files' names."""
    samples = [step * setting.batch_size for step in setting.evaluated_steps]
    found = {"-fig4": _fig4(results, samples)}
    if FIG5_GROUPS in results.groups:
        found["-fig5"] = _fig5(results, samples)
    return found


def _checks(results: MomentResults) -> Table:
    identical = {
        groups: all(one.is_identical for one in results.runs if one.run.num_groups == groups)
        for groups in results.groups
    }
    return Table.of(
        list(zip(results.groups, results.verifications, results.growth(), strict=True)),
        (
            ("groups", lambda one: str(one[0])),
            ("steps compared", lambda one: str(one[1].steps)),
            ("largest error of weights", lambda one: f"{one[1].weight_error:.1e}"),
            ("of moments", lambda one: f"{one[1].moment_error:.1e}"),
            ("moments over one group's", lambda one: f"{one[2].ratio:.3f}"),
            ("states before and after a sync", lambda one: ", ".join(map(str, one[2].num_states))),
            ("bit-identical after training", lambda one: "yes" if identical[one[0]] else "no"),
        ),
        caption="The engine: errors against unsharded tables with c = M, and moments on gradients that are noise",
    )


def _tuning(results: MomentResults) -> Table:
    return Table.of(
        results.tuning,
        (
            ("learning rate", lambda one: f"{one.run.learning_rate:g}"),
            ("normalised entropy", lambda one: f"{one.entropies[-1]:.5f}"),
        ),
        caption="Learning rate of the tables, chosen for one group on data of its own",
    )


def _gaps(results: MomentResults) -> Table:
    pairs = {(one.num_groups, one.num_groups): one for one in results.pairs()}

    def share(gaps: Gaps, count: Callable[[Pairs], int]) -> str:
        found = pairs.get((gaps.num_groups, gaps.moment_scale))
        return "" if found is None else f"{count(found)} of {found.num_seeds}"

    return Table.of(
        results.all_gaps(),
        (
            ("groups", lambda one: str(one.num_groups)),
            ("c", lambda one: str(one.moment_scale)),
            ("mean gap", lambda one: f"{one.last.mean:+.3f}"),
            ("deviation over seeds", lambda one: f"{one.last.deviation:.3f}"),
            ("smaller than with c = 1", lambda one: share(one, lambda pairs: pairs.num_smaller)),
            ("nearer to 0", lambda one: share(one, lambda pairs: pairs.num_nearer)),
        ),
        caption="Gap of normalised entropy to one group, in per cent, after the last step",
    )


def _fig4(results: MomentResults, samples: Sequence[int]) -> go.Figure:
    figure = make_subplots(1, 2, horizontal_spacing=0.12)
    in_house_style(figure, height=_HEIGHT)
    for num_groups, colour in zip(results.groups[1:], _COLOURS, strict=False):
        name = f"{num_groups} groups"
        figure.add_trace(_over_samples(results.gaps(num_groups, 1), samples, name, colour), row=1, col=1)
        scales = results.scales(num_groups)
        last = [results.gaps(num_groups, scale).last for scale in scales]
        figure.add_scatter(
            name=name,
            x=scales,
            y=[one.mean for one in last],
            error_y={"array": [one.deviation for one in last]},
            mode="lines+markers",
            line={"color": colour, "width": 3},
            showlegend=False,
            row=1,
            col=2,
        )
    figure.update_xaxes(title_text="(a) samples, c = 1", row=1, col=1)
    figure.update_xaxes(title_text="(b) moment scale c", type="log", dtick=0.30103, row=1, col=2)
    figure.update_yaxes(title_text="gap of normalised entropy, %")
    return figure


def _fig5(results: MomentResults, samples: Sequence[int]) -> go.Figure:
    figure = in_house_style(go.Figure(), height=_HEIGHT)
    for scale, colour in ((1, ORANGE), (FIG5_GROUPS, BLUE)):
        gaps = results.gaps(FIG5_GROUPS, scale)
        figure.add_trace(_over_samples(gaps, samples, f"{FIG5_GROUPS} groups, c = {scale}", colour))
    figure.update_xaxes(title_text="samples")
    figure.update_yaxes(title_text="gap of normalised entropy, %")
    return figure


def _over_samples(gaps: Gaps, samples: Sequence[int], name: str, colour: str) -> go.Scatter:
    summaries = [gaps.at(evaluation) for evaluation in range(len(samples))]
    return go.Scatter(
        name=name,
        x=list(samples),
        y=[one.mean for one in summaries],
        error_y={"array": [one.deviation for one in summaries]},
        mode="lines+markers",
        line={"color": colour, "width": 3},
    )


#: Learning rates that are tried with one group.
RATES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
_NOISE_STEPS, _VERIFIED_STEPS = 40, 20


@command_options()
class MomentOptions:
    """Options of the study `moments`."""

    seeds: Annotated[int, typer.Option(min=1, help="Seeds: planted models, each with its samples.")] = 5
    max_groups: Annotated[int, typer.Option(min=2, help="Most replica groups; a power of 2.")] = 8
    nproc: Annotated[int, typer.Option(min=2, help="Processes; a power of 2.")] = 8
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 600
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step over all processes.")] = 512
    num_tables: Annotated[int, typer.Option(min=1, help="Tables.")] = 6
    num_rows: Annotated[int, typer.Option(min=2, help="Rows of a table.")] = 4000
    held_out: Annotated[int, typer.Option(min=1, help="Batches of held-out samples.")] = 64
    all_scales: Annotated[bool, typer.Option(help="Also train with moment scales between 1 and M.")] = False
    parts: PartsOption = None

    def __post_init__(self) -> None:
        powers = (("--nproc", self.nproc), ("--max-groups", self.max_groups))
        for field, value in powers:
            if value & (value - 1):
                raise InvalidOptionError(f"must be a power of 2, got {value}", field=field)
        if self.max_groups > self.nproc:
            message = f"must be at most the {self.nproc} processes, got {self.max_groups}"
            raise InvalidOptionError(message, field="--max-groups")
        if self.batch_size % self.nproc:
            message = f"must be a multiple of the {self.nproc} processes, got {self.batch_size}"
            raise InvalidOptionError(message, field="--batch-size")

    def groups(self) -> tuple[int, ...]:
        """Numbers of replica groups: powers of 2 from 1 on."""
        return tuple(1 << power for power in range(self.max_groups.bit_length()))

    def setting(self) -> Setting:
        """What all runs have in common."""
        return Setting(
            model=ClickModel(num_tables=self.num_tables, num_rows=self.num_rows, embedding_dim=8),
            num_processes=self.nproc,
            batch_size=self.batch_size,
            num_steps=self.steps,
            num_held_out=self.held_out * self.batch_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChecks:
    """What the engine computes, without training for a purpose."""

    verifications: tuple[Verification, ...]
    noise: tuple[NoiseResult, ...]


def main(options: MomentOptions, output: OutputOptions) -> None:
    """Trains with replica groups, with and without moment scaling, and draws 2D's Fig. 4 and 5.

    Example:
        python -m studies moments --parts moments -o docs/figures
    """
    setting, groups = options.setting(), options.groups()
    parts = PartStore.of(options.parts, asdict(setting))
    checks = parts.find_data("engine", EngineChecks, lambda: _engine_checks(setting, groups))
    tuning = _trained(setting, tuning_runs(RATES), parts, "Tuning the learning rate")
    runs = compared_runs(range(options.seeds), groups, best_rate(tuning), all_scales=options.all_scales)
    results = MomentResults(
        groups=groups,
        verifications=checks.verifications,
        noise=checks.noise,
        tuning=tuning,
        runs=_trained(setting, runs, parts, "Training"),
    )
    output.write(
        StudyResult(
            name="moments",
            document=Machine.of("moments", options).document(numbers(results, setting), "autoshard.moments/1"),
            tables=tables(results),
            images=figures(results, setting),
        )
    )


def _engine_checks(setting: Setting, groups: Sequence[int]) -> EngineChecks:
    return EngineChecks(
        verifications=verified(setting, groups, steps=_VERIFIED_STEPS),
        noise=moments_of_noise(NoiseJob(setting=replace(setting, num_steps=_NOISE_STEPS), groups=tuple(groups))),
    )


def _trained(setting: Setting, runs: Sequence[Run], parts: PartStore, label: str) -> tuple[TrainedRun, ...]:
    """Results of all runs: those that are finished, and the rest from one start of the processes."""
    left = tuple(run for run in runs if not parts.has(run.name))
    found = {run: read_as(TrainedRun, parts.read(run.name), run.name) for run in runs if run not in left}
    with console.progress(label, len(runs)) as advance:
        advance(len(found))
        for result in _kept(setting, left, parts) if left else ():
            found[result.run] = result
            advance(1)
    return tuple(found[run] for run in runs)


def _kept(setting: Setting, runs: tuple[Run, ...], parts: PartStore) -> Iterator[TrainedRun]:
    with closing(trained(TrainingJob(setting=setting, runs=runs))) as results:
        for result in results:
            parts.find(result.run.name, partial(asdict, result))
            yield result
