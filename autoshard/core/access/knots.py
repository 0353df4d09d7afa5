"""Where the knots of access profiles lie, and the lookups between them.

Shape suffixes: K knots, I intervals between knots (K - 1), V values.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

KNOTS_PER_OCTAVE = 4
#: Sums of up to so many powers are taken one by one.
_SHORT_SPAN = 64
#: Above it, access ranks are no int64.
_MAX_OCTAVES = 63


def log_spaced_ranks(num_rows: int, per_octave: int = KNOTS_PER_OCTAVE) -> IntArray:
    """Knot positions 0, 1, 2 ... num_rows, every rank at first and log-spaced later."""
    ladder = _ladder(per_octave)
    return np.append(ladder[: np.searchsorted(ladder, num_rows)], num_rows)


@cache
def _ladder(per_octave: int) -> IntArray:
    """Knot positions of tables of any size, in rising order."""
    steps = np.arange(0, _MAX_OCTAVES * per_octave) / per_octave
    return np.unique(np.concatenate([[0], np.floor(2.0**steps)]).astype(np.int64))


def concave_hull(ranks_K: FloatArray, masses_I: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Knots and the mass between them, with neighbours pooled that break concavity.

    Args:
        ranks_K: Access ranks of the knots, rising from 0.
        masses_I: Lookups, in any unit, between each knot and the next.
    """
    rows_I = ranks_K[1:] - ranks_K[:-1]
    if not (masses_I[1:] * rows_I[:-1] > masses_I[:-1] * rows_I[1:]).any():
        return np.array(ranks_K, dtype=np.float64), np.array(masses_I, dtype=np.float64)
    ends = [0.0]
    masses: list[float] = []
    start = 0.0
    for end, next_mass in zip(ranks_K[1:].tolist(), masses_I.tolist(), strict=True):
        mass = next_mass
        while masses and mass * (start - ends[-2]) > masses[-1] * (end - start):
            mass = masses.pop() + mass
            ends.pop()
            start = ends[-1]
        masses.append(mass)
        ends.append(end)
        start = end
    return np.array(ends), np.array(masses)


def power_sums(bounds_K: FloatArray, alpha: float) -> FloatArray:
    """Sums of r ** -alpha from each bound, itself left out, to the next in steps of 1; shape (I,).

    Exact for short spans, Euler-Maclaurin beyond.

    Args:
        bounds_K: Rising, whole numbers apart.
        alpha: Exponent, at least 0.
    """
    starts_I, stops_I = bounds_K[:-1], bounds_K[1:]
    is_short_I = stops_I - starts_I <= _SHORT_SPAN
    sums_I = np.empty(len(starts_I))
    sums_I[is_short_I] = _short_sums(starts_I[is_short_I], stops_I[is_short_I], alpha)
    sums_I[~is_short_I] = _long_sums(starts_I[~is_short_I] + 1, stops_I[~is_short_I], alpha)
    return sums_I


def _short_sums(starts_I: FloatArray, stops_I: FloatArray, alpha: float) -> FloatArray:
    if not len(starts_I):
        return starts_I
    spans_I = np.rint(stops_I - starts_I).astype(np.int64)
    firsts_I = np.cumsum(spans_I) - spans_I
    numbers_V = np.arange(1, spans_I.sum() + 1) - np.repeat(firsts_I, spans_I)
    return np.asarray(np.add.reduceat((np.repeat(starts_I, spans_I) + numbers_V) ** -alpha, firsts_I))


def _long_sums(low_I: FloatArray, high_I: FloatArray, alpha: float) -> FloatArray:
    power = 1 - alpha
    integral_I = (high_I**power - low_I**power) / power if power else np.log(high_I / low_I)
    ends_I = 0.5 * (low_I**-alpha + high_I**-alpha)
    return np.asarray(integral_I + ends_I + alpha / 12 * (low_I ** (-alpha - 1) - high_I ** (-alpha - 1)))
