"""The study `flexshard`: `python -m studies flexshard`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from autoshard.core import Tier
from autoshard.planners.flexshard.equations import FlexMachine, ParetoFrontier
from autoshard.report.wording import write_percent
from autoshard.table import Table
from studies.frame import OutputOptions, StudyResult
from studies.papers.flexshard.figures import (
    fig1_figure,
    fig3_figure,
    fig5_figure,
    fig6_figure,
    fig7_figure,
    named_points,
)
from studies.papers.flexshard.models import Run, TierShare
from studies.papers.flexshard.results import (
    TWO_TIER_GAIN,
    HistoryCosts,
    ModelResult,
    ReplicaCosts,
    all_to_all_fit_ms,
    fig1_costs,
    fig3_costs,
    fig5_frontier,
    fitted_machine,
    model_results,
    rest_of_step_ms,
)

SCHEMA = "autoshard.papers.flexshard/1"
#: Sec. 6.2: what three tiers add to RM-1's throughput.
_THREE_TIER_GAIN = 0.81


def results_tables(
    results: Sequence[ModelResult], frontier: ParetoFrontier, histories: HistoryCosts
) -> tuple[Table, ...]:
    """Tables with the paper's numbers and ours."""
    return (
        _three_tier_table(results),
        _two_tier_table(results),
        _all_to_all_table(results),
        _times_table(results),
        _speedup_table(results),
        _throughput_table(results[0]),
        _histories_table(histories),
        _points_table(frontier),
    )


def results_document(
    machine: FlexMachine,
    results: Sequence[ModelResult],
    frontier: ParetoFrontier,
    histories: HistoryCosts,
    replicas: ReplicaCosts,
) -> dict[str, object]:
    """The numbers behind the tables and images."""
    return {
        "schema": SCHEMA,
        "bandwidths_bytes_per_s": asdict(machine.bandwidths),
        "models": [_model_document(result) for result in results],
        "fig1": {
            "lookups_per_sample": histories.length_N.tolist(),
            "sequence_gb": histories.sequence_gb_N.tolist(),
            "sequence_ms": histories.sequence_ms_N.tolist(),
            "pooled_gb": {str(tables): value for tables, value in histories.pooled_gb.items()},
            "pooled_ms": {str(tables): value for tables, value in histories.pooled_ms.items()},
            "reduced_gb": {str(tables): value for tables, value in histories.reduced_gb.items()},
            "reduced_ms": {str(tables): value for tables, value in histories.reduced_ms.items()},
        },
        "throughput": {
            "model": results[0].model.name,
            "rest_of_step_ms": rest_of_step_ms(results[0].model),
            "gains": {label: list(gains) for label, gains in _gains(results[0]).items()},
        },
        "fig3": {
            "alpha": replicas.alpha_N.tolist(),
            "memory": replicas.memory_N.tolist(),
            "communication": replicas.communication_N.tolist(),
            "memory_neutral": replicas.memory_neutral,
            "communication_neutral": replicas.communication_neutral,
        },
        "fig5": {
            "points": {letter: asdict(point) for letter, point in named_points(frontier).items()},
            "curve": [[point.num_rows, point.memory_bytes, point.communication_s] for point in frontier.curve],
        },
    }


def _model_document(result: ModelResult) -> dict[str, object]:
    def tiers(plans: tuple[dict[Tier, TierShare], dict[Tier, TierShare]]) -> list[dict[str, object]]:
        return [{tier.value: asdict(share) for tier, share in plan.items()} for plan in plans]

    model = result.model
    return {
        "name": model.name,
        "lengths": {
            "neutral": model.neutral_length,
            "measured": model.measured_length,
            "leaving": model.leaving_length,
        },
        "tiers": {name: tiers(getattr(result, name)) for name in ("neutral", "measured", "leaving")},
        "paper": asdict(model),
        "predicted": [asdict(run) for run in result.predicted],
    }


def _three_tier_table(results: Sequence[ModelResult]) -> Table:
    def off(result: ModelResult) -> float:
        return result.neutral[1][Tier.FLEX].num_rows / result.model.flexed.num_rows - 1

    return Table.of(
        results,
        (
            ("3-tier", lambda one: one.model.name),
            ("data-parallel, paper", lambda one: _rows(one.model.replicated)),
            ("ours", lambda one: _rows(one.neutral[1][Tier.DATA_PARALLEL])),
            ("Flex, paper", lambda one: _rows(one.model.flexed)),
            ("ours", lambda one: _rows(one.neutral[1][Tier.FLEX])),
            ("Flex rows off by", lambda one: write_percent(off(one), signed=True)),
        ),
        caption="Table 5, rows and coverage, with L from the paper's neutral 2-tier rows.",
    )


def _two_tier_table(results: Sequence[ModelResult]) -> Table:
    lines = []
    for result in results:
        paper = result.model.two_tier
        cells = [result.model.name, _rows(paper)]
        lengths = (result.model.measured_length, result.model.leaving_length)
        for length, (plan, _) in zip(lengths, (result.measured, result.leaving), strict=True):
            share = plan[Tier.DATA_PARALLEL]
            off = write_percent(share.num_rows / paper.num_rows - 1, signed=True)
            cells += [f"{length:.1f}", _rows(share), off]
        lines.append(tuple(cells))
    return Table(
        columns=("2-tier", "paper", "L, volume as it is", "rows", "off by", "L, volume that leaves", "rows", "off by"),
        rows=tuple(lines),
        caption="Table 5, 2-tier rows with L from Table 6's measured row-wise volumes.",
    )


def _all_to_all_table(results: Sequence[ModelResult]) -> Table:
    lines = []
    machine = fitted_machine()
    for result in results:
        fits = all_to_all_fit_ms(result.model, machine)
        for name, run, fit_ms in zip(("RW", "2-tier", "3-tier"), result.model.runs, fits, strict=True):
            off = write_percent(fit_ms / run.all_to_all_ms - 1, signed=True)
            lines.append((f"{result.model.name} {name}", f"{run.all_to_all_ms:.0f}", f"{fit_ms:.0f}", off))
    return Table(
        columns=("global all-to-all, ms", "paper", "ours", "off by"),
        rows=tuple(lines),
        caption="Table 6, measured volumes at the bandwidth of RM-1's row-wise run.",
    )


def _times_table(results: Sequence[ModelResult]) -> Table:
    def cells(paper: Run, ours: Run) -> list[str]:
        names = ("all_to_all_ms", "intra_ms", "all_reduce_ms", "cross_ms")
        pairs = ((getattr(paper, name), getattr(ours, name)) for name in names)
        return [f"{of_paper:.0f} / {of_ours:.1f}" if of_ours else "" for of_paper, of_ours in pairs]

    lines = []
    for result in results:
        runs = zip(("2-tier", "3-tier"), result.model.runs[1:], result.predicted[1:], strict=True)
        for name, paper, ours in runs:
            volumes = f"{paper.volume / 1e6:.0f} / {ours.volume / 1e6:.0f}"
            lines.append((f"{result.model.name} {name}", volumes, *cells(paper, ours)))
    return Table(
        columns=(
            "paper / ours",
            "volume, millions",
            "all-to-all, ms",
            "within nodes, ms",
            "all-reduce, ms",
            "across nodes, ms",
        ),
        rows=tuple(lines),
        caption="Table 6 predicted: our plans from the measured row-wise volume, at bandwidths of RM-1's runs.",
    )


def _speedup_table(results: Sequence[ModelResult]) -> Table:
    lines = []
    for result in results:
        ways = [(is_measured, is_hidden) for is_hidden in (True, False) for is_measured in (True, False)]
        speedups = [result.speedups(is_measured=measured, is_hidden=hidden) for measured, hidden in ways]
        for index, name in enumerate(("2-tier", "3-tier")):
            reductions = result.measured_reductions[index], result.predicted_reductions[index]
            cells = [write_percent(share) for share in reductions] + [f"{pair[index]:.2f}" for pair in speedups]
            lines.append((f"{result.model.name} {name}", *cells))
    return Table(
        columns=("", "saved, paper", "ours", "speed-up, paper", "ours", "nothing hidden, paper", "ours"),
        rows=tuple(lines),
        caption="Fig. 6 and 7: global all-to-all saved, and communication of row-wise steps over that of tiered ones.",
    )


def _gains(result: ModelResult) -> dict[str, tuple[float, float]]:
    """Gains in throughput by where the times of communication come from and whether Flex's are hidden."""
    rest_ms = rest_of_step_ms(result.model)
    return {
        f"{source} times, Flex {way}": result.gains(rest_ms, is_measured=is_measured, is_hidden=is_hidden)
        for source, is_measured in (("Table 6's", True), ("predicted", False))
        for way, is_hidden in (("hidden", True), ("not hidden", False))
    }


def _throughput_table(result: ModelResult) -> Table:
    lines = {"the paper": (TWO_TIER_GAIN, _THREE_TIER_GAIN), **_gains(result)}
    return Table.of(
        lines.items(),
        (
            ("gain", lambda line: line[0]),
            ("2-tier", lambda line: f"{line[1][0]:+.0%}"),
            ("3-tier", lambda line: f"{line[1][1]:+.0%}"),
        ),
        caption=(
            f"Sec. 6.2, {result.model.name}: throughput over row-wise, with "
            f"{rest_of_step_ms(result.model):.0f} ms for the "
            "rest of a step, from the paper's 2-tier gain."
        ),
    )


def _histories_table(histories: HistoryCosts) -> Table:
    longest_gb, longest_ms = float(histories.sequence_gb_N[-1]), float(histories.sequence_ms_N[-1])
    lines = [(f"kept, {histories.length_N[-1]:,.0f} lookups", f"{longest_gb:.3g}", f"{longest_ms:.3g}", "", "")]
    for label, by_gb, by_ms in (
        ("reduce-scatter", histories.reduced_gb, histories.reduced_ms),
        ("all-to-all", histories.pooled_gb, histories.pooled_ms),
    ):
        lines += [
            (
                f"{tables} summed, {label}",
                f"{memory_gb:.3g}",
                f"{by_ms[tables]:.3g}",
                f"{longest_gb / memory_gb:.0f}",
                f"{longest_ms / by_ms[tables]:.0f}",
            )
            for tables, memory_gb in by_gb.items()
        ]
    return Table(
        columns=("histories", "memory, GB", "communication, ms", "memory, times less", "communication, times less"),
        rows=tuple(lines),
        caption="Fig. 1, 32 ranks, row-wise, dimension 256.",
    )


def _points_table(frontier: ParetoFrontier) -> Table:
    return Table.of(
        named_points(frontier).items(),
        (
            ("point", lambda named: named[0]),
            ("rows replicated", lambda named: f"{named[1].num_rows:,.0f}"),
            ("coverage", lambda named: write_percent(named[1].coverage)),
            ("memory, GB per rank", lambda named: f"{named[1].memory_bytes / 1e9:+.2f}"),
            ("communication, ms per step", lambda named: f"{named[1].communication_s * 1e3:+.1f}"),
        ),
        caption="Fig. 5, on RM-1: over row-wise sharding.",
    )


def _rows(share: TierShare) -> str:
    return f"{share.num_rows:,} ({write_percent(share.coverage)})"


def main(output: OutputOptions) -> None:
    """Plans FlexShard's four models, prints its Tables 5 and 6 beside them, and draws its Fig. 1, 3, 5, 6 and 7.

    Example:
        python -m studies flexshard -o docs/figures
    """
    machine = fitted_machine()
    results = model_results()
    frontier, histories, replicas = fig5_frontier(machine), fig1_costs(machine), fig3_costs(machine)
    output.write(
        StudyResult(
            name="flexshard",
            document=results_document(machine, results, frontier, histories, replicas),
            tables=results_tables(results, frontier, histories),
            images={
                "-fig1": fig1_figure(histories),
                "-fig3": fig3_figure(replicas),
                "-fig5": fig5_figure(frontier),
                "-fig6": fig6_figure(results),
                "-fig7": fig7_figure(results),
            },
        )
    )
