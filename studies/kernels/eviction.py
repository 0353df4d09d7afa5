"""Proof that the flush empties the last cache before memory: `python -m studies eviction --device cpu`.

A buffer that fits in the cache is read twice in a row, and once more after a flush. After a flush that works, the read
takes longer than the second one. The same is done with a small write in place of the flush, as the baseline.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Final

import torch
import typer

from autoshard.commands.arguments import DeviceOption
from autoshard.commands.options import command_options
from autoshard.core.choices import Device
from autoshard.runtime.processes.threads import intra_op_threads
from bench.measuring.caches import CacheFlush, device_cache_bytes
from bench.measuring.devices import find_device
from bench.measuring.timing import device_clock, led_ms
from studies.frame import OutputOptions, StudyResult

_MAX_CPU_BUFFER_BYTES: Final = 8 * 2**20
_CACHE_LINE_BYTES: Final = 64
_REPETITIONS: Final = 11
_WARMUP: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """Slowdown of reading a buffer after a flush and after a small write.

    Attributes:
        cache_bytes: Size of the device's last cache before memory.
        buffer_bytes: Size of the buffer: of a GPU, half its cache.
        flush_bytes: Bytes that a flush touches.
        again_ms: Median time of reading again at once.
        after_flush: Median time after a flush over `again_ms`.
        after_two_flushes: The same after two: no more where one leaves nothing in the cache.
        after_small_write: The same after a write of 256 bytes: what noise alone makes of it.
    """

    cache_bytes: int
    buffer_bytes: int
    flush_bytes: int
    again_ms: float
    after_flush: float
    after_two_flushes: float
    after_small_write: float


class _Gather:
    """Reads one number of every cache line of a buffer, in random order, so that no prefetcher helps."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._values = torch.rand(num_bytes // 4, device=device)
        num_lines = num_bytes // _CACHE_LINE_BYTES
        self._order = torch.randperm(num_lines, device=device) * (_CACHE_LINE_BYTES // 4)
        self._clock = device_clock(device)

    def read_ms(self, before: Callable[[], object]) -> float:
        """Milliseconds of a read after something else, both queued at once on a GPU."""
        return led_ms(lambda: self._values.index_select(0, self._order), self._clock, before=before)


def measure_eviction(device: torch.device, repetitions: int = _REPETITIONS) -> Eviction:
    """Measures the flush of one device on one thread.

    Args:
        device: Whose cache is flushed.
        repetitions: Reads of each kind, at least 1; medians are taken.
    """
    cache_bytes = device_cache_bytes(device)
    buffer_bytes = cache_bytes // 2 if device.type == "cuda" else min(_MAX_CPU_BUFFER_BYTES, cache_bytes // 4)
    with intra_op_threads(1):
        gather, flush, little = _Gather(buffer_bytes, device), CacheFlush(device), torch.zeros(64, device=device)

        def twice() -> None:
            flush()
            flush()

        ways: tuple[Callable[[], object], ...] = (flush, twice, lambda: little.add_(1.0))
        found = [_after(gather, between, repetitions) for between in ways]
    again_ms = statistics.median(again for again, _ in found)
    return Eviction(
        cache_bytes=cache_bytes,
        buffer_bytes=buffer_bytes,
        flush_bytes=flush.num_bytes,
        again_ms=again_ms,
        after_flush=found[0][1] / found[0][0],
        after_two_flushes=found[1][1] / found[1][0],
        after_small_write=found[2][1] / found[2][0],
    )


def _after(gather: _Gather, between: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Median milliseconds of reading again at once, and after something."""
    again_ms, after_ms = [], []
    for number in range(_WARMUP + repetitions):
        gather.read_ms(lambda: None)
        again, after = gather.read_ms(lambda: None), gather.read_ms(between)
        if number >= _WARMUP:
            again_ms.append(again)
            after_ms.append(after)
    return statistics.median(again_ms), statistics.median(after_ms)


def described(found: Eviction) -> str:
    """The proof in a sentence."""
    return (
        f"reading {found.buffer_bytes / 2**20:.1f} MiB of a cache of {found.cache_bytes / 2**20:.0f} MiB takes "
        f"{found.after_flush:.2f} times as long after a flush of {found.flush_bytes / 2**20:.0f} MiB, "
        f"{found.after_two_flushes:.2f} times after two, {found.after_small_write:.2f} times after a write of 256 bytes"
    )


@command_options()
class EvictionOptions:
    """Options of the study `eviction`."""

    device: DeviceOption = Device.AUTO
    repetitions: Annotated[int, typer.Option(min=1, help="Reads of each kind; medians are taken.")] = _REPETITIONS


def main(options: EvictionOptions, output: OutputOptions) -> None:
    """Measures whether the flush between runs empties the last cache before memory.

    Example:
        python -m studies eviction --device cpu
    """
    target = find_device(options.device).device
    found = measure_eviction(target, options.repetitions)
    text = f"{target}: {described(found)} (medians of {options.repetitions})"
    output.write(StudyResult(name="eviction", document=asdict(found), notes=(text,)))
