"""The study `cost-models`: the learned kernel model beside other methods, on seen and on unseen tables.

Every number of the charts is in the document, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import plotly.graph_objects as go
import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.formats.stores.samples import devices_in, read_samples
from autoshard.report.figures import BLUE, GREEN, GREY, GRID, INK, ORANGE, PINK, SKY, YELLOW, in_house_style
from autoshard.report.images import FigureReport, Section
from autoshard.report.wording import write_ms, write_percent
from autoshard.table import Table
from costmodel.kernel.training import CostTrainingOptions
from studies.cost_models.evaluation import FULL, KERNEL, METHODS, Evaluation, EvaluationOptions, evaluate_methods
from studies.cost_models.evaluation_numbers import PARTS, to_document
from studies.cost_models.evidence import SplitKind, plain_sets
from studies.frame import OutputOptions, StudyResult

#: Points of a scatter: more overlap, and make the page heavy.
_MOST_POINTS = 2000
#: Methods whose error is drawn against the number of tables, with their colours.
_LINES: Mapping[str, str] = {
    KERNEL: BLUE,
    "autoshard_best": ORANGE,
    "singles_scaled": PINK,
    "pooled_linear": GREEN,
    "boosted_trees": YELLOW,
    "analytic_scaled": GREY,
    "torchrec": SKY,
}


def scatter_figure(evaluation: Evaluation) -> go.Figure:
    """Predicted against measured times of held-out sets, both axes logarithmic: seen tables, and unseen ones."""
    figure = in_house_style(go.Figure(), height=520)
    measured_S = evaluation.evidence.dataset.kernel_ms
    first = {split.kind: split for split in reversed(evaluation.splits)}
    parts = [("sets of seen tables", first[SplitKind.RANDOM].held_out, BLUE)]
    unseen = first.get(SplitKind.HALF) or first.get(SplitKind.MIXED)
    if unseen is not None:
        which = "sets of unseen tables alone" if unseen.kind is SplitKind.HALF else "sets with unseen tables"
        parts.append((which, unseen.unseen, ORANGE))
    ends = [np.inf, 0.0]
    for name, prices, colour in parts:
        priced = prices[KERNEL]
        measured, predicted = measured_S[priced.samples_T][:_MOST_POINTS], priced.ms_T[:_MOST_POINTS]
        ends = [min(ends[0], measured.min(), predicted.min()), max(ends[1], measured.max(), predicted.max())]
        figure.add_scatter(
            name=name,
            x=measured.tolist(),
            y=predicted.tolist(),
            mode="markers",
            marker={"color": colour, "size": 5, "opacity": 0.5},
            hovertemplate="measured %{x:.3g} ms, predicted %{y:.3g} ms<extra></extra>",
        )
    line = {"color": INK, "width": 1.2, "dash": "dot"}
    figure.add_scatter(name="equal", x=ends, y=ends, mode="lines", line=line, hoverinfo="skip")
    margin = (np.log10(ends[1]) - np.log10(ends[0])) * 0.03
    axis = {
        "type": "log",
        "range": [float(np.log10(ends[0]) - margin), float(np.log10(ends[1]) + margin)],
        "dtick": 1,
        "gridcolor": GRID,
        "showline": True,
        "linecolor": GREY,
    }
    figure.update_xaxes(title_text="measured kernel, ms", **axis)
    figure.update_yaxes(title_text="predicted kernel, ms", **axis)
    return figure


def tables_figure(document: Mapping[str, Any]) -> go.Figure:
    """Mean relative error against the number of tables, by method, with the repeat noise as a line."""
    figure = in_house_style(go.Figure(), height=440)
    for method, colour in _LINES.items():
        errors = document["by_tables"].get(method)
        if errors:
            figure.add_scatter(
                name=METHODS[method],
                x=list(errors),
                y=[100 * value for value in errors.values()],
                mode="lines+markers",
                line={"color": colour, "width": 3 if method == KERNEL else 1.8},
                hovertemplate="%{x} tables: %{y:.2f}%<extra>" + METHODS[method] + "</extra>",
            )
    repeated = document["noise"]["repeated"]
    if repeated:
        figure.add_hline(y=100 * repeated, line={"color": INK, "width": 1.2, "dash": "dot"})
        figure.add_annotation(
            x=1,
            xref="paper",
            xanchor="right",
            y=np.log10(100 * repeated),
            yanchor="bottom",
            showarrow=False,
            text=f"noise of repeated sets {100 * repeated:.1f}%",
        )
    figure.update_xaxes(title_text="tables in the set", type="category", showline=True, linecolor=GREY)
    ticks = [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
    figure.update_yaxes(
        title_text="mean relative error, %", type="log", tickvals=ticks, ticktext=[f"{t:g}" for t in ticks]
    )
    figure.update_layout(margin={"t": 76, "r": 24})
    return figure


def ablation_figure(document: Mapping[str, Any]) -> go.Figure:
    """Mean relative error without each group of features, with deviations over seeds."""
    errors = document["ablation"]
    names = sorted(errors, key=lambda name: errors[name]["mean"])
    figure = in_house_style(go.Figure(), height=60 + 36 * len(names))
    means = [100 * errors[name]["mean"] for name in names]
    figure.add_bar(
        x=means,
        y=[f"without {name}" if name != FULL else "full model" for name in names],
        orientation="h",
        marker_color=[ORANGE if name == FULL else BLUE for name in names],
        error_x={"array": [100 * errors[name]["deviation"] for name in names], "color": INK, "thickness": 1.2},
        text=[f" {value:.2f}%" for value in means],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.2f}%<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(title_text="mean relative error on held-out sets, %", gridcolor=GRID, rangemode="tozero")
    figure.update_layout(margin={"r": 72})
    return figure


def groups_figure(document: Mapping[str, Any]) -> go.Figure:
    """Mean relative error by how sets were chosen, and by the kinds of kernels that they hold."""
    figure = in_house_style(go.Figure(), height=90 + 30 * (len(document["by_source"]) + len(document["by_kind"])))
    for name, groups, colour in (
        ("sets that hold", document["by_kind"], SKY),
        ("sets chosen by", document["by_source"], BLUE),
    ):
        labels = sorted(groups, key=lambda label: groups[label]["relative_error"])
        figure.add_bar(
            name=name,
            x=[100 * groups[label]["relative_error"] for label in labels],
            y=[f"{label} ({groups[label]['num_samples']:,})" for label in labels],
            orientation="h",
            marker_color=colour,
            text=[f" {100 * groups[label]['relative_error']:.1f}%" for label in labels],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.2f}%<extra></extra>",
        )
    figure.update_xaxes(title_text="mean relative error of the kernel model, %", gridcolor=GRID)
    figure.update_layout(margin={"r": 72, "t": 40}, legend={"traceorder": "reversed"})
    return figure


def coverage_figure(document: Mapping[str, Any]) -> go.Figure:
    """Share of measurements within intervals against what the intervals promise."""
    figure = in_house_style(go.Figure(), height=420)
    line = {"color": INK, "width": 1.2, "dash": "dot"}
    figure.add_scatter(name="as promised", x=[45, 100], y=[45, 100], mode="lines", line=line, hoverinfo="skip")
    for (name, shares), colour in zip(document["interval_coverage"].items(), (BLUE, ORANGE, GREEN), strict=False):
        figure.add_scatter(
            name=name,
            x=[100 * float(level) for level in shares],
            y=[100 * share for share in shares.values()],
            mode="lines+markers",
            line={"color": colour, "width": 2},
            hovertemplate="%{x:.0f}% promised, %{y:.1f}% within<extra></extra>",
        )
    axis = {"ticksuffix": "%", "gridcolor": GRID, "showline": True, "linecolor": GREY}
    figure.update_xaxes(title_text="promised by the interval", **axis)
    figure.update_yaxes(title_text="measurements within", **axis)
    return figure


_WIDTH: Final = 960
_NONE = "n/a"
_ACCURACY_COLUMNS = ("method", "relative error", "MAE, ms", "MSE, ms²", "Kendall's tau", "sets priced")
_METHOD_NOTES = (
    "Sum of single tables: the kernel model prices each table alone, as planners do that take costs as additive. "
    "One factor: fitted on the training samples to the smallest mean relative error, so that units do not decide. "
    "Linear, one weight per table: only for sets of shards that are in three training samples or more. "
    "All methods learn from the same samples."
)


def further_figures(document: Mapping[str, Any]) -> dict[str, Any]:
    """The charts beside the scatter, by the ends of their files' names."""
    figures = {
        "tables": tables_figure(document),
        "groups": groups_figure(document),
        "coverage": coverage_figure(document),
    }
    return figures | ({"ablation": ablation_figure(document)} if document["ablation"] else {})


def evaluation_result(evaluation: Evaluation) -> StudyResult:
    """Numbers, page and images of an evaluation."""
    document = to_document(evaluation)
    scatter = scatter_figure(evaluation)
    further = further_figures(document)
    sections = [
        Section(
            title="Predicted against measured",
            caption=f"Sets that training did not see. {_METHOD_NOTES}",
            figure=scatter,
            tables=tuple(accuracy_table(document, part) for part in document["accuracy"]),
        ),
        Section(title="Unseen tables", caption=_unseen_caption(document), tables=(ratio_table(document),)),
        Section(
            title="Number of tables, and noise",
            caption=_noise_caption(document),
            figure=further["tables"],
            tables=(tables_table(document),),
        ),
        Section(
            title="Where the kernel model errs",
            caption="Held-out sets, by how they were chosen and by what they hold; a set may be in several groups of "
            "the latter. Numbers of samples in brackets, over all seeds.",
            figure=further["groups"],
            tables=(group_table(document, "by_source", "chosen by"), group_table(document, "by_kind", "holds")),
        ),
        Section(
            title="Intervals",
            caption="Ends of intervals are read from one half of the held-out samples of seen tables, and tested on "
            "the other half, and on sets with unseen tables.",
            figure=further["coverage"],
            tables=(coverage_table(document),),
        ),
    ]
    if document["ablation"]:
        sections.append(
            Section(
                title="What each group of features is worth",
                caption="As AutoShard's Table 2, by the error of the cost model: all that follows from what is left "
                "out goes with it; without work, the network has no amounts to multiply its prices with. "
                f"{document['options']['ablation_updates']:,} updates each.",
                figure=further["ablation"],
                tables=(ablation_table(document),),
            )
        )
    page = FigureReport(
        title="Cost models of embedding kernels",
        subtitle=f"{', '.join(document['device_names'])} ({document['device']}), {document['num_samples']:,} samples",
        sections=tuple(sections),
        facts=_facts(document),
        provenance=_provenance(document),
    )
    images = {"": scatter} | {f"-{name}": figure for name, figure in further.items()}
    return StudyResult(name=f"cost-{evaluation.device}", document=document, page=page, images=images, width=_WIDTH)


def accuracy_table(document: Mapping[str, Any], part: str) -> Table:
    """Accuracy of all methods on one kind of sets, such as `random.held_out`."""
    kind, _, where = part.partition(".")
    by_method = document["accuracy"][part]
    lines = []
    for method, name in METHODS.items():
        found = by_method.get(method)
        if found is None:
            reason = document["missing"].get(method, "cannot price them")
            lines.append((name, *[_NONE] * 4, reason))
            continue
        lines.append(
            (
                name,
                _spread(found["relative_error"], percent=True),
                _spread(found["mae_ms"]),
                _spread(found["mse_ms2"]),
                f"{found['kendall_tau']['mean']:.3f}",
                f"{found['num_priced']:,.0f} of {found['num_sets']:,.0f}",
            )
        )
    title = PARTS[SplitKind(kind), where]
    return Table(columns=_ACCURACY_COLUMNS, rows=tuple(lines), caption=f"{title[0].upper()}{title[1:]}")


def _spread(summary: Mapping[str, float], *, percent: bool = False) -> str:
    mean, deviation = summary["mean"], summary["deviation"]
    if percent:
        return f"{100 * mean:.2f}% ± {100 * deviation:.2f}"
    return f"{write_ms(mean)} ± {write_ms(deviation)}"


def ratio_table(document: Mapping[str, Any]) -> Table:
    """Error on unseen tables over that on seen ones."""
    ratios = document["unseen_over_seen"]
    lines = tuple(
        (name, *(_ratio(ratios[kind.value].get(method)) for kind in (SplitKind.HALF, SplitKind.MIXED)))
        for method, name in METHODS.items()
    )
    return Table(
        columns=("method", "half of the tables unseen", "sets with some of a tenth"),
        rows=lines,
        caption="Relative error on unseen tables over that on seen ones (AutoShard: 2.3, by its MAE)",
    )


def _ratio(summary: Mapping[str, float] | None) -> str:
    return _NONE if summary is None else f"{summary['mean']:.2f} ± {summary['deviation']:.2f}"


def tables_table(document: Mapping[str, Any]) -> Table:
    """Mean relative error by number of tables."""
    groups = list(dict.fromkeys(label for errors in document["by_tables"].values() for label in errors))
    lines = tuple(
        (METHODS[method], *(write_percent(errors[label]) if label in errors else _NONE for label in groups))
        for method, errors in document["by_tables"].items()
    )
    return Table(columns=("tables in the set", *groups), rows=lines, caption="Relative error by number of tables")


def group_table(document: Mapping[str, Any], key: str, name: str) -> Table:
    """Mean relative error of the kernel model by a label of sets."""
    lines = tuple(
        (label, f"{100 * group['relative_error']:.2f}%", f"{group['num_samples']:,}")
        for label, group in document[key].items()
    )
    return Table(
        columns=(name, "relative error", "held-out samples"),
        rows=lines,
        caption=f"Kernel model, by what a set {name}" if key == "by_kind" else "Kernel model, by how sets were chosen",
    )


def coverage_table(document: Mapping[str, Any]) -> Table:
    """Share of measurements within intervals."""
    rows = document["interval_coverage"]
    levels = list(next(iter(rows.values())))
    lines = tuple((name, *(write_percent(shares[level]) for level in levels)) for name, shares in rows.items())
    return Table(
        columns=("promised", *(f"{float(level):.0%}" for level in levels)),
        rows=lines,
        caption="Measurements within intervals",
    )


def ablation_table(document: Mapping[str, Any]) -> Table:
    """Error without each group of features."""
    errors = document["ablation"]
    full = errors[FULL]["mean"]
    lines = tuple(
        (
            "full model" if name == FULL else f"without {name}",
            _spread(found, percent=True),
            f"{found['mean'] / full:.2f}",
        )
        for name, found in errors.items()
    )
    return Table(columns=("features", "relative error", "over that of the full model"), rows=lines, caption="Ablation")


def _facts(document: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    found = document["accuracy"]["random.held_out"][KERNEL]
    noise, ratios = document["noise"], document["unseen_over_seen"]
    facts = [
        ("Held-out error", f"{found['relative_error']['mean']:.2%}", f"{found['num_sets']:,.0f} sets per seed"),
        ("Kendall's tau", f"{found['kendall_tau']['mean']:.3f}", "order of held-out sets"),
    ]
    if noise["ratio"] is not None:
        facts.append(
            ("Error over noise", f"{noise['ratio']:.2f}", f"{noise['num_sets']:,} sets measured more than once")
        )
    for kind, note in ((SplitKind.HALF, "half of the tables unseen"), (SplitKind.MIXED, "sets with some of a tenth")):
        ratio = ratios[kind.value].get(KERNEL)
        if ratio is not None:
            facts.append(("Unseen over seen", f"{ratio['mean']:.2f}", note))
    if document["stated_coverage"] is not None:
        facts.append(("90% interval holds", write_percent(document["stated_coverage"]), "of held-out samples"))
    return tuple(facts)


def _unseen_caption(document: Mapping[str, Any]) -> str:
    parts = []
    for kind, what in (
        (
            SplitKind.HALF,
            "Half of the tables are unseen: training has sets of seen tables alone, the test sets of unseen "
            "ones alone. Random sets of many tables are neither, so the sets are small",
        ),
        (
            SplitKind.MIXED,
            "A tenth of the tables are unseen: training has the sets without any of them, the test all that hold one",
        ),
    ):
        size = document["sizes"].get(kind.value)
        if size is None:
            parts.append(f"{what}. Too few samples for it: {document['skipped'][kind.value]}.")
            continue
        parts.append(
            f"{what}; {size['num_splits']} random choices of tables, in the mean {size['trained']:,.0f} samples "
            f"trained on, {size['held_out']:,.0f} of seen tables held out ({size['held_out_tables_per_set']:.1f} "
            f"tables per set), {size['unseen']:,.0f} with unseen tables ({size['unseen_tables_per_set']:.1f} per set)."
        )
    return " ".join(parts)


def _noise_caption(document: Mapping[str, Any]) -> str:
    noise = document["noise"]
    within = f"The spread of single rounds alone would leave {write_percent(noise['within'])}."
    if noise["repeated"] is None:
        return f"No set was measured more than once, so the noise of the samples is not known. {within}"
    text = (
        f"Sets measured more than once: {noise['num_sets']:,}. A model that knew their true times would be off by "
        f"{100 * noise['repeated']:.2f}%"
    )
    if noise["kernel_error"] is not None:
        text += f", the kernel model is off by {100 * noise['kernel_error']:.2f}% on the same sets when held out"
    return f"{text}. {within}"


def _provenance(document: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    options = document["options"]
    schedule = options["training"]["schedule"]
    return (
        ("Device", f"{', '.join(document['device_names'])} ({document['device']})"),
        ("Versions", ", ".join(f"{name} {value}" for name, value in document["versions"].items())),
        ("Samples", f"{document['num_samples']:,}, {document['num_left_out']:,} noisy ones left out"),
        ("Seeds", f"{options['num_seeds']} splits of each kind, {options['ablation_seeds']} trainings per ablation"),
        (
            "Training",
            ", ".join(
                f"{name} {value}" for name, value in {**options["training"], **schedule}.items() if name != "schedule"
            ),
        ),
    )


@command_options()
class CompareOptions:
    """Options of the study `cost-models`."""

    store: Annotated[Path, typer.Option(help="Folder with samples, made by `autoshard collect`.")]
    device: Annotated[str | None, typer.Option(help="Key of the device.", show_default="all of the store")] = None
    updates: Annotated[int | None, typer.Option(min=1, help="Updates of every network.")] = None
    quick: Annotated[bool, typer.Option("--quick", help="One seed, a tenth of the updates.")] = False
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Only sets that AutoShard's features can tell apart: whole tables, one kernel and batch."
        ),
    ] = False
    ablation: Annotated[bool, typer.Option(help="Train without each group of features as well.")] = True
    workers: Annotated[int, typer.Option(min=1, help="Processes that train.")] = 2

    def evaluation(self) -> EvaluationOptions:
        """Amounts of training."""
        training = CostTrainingOptions()
        if self.updates is not None:
            training = replace(training, num_updates=self.updates)
        if self.quick:
            options = EvaluationOptions.quick(training)
        else:
            options = EvaluationOptions(training=training)
            if self.updates is not None:
                options = replace(options, paper_updates=self.updates, ablation_updates=self.updates)
        seeds = options.ablation_seeds if self.ablation else 0
        return replace(options, num_workers=self.workers, ablation_seeds=seeds)


def main(options: CompareOptions, output: OutputOptions) -> None:
    """Compares the learned kernel model with other methods.

    These are AutoShard's network, sums of single tables, linear models, boosted trees, TorchRec's performance model and
    the analytic model.

    Example:
        python -m studies cost-models --store docs/data/samples -o cost-report
    """
    for device in devices_in(options.store) if options.device is None else (options.device,):
        with console.progress(f"Comparing, {device}", 1.0) as advance:
            samples = read_samples(options.store, device)
            if options.plain:
                samples = plain_sets(samples)
            evaluation = evaluate_methods(samples, options.evaluation(), advance)
        result = evaluation_result(evaluation)
        output.write(replace(result, name=f"{result.name}-plain") if options.plain else result)
