"""How wrong a cost model is expected to be about a set that nobody has measured, and the sets where that is most.

Shape suffixes: S sets, M measured samples, K neighbours, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    CostModel,
    DType,
    Exchange,
    LocalShard,
    MemoryLevel,
    Optimizer,
    Pooling,
    Update,
    set_costs,
)
from autoshard.core.errors import InvalidOptionError, ModelError
from autoshard.formats.stores.drift import corrected_ms
from autoshard.formats.stores.samples import SampleTable

FloatArray = NDArray[np.float64]

_NUM_NEIGHBOURS = 8
#: Measured samples that neighbours are sought among: more add little, and each costs a distance per candidate.
_MAX_MEASURED = 8192
#: Weight of the residuals of all samples beside those of the neighbours, in neighbours.
_PRIOR_WEIGHT = 4.0
#: Pairs of samples, and samples, that the growth of errors with distance is read from.
_NUM_PAIRS, _NUM_TYPICAL = 20_000, 512
_RIDGE = 1e-2
#: Deviations of a normal distribution within its 90% interval, both sides together.
_DEVIATIONS_IN_90 = 2 * 1.6449
_CACHED_SHARDS = 1 << 16

_OTHER_KINDS = (DType.FP16, DType.BF16, Pooling.MEAN, Pooling.SEQUENCE, Optimizer.SGD, Optimizer.ADAM)


@lru_cache(maxsize=_CACHED_SHARDS)
def _amounts(shard: LocalShard) -> tuple[float, ...]:
    """What a shard adds to the sums of a set."""
    lookups = shard.num_lookups
    distinct = shard.access.expected_distinct(lookups)
    kinds = (shard.dtype, shard.pooling, shard.optimizer)
    marks = [float(kind in kinds) for kind in _OTHER_KINDS]
    marks += [shard.level is not MemoryLevel.HBM, shard.update is Update.ALL_REDUCED, shard.output is Exchange.ROWS]
    return (
        1.0,
        lookups,
        lookups * shard.embedding_dim,
        distinct,
        distinct * shard.embedding_dim,
        float(shard.num_bags),
        float(shard.num_bags) * shard.embedding_dim,
        float(shard.memory_bytes),
        lookups * float(np.log(shard.num_embeddings)),
        lookups * lookups,
        *(lookups * mark for mark in marks),
    )


_NUM_SUMS = 8


def set_features(sets: Sequence[Sequence[LocalShard]]) -> FloatArray:
    """Features of non-empty sets as a whole, whatever the cost model; shape (S, F).

    Logarithms of the sums over shards (their number, lookups, values looked up, distinct rows, values in these, bags,
    values in these, bytes); then, by lookups, the mean logarithm of rows, how unequal the shards are, and the shares
    of other kinds than pooled fp32 with row-wise AdaGrad in device memory.
    """
    sums_SF = np.array([np.sum([_amounts(shard) for shard in shards], axis=0) for shards in sets])
    lookups_S1 = np.maximum(sums_SF[:, 1:2], 1e-9)
    unequal_S1 = np.sqrt(sums_SF[:, _NUM_SUMS + 1 : _NUM_SUMS + 2]) / lookups_S1
    shares_SF = sums_SF[:, _NUM_SUMS + 2 :] / lookups_S1
    rows_S1 = sums_SF[:, _NUM_SUMS : _NUM_SUMS + 1] / lookups_S1
    return np.concatenate([np.log1p(sums_SF[:, :_NUM_SUMS]), rows_S1, unequal_S1, shares_SF], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ErrorEstimate:
    """Expected relative error of a cost model, from its errors about the measured samples nearest to a set.

    Where neighbours are far, their errors tell less: the estimate grows with distance. What the model says of itself
    is added where its intervals are not the same, relatively, for all sets. A factor that all samples are off by does
    not count: one sample would tell it. Sets that the model cannot price are taken as priced by a line through the
    measured samples.

    Attributes:
        model: The cost model; None to estimate for the line alone.
        mean_F: Of the measured samples' features.
        std_F: Likewise; 1 for features that are all alike.
        measured_MF: Standardised features of measured samples.
        residual_M: Logarithm of measured over predicted latency, less the median.
        growth: Squared error per squared distance.
    """

    model: CostModel | None
    mean_F: FloatArray
    std_F: FloatArray
    measured_MF: FloatArray
    residual_M: FloatArray
    growth: float

    @classmethod
    def fit(cls, samples: SampleTable, model: CostModel | None = None) -> ErrorEstimate:
        """Compares a model with measured samples.

        Args:
            samples: At least `_NUM_NEIGHBOURS` + 1 of one device; the latest are taken where there are very many.
            model: Of the same device.

        Raises:
            InvalidOptionError: If there are too few samples.
        """
        kernel_ms = np.add(*corrected_ms(samples.samples))
        usable = [index for index, sample in enumerate(samples.samples) if sample.shards and kernel_ms[index] > 0]
        usable = usable[-_MAX_MEASURED:]
        if len(usable) <= _NUM_NEIGHBOURS:
            raise InvalidOptionError(
                f"must be more than {_NUM_NEIGHBOURS} to tell where a model is wrong, got {len(usable)}",
                field="samples",
            )
        sets = [samples.samples[index].local_shards for index in usable]
        features_MF = set_features(sets)
        std_F = features_MF.std(axis=0)
        mean_F, std_F = features_MF.mean(axis=0), np.where(std_F > 1e-9, std_F, 1.0)
        measured_MF = (features_MF - mean_F) / std_F
        log_ms_M = np.log(kernel_ms[usable])
        predicted_M = _line_fit(measured_MF, log_ms_M)
        priced_ms_M, _ = _priced(model, sets)
        predicted_M = np.where(priced_ms_M > 0, np.log(np.maximum(priced_ms_M, 1e-12)), predicted_M)
        residual_M = log_ms_M - predicted_M
        residual_M -= np.median(residual_M)
        return cls(
            model=model,
            mean_F=mean_F,
            std_F=std_F,
            measured_MF=measured_MF,
            residual_M=residual_M,
            growth=_growth(measured_MF, residual_M),
        )

    def relative_error(self, sets: Sequence[Sequence[LocalShard]]) -> FloatArray:
        """Expected relative error of the predicted latency of non-empty sets, shape (S,)."""
        squared_SK, neighbour_SK = _nearest(self.standardised(sets), self.measured_MF, _NUM_NEIGHBOURS)
        weight_SK = 1.0 / (1.0 + squared_SK / max(float(np.median(squared_SK)), 1e-12))
        overall = float(np.mean(self.residual_M**2))
        local_S = (weight_SK * self.residual_M[neighbour_SK] ** 2).sum(axis=1) + _PRIOR_WEIGHT * overall
        local_S /= weight_SK.sum(axis=1) + _PRIOR_WEIGHT
        _, own_S = _priced(self.model, sets)
        return np.sqrt(local_S + self.growth * squared_SK.mean(axis=1) + own_S**2)

    def standardised(self, sets: Sequence[Sequence[LocalShard]]) -> FloatArray:
        """Features in units of the measured samples' spread, shape (S, F)."""
        return (set_features(sets) - self.mean_F) / self.std_F


def _priced(model: CostModel | None, sets: Sequence[Sequence[LocalShard]]) -> tuple[FloatArray, FloatArray]:
    """Prices in milliseconds, 0 where the model has none, and its own relative errors where these differ; (S,) each."""
    price_S, error_S = np.zeros(len(sets)), np.zeros(len(sets))
    if model is None:
        return price_S, error_S
    able = _priceable(model, list({shard: None for shards in sets for shard in shards}))
    chosen = [index for index, shards in enumerate(sets) if all(shard in able for shard in shards)]
    if not chosen:
        return price_S, error_S
    costs = set_costs(model, [sets[index] for index in chosen])
    price_S[chosen] = costs.kernel_ms_S
    width_S = (costs.high_ms_S - costs.low_ms_S) / np.maximum(costs.kernel_ms_S, 1e-12) / _DEVIATIONS_IN_90
    if np.ptp(width_S) > 1e-6 * width_S.max():
        error_S[chosen] = width_S
    return price_S, error_S


def _priceable(model: CostModel, shards: Sequence[LocalShard]) -> set[LocalShard]:
    """Those that the model can price; where not all are, halves are asked until they are or one is left."""
    try:
        model.encode(shards)
    except ModelError:
        if len(shards) == 1:
            return set()
        middle = len(shards) // 2
        return _priceable(model, shards[:middle]) | _priceable(model, shards[middle:])
    return set(shards)


def _line_fit(features_MF: FloatArray, target_M: FloatArray) -> FloatArray:
    """Ridge regression, at the samples that it is fitted to."""
    design_MF = np.concatenate([features_MF, np.ones((len(features_MF), 1))], axis=1)
    normal_FF = design_MF.T @ design_MF + _RIDGE * len(features_MF) * np.eye(design_MF.shape[1])
    return design_MF @ np.linalg.solve(normal_FF, design_MF.T @ target_M)


def _nearest(query_SF: FloatArray, measured_MF: FloatArray, count: int) -> tuple[FloatArray, NDArray[np.int64]]:
    """Mean squared distances per feature to the nearest measured samples, and which these are; shape (S, K) each."""
    squared_SM = (query_SF**2).sum(axis=1)[:, None] + (measured_MF**2).sum(axis=1) - 2 * query_SF @ measured_MF.T
    neighbour_SK = np.argpartition(squared_SM, min(count, squared_SM.shape[1] - 1), axis=1)[:, :count]
    squared_SK = np.take_along_axis(squared_SM, neighbour_SK, axis=1)
    return np.maximum(squared_SK, 0.0) / query_SF.shape[1], neighbour_SK


def _growth(measured_MF: FloatArray, residual_M: FloatArray) -> float:
    """Squared error per squared distance: the larger of two estimates.

    One is how much more the residuals of far pairs differ than those of near ones. Residuals of samples that a model
    was trained on hide that; where the size of neighbours' residuals says little of a sample's own, the other takes a
    set at the usual distance from its neighbours to be off by as much again as samples are.
    """
    rng = np.random.default_rng(0)
    first, second = rng.integers(len(measured_MF), size=(2, _NUM_PAIRS))
    squared = ((measured_MF[first] - measured_MF[second]) ** 2).mean(axis=1)
    half = (residual_M[first] - residual_M[second]) ** 2 / 2
    varied = squared - squared.mean()
    seen = float(varied @ half) / max(float(varied @ varied), 1e-12)
    some = rng.permutation(len(measured_MF))[:_NUM_TYPICAL]
    squared_SK, neighbour_SK = _nearest(measured_MF[some], measured_MF, _NUM_NEIGHBOURS + 1)
    # Among the nearest of each is the sample itself.
    usual = float(np.median(squared_SK.sum(axis=1))) / _NUM_NEIGHBOURS
    own_S = residual_M[some] ** 2
    others_S = (residual_M[neighbour_SK] ** 2).sum(axis=1) - own_S
    alike = float(np.corrcoef(np.sqrt(own_S), np.sqrt(np.maximum(others_S, 0.0)))[0, 1]) if np.ptp(own_S) > 0 else 1.0
    return max(seen, (1.0 - max(0.0, alike)) ** 2 * float(np.mean(residual_M**2)) / max(usual, 1e-6))
