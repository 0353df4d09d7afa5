"""Access curves of tables, with the access ranks at which a plan cuts them."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from autoshard.core import EmbeddingTable, RowsBy, ShardingPlan
from autoshard.core.quoting import printable, shortened
from autoshard.report.figures import BLUE, GREEN, GREY, INK, ORANGE, PINK, SKY, YELLOW, in_house_style

_COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, GREY, INK)
#: Tables that are drawn.
MOST_CURVES = len(_COLOURS)
#: Knots that are drawn of each curve.
_MOST_POINTS = 80
_NAME_ROOM = 24


def curved_tables(plan: ShardingPlan) -> list[EmbeddingTable]:
    """Tables with an access curve to show, those with most lookups first.

    These are the tables that are cut by access; without a cut, those of which some rows are hotter than others.
    """
    cuts = _cuts(plan)
    tables = [table for table in plan.tables.tables if table.name in cuts] or [
        table for table in plan.tables.tables if _is_skewed(table)
    ]
    return sorted(tables, key=lambda table: -table.pooling_factor)


def access_figure(plan: ShardingPlan) -> go.Figure | None:
    """The share of lookups that go to the hottest rows, of the first `MOST_CURVES` of `curved_tables`.

    A mark on a curve is the end of a tier.

    Returns:
        The figure; None if no row of any table is hotter than another.
    """
    cuts, tables = _cuts(plan), curved_tables(plan)
    if not tables:
        return None
    figure = in_house_style(go.Figure())
    for table, colour in zip(tables, _COLOURS, strict=False):
        _add_curve(figure, table, colour)
        if table.name in cuts:
            _add_cuts(figure, table, cuts[table.name], colour)
    figure.update_xaxes(title_text="hottest rows, share of the table", type="log", dtick=1, exponentformat="power")
    figure.update_yaxes(title_text="share of lookups", range=[0, 1.04], tickformat=".0%")
    return figure


def _cuts(plan: ShardingPlan) -> dict[str, list[tuple[int, str]]]:
    """Of tables that are cut by access rank: the end of each tier but the last, and its kind."""
    found: dict[str, list[tuple[int, str]]] = {}
    for placed in plan.shards:
        shard = placed.shard
        if shard.rows.by is RowsBy.ACCESS_RANK and shard.rows.stop < shard.table.num_embeddings:
            found.setdefault(shard.table.name, []).append((shard.rows.stop, placed.tier.value))
    return {name: sorted(set(ends)) for name, ends in found.items()}


def _is_skewed(table: EmbeddingTable) -> bool:
    return table.access.num_rows > 1 and float(table.access.coverage(table.num_embeddings / 2)) > 0.5 + 1e-6


def _add_curve(figure: go.Figure, table: EmbeddingTable, colour: str) -> None:
    ranks_K = table.access.ranks_K[table.access.ranks_K >= 1]
    picked = np.unique(np.linspace(0, len(ranks_K) - 1, min(len(ranks_K), _MOST_POINTS)).round().astype(int))
    shown = ranks_K[picked]
    figure.add_scatter(
        name=_shown(table),
        legendgroup=colour,
        x=[float(f"{value:.4g}") for value in shown / table.num_embeddings],
        y=[float(f"{value:.4g}") for value in table.access.coverage(shown)],
        mode="lines",
        line={"color": colour, "width": 2},
        hovertemplate="%{y:.1%} of lookups go to %{x:.3~p} of the rows<extra>%{fullData.name}</extra>",
    )


def _add_cuts(figure: go.Figure, table: EmbeddingTable, ends: Sequence[tuple[int, str]], colour: str) -> None:
    figure.add_scatter(
        name=f"{_shown(table)}: ends of tiers",
        legendgroup=colour,
        showlegend=False,
        x=[stop / table.num_embeddings for stop, _ in ends],
        y=[float(table.access.coverage(stop)) for stop, _ in ends],
        text=[f"{stop:,} rows up to here: {kind}" for stop, kind in ends],
        mode="markers",
        marker={"symbol": "diamond", "size": 10, "color": colour, "line": {"color": "white", "width": 1}},
        hovertemplate="%{text}, %{y:.1%} of lookups<extra>%{fullData.name}</extra>",
    )


def _shown(table: EmbeddingTable) -> str:
    return html.escape(shortened(printable(table.name), _NAME_ROOM))
