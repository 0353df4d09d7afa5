"""Each row once, where lookups hit rows again and again.

Shape suffixes: K places of rows, J jagged rows of lookups, L lookups, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.functional import pad

from autoshard.runtime.engine.ids.messages import id_dtype


@dataclass(frozen=True, slots=True, eq=False)
class DistinctRows:
    """The distinct rows of several places, and who looks them up.

    Attributes:
        rows_U: Rows of every place, rising, place by place; what lies behind the last one is no row.
        ends_K: Where the rows of each place end, with 0 before; int64 of shape (K + 1,).
    """

    rows_U: torch.Tensor
    ends_K: torch.Tensor
    _order_L: torch.Tensor
    _number_L: torch.Tensor

    def hit(self) -> torch.Tensor:
        """Which of all distinct rows each lookup hits, shape (L,)."""
        return torch.empty_like(self._order_L).scatter_(0, self._order_L, self._number_L - 1)


class Distinct:
    """Finds the distinct rows of several places with one sort, for which the host does not wait.

    Args:
        num_rows: How many rows there are in each place.
        jagged: For each jagged row of lookups its place, and the row of the place that its row 0 is; place by place.
        device: Where lookups are.
    """

    def __init__(self, num_rows: Sequence[int], jagged: Sequence[tuple[int, int]], device: torch.device) -> None:
        # Rows of all places are numbered one after the other; int32 is sorted in half the time of int64.
        bounds = [0, *accumulate(num_rows)]
        self._bounds_K = torch.tensor(bounds, dtype=id_dtype([bounds[-1] + 1]), device=device)
        self._shift_J = torch.tensor([*(bounds[place] + base for place, base in jagged), 0], device=device)
        self._is_row_J = torch.tensor([*(True for _ in jagged), False], device=device)
        self._none = self._bounds_K[-1:].clone()

    def __call__(self, ids_L: torch.Tensor, counts_J: torch.Tensor) -> DistinctRows:
        """The distinct rows of every place.

        Args:
            ids_L: Rows that are looked up, jagged row by jagged row; there may be anything behind the last one.
            counts_J: Lookups of each jagged row, int64.
        """
        L = len(ids_L)
        counts_J = pad(counts_J, (0, 1))
        counts_J[-1] = L - counts_J.sum()
        number_L = ids_L + torch.repeat_interleave(self._shift_J, counts_J, output_size=L)
        is_row_L = torch.repeat_interleave(self._is_row_J, counts_J, output_size=L)
        sorted_L, order_L = torch.where(is_row_L, number_L.to(self._none.dtype), self._none).sort(stable=True)
        # As `torch.unique`, which would wait for how many they are. What is no row comes last, beyond all places.
        is_new_L = torch.ones_like(sorted_L, dtype=torch.bool)
        is_new_L[1:] = sorted_L[1:] != sorted_L[:-1]
        number_L = is_new_L.cumsum(0)
        ends_K = pad(number_L, (1, 0)).index_select(0, torch.searchsorted(sorted_L, self._bounds_K))
        # The first lookup of each row; the others of a row all write behind the last.
        place_L = torch.where(is_new_L, number_L - 1, L)
        rows_U = sorted_L.new_empty(L + 1).scatter_(0, place_L, sorted_L)[:L]
        sizes_K = pad(ends_K.diff(), (0, 1))
        sizes_K[-1] = L - ends_K[-1]
        rows_U = rows_U.long() - torch.repeat_interleave(self._bounds_K, sizes_K, output_size=L)
        return DistinctRows(rows_U, ends_K, order_L, number_L)
