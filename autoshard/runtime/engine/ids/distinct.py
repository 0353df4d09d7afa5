"""Each row once, where lookups hit rows again and again.

Shape suffixes: K places of rows, L lookups, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from autoshard.runtime.engine.staging import staged


class Distinct:
    """Finds the distinct rows of several places with one sort; the host waits once, for how many they are.

    Args:
        num_rows: How many rows there are in each place.
        device: Where lookups are.
    """

    def __init__(self, num_rows: Sequence[int], device: torch.device) -> None:
        # Rows of all places are numbered one after the other.
        self._bounds_K = torch.tensor([0, *accumulate(num_rows)], device=device)

    def __call__(self, rows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The distinct rows of every place, rising; and which of all these each lookup hits, place by place.

        Args:
            rows: For each place the rows that are looked up, (L,).
        """
        counts, starts_K = [len(one) for one in rows], self._bounds_K[:-1]
        counts_K = staged(counts, starts_K.device)
        start_L = torch.repeat_interleave(starts_K, counts_K, output_size=sum(counts))
        sorted_L, order_L = (torch.cat(list(rows)) + start_L).sort()
        # As `torch.unique`, which would wait for the number of all, before that of each place is asked for.
        number_L = torch.ones_like(sorted_L)
        number_L[1:] = sorted_L[1:] != sorted_L[:-1]
        number_L = number_L.cumsum(0)
        until_K = torch.cat([number_L.new_zeros(1), number_L])[torch.searchsorted(sorted_L, self._bounds_K)]
        sizes_K = until_K.diff()
        sizes = sizes_K.tolist()
        num_distinct = sum(sizes)
        first_U = torch.searchsorted(number_L, torch.arange(1, num_distinct + 1, device=number_L.device))
        rows_U = sorted_L[first_U] - torch.repeat_interleave(starts_K, sizes_K, output_size=num_distinct)
        hit_L = torch.empty_like(order_L)
        hit_L[order_L] = number_L - 1
        return list(torch.split(rows_U, sizes)), list(torch.split(hit_L, counts))
