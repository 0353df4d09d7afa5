"""Time of one collective on one kind of link, from bytes and ranks: a rising curve of few coefficients.

Shape suffixes: S samples, F features, K bends of the curve, W numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from autoshard.core.costs import CollectiveName
from autoshard.core.errors import ModelError
from costmodel.registry.card_fields import check_tensor
from costmodel.step.regression import FloatArray, fit_nonnegative

#: The byte term bends at every so many times more bytes between the smallest and the largest measured.
_BEND_RATIO = 8.0
#: How far outside the measured numbers of ranks, in doublings, the learned factor fades to 1.
FADE_OCTAVES = 1.0
#: Samples that a number of ranks needs for its own factor to count half.
_HALF_TRUST = 8.0
#: Names of a curve's tensors, and the largest number of each.
_LIMITS = {"bends_K": 1e18, "coefficients": 1e6, "log_world_W": 30.0, "log_factor_W": 20.0}


def num_latencies(collective: CollectiveName, num_ranks: float) -> float:
    """How often a rank waits for another one, one after the other, in an algorithm that is common.

    Source:
        Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005): pairwise
        exchange for all-to-all, ring for all-gather and reduce-scatter, recursive halving and doubling for all-reduce.
    """
    if num_ranks <= 1:
        return 0.0
    return 2.0 * float(np.log2(num_ranks)) if collective == "all_reduce" else float(num_ranks - 1)


def passing_bytes(one_way: FloatArray, other_way: FloatArray, both_ways: float) -> FloatArray:
    """Bytes each way that take as long as some one way and some the other, same shape.

    Args:
        one_way: Bytes one way.
        other_way: Bytes the other way.
        both_ways: Share of the fewer that does not hide behind the more.
    """
    return np.asarray((np.maximum(one_way, other_way) + both_ways * np.minimum(one_way, other_way)) / (1.0 + both_ways))


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoints:
    """Measured collectives of one kind, shapes (S,).

    Attributes:
        num_bytes_S: Bytes that the busiest rank sends or receives, see `passing_bytes`.
        group_S: Ranks that take part together.
        world_S: Ranks that run at the same time, other groups included: they share links and cores.
        measured_ms_S: Times.
    """

    num_bytes_S: FloatArray
    group_S: FloatArray
    world_S: FloatArray
    measured_ms_S: FloatArray

    def __len__(self) -> int:
        return len(self.num_bytes_S)

    def only(self, chosen_S: Any) -> CurvePoints:
        """Some of them, by index or mask."""
        parts = (self.num_bytes_S, self.group_S, self.world_S, self.measured_ms_S)
        num_bytes_S, group_S, world_S, measured_ms_S = (part[chosen_S] for part in parts)
        return CurvePoints(num_bytes_S=num_bytes_S, group_S=group_S, world_S=world_S, measured_ms_S=measured_ms_S)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveCurve:
    """Latency per step and bytes times a price that changes with the size of the message, times a factor by ranks.

    The price per byte is piecewise constant and never negative, so that time never falls with the bytes. Below and
    above the measured sizes it stays as it is there. The factor is what measured numbers of ranks showed beyond the
    curve; between them it is interpolated, and it fades to 1 one doubling outside of them.

    Attributes:
        collective: Which one.
        bends_K: Bytes where the price changes, rising.
        coefficients: Milliseconds once, per latency, per byte, per byte and doubling of ranks, and for each stretch
            between bends per byte on top, shape (5 + K,).
        log_world_W: log2 of the numbers of ranks that were measured, rising.
        log_factor_W: Logarithm of the factor there.
    """

    collective: CollectiveName
    bends_K: FloatArray
    coefficients: FloatArray
    log_world_W: FloatArray
    log_factor_W: FloatArray

    def __post_init__(self) -> None:
        if len(self.coefficients) != 5 + len(self.bends_K) or len(self.log_world_W) != len(self.log_factor_W):
            raise ModelError("coefficients do not fit the bends", field=self.collective)
        for name in _LIMITS:
            if not np.isfinite(getattr(self, name)).all():
                raise ModelError(f"{name} holds numbers that are not finite", field=self.collective)
        if (self.coefficients < 0).any() or (np.diff(self.bends_K) <= 0).any() or not len(self.log_world_W):
            raise ModelError("must have coefficients of at least 0 and rising bends", field=self.collective)

    @classmethod
    def fit(cls, collective: CollectiveName, points: CurvePoints) -> CollectiveCurve:
        """The curve of some samples, at least one."""
        bends_K = _bends(points.num_bytes_S)
        features_SF = _features(collective, bends_K, points.num_bytes_S, points.group_S, points.world_S)
        features_SF = features_SF * _identifiable(points, len(bends_K))
        strength_F = np.full(features_SF.shape[1], 1e-3)
        strength_F[4:] = 3e-3
        coefficients = fit_nonnegative(features_SF, points.measured_ms_S, strength_F=strength_F)
        with np.errstate(divide="ignore"):
            left_S = np.log(points.measured_ms_S / np.maximum(features_SF @ coefficients, 1e-12))
        log_world_S = np.log2(points.world_S)
        worlds = np.unique(log_world_S)
        factors = [_shrunk(left_S[log_world_S == world]) for world in worlds]
        return cls(
            collective=collective,
            bends_K=bends_K,
            coefficients=coefficients,
            log_world_W=worlds,
            log_factor_W=np.array(factors),
        )

    def ms(self, num_bytes: FloatArray, group: float, world: float) -> FloatArray:
        """Times for some numbers of bytes, same shape; 0 for none.

        Args:
            num_bytes: Bytes that a rank sends or receives.
            group: Ranks that take part together.
            world: Ranks that run at the same time.
        """
        flat_S = np.asarray(num_bytes, dtype=np.float64).ravel()
        size_S = np.ones(len(flat_S))
        features_SF = _features(self.collective, self.bends_K, flat_S, size_S * group, size_S * world)
        factor = np.exp(_faded(float(np.log2(max(world, 1.0))), self.log_world_W, self.log_factor_W))
        times_S = np.where(flat_S > 0, features_SF @ self.coefficients * factor, 0.0)
        return np.asarray(times_S.reshape(np.shape(num_bytes)))

    def predict(self, points: CurvePoints) -> FloatArray:
        """Times of samples, shape (S,)."""
        arguments = zip(points.num_bytes_S, points.group_S, points.world_S, strict=True)
        return np.array([float(self.ms(np.array(size), group, world)) for size, group, world in arguments])

    def octaves_outside(self, world: float) -> float:
        """Doublings between a number of ranks and the measured ones; 0 within."""
        at = float(np.log2(max(world, 1.0)))
        return max(0.0, float(self.log_world_W[0]) - at, at - float(self.log_world_W[-1]))

    def tensors(self) -> dict[str, FloatArray]:
        """Its numbers by name."""
        return {name: np.asarray(getattr(self, name), dtype=np.float64) for name in _LIMITS}

    @classmethod
    def restored(cls, collective: CollectiveName, tensors: Mapping[str, Any], prefix: str) -> CollectiveCurve:
        """Reads what `tensors` gave.

        Raises:
            ModelError: If one is missing or impossible.
        """
        values = {}
        for name in _LIMITS:
            tensor = tensors.get(f"{prefix}{name}")
            if tensor is None or tensor.ndim != 1:
                raise ModelError("needs a tensor of one dimension", field=f"{prefix}{name}")
            check_tensor(tensor, f"{prefix}{name}", dtype="float64", limit=_LIMITS[name])
            values[name] = np.asarray(tensor, dtype=np.float64)
        return cls(collective=collective, **values)


def _bends(num_bytes_S: FloatArray) -> FloatArray:
    low, high = max(1.0, float(num_bytes_S.min())), float(num_bytes_S.max())
    count = int(np.log(high / low) / np.log(_BEND_RATIO)) if high > low else 0
    # The last stretch has to be as long as the others, or the price of large messages hangs on one sample.
    return np.asarray(low * _BEND_RATIO ** np.arange(1, count), dtype=np.float64)


def _features(
    collective: CollectiveName, bends_K: FloatArray, num_bytes_S: FloatArray, group_S: FloatArray, world_S: FloatArray
) -> FloatArray:
    latencies_S = np.array([num_latencies(collective, float(group)) for group in group_S])
    doublings_S = np.log2(np.maximum(world_S, 2.0) / 2.0)
    edges = np.concatenate([[0.0], bends_K, [np.inf]])
    stretches = [np.clip(num_bytes_S - start, 0.0, stop - start) for start, stop in pairwise(edges)]
    columns = [np.ones(len(num_bytes_S)), latencies_S, num_bytes_S, num_bytes_S * doublings_S, *stretches]
    return np.stack(columns, axis=1)


def _identifiable(points: CurvePoints, num_bends: int) -> FloatArray:
    """1 for features that samples can tell apart, 0 for the others."""
    mask = np.ones(5 + num_bends)
    if len(np.unique(points.group_S)) < 2:
        mask[0] = 0.0  # all latency grows with the ranks, as the algorithm says
    if len(np.unique(points.world_S)) < 2:
        mask[3] = 0.0
    return mask


def _shrunk(log_ratio_S: FloatArray) -> float:
    """Median, drawn to 0 where there are few samples."""
    return float(np.median(log_ratio_S)) * len(log_ratio_S) / (len(log_ratio_S) + _HALF_TRUST)


def _faded(at: float, known_W: FloatArray, values_W: FloatArray) -> float:
    outside = max(float(known_W[0]) - at, at - float(known_W[-1]), 0.0)
    return float(np.interp(at, known_W, values_W)) * max(0.0, 1.0 - outside / FADE_OCTAVES)
