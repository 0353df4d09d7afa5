"""Pieces in their order: runs that are one, and batches up to a size; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

_KeyT = TypeVar("_KeyT")
_PieceT = TypeVar("_PieceT")


def merged(runs: Iterable[tuple[_KeyT, int, int]]) -> list[tuple[_KeyT, int, int]]:
    """Runs in their order, neighbours as one where they have the same key and the second starts as the first stops.

    Args:
        runs: (key, start, stop) of each.
    """
    found: list[tuple[_KeyT, int, int]] = []
    for key, start, stop in runs:
        if found and found[-1][0] == key and found[-1][2] == start:
            found[-1] = (key, found[-1][1], stop)
        else:
            found.append((key, start, stop))
    return found


def within(pieces: Iterable[tuple[_PieceT, int]], num_bytes: int) -> Iterator[list[_PieceT]]:
    """Pieces in their order, as many together as have so many bytes, or one that has more.

    Args:
        pieces: The pieces, each with its bytes.
        num_bytes: Most of those together.
    """
    batch: list[_PieceT] = []
    room = num_bytes
    for piece, size in pieces:
        if batch and size > room:
            yield batch
            batch, room = [], num_bytes
        batch.append(piece)
        room -= size
    if batch:
        yield batch
