"""An evaluation as a page, images and a file of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from autoshard.report.images import FigureReport, Section
from autoshard.report.wording import write_ms, write_percent
from autoshard.table import Table
from studies.cost_models.ablation import FULL
from studies.cost_models.evaluation import KERNEL, METHODS, Evaluation
from studies.cost_models.evaluation_charts import (
    ablation_figure,
    coverage_figure,
    groups_figure,
    scatter_figure,
    tables_figure,
)
from studies.cost_models.evaluation_numbers import PARTS, to_document
from studies.cost_models.evidence import SplitKind
from studies.frame import StudyResult

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
