"""How many rows were looked up how often, counted from parts of a table too large to hold.

Shape suffixes: N rows of one part, V buckets of values, in rising order.
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from autoshard.core.accepted import Range
from autoshard.core.access import AccessProfile, FloatArray, IntArray
from autoshard.core.errors import InvalidTableError

Counts = NDArray[np.integer] | NDArray[np.floating]

#: Most buckets that are held, besides one for each whole number below `_NUM_SMALL`.
MAX_BUCKETS = 1 << 20
#: Whole numbers below it are counted by index, without sorting.
_NUM_SMALL = 1 << 16
#: Larger or broken numbers that wait to be sorted together.
_MAX_PENDING = 1 << 19


class CountHistogram:
    """Rows of one table by their number of lookups; memory depends on neither rows nor lookups.

    - A bucket is all numbers whose doubles agree but for some lowest bits, and holds its rows and the exact
      sum of their lookups (exact to 2**53). While there are at most `max_buckets` different numbers none is dropped,
      so each number has its own bucket and the profile's knots are exact. Whole numbers from 1 to n, each at least
      once, are n (n + 1) / 2 lookups: up to 2**39 lookups (550 billion) never need more than 2**20 buckets.
    - With more, as many bits are dropped as it takes. Rows of a bucket then count as alike, which puts no point of the
      curve further off than `max_error`. Whole numbers below 2**63 keep 14 bits or more, so that it is at most 2**-16
      of the mass of the heaviest bucket; any doubles keep 9 bits.
    - Held are at most `max_buckets` buckets and half a million numbers that wait for one, some 200 MB with the room
      to sort them.
    - The order in which parts arrive does not matter.
    """

    __slots__ = (
        "_dropped_bits",
        "_keys_V",
        "_max_buckets",
        "_num_pending",
        "_num_rows",
        "_pending",
        "_rows_V",
        "_small_rows_V",
        "_sums_V",
    )

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        # One for each power of two that a double can be, at least.
        Range(at_least=1 << 12).check(max_buckets, "max_buckets", InvalidTableError)
        self._max_buckets = max_buckets
        self._small_rows_V: IntArray = np.zeros(_NUM_SMALL, dtype=np.int64)
        self._keys_V: IntArray = np.zeros(0, dtype=np.int64)
        self._rows_V: IntArray = np.zeros(0, dtype=np.int64)
        self._sums_V: FloatArray = np.zeros(0)
        self._dropped_bits = 0
        self._pending: list[FloatArray] = []
        self._num_pending = 0
        self._num_rows = 0

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return self._num_rows

    @property
    def num_lookups(self) -> float:
        """Lookups so far."""
        return float(self._buckets()[2].sum())

    @property
    def max_error(self) -> float:
        """How far the profile's cumulative probabilities may be below those of the single rows."""
        keys_V, rows_V, sums_V = self._buckets()
        if self._dropped_bits == 0:
            return 0.0
        # n numbers of [a, b] in falling order, against n times their mean: n (b - a) / 4 apart at most.
        edges = np.stack([keys_V, keys_V + 1]) << self._dropped_bits
        low_V, high_V = edges.view(np.float64)
        return float((rows_V * (high_V - low_V)).max() / (4 * sums_V.sum()))

    def add(self, counts_N: Counts) -> None:
        """Counts some rows.

        Args:
            counts_N: Lookups of each of the table's next rows: whole or broken numbers, finite, at least 0.

        Raises:
            InvalidTableError: If one is negative or not finite; the text has it and its row, counted from 0 over all
                parts.
        """
        if counts_N.ndim != 1 or counts_N.dtype.kind not in "iuf":
            raise InvalidTableError("needs one number per row", field="counts")
        if counts_N.dtype.kind == "f":
            counts_N = counts_N.astype(np.float64, copy=False)
        if len(counts_N) == 0:
            return
        low, high = counts_N.min(), counts_N.max()
        if not (low >= 0 and np.isfinite(high)):  # not a number fails, too
            row = int(np.argmin((counts_N >= 0) & np.isfinite(counts_N)))
            raise InvalidTableError(
                f"must be finite and at least 0, got {counts_N[row]} in row {self._num_rows + row}", field="counts"
            )
        self._num_rows += len(counts_N)
        self._add_valid(counts_N, float(high))

    def _add_valid(self, counts_N: Counts, high: float) -> None:
        whole_N = _as_whole(counts_N, high)
        if whole_N is None:
            self._wait(counts_N.astype(np.float64))
        elif high < _NUM_SMALL:
            self._small_rows_V += np.bincount(whole_N, minlength=_NUM_SMALL)
        else:
            self._small_rows_V += np.bincount(np.minimum(whole_N, _NUM_SMALL), minlength=_NUM_SMALL)[:_NUM_SMALL]
            self._wait(whole_N[whole_N >= _NUM_SMALL].astype(np.float64))

    def profile(self) -> AccessProfile:
        """The profile of the rows so far.

        Raises:
            InvalidTableError: If there are none, or nothing looked them up.
        """
        _, rows_V, sums_V = self._buckets()
        return AccessProfile.from_groups(rows_V[::-1], sums_V[::-1])

    def _wait(self, values_N: FloatArray) -> None:
        for start in range(0, len(values_N), _MAX_PENDING):
            part_N = values_N[start : start + _MAX_PENDING]
            if self._num_pending + len(part_N) > _MAX_PENDING:
                self._merge()
            self._pending.append(part_N)
            self._num_pending += len(part_N)

    def _merge(self) -> None:
        """Puts the waiting numbers in buckets, and widens these until there are few enough."""
        if not self._num_pending:
            return
        values_V, rows_V = np.unique(np.concatenate(self._pending), return_counts=True)
        self._pending, self._num_pending = [], 0
        # Doubles of at least 0 sort as the whole numbers that have their bits.
        keys_V, rows_V, sums_V = _together(
            np.concatenate([self._keys_V, values_V.view(np.int64) >> self._dropped_bits]),
            np.concatenate([self._rows_V, rows_V]),
            np.concatenate([self._sums_V, rows_V * values_V]),
        )
        more = bisect.bisect_left(range(53), True, key=lambda bits: _num_keys(keys_V, bits) <= self._max_buckets)
        if more:
            keys_V, rows_V, sums_V = _together(keys_V >> more, rows_V, sums_V)
        self._dropped_bits += more
        self._keys_V, self._rows_V, self._sums_V = keys_V, rows_V, sums_V

    def _buckets(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Keys, rows and lookups of all buckets, those of small whole numbers among them."""
        self._merge()
        small_V = np.flatnonzero(self._small_rows_V)
        rows_V, values_V = self._small_rows_V[small_V], small_V.astype(np.float64)
        return _together(
            np.concatenate([self._keys_V, values_V.view(np.int64) >> self._dropped_bits]),
            np.concatenate([self._rows_V, rows_V]),
            np.concatenate([self._sums_V, rows_V * values_V]),
        )


def _as_whole(counts_N: Counts, high: float) -> IntArray | None:
    """The numbers as 64-bit whole ones, if they are whole."""
    if high >= 2.0**63:
        return None
    whole_N = counts_N.astype(np.int64, copy=False)
    return whole_N if counts_N.dtype.kind != "f" or np.array_equal(whole_N, counts_N) else None


def _num_keys(keys_V: IntArray, bits: int) -> int:
    """How many sorted keys differ above their lowest bits."""
    return int(np.count_nonzero(np.diff(keys_V >> bits))) + 1


def _together(keys_V: IntArray, rows_V: IntArray, sums_V: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """One bucket per key, in rising order."""
    if len(keys_V) == 0:
        return keys_V, rows_V, sums_V
    order = np.argsort(keys_V, kind="stable")  # both halves are sorted: one pass
    keys_V = keys_V[order]
    starts = np.flatnonzero(np.diff(keys_V, prepend=-1))
    return keys_V[starts], np.add.reduceat(rows_V[order], starts), np.add.reduceat(sums_V[order], starts)
