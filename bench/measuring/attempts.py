"""Measurements of one thing, made again where its runs disagree: how far they spread, and their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

#: Runs do not agree better than that, whatever a few of them say.
_LEAST_SPREAD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Latency of a forward and a backward pass, and of a reference in the same rounds.

    Attributes:
        forward_ms: Forward pass.
        backward_ms: Backward pass.
        forward_spread: How far apart the runs were, relative to their mean, see `Location`.
        backward_spread: As `forward_spread`.
        reference_forward_ms: The reference in the same rounds.
        reference_backward_ms: As `reference_forward_ms`.
        num_rounds: Runs measured; the mean over attempts.
        num_attempts: Measurements that this is the mean of.
        is_noisy: Whether its runs were too far apart for as many.
        sm_clock_mhz: Median clock of the GPU during its rounds; 0 where nothing tells it.
        throttle_reasons: What held the clock back in any of them, separated by commas.
    """

    forward_ms: float
    backward_ms: float
    forward_spread: float
    backward_spread: float
    reference_forward_ms: float
    reference_backward_ms: float
    num_rounds: int
    num_attempts: int = 1
    is_noisy: bool = False
    sm_clock_mhz: float = 0.0
    throttle_reasons: str = ""

    @property
    def spread(self) -> float:
        """Spread of forward plus backward, as if the two were slow in the same runs; 0 for what takes no time."""
        total_ms = self.forward_ms + self.backward_ms
        if not total_ms:
            return 0.0
        return (self.forward_ms * self.forward_spread + self.backward_ms * self.backward_spread) / total_ms


TimingT = TypeVar("TimingT", bound=Timing)


def combined_spread(attempts: Sequence[Timing]) -> float:
    """Spread that a single measurement, of as many rounds as the longest, as good as the mean of all would have."""
    return float(_weights_of(attempts).sum() ** -0.5)


def mean_of(attempts: Sequence[TimingT], max_spread: float) -> TimingT:
    """Mean of measurements of one thing, by rounds over the squares of their spreads; all else is the last one's.

    What is averaged are times relative to the reference's, which differ between measurements as the machine does.

    A mean, where keeping the steadiest would leave out data: slow runs are dropped from each measurement already
    (`locate`), so what is left errs to both sides. Of the sets that `docs/data/samples` and `samples-epyc` hold twice,
    the less steady measurement is the slower one in 50% of 404 and in 56% of 360 pairs, and pairs differ in proportion
    to their spreads. Where a set was measured three times or more, the mean of the others is off by 2.1 and 4.3% from
    the one left out, the steadiest of them by 2.4 and 4.8%, the fastest by 2.4 and 5.3% (root mean squares of 30 and 40
    cases, relative to the reference, November 2026).

    Args:
        attempts: At least one.
        max_spread: Spread above which the mean is marked as noisy.
    """
    is_noisy = combined_spread(attempts) > max_spread
    if len(attempts) == 1:
        return replace(attempts[0], is_noisy=is_noisy)
    weights = _weights_of(attempts)

    def mean(name: str, over: str | None = None) -> float:
        values = [getattr(one, name) / (getattr(one, over) if over else 1.0) for one in attempts]
        return float(np.average(values, weights=weights))

    reference_forward_ms, reference_backward_ms = mean("reference_forward_ms"), mean("reference_backward_ms")
    return replace(
        attempts[-1],
        reference_forward_ms=reference_forward_ms,
        reference_backward_ms=reference_backward_ms,
        forward_ms=mean("forward_ms", "reference_forward_ms") * reference_forward_ms,
        backward_ms=mean("backward_ms", "reference_backward_ms") * reference_backward_ms,
        forward_spread=mean("forward_spread"),
        backward_spread=mean("backward_spread"),
        num_rounds=round(np.mean([one.num_rounds for one in attempts])),
        num_attempts=len(attempts),
        is_noisy=is_noisy,
    )


def _weights_of(attempts: Sequence[Timing]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    most = max(one.num_rounds for one in attempts)
    return np.array([one.num_rounds / most * max(one.spread, _LEAST_SPREAD) ** -2 for one in attempts])
