"""Predictions of samples, and how well they agree with what was measured.

Shape suffixes: S samples, B some of them, U distinct shards, N shards of all samples, H width of a code, O outputs
(forward, backward).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.core.costs import CodeArray
from costmodel.kernel.card import HeldOutMetrics, Interval
from costmodel.kernel.dataset import CostDataset, IndexArray
from costmodel.kernel.predictor import CostPredictor

MsArray = NDArray[np.float64]

#: Ends of the interval, as quantiles.
_ENDS = (0.05, 0.95)
#: With fewer samples, a share of them says nothing about coverage.
_MIN_FOR_COVERAGE = 20
# A prediction of 0 has no ratio; a nanosecond is below every latency that can be measured.
_SMALLEST_MS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedSamples:
    """Samples with what a network says of them, also where a card would refuse their kernels.

    Attributes:
        dataset: The samples.
        ms_SO: Predicted forward and backward latency of each, shape (S, O).
        spread_S: The spread of their sum, shape (S,).
    """

    dataset: CostDataset
    ms_SO: MsArray
    spread_S: MsArray

    @classmethod
    def of(cls, predictor: CostPredictor, dataset: CostDataset) -> PricedSamples:
        """Prices samples."""
        codes_SH = set_codes(predictor, dataset)
        return cls(dataset=dataset, ms_SO=predictor.predict(codes_SH), spread_S=predictor.spread(codes_SH))

    def take(self, samples_B: IndexArray) -> PricedSamples:
        """The samples with the given indices, in that order."""
        return PricedSamples(
            dataset=self.dataset.take(samples_B), ms_SO=self.ms_SO[samples_B], spread_S=self.spread_S[samples_B]
        )

    @property
    def kernel_ms_S(self) -> MsArray:  # noqa: N802 - a shape suffix
        """Predicted kernel time, forward plus backward, shape (S,)."""
        kernel_ms_S: MsArray = self.ms_SO.sum(axis=1)
        return kernel_ms_S

    @property
    def ratio_S(self) -> MsArray:  # noqa: N802 - a shape suffix
        """Measured over predicted, shape (S,)."""
        ratio_S: MsArray = self.dataset.kernel_ms / self.kernel_ms_S
        return ratio_S

    @property
    def errors_S(self) -> MsArray:  # noqa: N802 - a shape suffix
        """Relative errors, shape (S,)."""
        errors_S: MsArray = np.abs(self.kernel_ms_S / self.dataset.kernel_ms - 1)
        return errors_S

    def metrics(self) -> HeldOutMetrics:
        """Accuracy, where training did not see the samples."""
        return held_out_metrics(self.kernel_ms_S, self.dataset.kernel_ms)

    def interval(self, *, farthest: float | None = None) -> Interval:
        """The interval that holds nine tenths of the measurements, see `calibrated_interval`."""
        return calibrated_interval(self.kernel_ms_S, self.spread_S, self.dataset.kernel_ms, farthest=farthest)


def set_codes(predictor: CostPredictor, dataset: CostDataset) -> CodeArray:
    """Sums of codes of every sample; shape (S, H)."""
    codes_UH = predictor.encode(dataset.features_UF)
    shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
    return sum_codes(codes_UH, shard_N, starts_S)


def sum_codes(codes_UH: CodeArray, shard_N: IndexArray, starts_S: IndexArray) -> CodeArray:
    """Sums of the codes of every set's shards, shape (S, H).

    What embedding tables are pooled with pools codes as well: for 1,000 sets of up to 100 shards it takes a hundredth
    of the time of gathering and adding up in numpy.

    Args:
        codes_UH: Codes of the distinct shards.
        shard_N: Which of them the sets hold, set after set.
        starts_S: Where each set starts in `shard_N`; a set that starts where the next one does is empty.
    """
    summed_SH = torch.nn.functional.embedding_bag(
        torch.from_numpy(shard_N), torch.from_numpy(codes_UH), torch.from_numpy(starts_S), mode="sum"
    )
    codes_SH: CodeArray = summed_SH.numpy()
    return codes_SH


def held_out_metrics(predicted_ms_S: MsArray, measured_ms_S: MsArray) -> HeldOutMetrics:
    """Compares predictions with measurements that were kept from training; all above 0."""
    error_ms_S = np.abs(predicted_ms_S - measured_ms_S)
    return HeldOutMetrics(
        num_samples=len(measured_ms_S),
        mae_ms=float(error_ms_S.mean()),
        mse_ms2=float((error_ms_S**2).mean()),
        relative_error=float((error_ms_S / measured_ms_S).mean()),
        kendall_tau=kendall_tau(predicted_ms_S, measured_ms_S),
    )


def calibrated_interval(
    predicted_ms_S: MsArray, spread_S: MsArray, measured_ms_S: MsArray, *, farthest: float | None = None
) -> Interval:
    """The interval that holds nine tenths of the measurements.

    Every other sample sets its ends, the rest measure its coverage; its ends are then set anew on all.

    Args:
        predicted_ms_S: Predictions.
        spread_S: Their spreads.
        measured_ms_S: Measurements.
        farthest: Logarithm of measured over predicted that counts as seen once at either side, beside the samples; so
            an interval of few samples is as wide as is known before any. None where there are samples enough.
    """
    # np.log of a ratio of 0 has no bound; predictions are above 0 for sets that are not empty.
    off_S = np.log(measured_ms_S / np.maximum(predicted_ms_S, _SMALLEST_MS)) / spread_S
    ends = _ends(off_S) if farthest is None else _outer_ends(off_S, farthest / _typical(spread_S))
    if len(off_S) < 2 * _MIN_FOR_COVERAGE:
        return Interval(low=ends[0], high=ends[1])
    low, high = _ends(off_S[::2])
    half = Interval(low=low, high=high)
    tested_S = off_S[1::2]
    is_within_S = (tested_S >= half.low) & (tested_S <= half.high)
    low_S, high_S = half.factors(spread_S[1::2])
    half_width_S = (high_S - low_S) / 2
    return Interval(
        low=ends[0], high=ends[1], coverage=float(is_within_S.mean()), half_width=float(np.median(half_width_S))
    )


def _ends(off_S: MsArray) -> tuple[float, float]:
    low, high = np.quantile(off_S, _ENDS)
    return min(float(low), 0.0), max(float(high), 0.0)


def _outer_ends(off_S: MsArray, farthest: float) -> tuple[float, float]:
    """As `_ends`, with one more sample at either side; ends are those of samples, none lies between two."""
    seen = np.concatenate([off_S, [-farthest, farthest]])
    low, high = np.quantile(seen, _ENDS[0], method="lower"), np.quantile(seen, _ENDS[1], method="higher")
    return min(float(low), 0.0), max(float(high), 0.0)


def _typical(spread_S: MsArray) -> float:
    return float(np.median(spread_S)) if len(spread_S) else 1.0


def kendall_tau(first_S: MsArray, second_S: MsArray) -> float:
    """Kendall's rank correlation (tau-a): pairs in the same order minus pairs in opposite order, over all pairs.

    Returns:
        From -1 to 1; 0 for fewer than two samples.
    """
    num_samples = len(first_S)
    if num_samples < 2:
        return 0.0
    agreeing = 0.0
    for index in range(num_samples - 1):  # a row of pairs at a time: all pairs at once would not fit for large S
        rest = slice(index + 1, None)
        agreeing += float(np.sign(first_S[rest] - first_S[index]) @ np.sign(second_S[rest] - second_S[index]))
    return agreeing / (num_samples * (num_samples - 1) / 2)
