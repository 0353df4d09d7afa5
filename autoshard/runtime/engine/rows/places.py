"""Places of a table's rows in the memory of the process that holds them, for initial weights and for reading states.

Shape suffixes: L ids, N rows, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autoshard.core import Split
from autoshard.core.batches import coprime_step
from autoshard.runtime.engine.holdings import Holding
from autoshard.runtime.engine.ids.addresses import RowOrderMap
from autoshard.runtime.weights import CHUNK_ROWS, initial_chunk


def held_chunks(
    holding: Holding, process: int, order: RowOrderMap | None, ids: range
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Rows of a table that a process has of a holding, a chunk of row ids at a time.

    Args:
        holding: The holding.
        process: The process.
        order: Row order of the table; None for that of the ids.
        ids: Row ids to go through.

    Yields:
        First id of the chunk; which of its rows are held, counted from there; and their places, both of shape (L,).
    """
    parts = [(own, holding.ranges[own.range]) for own in holding.parts_of(process)]
    for start in range(ids.start, ids.stop, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, ids.stop)
        mine = parts
        if order is None:
            mine = [(own, held) for own, held in parts if held.may_hold(own.part, start, stop)]
        if not mine:
            continue
        positions_L = torch.arange(start, stop)
        if order is not None:  # which lies where batches are
            positions_L = order.ranks(positions_L.to(order.device)).cpu()
        rows, places = [], []
        for own, held in mine:
            inner_L = positions_L - held.start
            part_L, place_L = dealt(inner_L, held.num_rows, held.num_parts, held.split)
            is_mine_L = (inner_L >= 0) & (inner_L < held.num_rows) & (part_L == own.part)
            rows.append(is_mine_L.nonzero().squeeze(1))
            places.append(place_L[is_mine_L] + own.offset)
        if any(map(len, rows)):
            yield start, torch.cat(rows), torch.cat(places)


def dealt(inner_L: torch.Tensor, num_rows: int, num_parts: int, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Part and place of rows counted from the start of their range."""
    if split is Split.BLOCK:
        block = -(-num_rows // num_parts)
        return inner_L // block, inner_L % block
    if split is Split.HASH:
        inner_L = inner_L * coprime_step(num_rows) % num_rows
    return inner_L % num_parts, inner_L // num_parts


@torch.no_grad()
def initialise_held(
    weights_ND: torch.Tensor, holding: Holding, process: int, order: RowOrderMap | None, seed: int
) -> None:
    """Writes the initial weights of what a process has of a holding, whatever their dtype and device."""
    first, last = holding.columns
    for start, rows_L, places_L in held_chunks(holding, process, order, range(holding.of.num_embeddings)):
        chunk_ND = initial_chunk(holding.of, start, seed)[rows_L, first:last]
        weights_ND[places_L.to(weights_ND.device)] = chunk_ND.to(weights_ND)
