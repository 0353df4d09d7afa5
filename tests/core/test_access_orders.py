"""Row orders: the ranks of rows, and what two orders share."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core.access.orders import Reordering, ranks_in
from autoshard.runtime.engine.ids.addresses import RowOrderMap

NUM_ROWS = 40
ALL = np.arange(NUM_ROWS)


@st.composite
def orders(draw):
    """Some of the rows, in any order."""
    return np.array(draw(st.permutations(range(NUM_ROWS)))[: draw(st.integers(0, NUM_ROWS))], dtype=np.int64)


@given(orders())
def test_ranks_are_those_of_the_runtime(order):
    of_runtime = RowOrderMap(torch.from_numpy(order), NUM_ROWS, torch.device("cpu"))
    assert ranks_in(order, ALL).tolist() == of_runtime.ranks(torch.from_numpy(ALL)).tolist()


@given(orders(), orders(), st.integers(0, 30), st.integers(1, 10), st.integers(0, 30), st.integers(1, 10))
def test_shared_rows_are_those_of_both_ranges(first, second, start, length, start_after, length_after):
    before, after = (start, start + length), (start_after, start_after + length_after)
    strewn, kept = Reordering.of(first, second, NUM_ROWS).shared_rows(before, after)
    ranks, ranks_after = ranks_in(first, ALL), ranks_in(second, ALL)
    is_shared = (ranks >= before[0]) & (ranks < before[1]) & (ranks_after >= after[0]) & (ranks_after < after[1])
    first_rest = max(len(first), len(second))
    moved = np.isin(ALL, np.union1d(first, second)) | (first_rest > ALL)
    assert strewn == (is_shared & moved).sum()
    # The others keep their rank; which numbers listed rows leave among these is not kept.
    assert (ranks == ranks_after)[~moved].all()
    assert abs(kept - (is_shared & ~moved).sum()) <= (moved & (first_rest <= ALL)).sum()


def test_rows_whose_number_a_listed_row_has_as_its_rank_are_elsewhere():
    # 4 to 7 are the hottest rows, then 0 to 3: the halves are swapped.
    found = Reordering.of(np.arange(4, 8), np.arange(0), 8)
    assert [found.shared_rows((4, 8), after) for after in ((0, 4), (4, 8))] == [(4, 0), (0, 0)]
