"""Plans, comparisons and sweeps as notebooks show them: fragments of HTML without scripts, on light and dark paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from autoshard.core import CostBreakdown, ShardingPlan
from autoshard.report.caveats import comparison_warnings, plan_warnings
from autoshard.report.comparison import failure_lines, planners_table
from autoshard.report.figures import BLUE, ORANGE, PINK
from autoshard.report.pages import part_table, plan_facts, task_line
from autoshard.report.rendering import render_template
from autoshard.report.simulation import point_tables
from autoshard.results.comparison import ComparedPlan
from autoshard.results.sweep_record import SweepRecord
from autoshard.table import Table

#: Ranks that the bars show; more would be thinner than a pixel.
_MOST_RANKS = 512
_WIDTH, _HEIGHT = 640, 120
_PARTS = (
    ("kernel", BLUE, ("forward_kernel_ms", "backward_kernel_ms")),
    ("exchange", ORANGE, ("input_ms", "forward_exchange_ms", "backward_exchange_ms")),
    ("synchronisation", PINK, ("sync_ms",)),
)


def plan_html(plan: ShardingPlan) -> str:
    """A plan: warnings, figures, bars of its ranks, parts of the step."""
    predicted = plan.predicted
    if predicted is None:
        return _fragment(task_line(plan), (), note="No prediction: `autoshard evaluate` prices the plan.")
    parts = replace(part_table(predicted), caption="Parts of the step.")
    facts = plan_facts(plan, predicted, None)
    bars = _rank_bars(predicted)
    num_ranks = len(predicted.ranks)
    of_ranks = "each rank" if num_ranks <= _MOST_RANKS else f"each of the first {_MOST_RANKS:,} of {num_ranks:,} ranks"
    return _fragment(task_line(plan), plan_warnings(plan), facts=facts, bars=bars, of_ranks=of_ranks, tables=(parts,))


def comparison_html(rows: Sequence[ComparedPlan]) -> str:
    """Planners side by side, as `autoshard compare` prints them."""
    planned = next((row.plan for row in rows if row.plan is not None), None)
    table = replace(planners_table(rows), caption="Planners.")
    warnings = (*failure_lines(rows), *comparison_warnings(rows))
    return _fragment(task_line(planned) if planned else "Planners", warnings, tables=(table,))


def sweep_html(record: SweepRecord) -> str:
    """All points of a sweep, as `autoshard simulate` prints them."""
    return _fragment("Simulated steps", (), tables=point_tables(record.points))


def _fragment(
    title: str,
    warnings: Sequence[str],
    *,
    note: str = "",
    facts: Sequence[dict[str, str]] = (),
    bars: Markup | None = None,
    of_ranks: str = "",
    tables: Sequence[Table] = (),
) -> str:
    return render_template(
        "notebook.html.j2",
        title=title,
        warnings=warnings,
        note=note,
        facts=facts,
        bars=bars,
        of_ranks=of_ranks,
        tables=tables,
    )


def _rank_bars(predicted: CostBreakdown) -> Markup:
    """Stacked bars of the ranks' times, as SVG."""
    ranks = predicted.ranks[:_MOST_RANKS]
    times = [[sum(getattr(rank, name) for name in names) for _, _, names in _PARTS] for rank in ranks]
    scale = _HEIGHT / max(*(sum(parts) for parts in times), 1e-12)
    step = _WIDTH / len(ranks)
    bars = []
    for index, parts in enumerate(times):
        low = float(_HEIGHT)
        for (_, colour, _), value in zip(_PARTS, parts, strict=True):
            low -= value * scale
            place = f'x="{index * step:.1f}" y="{low:.1f}" width="{0.8 * step:.1f}" height="{value * scale:.1f}"'
            bars.append(f'<rect {place} fill="{colour}"/>')
    label = f"Time of {len(ranks):,} ranks, kernel below, exchange and synchronisation above."
    style = f"width: 100%; max-width: {_WIDTH}px"
    return Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}" style="{}">{}</svg>').format(
        label, _WIDTH, _HEIGHT, style, Markup("".join(bars))
    )
