"""Means and deviations over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Mean and standard deviation over seeds, which are taken as all there are: squares are divided by their number."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Of at least one value; the deviation of one is 0."""
        return cls(mean=float(np.mean(values)), deviation=float(np.std(values)))
