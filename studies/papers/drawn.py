"""Numbers drawn for models whose details are not published.

Shape suffixes: N numbers.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def normal_quantiles(count: int) -> FloatArray:
    """Evenly spaced quantiles of the standard normal distribution, rising; shape (N,)."""
    return np.array([NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)])


def scaled_to(values_N: FloatArray, total: float) -> FloatArray:
    """The same proportions with another sum."""
    return values_N * (total / float(values_N.sum()))
