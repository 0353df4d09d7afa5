"""Proof that the flush empties the last cache before memory: `python -m studies eviction --device cpu`.

A buffer that fits in the cache is read twice in a row, and once more after a flush. After a flush that works, the read
takes longer than the second one. The same is done with a small write in place of the flush, as the baseline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Final

import torch
import typer

from autoshard.commands.options import command_options
from autoshard.runtime.processes.threads import intra_op_threads
from bench.measuring.caches import CacheFlush, device_cache_bytes
from bench.measuring.devices import find_device
from studies.frame import BenchDeviceOption, OutputOptions, StudyResult

_MAX_BUFFER_BYTES: Final = 8 * 2**20
_CACHE_LINE_BYTES: Final = 64
_REPETITIONS: Final = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """Slowdown of reading a buffer after a flush and after a small write.

    Attributes:
        cache_bytes: Size of the device's last cache before memory.
        buffer_bytes: Size of the buffer.
        after_flush: Median time after a flush over the median time of reading again at once.
        after_small_write: The same after a write of 256 bytes: what noise alone makes of it.
    """

    cache_bytes: int
    buffer_bytes: int
    after_flush: float
    after_small_write: float


class _Gather:
    """Reads one number of every cache line of a buffer, in random order, so that no prefetcher helps."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._values = torch.rand(num_bytes // 4, device=device)
        self._order = torch.randperm(num_bytes // 4, device=device)[: num_bytes // _CACHE_LINE_BYTES]

    def read_ms(self) -> float:
        if self._values.device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self._values.index_select(0, self._order)
            stop.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(stop))
        start_s = time.thread_time()
        self._values.index_select(0, self._order)
        return (time.thread_time() - start_s) * 1e3


def measure_eviction(device: torch.device, repetitions: int = _REPETITIONS) -> Eviction:
    """Measures the flush of one device on one thread.

    Args:
        device: Whose cache is flushed.
        repetitions: Reads of each kind, at least 1; medians are taken.
    """
    cache_bytes = device_cache_bytes(device)
    buffer_bytes = min(_MAX_BUFFER_BYTES, cache_bytes // 4)
    gather, flush, little = _Gather(buffer_bytes, device), CacheFlush(device), torch.zeros(64, device=device)
    with intra_op_threads(1):
        return Eviction(
            cache_bytes=cache_bytes,
            buffer_bytes=buffer_bytes,
            after_flush=_slowdown(gather, flush, repetitions),
            after_small_write=_slowdown(gather, lambda: little.add_(1.0), repetitions),
        )


def _slowdown(gather: _Gather, between: Callable[[], object], repetitions: int) -> float:
    again_ms, after_ms = [], []
    for _ in range(repetitions):
        gather.read_ms()
        again_ms.append(gather.read_ms())
        between()
        after_ms.append(gather.read_ms())
    return statistics.median(after_ms) / statistics.median(again_ms)


@command_options()
class EvictionOptions:
    """Options of the study `eviction`."""

    device: BenchDeviceOption = "auto"
    repetitions: Annotated[int, typer.Option(min=1, help="Reads of each kind; medians are taken.")] = _REPETITIONS


def main(options: EvictionOptions, output: OutputOptions) -> None:
    """Measures whether the flush between runs empties the last cache before memory.

    Example:
        python -m studies eviction --device cpu
    """
    target = find_device(options.device).device
    found = measure_eviction(target, options.repetitions)
    text = (
        f"{target}, {found.cache_bytes / 2**20:.0f} MiB of cache: reading {found.buffer_bytes / 2**20:.1f} MiB takes "
        f"{found.after_flush:.2f} times as long after a flush, {found.after_small_write:.2f} times after a write of "
        f"256 bytes (medians of {options.repetitions})"
    )
    output.write(StudyResult(name="eviction", document=asdict(found), notes=(text,)))
