"""Timed runs of kernels: interleaved rounds, flushed caches, clocks of the device.

Shape suffixes: S sets, R rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from autoshard.core.errors import InvalidOptionError
from bench.measuring.caches import CacheFlush
from bench.measuring.robust_stats import MsArray


class TimedKernel(Protocol):
    """What can be timed: a forward pass whose result the backward pass takes."""

    @property
    def is_idle(self) -> bool:
        """Whether it runs nothing."""
        ...

    def forward(self) -> Any:
        """Runs the forward pass."""
        ...

    def backward(self, outputs: Any) -> None:
        """Runs the backward pass on what `forward` returned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """How often kernels run, and which runs count.

    Source:
        AutoShard Algorithm 3 and B.1: W = 5, B = 10, R = 2, a flush before every run. Differs on a CPU, see
        `Settings.for_device`.
    """

    num_warmup: int = 5
    """Rounds that are not counted, W."""
    num_measured: int = 10
    """Rounds that are, B."""
    num_dropped: int = 2
    """Highest and lowest of them that are dropped at each end, R."""
    flush_every_run: bool = True
    """Flush before every run; otherwise once per round, which is enough where a cache flush takes longer than a run."""

    def __post_init__(self) -> None:
        if self.num_warmup < 0 or self.num_dropped < 0 or self.num_measured <= 2 * self.num_dropped:
            raise InvalidOptionError(
                f"must leave at least one of {self.num_measured} rounds, got {self.num_dropped} dropped at each end",
                field="num_dropped",
            )

    @property
    def num_rounds(self) -> int:
        """Rounds that are run, counted or not."""
        return self.num_warmup + self.num_measured


class _WallClock:
    """Monotonic clock of the machine."""

    def mark(self) -> float:
        return time.perf_counter()

    def lead(self) -> None:
        """Nothing is queued on a CPU."""

    def settle(self) -> None:
        """Nothing is queued on a CPU."""

    def elapsed_ms(self, start: float, stop: float) -> float:
        return (stop - start) * 1e3


class _ThreadClock(_WallClock):
    """Time that the calling thread has run: it stands still while another process has the core.

    A kernel of one thread takes as long on this clock as on the wall while the machine is otherwise idle. With
    another process busy on each of 2 cores, the spread of repeated runs is 3% instead of 29%.
    """

    def mark(self) -> float:
        return time.thread_time()


class _CudaClock:
    """CUDA events on the current stream."""

    #: Cycles that the GPU idles before each run, so that launching from Python (about 1 ms) is not part of it.
    _LEAD_CYCLES = 3_000_000

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lead(self) -> None:
        torch.cuda._sleep(self._LEAD_CYCLES)

    def settle(self) -> None:
        torch.cuda.synchronize()

    def elapsed_ms(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return float(start.elapsed_time(stop))


def time_rounds(
    kernels: Sequence[TimedKernel],
    flush: CacheFlush,
    settings: RoundSettings,
    *,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> tuple[MsArray, MsArray]:
    """Runs every kernel once per round, in an order drawn anew for each round.

    Args:
        kernels: What to run; between two runs of a kernel all others run and the cache is flushed.
        flush: Empties the cache.
        settings: Number of rounds.
        seed: Of the order.
        on_round: Called after every round.

    Returns:
        Forward and backward latencies of the counted rounds, each (S, R).
    """
    clock = _clock(flush.device)
    rng = np.random.default_rng(seed)
    marks = []
    with quiet_process():
        for round_ in range(settings.num_rounds):
            if not settings.flush_every_run:
                flush()
            for index in rng.permutation(len(kernels)).tolist():
                run = _run_once(kernels[index], flush if settings.flush_every_run else None, clock)
                if round_ >= settings.num_warmup:
                    marks.append((index, round_ - settings.num_warmup, run))
            clock.settle()
            on_round()
    forward_ms_SR = np.zeros((len(kernels), settings.num_measured))
    backward_ms_SR = np.zeros_like(forward_ms_SR)
    for index, column, (start, middle, stop) in marks:
        forward_ms_SR[index, column] = clock.elapsed_ms(start, middle)
        backward_ms_SR[index, column] = clock.elapsed_ms(middle, stop)
    return forward_ms_SR, backward_ms_SR


def _clock(device: torch.device) -> Any:
    if device.type == "cuda":
        return _CudaClock()
    return _ThreadClock() if torch.get_num_threads() == 1 else _WallClock()


def _run_once(kernel: TimedKernel, flush: CacheFlush | None, clock: Any) -> tuple[Any, Any, Any]:
    if flush is not None:
        flush()
    clock.lead()
    start = clock.mark()
    outputs = kernel.forward()
    middle = clock.mark()
    kernel.backward(outputs)
    return start, middle, clock.mark()


@contextmanager
def quiet_process() -> Iterator[None]:
    """Keeps Python's garbage collector out of timed code."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
