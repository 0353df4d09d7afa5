"""FlexShard's Pareto curves: memory against communication as ever more rows of a table are replicated."""

from __future__ import annotations

import html

import numpy as np
import plotly.graph_objects as go

from autoshard.core import EmbeddingTable, ShardingPlan, Tier
from autoshard.core.quoting import printable, shortened
from autoshard.evaluation.communication import AlphaBetaComm
from autoshard.planners.flexshard.equations import FlexMachine, ParetoFrontier, ParetoPoint, RowSet, pareto_frontier
from autoshard.report.figures import BLUE, GREEN, INK, ORANGE, PINK, in_house_style

_COLOURS = (BLUE, ORANGE, GREEN, PINK)
#: Tables that are drawn.
MOST_FRONTIERS = len(_COLOURS)
_NAME_ROOM = 24
_MIB = 1 << 20


def pareto_figure(plan: ShardingPlan) -> go.Figure | None:
    """Costs of replicating the hottest rows over splitting all rows, per rank, of up to `MOST_FRONTIERS` tables.

    Those with replicated rows come first, then the largest.

    Priced by the scaling equations with the links of the topology. A diamond is the number of rows that the plan
    replicates, a circle the number at which memory is that of splitting (the paper's point B).

    Returns:
        The figure; None for plans of other planners than flexshard.

    Source:
        FlexShard, Sec. 4.3 and Fig. 5.
    """
    if plan.provenance is None or plan.provenance.planner != "flexshard" or plan.topology.world_size < 2:
        return None
    machine = FlexMachine.of(plan.topology, AlphaBetaComm(), plan.tables.batch_size)
    replicated = _replicated_rows(plan)
    tables = sorted(plan.tables.tables, key=lambda table: (table.name not in replicated, -table.storage_bytes))
    figure = in_house_style(go.Figure())
    for table, colour in zip(tables, _COLOURS, strict=False):
        frontier = pareto_frontier(table.access, RowSet.of(table, plan.payload), machine)
        _add_table(figure, table, frontier, replicated.get(table.name, 0), colour)
    figure.add_hline(y=0.0, line={"color": INK, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text="communication over splitting all rows, ms per step", zeroline=False)
    figure.update_yaxes(title_text="memory over that, MiB per rank", zeroline=False)
    return figure


def _replicated_rows(plan: ShardingPlan) -> dict[str, int]:
    """Rows of each table that all ranks hold."""
    found: dict[str, int] = {}
    for placed in plan.shards:
        if placed.tier is Tier.DATA_PARALLEL:
            found[placed.shard.table.name] = max(found.get(placed.shard.table.name, 0), placed.shard.rows.stop)
    return found


def _add_table(
    figure: go.Figure, table: EmbeddingTable, frontier: ParetoFrontier, num_replicated: int, colour: str
) -> None:
    """The curve up to where more rows cost more of both, with its marks."""
    last = max(frontier.most_communication_saved.num_rows, frontier.memory_neutral.num_rows, num_replicated)
    shown = [point for point in frontier.curve if point.num_rows <= last]
    name = html.escape(shortened(printable(table.name), _NAME_ROOM))
    hover = "%{text} rows replicated: %{x:.3g} ms, %{y:.3g} MiB<extra>%{fullData.name}</extra>"
    rows = [point.num_rows for point in frontier.curve]
    chosen = {
        field: float(np.interp(num_replicated, rows, [getattr(point, field) for point in frontier.curve]))
        for field in ("coverage", "memory_bytes", "communication_s")
    }
    planned = ParetoPoint(num_rows=num_replicated, **chosen)
    for label, points, mode, symbol in (
        (name, shown, "lines", None),
        (f"{name}: memory as if split", [frontier.memory_neutral], "markers", "circle-open"),
        (f"{name}: as planned", [planned], "markers", "diamond"),
    ):
        figure.add_scatter(
            name=label,
            x=[point.communication_s * 1e3 for point in points],
            y=[point.memory_bytes / _MIB for point in points],
            text=[f"{point.num_rows:,.0f}" for point in points],
            mode=mode,
            legendgroup=colour,
            showlegend=symbol is None,
            line={"color": colour, "width": 2},
            marker={"symbol": symbol or "circle", "size": 11, "color": colour},
            hovertemplate=hover,
        )
