"""How an item may be split in two, and in two again."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from autoshard.core import Shard
from autoshard.planners.space.options import COLUMN_STEP, hot_rows, split_rows

#: Shares of a table's lookups that its hottest rows have, those of the first cut, of the first two and so on.
HOT_SHARES = (0.5, 0.9)


class SplitBy(StrEnum):
    """What splits cut."""

    COLUMNS = "columns"
    """Columns are halved, and the halves may be halved."""
    HOT_ROWS = "hot_rows"
    """The hottest rows of a whole table are cut off, and the hottest of the rest, at `HOT_SHARES` of its lookups; of
    tables whose row order is known."""


def most_splits(by: SplitBy) -> int | None:
    """How often parts may be split one within the other; None for as often as they are wide enough."""
    return len(HOT_SHARES) if by is SplitBy.HOT_ROWS else None


def split(shard: Shard, by: SplitBy, depth: int) -> tuple[Shard, Shard] | None:
    """The shard as two, or None if it is too small or of a kind that is not cut so.

    Args:
        shard: A whole table or what became of it, in `depth` splits.
        by: What is cut.
        depth: How often it has been split.

    Source:
        FlexShard Sec. 4.3 for hot rows; differs: the same shares of the lookups of every table.
    """
    return _halves(shard) if by is SplitBy.COLUMNS else _hot_and_rest(shard, depth)


def may_go_on(by: SplitBy, second: bool) -> bool:
    """Whether the first or the second of two parts may be split again."""
    return second or by is SplitBy.COLUMNS


def _halves(shard: Shard) -> tuple[Shard, Shard] | None:
    start, stop = shard.columns
    if (stop - start) % (2 * COLUMN_STEP):
        return None
    middle = (start + stop) // 2
    return replace(shard, columns=(start, middle)), replace(shard, columns=(middle, stop))


def _hot_and_rest(shard: Shard, depth: int) -> tuple[Shard, Shard] | None:
    rows = shard.rows
    is_range = depth == 0 and rows.num_rows < shard.table.num_embeddings
    if depth >= len(HOT_SHARES) or rows.num_rows < 2 or is_range or shard.table.row_order is None:
        return None
    # Both have a row at least.
    middle = min(max(hot_rows(shard.table, HOT_SHARES[depth]), rows.start + 1), rows.stop - 1)
    return split_rows(shard, middle)
