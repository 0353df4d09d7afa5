"""Which sets of shards to measure, so that a cost model sees what planners will ask it.

Shape suffixes: P positions of a stream.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from autoshard.core import LocalShard, TableSet
from autoshard.core.accepted import AT_LEAST_0, FINITE_AT_LEAST_0, check_choice
from autoshard.core.errors import InvalidOptionError
from bench.sampling.candidates import MostUncertain
from bench.sampling.kinds import OtherKinds
from bench.sampling.slices import Copies, Slices
from bench.sampling.strategies import (
    LargerBatches,
    NearMemoryLimit,
    RandomSubsets,
    SetSource,
    SingleTables,
    Strategy,
    generator_of,
    whole_shard,
)
from bench.sampling.visited import Placements

__all__ = [
    "CALIBRATION_WEIGHTS",
    "DEFAULT_WEIGHTS",
    "STRATEGIES",
    "ChosenSet",
    "SetSource",
    "stream_sets",
    "table_wise_pool",
]

#: Strategies by name. A new one raises InvalidOptionError when made where it cannot work.
STRATEGIES: Mapping[str, Callable[[SetSource, int], Strategy]] = {
    "random": RandomSubsets,
    "placements": Placements,
    "memory-limit": NearMemoryLimit,
    "singles": SingleTables,
    "batches": LargerBatches,
    "copies": Copies,
    "slices": Slices,
    "kinds": OtherKinds,
    "uncertain": MostUncertain,
}
#: Half of the sets are whole tables as they are met in placements or drawn evenly; the rest is at the edges.
DEFAULT_WEIGHTS: Mapping[str, float] = {
    "random": 0.15,
    "placements": 0.25,
    "memory-limit": 0.05,
    "singles": 0.05,
    "batches": 0.05,
    "copies": 0.05,
    "slices": 0.15,
    "kinds": 0.15,
    "uncertain": 0.10,
}
#: What calibrations measure. A model of another machine stays wrong longest about kinds of kernels and slices; of whole
#: tables a few sets tell all (`python -m studies calibrate`).
CALIBRATION_WEIGHTS: Mapping[str, float] = {
    "random": 0.10,
    "placements": 0.10,
    "memory-limit": 0.05,
    "batches": 0.05,
    "copies": 0.10,
    "slices": 0.30,
    "kinds": 0.30,
}
REPEAT = "repeat"
#: Every so many sets one of the last sets comes again, so that a store tells how well it repeats itself.
REPEAT_EVERY = 32
_NUM_REMEMBERED = 256
_GOLDEN = (math.sqrt(5) - 1) / 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSet:
    """A set of shards, and how it was chosen: the name of a strategy, or `repeat`."""

    shards: tuple[LocalShard, ...]
    source: str


def table_wise_pool(tables: TableSet) -> tuple[LocalShard, ...]:
    """All tables of a model as a rank runs them that holds them whole."""
    return tuple(whole_shard(table, tables.batch_size) for table in tables.tables)


def stream_sets(
    source: SetSource,
    *,
    seed: int,
    start: int = 0,
    weights: Mapping[str, float] | None = None,
    usual: Mapping[str, float] = DEFAULT_WEIGHTS,
) -> Iterator[ChosenSet]:
    """Endless sets to measure: a mixture of strategies, in which an earlier set comes again now and then.

    The same source, seed and weights give the same sets, and `start=n` goes on where n sets were taken before,
    without drawing them again. (What a trained model or policy of the source's registry is asked, and its samples,
    are part of the source: when they change, so do the sets that come from them.)

    Example:
        source = SetSource(
            tables=load_tables("metasyn").scaled(64), max_tables=15, device="cpu", memory_bytes=2**30,
            accepts=lambda shard: is_measurable(shard, device), samples=read_samples(store, "cpu"),
        )
        for chosen in stream_sets(source, seed=7, start=1200):
            measure(chosen.shards, chosen.source)

    Args:
        source: What to choose from.
        seed: At least 0.
        start: Sets to skip.
        weights: Shares of the strategies by name, of any sum; each has to work with this source.
        usual: Shares where no weights are given, less the strategies that cannot work with this source (such as
            `memory-limit` without a limit).

    Raises:
        InvalidOptionError: If a number is out of range, a strategy unknown, or one that was named cannot work.
    """
    AT_LEAST_0.check(seed, "seed")
    AT_LEAST_0.check(start, "start")
    mixture = _Mixture(_strategies(source, seed, weights, usual), seed)
    return mixture.sets(start)


def _strategies(
    source: SetSource, seed: int, weights: Mapping[str, float] | None, usual: Mapping[str, float]
) -> dict[str, tuple[Strategy, float]]:
    found: dict[str, tuple[Strategy, float]] = {}
    for name, weight in (usual if weights is None else weights).items():
        check_choice(name, STRATEGIES, "strategies")
        FINITE_AT_LEAST_0.check(weight, f"strategies.{name}")
        if weight == 0:
            continue
        try:
            found[name] = (STRATEGIES[name](source, seed), weight)
        except InvalidOptionError as error:
            if weights is not None:
                raise
            _log.info("no sets by %s: %s", name, error)
    if not found:
        raise InvalidOptionError("none of them can choose sets from this source", field="strategies")
    return found


class _Mixture:
    """Deals the positions of a stream to strategies, evenly by their weights."""

    def __init__(self, strategies: Mapping[str, tuple[Strategy, float]], seed: int) -> None:
        self._names = tuple(strategies)
        self._strategies = tuple(strategy for strategy, _ in strategies.values())
        shares = np.array([weight for _, weight in strategies.values()])
        self._ends = np.cumsum(shares) / shares.sum()
        self._seed = seed
        self._offset = float(generator_of(seed, "mixture", 0).random())

    def sets(self, start: int) -> Iterator[ChosenSet]:
        """The stream from a position on."""
        dealt_P = self._dealt(0, start)
        numbers = np.bincount(dealt_P[dealt_P >= 0], minlength=len(self._names)).tolist()
        remembered = self._remembered(dealt_P, numbers)
        for position in count(start):
            strategy = int(self._dealt(position, position + 1)[0])
            if strategy < 0:
                rng = generator_of(self._seed, REPEAT, position)
                again, number = remembered[int(rng.integers(len(remembered)))]
                yield ChosenSet(shards=self._strategies[again].draw(number), source=REPEAT)
                continue
            number = numbers[strategy]
            numbers[strategy] += 1
            remembered.append((strategy, number))
            yield ChosenSet(shards=self._strategies[strategy].draw(number), source=self._names[strategy])

    def _dealt(self, start: int, stop: int) -> NDArray[np.int64]:
        """Index of the strategy of each position, shape (P,); -1 for repeats.

        Multiples of the golden ratio, modulo 1, are spread more evenly than draws, and known without the earlier ones.
        """
        position_P = np.arange(start, stop, dtype=np.int64)
        places_P = (self._offset + position_P * _GOLDEN) % 1.0
        strategy_P = np.minimum(np.searchsorted(self._ends, places_P, side="right"), len(self._names) - 1)
        return np.where((position_P + 1) % REPEAT_EVERY == 0, -1, strategy_P)

    @staticmethod
    def _remembered(dealt_P: NDArray[np.int64], numbers: Sequence[int]) -> deque[tuple[int, int]]:
        """Strategies and numbers of the last sets before a position."""
        left = list(numbers)
        found: deque[tuple[int, int]] = deque(maxlen=_NUM_REMEMBERED)
        for strategy in dealt_P[::-1]:
            if len(found) == _NUM_REMEMBERED:
                break
            if strategy >= 0:
                left[strategy] -= 1
                found.appendleft((int(strategy), left[strategy]))
        return found
