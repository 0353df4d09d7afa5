"""AutoShard's reuse bins: how often a batch hits the rows that it hits, expected from the rate of each row.

Shape suffixes: N groups of intervals, I intervals of rows with one rate, E edges of bins, V values.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from autoshard.core.access.knots import FloatArray, IntArray

NUM_REUSE_BINS = 17
#: Upper edges of AutoShard's reuse bins (0, 1], (1, 2], (2, 4] ... (16384, 32768], (32768, inf).
REUSE_BIN_EDGES: tuple[float, ...] = (*(float(2**i) for i in range(NUM_REUSE_BINS - 1)), math.inf)
#: Lookups per row that stand for a bin: 1, 2, 3, 6, 12 ... 49152.
REUSE_BIN_MIDDLES: tuple[float, ...] = (1.0, 2.0, *(1.5 * 2.0**i for i in range(1, NUM_REUSE_BINS - 1)))

_EXACT_POISSON_MAX = 64
#: Deviations beyond which a normal distribution function is 0 or 1 to the last bit of a share.
_FARTHEST_DEVIATION = 9.0
#: Intervals at once: what is made of them on the way stays within a core's cache.
_INTERVALS_AT_ONCE = 4096


def hit_rows(rows_I: FloatArray, rates_I: FloatArray) -> FloatArray:
    """Expected rows of each interval that are looked up at all, shape (I,); counts are taken as Poisson."""
    return np.asarray(rows_I * -np.expm1(-rates_I))


def expected_bins(
    rows_I: FloatArray, rates_I: FloatArray, starts_N: IntArray, of: Literal["rows", "lookups"]
) -> FloatArray:
    """Expected shares of the 17 reuse bins, shape (N, 17); each row sums to 1, or to 0 when nothing is looked up.

    Args:
        rows_I: Rows of each interval.
        rates_I: Expected lookups of each of its rows; counts are taken as Poisson.
        starts_N: First interval of each group, from 0 on, rising.
        of: Shares of the distinct rows hit, or of the lookups.
    """
    bins_NE = np.empty((len(starts_N), NUM_REUSE_BINS))
    ends_N = np.append(starts_N[1:], len(rows_I))
    first = 0
    while first < len(starts_N):
        last = max(first + 1, int(np.searchsorted(ends_N, starts_N[first] + _INTERVALS_AT_ONCE, side="right")))
        chunk = slice(starts_N[first], ends_N[last - 1])
        amounts_EI = _amounts(rows_I[chunk], rates_I[chunk], of)
        bins_NE[first:last] = np.add.reduceat(amounts_EI, starts_N[first:last] - starts_N[first], axis=1).T
        first = last
    np.maximum(bins_NE, 0.0, out=bins_NE)
    total_N1 = bins_NE.sum(axis=1, keepdims=True)
    total_N1[total_N1 == 0] = 1.0
    bins_NE /= total_N1
    return bins_NE


def _amounts(rows_I: FloatArray, rates_I: FloatArray, of: Literal["rows", "lookups"]) -> FloatArray:
    """Expected rows or lookups of each interval in each bin, shape (E, I)."""
    edges_E = np.array(REUSE_BIN_EDGES[:-1])
    below_EI = np.empty((NUM_REUSE_BINS + 1, len(rates_I)))
    if of == "rows":
        np.exp(-rates_I, out=below_EI[0])
        below_EI[1:-1] = poisson_cdf(rates_I, edges_E)
    else:  # sum of k P(k) up to an edge is rate * P(X <= edge - 1)
        below_EI[0] = 0.0
        below_EI[1:-1] = poisson_cdf(rates_I, edges_E - 1)
    below_EI[-1] = 1.0
    return np.diff(below_EI, axis=0) * (rows_I if of == "rows" else rows_I * rates_I)


def poisson_cdf(rates_I: FloatArray, edges_E: FloatArray) -> FloatArray:
    """P(X <= edge) of Poisson variables, shape (E, I): exact to 64, Wilson-Hilferty with erf beyond.

    Args:
        rates_I: Means of the variables, at least 0.
        edges_E: Whole numbers, rising.
    """
    result_EI = np.empty((len(edges_E), len(rates_I)))
    is_exact_E = edges_E <= _EXACT_POISSON_MAX
    term_I = np.exp(-rates_I)
    sum_I = term_I.copy()
    count = 0
    for index, edge in enumerate(edges_E[is_exact_E].tolist()):
        while count < edge:
            count += 1
            term_I *= rates_I
            term_I /= count
            sum_I += term_I
        result_EI[index] = sum_I
    # Chi-square form: P(X <= k) = P(chi2 with 2k + 2 degrees > 2 rate).
    degrees_E1 = edges_E[~is_exact_E, None] + 1
    ratio_EI = np.cbrt(rates_I) / np.cbrt(degrees_E1)
    result_EI[~is_exact_E] = _normal_tail((ratio_EI - (1 - 1 / (9 * degrees_E1))) * (3 * np.sqrt(degrees_E1)))
    return np.minimum(result_EI, 1.0, out=result_EI)


def _normal_tail(deviations_V: FloatArray) -> FloatArray:
    """P(Z > z) of a standard normal variable, of any shape."""
    tail_V = np.where(deviations_V > 0, 0.0, 1.0)
    near_V = np.abs(deviations_V) < _FARTHEST_DEVIATION
    tail_V[near_V] = [0.5 * math.erfc(value) for value in (deviations_V[near_V] / math.sqrt(2)).tolist()]
    return tail_V
