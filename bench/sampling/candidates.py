"""New samples go where the cost model is least certain: candidates of other strategies, the doubtful ones among them.

Shape suffixes: C candidates, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModel
from autoshard.core.errors import InvalidOptionError, ModelError
from autoshard.evaluation.analytic import DEVICE_MEMORY, AnalyticCostModel
from autoshard.planning import kernel_model
from bench.sampling.kinds import OtherKinds
from bench.sampling.slices import Slices
from bench.sampling.strategies import (
    NearMemoryLimit,
    RandomSubsets,
    SetSource,
    ShardSet,
    SingleTables,
    Strategy,
    generator_of,
)
from bench.sampling.uncertainty import ErrorEstimate
from bench.sampling.visited import Placements, single_level

#: Sets that are chosen together, and candidates that they are chosen from.
BATCH_SIZE = 32
NUM_CANDIDATES = 256
#: A candidate with twice the expected error is as likely to be chosen as this power of two others.
_SHARPNESS = 3.0
_CANDIDATE_STRATEGIES = (RandomSubsets, Placements, Slices, OtherKinds, NearMemoryLimit, SingleTables)
_BATCHES_KEPT = 8


class MostUncertain:
    """Sets about which the cost model is expected to be most wrong, with chance in it, and no two alike in a batch.

    The model is that of the source's registry for its device, else the analytic one; where it is expected to be wrong
    is told from the source's samples (`ErrorEstimate`). Both are taken once: to go by samples that were measured
    since, make a new stream with these and `start` where the last one was left.
    """

    def __init__(self, source: SetSource, seed: int) -> None:
        if source.samples is None:
            raise InvalidOptionError("the strategy uncertain needs samples that were measured before", field="samples")
        self.estimate = ErrorEstimate.fit(source.samples, _model(source))
        self._seed = seed
        own_seed = int(generator_of(seed, "uncertain/seed", 0).integers(2**63))
        self._strategies = _working(source, own_seed)
        self._batch = lru_cache(maxsize=_BATCHES_KEPT)(self._choose)

    def draw(self, number: int) -> ShardSet:
        """One of a batch of doubtful sets."""
        block, place = divmod(number, BATCH_SIZE)
        return self._batch(block)[place]

    def candidates(self, block: int) -> tuple[ShardSet, ...]:
        """What a batch is chosen from, strategies in turn."""
        numbers = range(block * NUM_CANDIDATES, (block + 1) * NUM_CANDIDATES)
        count = len(self._strategies)
        return tuple(self._strategies[number % count].draw(number // count) for number in numbers)

    def _choose(self, block: int) -> tuple[ShardSet, ...]:
        candidates = self.candidates(block)
        rng = generator_of(self._seed, "uncertain", block)
        # Largest first after adding Gumbel noise to logarithms draws without replacement by these weights.
        score_C = _SHARPNESS * np.log(self.estimate.relative_error(candidates)) + rng.gumbel(size=len(candidates))
        features_CF = self.estimate.standardised(candidates)
        chosen = spread_out(features_CF, np.argsort(-score_C, kind="stable"), BATCH_SIZE)
        return tuple(candidates[index] for index in chosen)


def spread_out(features_CF: NDArray[np.float64], order: Sequence[int] | NDArray[np.int64], count: int) -> list[int]:
    """The first `count` of an order that are not too near to one before them; then, if too few, the nearest others.

    Too near is half of what candidates are usually away from their nearest neighbour.
    """
    squared_CC = ((features_CF[:, None] - features_CF) ** 2).mean(axis=2)
    np.fill_diagonal(squared_CC, np.inf)
    too_near = float(np.median(squared_CC.min(axis=1))) / 4
    chosen: list[int] = []
    passed: list[int] = []
    for index in map(int, order):
        is_near = chosen and squared_CC[index, chosen].min() <= too_near
        (passed if is_near else chosen).append(index)
        if len(chosen) == count:
            return chosen
    return chosen + passed[: count - len(chosen)]


def _model(source: SetSource) -> CostModel | None:
    if source.registry is not None:
        try:
            return kernel_model(single_level(source.device, 1, 1), source.registry)
        except ModelError:
            if source.device in DEVICE_MEMORY:
                raise
            return None
    return AnalyticCostModel.for_device(source.device) if source.device in DEVICE_MEMORY else None


def _working(source: SetSource, seed: int) -> tuple[Strategy, ...]:
    """The strategies that can choose from this source."""
    made: list[Strategy] = []
    failure: InvalidOptionError | None = None
    for index, make in enumerate(_CANDIDATE_STRATEGIES):
        try:
            made.append(make(source, seed + index))
        except InvalidOptionError as error:
            failure = error
    if not made:
        assert failure is not None
        raise failure
    return tuple(made)
