"""Draws the pictures of docs/concepts.md and README.md: `python -m scripts.drawings`; a test compares them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final

from scripts.generated import ROOT, write_generated

FOLDER: Final = ROOT / "docs" / "images"

_INK, _GREY, _LINE, _PAPER = "#1f2937", "#6b7280", "#9ca3af", "#ffffff"
#: Fills of boxes and parts: measured, learned, planned, executed.
_BLUE, _GREEN, _ORANGE, _VIOLET, _PALE = "#56b4e9", "#7fc8a9", "#f0b45f", "#b8a1d9", "#eef2f7"


def drawings() -> dict[str, str]:
    """The text of every picture, by its name in `FOLDER`."""
    return {
        "overview.svg": overview(),
        "sharding-types.svg": sharding_types(),
        "step.svg": step(),
        "access.svg": access(),
        "groups.svg": groups(),
    }


def overview() -> str:
    """From measurements to an executed plan."""
    columns = (
        ("measure", "collect", "kernels, dense layers,|collectives of your machine", _BLUE),
        ("learn", "train", "cost models with intervals,|a sharding policy", _GREEN),
        ("plan", "plan, compare", "14 planners, checked by one|validator, priced in ms", _ORANGE),
        ("check", "replay, explain", "measured kernels of every|rank; every alternative", _BLUE),
        ("execute", "run, serve", "training steps of whole|tables; plans over REST", _VIOLET),
    )
    parts = []
    for index, (title, command, text, fill) in enumerate(columns):
        left = 12 + index * 196
        parts.append(_box(left, 44, 172, 112, fill))
        parts.append(_words(left + 86, 68, title, size=16, weight="bold"))
        parts.append(_words(left + 86, 90, command, size=12, family="monospace"))
        parts += [_words(left + 86, 114 + 18 * row, line, size=12) for row, line in enumerate(text.split("|"))]
        if index:
            parts.append(_arrow(left - 23, 100, left - 3, 100))
    files = ("samples/", "registry/", "plan.json", "report.html")
    parts += [
        _words(196 + index * 196, 182, name, size=12, fill=_GREY, family="monospace")
        for index, name in enumerate(files)
    ]
    parts.append(_words(494, 26, "tables.json and topology.json in, plan.json out", size=14, fill=_GREY))
    return _svg(988, 196, parts)


def sharding_types() -> str:
    """One table on four ranks of two nodes, in six ways."""
    panels = (
        ("table_wise", "whole, on one rank", [(1, 0, 1, 0, 1)]),
        ("column_wise", "columns on two ranks", [(0, 0, 0.5, 0, 1), (2, 0.5, 1, 0, 1)]),
        ("row_wise", "rows over all ranks", [(rank, 0, 1, rank / 4, (rank + 1) / 4) for rank in range(4)]),
        ("table_row_wise", "rows over one node", [(2, 0, 1, 0, 0.5), (3, 0, 1, 0.5, 1)]),
        ("data_parallel", "a copy on every rank", [(rank, 0, 1, 0, 1) for rank in range(4)]),
        ("flex", "a copy per node, split in it", [(rank, 0, 1, rank % 2 / 2, rank % 2 / 2 + 0.5) for rank in range(4)]),
    )
    parts = []
    for index, (title, text, pieces) in enumerate(panels):
        left, top = 12 + index % 3 * 308, 12 + index // 3 * 176
        parts.append(_words(left + 146, top + 18, title, size=14, weight="bold", family="monospace"))
        parts.append(_words(left + 146, top + 36, text, size=12, fill=_GREY))
        for node in range(2):
            parts.append(_box(left + node * 148, top + 46, 144, 102, _PALE))
        for rank in range(4):
            x = left + 14 + rank % 2 * 62 + rank // 2 * 148
            parts.append(_outline(x, top + 56, 54, 72))
            parts.append(_words(x + 27, top + 142, f"rank {rank}", size=11, fill=_GREY))
        for rank, first, last, top_row, last_row in pieces:
            x = left + 14 + rank % 2 * 62 + rank // 2 * 148
            width, height = 54 * (last - first), 72 * (last_row - top_row)
            parts.append(_box(x + 54 * first, top + 56 + 72 * top_row, width, height, _BLUE))
    return _svg(936, 360, parts)


def step() -> str:
    """The parts of a training step on two ranks, one after the other."""
    names = ("ids", "lookup", "exchange", "dense layers", "exchange", "update")
    fills = (_PALE, _BLUE, _ORANGE, _GREEN, _ORANGE, _BLUE)
    lengths = ((30, 150, 70, 120, 70, 190), (30, 110, 70, 120, 70, 130))
    starts = (96, 136, 296, 376, 506, 586)
    parts = []
    for rank, widths in enumerate(lengths):
        top = 44 + rank * 56
        parts.append(_words(50, top + 25, f"rank {rank}", size=13))
        for name, start, width, fill in zip(names, starts, widths, fills, strict=True):
            parts.append(_box(start, top, width, 38, fill))
            parts.append(_words(start + width / 2, top + 24, name, size=12))
    groups = (("forward", 96, 366), ("forward and backward", 376, 496), ("backward", 506, 776))
    for name, first, last in groups:
        parts.append(_line(first, 34, last, 34))
        parts.append(_words((first + last) / 2, 24, name, size=12, fill=_GREY))
    parts.append(_line(136, 160, 286, 160))
    parts.append(_words(211, 178, "the slowest rank decides", size=12, fill=_GREY))
    parts.append(_line(586, 160, 776, 160))
    parts.append(_words(681, 178, "optimizer fused into the kernel", size=12, fill=_GREY))
    return _svg(800, 190, parts)


def access() -> str:
    """An access curve, and the tiers that FlexShard cuts from it."""
    left, bottom, width, height = 70, 230, 560, 190
    tiers = ((0.0, 0.12, "data_parallel", _ORANGE), (0.12, 0.4, "flex", _GREEN), (0.4, 1.0, "row_wise", _BLUE))
    parts = []
    for first, last, name, fill in tiers:
        parts.append(_box(left + width * first, bottom - height, width * (last - first), height, fill, opacity=0.35))
        label = left + width * (first + last) / 2
        parts.append(_words(label, bottom + 18, name, size=11, family="monospace"))
    steps = [(index / 60) ** 3 for index in range(61)]
    points = " ".join(f"{left + width * x:.1f},{bottom - height * x**0.3:.1f}" for x in steps)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{_INK}" stroke-width="2"/>')
    parts += [_line(left, bottom, left + width, bottom), _line(left, bottom - height, left, bottom)]
    parts.append(_words(left + width / 2, bottom + 42, "access rank: rows, the hottest first", size=12, fill=_GREY))
    parts += [
        _words(44, bottom - height + 5, "100%", size=11, fill=_GREY),
        _words(50, bottom, "0%", size=11, fill=_GREY),
    ]
    parts.append(_words(left + width / 2, 24, "share of lookups that go to the rows so far", size=12, fill=_GREY))
    return _svg(660, 286, parts)


def groups() -> str:
    """Replica groups: the whole plan twice, once on each node, and what the groups exchange."""
    parts = [_words(400, 24, "each group holds all tables and sees half of the batch", size=12, fill=_GREY)]
    fills = (_BLUE, _GREEN, _ORANGE, _VIOLET)
    for group in range(2):
        left = 12 + group * 408
        parts.append(_box(left, 38, 368, 124, _PALE))
        parts.append(_words(left + 184, 58, f"group {group}", size=14, weight="bold"))
        for place, fill in enumerate(fills):
            x = left + 14 + place * 88
            parts.append(_box(x, 72, 76, 56, fill))
            parts.append(_words(x + 38, 105, f"quarter {place}", size=12))
            parts.append(_words(x + 38, 148, f"rank {4 * group + place}", size=11, fill=_GREY))
        parts.append(_words(left + 184, 184, "ids and embeddings stay within the group", size=12, fill=_GREY))
    parts.append(_line(64, 206, 472, 206))
    parts += [_line(x, 196, x, 206) for x in (64, 472)]
    parts.append(_words(268, 226, "every few steps, copies of a quarter are averaged over groups", size=12, fill=_GREY))
    return _svg(800, 240, parts)


def _box(x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
        f'fill-opacity="{opacity:g}" stroke="{_LINE}"/>'
    )


def _outline(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{_PAPER}" stroke="{_LINE}" '
        'stroke-dasharray="4 3"/>'
    )


def _words(
    x: float, y: float, text: str, *, size: int, fill: str = _INK, weight: str = "normal", family: str = "sans-serif"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" font-family="{family}" fill="{fill}" '
        f'text-anchor="middle">{text}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{_GREY}"/>'


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'{_line(x1, y1, x2, y2)}<polygon points="{x2:g},{y2:g} {x2 - 7:g},{y2 - 4:g} {x2 - 7:g},{y2 + 4:g}" '
        f'fill="{_GREY}"/>'
    )


def _svg(width: int, height: int, parts: Iterable[str]) -> str:
    lines: Sequence[str] = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<rect width="{width}" height="{height}" fill="{_PAPER}"/>',
        *parts,
        "</svg>",
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_generated(drawings(), FOLDER))
