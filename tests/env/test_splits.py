"""Where items are cut."""

import pytest

from autoshard.core import RowRange, RowsBy, Shard
from env.splits import HOT_SHARES, SplitBy, split
from tests import builders as make


def test_hot_rows_are_those_with_a_share_of_the_lookups():
    table = make.table("t", 100_000)
    hot, rest = split(Shard.whole(table), SplitBy.HOT_ROWS, 0)
    warm, cold = split(rest, SplitBy.HOT_ROWS, 1)
    assert split(cold, SplitBy.HOT_ROWS, 2) is None
    assert [part.rows.start for part in (hot, warm, cold)] == [0, hot.rows.stop, warm.rows.stop]
    assert cold.rows.stop == table.num_embeddings
    shares = [part.access()[1] for part in (hot, warm, cold)]
    first, second = HOT_SHARES
    assert shares == pytest.approx([first, second - first, 1 - second], abs=0.01)
    assert hot.num_embeddings < warm.num_embeddings < cold.num_embeddings


@pytest.mark.parametrize("num_rows", [2, 3, 4])
def test_every_part_of_a_small_table_has_a_row(num_rows):
    hot, rest = split(Shard.whole(make.table("t", num_rows)), SplitBy.HOT_ROWS, 0)
    parts = [hot, *(split(rest, SplitBy.HOT_ROWS, 1) or [rest])]
    assert sum(part.num_embeddings for part in parts) == num_rows
    assert len(parts) == min(num_rows, 3)


def test_a_row_and_a_range_of_rows_stay_as_they_are():
    assert split(Shard.whole(make.table("t", 1)), SplitBy.HOT_ROWS, 0) is None
    table = make.table("t", 100)
    for by in RowsBy:
        part = Shard(table=table, rows=RowRange(start=10, stop=90, by=by), columns=(0, 16))
        assert split(part, SplitBy.HOT_ROWS, 0) is None


@pytest.mark.parametrize(("dim", "halves"), [(16, [(0, 8), (8, 16)]), (8, [(0, 4), (4, 8)]), (12, None), (4, None)])
def test_halves_are_multiples_of_four_columns(dim, halves):
    found = split(Shard.whole(make.table("t", 10, dim)), SplitBy.COLUMNS, 0)
    assert (found and [part.columns for part in found]) == halves
