"""Each row once, where lookups hit rows again and again.

Shape suffixes: K places of rows, L lookups, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch.nn.functional import pad

from autoshard.runtime.engine.ids.messages import id_dtype
from autoshard.runtime.engine.staging import staged


class Distinct:
    """Finds the distinct rows of several places with one sort; the host waits once, for how many they are.

    Args:
        num_rows: How many rows there are in each place.
        device: Where lookups are.
    """

    def __init__(self, num_rows: Sequence[int], device: torch.device) -> None:
        # Rows of all places are numbered one after the other; int32 is sorted in half the time of int64.
        self._bounds_K = torch.tensor([0, *accumulate(num_rows)], dtype=id_dtype([sum(num_rows)]), device=device)

    def __call__(self, rows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], list[torch.Tensor]]]:
        """The distinct rows of every place, rising.

        Args:
            rows: For each place the rows that are looked up, (L,).

        Returns:
            They, and a function for which of all of them each lookup hits, place by place.
        """
        counts, starts_K, device = [len(one) for one in rows], self._bounds_K[:-1], self._bounds_K.device
        start_L = torch.repeat_interleave(starts_K, staged(counts, device), output_size=sum(counts))
        sorted_L, order_L = (torch.cat(list(rows)).to(start_L.dtype) + start_L).sort(stable=True)
        # As `torch.unique`, which would wait for the number of all, before that of each place is asked for.
        is_new_L = torch.ones_like(sorted_L, dtype=torch.bool)
        is_new_L[1:] = sorted_L[1:] != sorted_L[:-1]
        number_L = is_new_L.cumsum(0)
        until_K = pad(number_L, (1, 0))[torch.searchsorted(sorted_L, self._bounds_K)]
        sizes_K = until_K.diff()
        sizes = sizes_K.tolist()
        num_distinct = sum(sizes)
        # The first lookup of each row; the others of a row all write behind the last.
        place_L = torch.where(is_new_L, number_L - 1, num_distinct)
        rows_U = sorted_L.new_empty(num_distinct + 1).scatter_(0, place_L, sorted_L)[:num_distinct]
        rows_U = rows_U.long() - torch.repeat_interleave(starts_K, sizes_K, output_size=num_distinct)

        def hit() -> list[torch.Tensor]:
            return list(torch.split(torch.empty_like(order_L).scatter_(0, order_L, number_L - 1), counts))

        return list(torch.split(rows_U, sizes)), hit
