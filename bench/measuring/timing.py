"""Timed runs of kernels: interleaved rounds, flushed caches, clocks of the device.

Shape suffixes: S sets, R rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.core.collector import collector_paused
from autoshard.core.errors import InvalidOptionError
from bench.measuring.caches import CacheFlush
from bench.measuring.robust_stats import MsArray, standard_errors


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


#: Fewest runs that tell how far apart runs are.
_FEWEST = 3


def num_to_drop(num_rounds: int) -> int:
    """Two runs at each end of nine, one of three: about a fifth, and all but the median where there are few."""
    return min(2, (num_rounds - 1) // 2 if num_rounds < 5 else (num_rounds - 1) // 4)


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
    """Rounds that are, B; the most where kernels may stop early."""
    num_dropped: int = 2
    """Highest and lowest of them that are dropped at each end, R."""
    flush_every_run: bool = True
    """Flush before every run; otherwise once per round, which is enough where a cache flush takes longer than a run."""
    num_least: int | None = None
    """Counted rounds after which a kernel may stop; None for all."""
    enough: float = 0.0
    """Standard error of a kernel's latency, relative to it, at which it stops."""

    def __post_init__(self) -> None:
        if self.num_warmup < 0 or self.num_dropped < 0 or self.num_measured <= 2 * self.num_dropped:
            raise InvalidOptionError(
                f"must leave at least one of {self.num_measured} rounds, got {self.num_dropped} dropped at each end",
                field="num_dropped",
            )
        if self.num_least is not None and not _FEWEST <= self.num_least <= self.num_measured:
            raise InvalidOptionError(
                f"must be from {_FEWEST} to {self.num_measured} rounds, got {self.num_least}", field="num_least"
            )

    def dropped_of(self, num_rounds: int) -> int:
        """Highest and lowest runs that are dropped at each end of a kernel that stopped after so many rounds."""
        return self.num_dropped if num_rounds == self.num_measured else min(self.num_dropped, num_to_drop(num_rounds))

    @property
    def num_rounds(self) -> int:
        """Rounds that are run, counted or not."""
        return self.num_warmup + self.num_measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Latencies of kernels that took turns.

    Attributes:
        forward_ms_SR: Forward passes in counted rounds, in order; 0 after a kernel's last round.
        backward_ms_SR: As `forward_ms_SR`.
        num_rounds_S: Rounds that each kernel was in, the first ones.
        num_discarded: Runs that were run again, since they began before all of them was queued on the GPU.
        num_waiting: Kernels that wait for the host by themselves: their latency holds its time.
    """

    forward_ms_SR: MsArray
    backward_ms_SR: MsArray
    num_rounds_S: NDArray[np.int64]
    num_discarded: int = 0
    num_waiting: int = 0


class Clock(Protocol):
    """Where and how moments are noted: on the host, or in the queue of a GPU."""

    def mark(self) -> Any:
        """Notes a moment."""
        ...

    def lead(self, key: int) -> None:
        """Keeps the device busy, so that the next run of what has this key is queued before it begins."""
        ...

    def is_late(self, start: Any) -> bool:
        """Whether a run, whose last mark was just made, began before all of it was queued: at `start` or later."""
        ...

    def lengthen(self, key: int) -> bool:
        """Makes a key's lead longer after a late run, which is to be run again; false if no lead is long enough."""
        ...

    def settle(self) -> None:
        """Waits for all that is queued."""
        ...

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Time between two marks."""
        ...


class WallClock:
    """Monotonic clock of the machine. Nothing is queued on a CPU, so that no run needs a lead."""

    def mark(self) -> float:
        """Now, in seconds."""
        return time.perf_counter()

    def lead(self, _key: int) -> None:
        """Nothing."""

    def is_late(self, _start: float) -> bool:
        """Never."""
        return False

    def lengthen(self, _key: int) -> bool:
        """There is no lead."""
        return False

    def settle(self) -> None:
        """Nothing."""

    def elapsed_ms(self, start: float, stop: float) -> float:
        """Milliseconds between two marks."""
        return (stop - start) * 1e3


class _ThreadClock(WallClock):
    """Time that the calling thread has run: it stands still while another process has the core.

    A kernel of one thread takes as long on this clock as on the wall while the machine is otherwise idle. With
    another process busy on each of 2 cores, the spread of repeated runs is 3% instead of 29%.
    """

    def mark(self) -> float:
        return time.thread_time()


class CudaClock:
    """CUDA events on the current stream, behind a lead: the GPU idles while the host queues a run.

    A run that began before all of it was queued may hold waits for the host. It is to be run again, with a lead twice
    as long, which its key keeps. A run that is late behind the longest lead waits for the host by itself (it reads a
    number back): its key gets the shortest lead from then on, and its runs count as they are.

    Attributes:
        waiting: Keys whose runs wait for the host.
    """

    #: Cycles of the shortest lead, 1.5 ms at 1.98 GHz: launching one fused kernel from Python takes about 1 ms.
    LEAD_CYCLES = 3_000_000
    #: The longest lead is so many times as long.
    MAX_FACTOR = 32

    def __init__(self) -> None:
        self._factors: dict[int, int] = {}
        self.waiting: set[int] = set()

    def mark(self) -> torch.cuda.Event:
        """An event in the queue."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lead(self, key: int) -> None:
        """Queues as many idle cycles as the key's runs need."""
        torch.cuda._sleep(self.LEAD_CYCLES * self._factors.get(key, 1))

    def is_late(self, start: torch.cuda.Event) -> bool:
        """Whether the GPU has come to `start`."""
        return start.query()

    def lengthen(self, key: int) -> bool:
        """Doubles the lead; false if that was done as often as it may."""
        factor = 2 * self._factors.get(key, 1)
        if factor > self.MAX_FACTOR:
            self.waiting.add(key)
        self._factors[key] = 1 if key in self.waiting else factor
        return key not in self.waiting

    def settle(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize()

    def elapsed_ms(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Milliseconds of the GPU between two events that have come to pass."""
        return float(start.elapsed_time(stop))


def time_rounds(
    kernels: Sequence[TimedKernel],
    flush: CacheFlush,
    settings: RoundSettings,
    *,
    seed: int = 0,
    num_references: int = 0,
    on_round: Callable[[], None] = lambda: None,
    while_queued: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> RoundTimes:
    """Runs every kernel once per round, in an order drawn anew for each round.

    A kernel whose latency is known well enough takes no more rounds, see `RoundSettings.enough`.

    Args:
        kernels: What to run; between two runs of a kernel all others run and the cache is flushed.
        flush: Empties the cache.
        settings: Number of rounds.
        seed: Of the order.
        num_references: So many kernels, the first ones, run as long as any other does.
        on_round: Called after every round, and for every round that is left out at the end.
        while_queued: Called in every counted round once all runs are queued: on a GPU, while it is at work.
        clock: Times the runs; the flushed device's own when left out.
    """
    clock = device_clock(flush.device) if clock is None else clock
    num_discarded = 0
    rng = np.random.default_rng(seed)
    forward_ms_SR = np.zeros((len(kernels), settings.num_measured))
    backward_ms_SR = np.zeros_like(forward_ms_SR)
    num_rounds_S = np.zeros(len(kernels), dtype=np.int64)
    going = np.arange(len(kernels))
    counts_S = np.array([index >= num_references and not kernel.is_idle for index, kernel in enumerate(kernels)])
    with collector_paused():
        for round_ in range(-settings.num_warmup, settings.num_measured):
            if len(going):
                if not settings.flush_every_run:
                    flush()
                order = rng.permutation(going).tolist()
                # The first round compiles and allocates, which no lead is long enough for.
                is_first = round_ == -settings.num_warmup < 0
                runs = []
                for one in order:
                    marks, discarded = _run(
                        kernels[one], flush if settings.flush_every_run else None, clock, one, checks=not is_first
                    )
                    runs.append(marks)
                    num_discarded += discarded
                if round_ >= 0:
                    while_queued()
                clock.settle()
                if round_ >= 0:
                    for one, (start, middle, stop) in zip(order, runs, strict=True):
                        forward_ms_SR[one, round_] = clock.elapsed_ms(start, middle)
                        backward_ms_SR[one, round_] = clock.elapsed_ms(middle, stop)
                    num_rounds_S[going] = round_ + 1
                    going = _going(forward_ms_SR + backward_ms_SR, going, counts_S, round_ + 1, settings)
            on_round()
    return RoundTimes(
        forward_ms_SR=forward_ms_SR,
        backward_ms_SR=backward_ms_SR,
        num_rounds_S=num_rounds_S,
        num_discarded=num_discarded,
        num_waiting=len(clock.waiting) if isinstance(clock, CudaClock) else 0,
    )


def _going(
    latency_ms_SR: MsArray,
    going: NDArray[np.int64],
    counts_S: NDArray[np.bool_],
    num_rounds: int,
    settings: RoundSettings,
) -> NDArray[np.int64]:
    """Kernels that need more than these rounds, in which all of `going` were; those that do not count go along."""
    if settings.num_least is None or num_rounds < settings.num_least:
        return going
    errors = standard_errors(latency_ms_SR[going, :num_rounds], settings.dropped_of(num_rounds))
    is_open = counts_S[going] & (errors > settings.enough)
    return going[is_open | ~counts_S[going]] if is_open.any() else going[:0]


def led_ms(
    run: Callable[[], object],
    clock: Clock,
    *,
    key: int = 0,
    times: int = 1,
    before: Callable[[], object] = lambda: None,
    again: Callable[[], object] = lambda: None,
    agree: Callable[[bool], bool] | None = None,
) -> float:
    """Milliseconds of something that is run some times in a row, on a GPU behind a lead.

    Args:
        run: What to time.
        clock: Times it.
        key: Of the lead.
        times: How often; the mean is returned.
        before: Runs between lead and start.
        again: Runs after a late run, before the next one.
        agree: Waits for all that is queued, and tells whether all processes vote for something: a late one makes all of
            them run again, with leads that stay alike. None for this process alone.
    """
    while True:
        clock.lead(key)
        before()
        start = clock.mark()
        for _ in range(times):
            run()
        stop = clock.mark()
        was_led = not clock.is_late(start)
        if agree is None:
            clock.settle()
        else:
            was_led = agree(was_led)
        if was_led or not clock.lengthen(key):
            return clock.elapsed_ms(start, stop) / times
        again()


def device_clock(device: torch.device) -> Clock:
    """The clock that runs on a device are timed by."""
    if device.type == "cuda":
        return CudaClock()
    return _ThreadClock() if torch.get_num_threads() == 1 else WallClock()


def _run(
    kernel: TimedKernel, flush: CacheFlush | None, clock: Clock, key: int, *, checks: bool
) -> tuple[tuple[Any, Any, Any], int]:
    """Marks of a run that was queued in time, and how many before it were not; the first one where nobody checks."""
    for num_discarded in count():
        if flush is not None:
            flush()
        clock.lead(key)
        start = clock.mark()
        outputs = kernel.forward()
        middle = clock.mark()
        kernel.backward(outputs)
        stop = clock.mark()
        if not (checks and clock.is_late(start) and clock.lengthen(key)):
            return (start, middle, stop), num_discarded
    raise AssertionError("a clock leads at last")
