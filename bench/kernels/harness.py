"""The micro-benchmark: measures sets of shards. Collecting, replaying and rewarding all go through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from autoshard.core import AccessProfile, LocalShard
from autoshard.core.errors import DeviceError
from autoshard.formats.stores.samples import MeasuredShard
from bench.kernels.fused import ShardSet
from bench.kernels.inputs import BatchCache
from bench.kernels.measurable import buffer_bytes, check_measurable, num_draws, set_bytes
from bench.measuring.arena import Arenas
from bench.measuring.attempts import Timing
from bench.measuring.caches import CacheFlush
from bench.measuring.devices import BenchDevice
from bench.measuring.rounds import GroupHarness, GroupSettings
from bench.measuring.timing import RoundSettings, num_to_drop

#: Memory that sets of a group share on a CPU while samples are collected: the first touch of a GiB can take more than a
#: second, and a short run is over before it has used much of it again. Sets near the memory limit fill up to 1 GiB; a
#: quarter more is room for others beside them.
_COLLECTED_GROUP_BYTES = 5 * 2**28
#: Batch of a GPU's reference, whose tables are 1 GB then: one copy leaves the card to the ranks that are replayed.
_CUDA_REFERENCE_BAGS = 16_384
#: Rounds after which a set may stop on a CPU, and the standard error at which it does. Of the samples of
#: `docs/data/samples`, half have spreads below 3.9%, so that they stop after 4 to 6 rounds instead of 9.
_LEAST_ROUNDS, _ENOUGH = 4, 0.02
#: Spread of single runs above which a calibration measures a set again.
_WIDE_SPREAD = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(GroupSettings):
    """How sets are measured; `max_bytes` is for the weights of a group."""

    reference_bags: int = 1024
    """Batch of the reference set."""
    max_spread: float = 0.075
    max_attempts: int = 4

    @classmethod
    def for_device(cls, device: BenchDevice) -> Settings:
        """The usual settings of a device."""
        if device.is_cuda:
            return cls(reference_bags=_CUDA_REFERENCE_BAGS, num_references=1)
        rounds = RoundSettings(num_warmup=2, num_measured=9, num_dropped=2, flush_every_run=False)
        return cls(rounds=rounds)

    @classmethod
    def for_collecting(cls, device: BenchDevice, num_rounds: int | None = None) -> Settings:
        """Settings for many sets: larger groups, and on a CPU one round for warming up and fewer rounds of steady sets.

        Args:
            device: Where sets are measured.
            num_rounds: Most rounds that count; 9 on a CPU and 10 on a GPU when left out. Fewer leave time for more
                sets.
        """
        usual = cls.for_device(device)
        number = usual.rounds.num_measured if num_rounds is None else num_rounds
        rounds = replace(usual.rounds, num_measured=number, num_dropped=num_to_drop(number))
        if device.is_cuda:
            return replace(usual, rounds=rounds, max_group_sets=48)
        least = _LEAST_ROUNDS if number > _LEAST_ROUNDS else None
        rounds = replace(rounds, num_warmup=1, num_least=least, enough=_ENOUGH)
        return replace(usual, rounds=rounds, max_group_sets=32, group_bytes=_COLLECTED_GROUP_BYTES)

    @classmethod
    def for_calibrating(cls, device: BenchDevice, num_rounds: int | None = None) -> Settings:
        """As `for_collecting`; only sets whose runs disagree widely are measured again, and once more.

        A calibration gains more by another set than by a second measurement of one: with nine rounds instead of three,
        models of the same sets err as much (4.24 and 4.16%, 436 sets of the Xeon of docs/data).
        """
        return replace(cls.for_collecting(device, num_rounds), max_spread=_WIDE_SPREAD, max_attempts=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Timing):
    """Kernel latency of one set, the backward kernel with its fused optimizer. An empty set takes no time.

    Attributes:
        shards: The set, with what the measured batches held.
        group: Sets with the same number were measured in the same rounds.
        num_updated_S: Of each shard, rows of a replica that any of its ranks hits; 0 of others.
    """

    shards: tuple[MeasuredShard, ...]
    group: int
    num_updated_S: tuple[int, ...] = ()

    @property
    def kernel_ms(self) -> float:
        """Forward plus backward."""
        return self.forward_ms + self.backward_ms


class Harness(GroupHarness[Sequence[LocalShard], ShardSet, Measurement]):
    """Measures sets of shards on one device; holds the memory that they run on.

    Args of the constructor:
        device: Where to measure.
        settings: How; the device's usual ones when left out.
    """

    def __init__(self, device: BenchDevice, settings: Settings | None = None) -> None:
        self.settings = Settings.for_device(device) if settings is None else settings
        super().__init__(device, self.settings, reference_set(self.settings.reference_bags), CacheFlush(device.device))
        # A GPU's caching allocator does what the arenas do.
        self._arenas = Arenas(0 if device.is_cuda else self._max_bytes, device.device)
        self._batches_of = BatchCache(device.device)
        self._measure_group([self._reference])  # FBGEMM compiles its kernels when they first run
        self._timed_s = self._wall_s = 0.0

    def check(self, item: Sequence[LocalShard]) -> None:
        """Makes sure that a set can be measured.

        Raises:
            InvalidTableError: If a shard is of a kind that cannot be.
            DeviceError: If the set does not fit in memory.
        """
        for shard in item:
            check_measurable(shard, on_cuda=self.device.is_cuda)
        needed, free = self.needs(item)[0], self._max_bytes - self._reserved_bytes
        if needed > free:
            raise DeviceError(
                f"a set of {len(item)} shards takes {needed:,} bytes, more than the "
                f"{free:,} that the benchmark may fill on {self.device.name}"
            )

    def needs(self, item: Sequence[LocalShard]) -> tuple[int, float]:
        """Bytes that a set takes while it is measured; groups are not limited by time.

        On a GPU these are those of its inputs as well; a host has room for them beside the arenas.
        """
        return set_bytes(item) + (buffer_bytes(item) if self.device.is_cuda else 0), 0.0

    def _measure_group(
        self, items: Sequence[Sequence[LocalShard]], on_round: Callable[[], None] = lambda: None
    ) -> list[Measurement]:
        self._arenas.clear()
        self._batches_of.prepare((shard, num_draws(shard)) for shards in items for shard in shards)
        return super()._measure_group(items, on_round)

    def _build(self, item: Sequence[LocalShard], _seed: int) -> ShardSet:
        draws = [self._batches_of(shard, num_draws(shard)) for shard in item]
        return ShardSet(draws, self._arenas, self.device.device)

    def _result(self, kernel: ShardSet, timing: Timing) -> Measurement:
        return Measurement(
            **asdict(timing), shards=kernel.measured, group=self.num_groups, num_updated_S=kernel.num_updated_S
        )


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
