"""Latencies with the drift of the machine divided out, by a reference that is timed beside every sample.

Shape suffixes: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

MsArray = NDArray[np.float64]


class TimedPasses(Protocol):
    """Latencies of a forward and a backward pass, and of a reference in the same rounds, in ms."""

    @property
    def forward_ms(self) -> float:
        """Forward pass."""
        ...

    @property
    def backward_ms(self) -> float:
        """Backward pass."""
        ...

    @property
    def reference_forward_ms(self) -> float:
        """Forward pass of the reference."""
        ...

    @property
    def reference_backward_ms(self) -> float:
        """Backward pass of the reference."""
        ...


def divide_out_drift(latency_ms_S: ArrayLike, reference_ms_S: ArrayLike) -> MsArray:
    """Latencies as if the machine had always been as fast as it was in the middle.

    Args:
        latency_ms_S: Measured latencies.
        reference_ms_S: The reference, measured in the same rounds.

    Returns:
        Each latency over its own reference, times the median of the references; shape (S,).
    """
    reference_ms = np.asarray(reference_ms_S, dtype=np.float64)
    return np.asarray(latency_ms_S, dtype=np.float64) / reference_ms * np.median(reference_ms)


def corrected_ms(samples: Sequence[TimedPasses]) -> tuple[MsArray, MsArray]:
    """Forward and backward latencies, measured on one device, with its drift divided out, shapes (S,)."""
    forward_S = divide_out_drift([one.forward_ms for one in samples], [one.reference_forward_ms for one in samples])
    backward_S = divide_out_drift([one.backward_ms for one in samples], [one.reference_backward_ms for one in samples])
    return forward_S, backward_S
