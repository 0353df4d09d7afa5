"""Places of a table's rows in the memory of the processes that hold them.

Shape suffixes: L ids, N rows, K numbers of a row, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from autoshard.core import Split
from autoshard.core.batches import coprime_step
from autoshard.runtime.engine.holdings import HeldRange, Holding
from autoshard.runtime.engine.ids.addresses import RowOrderMap
from autoshard.runtime.weights import CHUNK_ROWS, initial_chunk


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowBlock:
    """Rows of a table, in some of its columns: which processes have them, at which places.

    Attributes:
        columns: First column, and the column after the last.
        rows: The rows by position, and the processes that have each part of them.
        first: By part and process, the place of the part's first row on the process.
        bounds: By name of a tensor, which columns each of its K numbers a row is of: K + 1 bounds, from the first
            column to the last. Weights have one for each column.
        tensors: What this process has, by name: (N,) or (N, K), by place. Empty if it has nothing.
    """

    columns: tuple[int, int]
    rows: HeldRange
    first: Mapping[tuple[int, int], int]
    bounds: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, torch.Tensor]

    def holders(self, part: int) -> tuple[int, ...]:
        """Processes that have a part, each once."""
        return tuple(dict.fromkeys(replica[part] for replica in self.rows.replicas))

    def is_of(self, process: int) -> bool:
        """Whether a process has some of the rows."""
        return any(process in replica for replica in self.rows.replicas)


@dataclass(frozen=True, slots=True, eq=False)
class TableLayout:
    """Where the rows of a table are.

    Attributes:
        blocks: The rows, whose columns add up to all of the table's.
        order: The table's row order, whose access ranks are positions; None for that of the ids.
    """

    blocks: tuple[RowBlock, ...]
    order: RowOrderMap | None = None

    def is_in_blocks(self, block: RowBlock) -> bool:
        """Whether each part of a block has ids that follow each other, at places that do."""
        return self.order is None and block.rows.split is Split.BLOCK

    def positions(self, ids: range) -> torch.Tensor:
        """Positions of rows, int64, on the host."""
        return positions(self.order, ids)


def positions(order: RowOrderMap | None, ids: range) -> torch.Tensor:
    """Positions of the rows of a table in its order, int64, on the host."""
    ids_L = torch.arange(ids.start, ids.stop)
    # An order lies where batches are.
    return ids_L if order is None else order.ranks(ids_L.to(order.device)).cpu()


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
        positions_L = positions(order, range(start, stop))
        rows, places = [], []
        for own, held in mine:
            part_L, place_L = located(held, positions_L)
            is_mine_L = part_L == own.part
            rows.append(is_mine_L.nonzero().squeeze(1))
            places.append(place_L[is_mine_L] + own.offset)
        if any(map(len, rows)):
            yield start, torch.cat(rows), torch.cat(places)


def located(held: HeldRange, positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Part of a range that has each position, -1 where none has, and its place there; both int64 of shape (L,)."""
    inner_L = positions_L - held.start
    part_L, place_L = _dealt(inner_L, held)
    return part_L.masked_fill((inner_L < 0) | (inner_L >= held.num_rows), -1), place_L


def _dealt(inner_L: torch.Tensor, held: HeldRange) -> tuple[torch.Tensor, torch.Tensor]:
    """Part and place of rows counted from the start of their range."""
    if held.split is Split.BLOCK:
        return inner_L // held.block_rows, inner_L % held.block_rows
    if held.split is Split.HASH:
        inner_L = inner_L * coprime_step(held.num_rows) % held.num_rows
    return inner_L % held.num_parts, inner_L // held.num_parts


@torch.no_grad()
def initialise_held(
    weights_ND: torch.Tensor, holding: Holding, process: int, order: RowOrderMap | None, seed: int
) -> None:
    """Writes the initial weights of what a process has of a holding, whatever their dtype and device."""
    first, last = holding.columns
    for start, rows_L, places_L in held_chunks(holding, process, order, range(holding.of.num_embeddings)):
        chunk_ND = initial_chunk(holding.of, start, seed)[rows_L, first:last]
        weights_ND[places_L.to(weights_ND.device)] = chunk_ND.to(weights_ND)
