"""The micro-benchmark: measures sets of shards. Collecting, replaying and rewarding all go through it.

Shape suffixes: S sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from autoshard.core import AccessProfile, LocalShard
from autoshard.core.errors import DeviceError
from autoshard.formats.samples import MeasuredShard
from bench.arena import Arena, free_bytes
from bench.caches import CacheFlush
from bench.devices import BenchDevice, find_device
from bench.inputs import BatchCache
from bench.kernels import ShardSet, check_measurable, weight_floats
from bench.location import locate
from bench.timing import RoundSettings, intra_op_threads, time_rounds

#: Copies of the reference set that each group holds, in memory of their own; their mean is the reference.
_REFERENCE_COPIES = 3


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

    @classmethod
    def for_device(cls, device: BenchDevice) -> Settings:
        """The usual settings of a device."""
        if device.is_cuda:
            return cls(reference_bags=65536)
        rounds = RoundSettings(num_warmup=2, num_measured=9, num_dropped=2, flush_every_run=False)
        return cls(rounds=rounds)

    @classmethod
    def for_collecting(cls, device: BenchDevice) -> Settings:
        """Settings that spend the time on more sets rather than on more rounds, which a cost model gains more by.

        Median of three rounds, nearly all of the time in kernels: on 2 cores with other processes on both, a sample
        repeats itself to 2.5%, against 1.8% with eleven rounds in almost four times the time.
        """
        if device.is_cuda:
            return cls.for_device(device)
        rounds = RoundSettings(num_warmup=0, num_measured=3, num_dropped=1, flush_every_run=False)
        return cls(rounds=rounds, max_group_sets=48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Kernel latency of one set. An empty set takes no time.

    Attributes:
        shards: The set, with what the measured batches held.
        forward_ms: Forward kernel.
        backward_ms: Backward kernel with the fused optimizer.
        forward_spread: How far apart the runs were, relative to their mean, see `Location`.
        backward_spread: As `forward_spread`.
        reference_forward_ms: The reference set in the same rounds.
        reference_backward_ms: As `reference_forward_ms`.
        num_rounds: Runs measured.
        group: Sets with the same number were measured in the same rounds.
    """

    shards: tuple[MeasuredShard, ...]
    forward_ms: float
    backward_ms: float
    forward_spread: float
    backward_spread: float
    reference_forward_ms: float
    reference_backward_ms: float
    num_rounds: int
    group: int

    @property
    def kernel_ms(self) -> float:
        """Forward plus backward."""
        return self.forward_ms + self.backward_ms

    @property
    def reference_ms(self) -> float:
        """Forward plus backward of the reference set."""
        return self.reference_forward_ms + self.reference_backward_ms


class Harness:
    """Measures sets of shards on one device; holds the memory that they run on.

    Args of the constructor:
        device: Where to measure.
        settings: How; the device's usual ones when left out.
    """

    def __init__(self, device: BenchDevice, settings: Settings | None = None) -> None:
        self.device = device
        self.settings = Settings.for_device(device) if settings is None else settings
        max_bytes = free_bytes(device.device) if self.settings.max_bytes is None else self.settings.max_bytes
        self._reference = reference_set(self.settings.reference_bags)
        # The smallest common dim is 4, with one moment per row: moments never need more than a quarter of the weights.
        self._max_floats = max_bytes // 5
        on_gpu = device.is_cuda  # there the caching allocator does the same
        self._weights = Arena(0 if on_gpu else self._max_floats, device.device)
        self._moments = Arena(0 if on_gpu else self._max_floats // 4, device.device)
        self._flush = CacheFlush(device.device)
        self._batch_of = BatchCache()
        self._num_groups = 0
        self._measure_group([self._reference])  # FBGEMM compiles its kernels when they first run

    def measure(
        self, sets: Sequence[Sequence[LocalShard]], advance: Callable[[float], None] = lambda _: None
    ) -> list[Measurement]:
        """Measures sets of shards, in groups whose rounds are interleaved.

        Args:
            sets: What one rank runs, for each set.
            advance: Told after every round how many sets' worth of work it was.

        Returns:
            One measurement per set, in order.

        Raises:
            InvalidTableError: If a shard is of a kind that cannot be measured.
            DeviceError: If a set does not fit in memory.
        """
        for shards in sets:
            for shard in shards:
                check_measurable(shard)
        result: list[Measurement] = []
        for group in self._groups(sets):
            share = len(group) / self.settings.rounds.num_rounds
            result += self._measure_group(group, on_round=partial(advance, share))
        return result

    def _groups(self, sets: Sequence[Sequence[LocalShard]]) -> Iterator[list[Sequence[LocalShard]]]:
        reserved = _REFERENCE_COPIES * weight_floats(self._reference)
        group: list[Sequence[LocalShard]] = []
        used = reserved
        for shards in sets:
            needed = weight_floats(shards) + 16
            if reserved + needed > self._max_floats:
                raise DeviceError(
                    f"a set of {len(shards)} shards has {4 * needed:,} bytes of weights, more than the "
                    f"{4 * (self._max_floats - reserved):,} that the benchmark may fill on {self.device.name}"
                )
            if group and (used + needed > self._max_floats or len(group) >= self.settings.max_group_sets):
                yield group
                group, used = [], reserved
            group.append(shards)
            used += needed
        if group:
            yield group

    def _measure_group(
        self, sets: Sequence[Sequence[LocalShard]], on_round: Callable[[], None] = lambda: None
    ) -> list[Measurement]:
        self._weights.clear()
        self._moments.clear()
        self._num_groups += 1
        rounds = self.settings.rounds
        with intra_op_threads(self.settings.num_threads), _memory_as_device_error(self.device):
            references = [self._build(self._reference) for _ in range(_REFERENCE_COPIES)]
            kernels = [self._build(shards) for shards in sets]
            forward_ms_SR, backward_ms_SR = time_rounds(
                [*references, *kernels], self._flush, rounds, seed=self._num_groups, on_round=on_round
            )
        for row, kernel in enumerate(kernels, start=_REFERENCE_COPIES):
            if not kernel.measured:  # nothing but the clock's own time
                forward_ms_SR[row] = backward_ms_SR[row] = 0.0
        forward = locate(forward_ms_SR, rounds.num_dropped)
        backward = locate(backward_ms_SR, rounds.num_dropped)
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
            )
            for row, kernel in enumerate(kernels, start=_REFERENCE_COPIES)
        ]

    def _build(self, shards: Sequence[LocalShard]) -> ShardSet:
        batches = [self._batch_of(shard) for shard in shards]
        return ShardSet(batches, self._weights, self._moments, self.device.device)


@contextmanager
def _memory_as_device_error(device: BenchDevice) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
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
