"""The map of a plan: its tables by its ranks, as one image.

Shape suffixes: T tables, R ranks.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from autoshard.core import PlacedShard, ShardingPlan, Tier
from autoshard.core.quoting import printable, shortened, write_bytes
from autoshard.report.figures import BLUE, in_house_style

#: Levels of colour; level 0 is a rank that holds nothing of a table.
_LEVELS = 255
_CLEAR = "rgba(0,0,0,0)"
#: Of the fewest bytes; seen on light and on dark paper.
_PALE = "#a6d5f2"
#: Up to so many tables are named on the axis; of more, the kinds of sharding are.
_MOST_NAMES = 40
#: Kinds of sharding whose middles are closer than this share of the axis would overlap.
_LEAST_GAP = 1 / 30
_NAME_ROOM = 20
#: Characters of a line of a longer name, where the pointer is.
_LINE = 60
#: Above the map, where narrow screens have room.
_SCALE = {
    "orientation": "h",
    "thickness": 12,
    "len": 0.9,
    "x": 0.5,
    "y": 1,
    "yanchor": "bottom",
    "ypad": 6,
    "ticklabeloverflow": "allow",
}
_HEIGHTS = (320, 1100)
#: Height of a row with a name, and of one among too many to be named.
_NAMED_PX, _ROW_PX = 18, 12


def placement_figure(plan: ShardingPlan) -> go.Figure:
    """Which rank holds how many bytes of each table: darker is more, on a logarithmic scale.

    Tables are ordered by how they are sharded and then by rank, so that whole tables form a staircase and replicated
    ones a band; `meta` of the only trace has their names. Ranks are those of one replica group.
    """
    rows = _rows(plan)
    levels_TR, ticks = _levels(np.array([row.bytes_R for row in rows]))
    figure = go.Figure()
    figure.add_heatmap(
        z=levels_TR,
        y=[row.label for row in rows],
        zmin=0,
        zmax=_LEVELS,
        colorscale=[[0, _CLEAR], [0.5 / _LEVELS, _CLEAR], [0.5 / _LEVELS, _PALE], [1, BLUE]],
        colorbar={**_SCALE, "tickvals": list(ticks), "ticktext": list(ticks.values())},
        hovertemplate="%{y}<br>rank %{x}<extra></extra>",
        hoverongaps=False,
        meta=[printable(row.name) for row in rows],
    )
    low, high = _HEIGHTS
    row_px = _NAMED_PX if len(rows) <= _MOST_NAMES else _ROW_PX
    in_house_style(figure, height=min(high, max(low, row_px * len(rows) + 120)))
    figure.update_layout(margin_t=64, showlegend=False)
    positions, texts = _names(rows)
    figure.update_xaxes(
        title_text="rank",
        title_standoff=8,
        tick0=0,
        dtick=_rank_step(plan.group_size),
        tickformat="d",
        tickangle=0,
        showgrid=False,
    )
    figure.update_yaxes(
        type="category",
        autorange="reversed",
        tickmode="array",
        tickvals=positions,
        ticktext=texts,
        showgrid=False,
        tickfont_size=11,
    )
    return figure


def _rank_step(num_ranks: int) -> int:
    """Ranks from one tick to the next, a power of two, with at most 16 ticks."""
    return 1 << max(0, (num_ranks - 1) // 16).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """A table's line: how it is sharded, and the bytes that each rank holds."""

    name: str
    tier: Tier
    bytes_R: NDArray[np.float64]

    @property
    def first_rank(self) -> int:
        return int(self.bytes_R.argmax())

    @property
    def label(self) -> str:
        held = self.bytes_R[self.bytes_R > 0]
        size = write_bytes(held.max()) if len(held) else "nothing"
        parts = (self.name[start : start + _LINE] for start in range(0, len(self.name), _LINE))
        name = "<br>".join(html.escape(printable(part), quote=False) for part in parts)
        return f"{name}: {self.tier.value}, {size} on {len(held):,} rank{'s' * (len(held) != 1)}"


def _rows(plan: ShardingPlan) -> list[_Row]:
    held: dict[str, list[PlacedShard]] = {}
    for placed in plan.shards:
        held.setdefault(placed.shard.table.name, []).append(placed)
    rows = []
    for name, shards in held.items():
        bytes_R = np.zeros(plan.group_size)
        for placed in shards:
            for replica in placed.replicas:
                bytes_R[list(replica)] += placed.shard.storage_bytes / len(replica)
        tier = max(shards, key=lambda one: one.shard.storage_bytes).tier
        rows.append(_Row(name=name, tier=tier, bytes_R=bytes_R))
    order = {tier: index for index, tier in enumerate(Tier)}
    return sorted(rows, key=lambda row: (order[row.tier], row.first_rank, -row.bytes_R.max()))


def _levels(bytes_TR: NDArray[np.float64]) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Levels from 1 to 255 on a logarithmic scale, 0 where nothing is held; and the texts of some."""
    is_held_TR = bytes_TR > 0
    held = bytes_TR[is_held_TR]
    low, high = (float(np.log(end)) for end in (held.min(), held.max()))
    if high - low < 1e-9:
        return np.where(is_held_TR, _LEVELS, 0).astype(np.uint8), {_LEVELS: write_bytes(np.exp(high))}
    logs_TR = np.log(bytes_TR, where=is_held_TR, out=np.full(bytes_TR.shape, low))
    levels_TR = 1 + np.round((logs_TR - low) / (high - low) * (_LEVELS - 1))
    ticks = {round(1 + share * (_LEVELS - 1)): write_bytes(np.exp(low + share * (high - low))) for share in (0, 0.5, 1)}
    return np.where(is_held_TR, levels_TR, 0).astype(np.uint8), ticks


def _names(rows: Sequence[_Row]) -> tuple[list[int], list[str]]:
    """Positions and texts on the axis of tables."""
    if len(rows) <= _MOST_NAMES:
        return list(range(len(rows))), [_shown(row.name, _NAME_ROOM) for row in rows]
    positions: list[int] = []
    texts = []
    start = 0
    for tier, group in groupby(rows, key=lambda row: row.tier):
        count = len(list(group))
        middle = start + count // 2
        start += count
        if not positions or middle - positions[-1] >= _LEAST_GAP * len(rows):
            positions.append(middle)
            texts.append(f"{tier.value}<br>{count:,} tables")
    return positions, texts


def _shown(name: str, room: int) -> str:
    """A name as plotly shows it: short, and without markup."""
    return html.escape(shortened(printable(name), room), quote=False)
