"""The micro-benchmark: measures sets of shards. Collecting, replaying and rewarding all go through it.

Shape suffixes: S sets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from autoshard.core import AccessProfile, LocalShard
from autoshard.core.errors import AutoshardError, DeviceError, InputError
from autoshard.formats.samples import MeasuredShard
from autoshard.runtime.threads import intra_op_threads
from bench.arena import Arenas, free_bytes
from bench.attempts import Timing, mean_of
from bench.caches import CacheFlush
from bench.clocks import DeviceClocks, read_clocks
from bench.devices import BenchDevice, find_device
from bench.inputs import BatchCache
from bench.kernels import ShardSet
from bench.location import locate
from bench.measurable import check_measurable, num_draws, set_bytes
from bench.timing import RoundSettings, time_rounds

#: Copies of the reference set that each group holds, in memory of their own; their mean is the reference.
_REFERENCE_COPIES = 3

OnSkip = Callable[[int, AutoshardError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How sets are measured."""

    rounds: RoundSettings = field(default_factory=RoundSettings)
    num_threads: int = 1
    """Intra-op threads of a CPU kernel: what one of several ranks on a machine gets."""
    max_group_sets: int = 24
    """Sets that share their rounds."""
    max_bytes: int | None = None
    """Memory for the weights of a group; None for a share of what is free."""
    reference_bags: int = 1024
    """Batch of the reference set."""
    max_spread: float = 0.075
    """Spread of single runs, relative to their mean, above which a set is measured again. Measurements of a set are
    averaged (`mean_of`), so that twice the spread takes four of them."""
    max_attempts: int = 4
    """Measurements of a set, after which their mean is marked as noisy if its spread is above the bound still."""

    @classmethod
    def for_device(cls, device: BenchDevice) -> Settings:
        """The usual settings of a device."""
        if device.is_cuda:
            return cls(reference_bags=65536)
        rounds = RoundSettings(num_warmup=2, num_measured=9, num_dropped=2, flush_every_run=False)
        return cls(rounds=rounds)

    @classmethod
    def for_collecting(cls, device: BenchDevice, num_rounds: int | None = None) -> Settings:
        """Settings for many sets: larger groups, and on a CPU one round for warming up.

        Args:
            device: Where sets are measured.
            num_rounds: Rounds that count; 9 on a CPU and 10 on a GPU when left out. Fewer leave time for more sets.
        """
        usual = cls.for_device(device)
        number = usual.rounds.num_measured if num_rounds is None else num_rounds
        # Two dropped at each end of nine, one of three: about a fifth, and the median where there are few.
        dropped = min(2, (number - 1) // 2 if number < 5 else (number - 1) // 4)
        rounds = replace(usual.rounds, num_measured=number, num_dropped=dropped)
        if device.is_cuda:
            return replace(usual, rounds=rounds, max_group_sets=48)
        return replace(usual, rounds=replace(rounds, num_warmup=1), max_group_sets=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Timing):
    """Kernel latency of one set, the backward kernel with its fused optimizer. An empty set takes no time.

    Attributes:
        shards: The set, with what the measured batches held.
        group: Sets with the same number were measured in the same rounds.
        clocks: The GPU's clocks after the rounds; None on a CPU.
    """

    shards: tuple[MeasuredShard, ...]
    group: int
    clocks: DeviceClocks | None = None

    @property
    def kernel_ms(self) -> float:
        """Forward plus backward."""
        return self.forward_ms + self.backward_ms

    @property
    def reference_ms(self) -> float:
        """Forward plus backward of the reference set."""
        return self.reference_forward_ms + self.reference_backward_ms


@dataclass(slots=True)
class _Waiting:
    """A set that is not measured well enough yet, and what was measured so far."""

    index: int
    shards: Sequence[LocalShard]
    attempts: list[Measurement] = field(default_factory=list)


class Harness:
    """Measures sets of shards on one device; holds the memory that they run on.

    Args of the constructor:
        device: Where to measure.
        settings: How; the device's usual ones when left out.
    """

    def __init__(self, device: BenchDevice, settings: Settings | None = None) -> None:
        self.device = device
        self.settings = Settings.for_device(device) if settings is None else settings
        self._max_bytes = free_bytes(device.device) if self.settings.max_bytes is None else self.settings.max_bytes
        self._reference = reference_set(self.settings.reference_bags)
        self._reserved_bytes = _REFERENCE_COPIES * set_bytes(self._reference)
        # A GPU's caching allocator does what the arenas do.
        self._arenas = Arenas(0 if device.is_cuda else self._max_bytes, device.device)
        self._flush = CacheFlush(device.device)
        self._batches_of = BatchCache()
        self._num_groups = 0
        self._timed_s = self._wall_s = 0.0
        self._measure_group([self._reference])  # FBGEMM compiles its kernels when they first run
        self._timed_s = self._wall_s = 0.0

    @property
    def timed_share(self) -> float:
        """Share of the wall time of all measuring so far that went to counted runs of kernels, references included."""
        return self._timed_s / self._wall_s if self._wall_s else 0.0

    def measure(
        self, sets: Sequence[Sequence[LocalShard]], advance: Callable[[float], None] = lambda _: None
    ) -> list[Measurement]:
        """Measures sets of shards, in groups whose rounds are interleaved.

        Args:
            sets: What one rank runs, for each set.
            advance: Told after every round how many sets' worth of work it was; measuring again is not counted.

        Returns:
            One measurement per set, in order.

        Raises:
            InvalidTableError: If a shard is of a kind that cannot be measured.
            DeviceError: If a set does not fit in memory.
        """
        for shards in sets:
            self._check(shards)
        found = dict(self.measure_each(sets, advance=advance))
        return [found[index] for index in range(len(sets))]

    def measure_each(
        self,
        sets: Iterable[Sequence[LocalShard]],
        *,
        advance: Callable[[float], None] = lambda _: None,
        on_skip: OnSkip | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Measurement]]:
        """Measures sets one group after the other; a set whose runs disagree is measured again with the next group.

        Args:
            sets: What to measure; taken when a group is made, so they may be endless.
            advance: As in `measure`.
            on_skip: Told of sets that cannot be measured, with the reason; without it, the reason is raised.
            is_over: Asked before every group; once it holds, what waits to be measured again is given as it is.

        Yields:
            The place of a set in `sets` and its measurement, each set once, not always in order.

        Raises:
            InvalidTableError: If a shard is of a kind that cannot be measured, and there is no `on_skip`.
            DeviceError: If a set does not fit in memory, likewise.
        """
        coming = (_Waiting(index, shards) for index, shards in enumerate(sets))
        waiting: deque[_Waiting] = deque()
        while not is_over() and (group := self._next_group(waiting, coming, on_skip)):
            share = sum(not item.attempts for item in group) / self.settings.rounds.num_rounds
            for item, result in self._measured(group, partial(advance, share), on_skip):
                item.attempts.append(result)
                mean = mean_of(item.attempts, self.settings.max_spread)
                if mean.is_noisy and len(item.attempts) < self.settings.max_attempts:
                    waiting.append(item)
                else:
                    yield item.index, mean
        for item in waiting:
            if item.attempts:
                yield item.index, mean_of(item.attempts, self.settings.max_spread)

    def _next_group(
        self, waiting: deque[_Waiting], coming: Iterator[_Waiting], on_skip: OnSkip | None
    ) -> list[_Waiting]:
        """Sets that fit together; one that does not fit any more is put back."""
        group: list[_Waiting] = []
        used = self._reserved_bytes
        while len(group) < self.settings.max_group_sets:
            item = waiting.popleft() if waiting else next(coming, None)
            if item is None:
                break
            if not item.attempts:
                try:
                    self._check(item.shards)
                except (DeviceError, InputError) as error:
                    if on_skip is None:
                        raise
                    on_skip(item.index, error)
                    continue
            needed = set_bytes(item.shards)
            if group and used + needed > self._max_bytes:
                waiting.appendleft(item)
                break
            group.append(item)
            used += needed
        return group

    def _check(self, shards: Sequence[LocalShard]) -> None:
        for shard in shards:
            check_measurable(shard, on_cuda=self.device.is_cuda)
        needed, free = set_bytes(shards), self._max_bytes - self._reserved_bytes
        if needed > free:
            raise DeviceError(
                f"a set of {len(shards)} shards has {needed:,} bytes of weights and optimizer state, more than the "
                f"{free:,} that the benchmark may fill on {self.device.name}"
            )

    def _measured(
        self, group: list[_Waiting], on_round: Callable[[], None], on_skip: OnSkip | None
    ) -> list[tuple[_Waiting, Measurement]]:
        """Measures a group; when memory runs out on the way, in halves, down to the set that does not fit."""
        try:
            results = self._measure_group([item.shards for item in group], on_round)
        except DeviceError as error:
            if on_skip is None:
                raise
            if len(group) == 1:
                on_skip(group[0].index, error)
                return []
            half = len(group) // 2
            return [*self._measured(group[:half], on_round, on_skip), *self._measured(group[half:], on_round, on_skip)]
        return list(zip(group, results, strict=True))

    def _measure_group(
        self, sets: Sequence[Sequence[LocalShard]], on_round: Callable[[], None] = lambda: None
    ) -> list[Measurement]:
        started = time.perf_counter()
        self._arenas.clear()
        self._num_groups += 1
        rounds = self.settings.rounds
        with intra_op_threads(self.settings.num_threads), _memory_as_device_error(self.device):
            references = [self._build(self._reference) for _ in range(_REFERENCE_COPIES)]
            kernels = [self._build(shards) for shards in sets]
            forward_ms_SR, backward_ms_SR = time_rounds(
                [*references, *kernels], self._flush, rounds, seed=self._num_groups, on_round=on_round
            )
        self._timed_s += float(forward_ms_SR.sum() + backward_ms_SR.sum()) / 1e3
        self._wall_s += time.perf_counter() - started
        for row, kernel in enumerate(kernels, start=_REFERENCE_COPIES):
            if not kernel.measured:  # nothing but the clock's own time
                forward_ms_SR[row] = backward_ms_SR[row] = 0.0
        forward = locate(forward_ms_SR, rounds.num_dropped)
        backward = locate(backward_ms_SR, rounds.num_dropped)
        clocks = read_clocks(self.device)
        return [
            Measurement(
                shards=kernel.measured,
                forward_ms=float(forward.mean_ms_S[row]),
                backward_ms=float(backward.mean_ms_S[row]),
                forward_spread=float(forward.spread_S[row]),
                backward_spread=float(backward.spread_S[row]),
                reference_forward_ms=float(np.mean(forward.mean_ms_S[:_REFERENCE_COPIES])),
                reference_backward_ms=float(np.mean(backward.mean_ms_S[:_REFERENCE_COPIES])),
                num_rounds=rounds.num_measured,
                group=self._num_groups,
                clocks=clocks,
            )
            for row, kernel in enumerate(kernels, start=_REFERENCE_COPIES)
        ]

    def _build(self, shards: Sequence[LocalShard]) -> ShardSet:
        draws = [self._batches_of(shard, num_draws(shard)) for shard in shards]
        return ShardSet(draws, self._arenas, self.device.device)


@contextmanager
def _memory_as_device_error(device: BenchDevice) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise DeviceError(f"{device.name} ran out of memory; others may be using it") from error


def measure(
    sets: Sequence[Sequence[LocalShard]], device: BenchDevice | None = None, settings: Settings | None = None
) -> list[Measurement]:
    """Measures sets of shards once; `Harness` does so many times over.

    Args:
        sets: What one rank runs, for each set.
        device: Where; a GPU if there is one, when left out.
        settings: How; the device's usual ones when left out.

    Raises:
        InvalidTableError: If a shard is of a kind that cannot be measured.
        DeviceError: If a set does not fit in memory.
    """
    return Harness(find_device() if device is None else device, settings).measure(sets)


def reference_set(num_bags: int) -> tuple[LocalShard, ...]:
    """The set that is measured beside all others: eight tables of middling size, hot and cold."""
    shards = []
    for index in range(8):
        num_embeddings = num_bags * (16 << (index % 4))
        shards.append(
            LocalShard(
                table=f"reference{index}",
                num_embeddings=num_embeddings,
                embedding_dim=32,
                num_bags=num_bags,
                pooling_factor=4.0 + index,
                access=AccessProfile.zipf(num_embeddings, 0.6 + 0.1 * index),
            )
        )
    return tuple(shards)
