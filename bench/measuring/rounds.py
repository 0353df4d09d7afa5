"""The round loop: measures things of one kind in groups whose rounds are interleaved, beside a reference.

Shape suffixes: S sets, R rounds.
"""

from __future__ import annotations

import gc
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from autoshard.core.errors import AutoshardError, DeviceError, InputError
from autoshard.runtime.processes.threads import intra_op_threads
from bench.measuring.arena import free_bytes
from bench.measuring.attempts import Timing, mean_of
from bench.measuring.caches import CacheFlush
from bench.measuring.clocks import ClockWatch, DeviceClocks
from bench.measuring.devices import BenchDevice
from bench.measuring.provenance import Machine, described_hardware, installed_software
from bench.measuring.robust_stats import locate
from bench.measuring.timing import RoundSettings, RoundTimes, TimedKernel, time_rounds

#: Items that may be put back while a group is filled, so that one large item does not end it. Of 600 sets of the
#: mixture of `collect`, 8 make groups as large as 64 do: 10.7 sets instead of 8.5 in 1 GiB, 13.3 instead of 10.3 in
#: 1.25.
_MOST_PUT_BACK = 8

ItemT = TypeVar("ItemT")
KernelT = TypeVar("KernelT", bound=TimedKernel)
ResultT = TypeVar("ResultT", bound=Timing)
OnSkip = Callable[[int, AutoshardError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """How things are measured in groups."""

    rounds: RoundSettings = field(default_factory=RoundSettings)
    num_threads: int = 1
    """Intra-op threads of a CPU kernel: what one of several ranks on a machine gets."""
    num_references: int = 3
    """Copies of the reference that each group holds, in memory of their own; their mean is the reference."""
    max_group_sets: int = 24
    """Sets that share their rounds."""
    max_bytes: int | None = None
    """Memory of a group; None for a share of what is free."""
    group_seconds: float = math.inf
    """Estimated time of a group."""
    group_bytes: float = math.inf
    """Memory of a group of several sets; one that needs more is measured alone."""
    max_spread: float = 0.1
    """Spread of single runs, relative to their mean, above which a set is measured again. Measurements of a set are
    averaged (`mean_of`), so that twice the spread takes four of them."""
    max_attempts: int = 2
    """Measurements of a set, after which their mean is marked as noisy if its spread is above the bound still."""


@dataclass(slots=True)
class _Waiting(Generic[ItemT, ResultT]):
    """What is not measured well enough yet, and its measurements so far."""

    index: int
    item: ItemT
    attempts: list[ResultT] = field(default_factory=list)


class GroupHarness(ABC, Generic[ItemT, KernelT, ResultT]):
    """Measures things of one kind on one device; a subclass says what they are.

    Args of the constructor:
        device: Where to measure.
        settings: How.
        reference: What is measured beside all others.
        flush: Empties the device's caches.

    Attributes:
        clocks: The clock of a GPU while it measured.
        num_runs: Counted runs so far, references included.
        num_discarded: Runs that were run again, see `RoundTimes`.
        num_waiting: Kernels that waited for the host by themselves, see `RoundTimes`.
    """

    def __init__(self, device: BenchDevice, settings: GroupSettings, reference: ItemT, flush: CacheFlush) -> None:
        self.device = device
        self._group_settings, self._reference, self._flush = settings, reference, flush
        self._max_bytes = free_bytes(device.device) if settings.max_bytes is None else settings.max_bytes
        self._reserved_bytes = settings.num_references * self.needs(reference)[0]
        self.num_groups = 0
        self._timed_s = self._wall_s = 0.0
        self.clocks = ClockWatch(device)
        self.num_runs = self.num_discarded = self.num_waiting = 0

    @abstractmethod
    def check(self, item: ItemT) -> None:
        """Makes sure that an item can be measured.

        Raises:
            InputError: If it is of a kind that the device does not run.
            DeviceError: If it does not fit in memory.
        """

    @abstractmethod
    def needs(self, item: ItemT) -> tuple[int, float]:
        """Bytes that an item takes while it is measured, and rough seconds of a run; 0 where they do not matter."""

    @abstractmethod
    def _build(self, item: ItemT, seed: int) -> KernelT:
        """What is timed."""

    @abstractmethod
    def _result(self, kernel: KernelT, timing: Timing) -> ResultT:
        """The record of a measurement."""

    @property
    def machine(self) -> Machine:
        """What samples say of where they were measured."""
        num_threads = 1 if self.device.is_cuda else self._group_settings.num_threads
        return Machine(
            device=self.device,
            num_threads=num_threads,
            software=installed_software(),
            hardware=described_hardware(self.device),
        )

    @property
    def timed_share(self) -> float:
        """Share of the wall time of all measuring so far that went to counted runs of kernels, references included."""
        return self._timed_s / self._wall_s if self._wall_s else 0.0

    def measure(self, items: Sequence[ItemT], advance: Callable[[float], None] = lambda _: None) -> list[ResultT]:
        """Measures items, in groups whose rounds are interleaved.

        Args:
            items: What to measure.
            advance: Told after every round how many items' worth of work it was; measuring again is not counted.

        Returns:
            One measurement per item, in order.

        Raises:
            InputError: If an item is of a kind that cannot be measured.
            DeviceError: If an item does not fit in memory.
        """
        for item in items:
            self.check(item)
        found = dict(self.measure_each(items, advance=advance))
        return [found[index] for index in range(len(items))]

    def measure_each(
        self,
        items: Iterable[ItemT],
        *,
        advance: Callable[[float], None] = lambda _: None,
        on_skip: OnSkip | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, ResultT]]:
        """Measures items one group after the other; one whose runs disagree is measured again with the next group.

        Args:
            items: What to measure; taken when a group is made, so they may be endless.
            advance: As in `measure`.
            on_skip: Told of items that cannot be measured, with the reason; without it, the reason is raised.
            is_over: Asked before every group; once it holds, what waits to be measured again is given as it is.

        Yields:
            The place of an item in `items` and its measurement, each item once, not always in order.

        Raises:
            InputError: If an item is of a kind that cannot be measured, and there is no `on_skip`.
            DeviceError: If an item does not fit in memory, likewise.
        """
        settings = self._group_settings
        coming = (_Waiting[ItemT, ResultT](index, item) for index, item in enumerate(items))
        waiting: deque[_Waiting[ItemT, ResultT]] = deque()
        while not is_over() and (group := self._next_group(waiting, coming, on_skip)):
            share = sum(not one.attempts for one in group) / settings.rounds.num_rounds
            for one, result in self._measured(group, partial(advance, share), on_skip):
                one.attempts.append(result)
                mean = mean_of(one.attempts, settings.max_spread)
                if mean.is_noisy and len(one.attempts) < settings.max_attempts:
                    waiting.append(one)
                else:
                    yield one.index, mean
        for one in waiting:
            if one.attempts:
                yield one.index, mean_of(one.attempts, settings.max_spread)

    def _next_group(
        self,
        waiting: deque[_Waiting[ItemT, ResultT]],
        coming: Iterator[_Waiting[ItemT, ResultT]],
        on_skip: OnSkip | None,
    ) -> list[_Waiting[ItemT, ResultT]]:
        """Items that fit together; those that do not come first in the next group."""
        settings = self._group_settings
        group: list[_Waiting[ItemT, ResultT]] = []
        too_large: list[_Waiting[ItemT, ResultT]] = []
        used_bytes, used_s = self._reserved_bytes, 0.0
        most_bytes = min(self._max_bytes, settings.group_bytes)
        while len(group) < settings.max_group_sets and len(too_large) < _MOST_PUT_BACK:
            one = waiting.popleft() if waiting else next(coming, None)
            if one is None:
                break
            if not one.attempts:
                try:
                    self.check(one.item)
                except (DeviceError, InputError) as error:
                    if on_skip is None:
                        raise
                    on_skip(one.index, error)
                    continue
            num_bytes, seconds = self.needs(one.item)
            seconds *= settings.rounds.num_rounds
            if group and (used_bytes + num_bytes > most_bytes or used_s + seconds > settings.group_seconds):
                too_large.append(one)
                continue
            used_bytes, used_s = used_bytes + num_bytes, used_s + seconds
            group.append(one)
        waiting.extendleft(reversed(too_large))
        return group

    def _measured(
        self, group: list[_Waiting[ItemT, ResultT]], on_round: Callable[[], None], on_skip: OnSkip | None
    ) -> list[tuple[_Waiting[ItemT, ResultT], ResultT]]:
        """Measures a group; when memory runs out on the way, in halves, down to the item that does not fit."""
        try:
            results = self._measure_group([one.item for one in group], on_round)
        except DeviceError as error:
            if len(group) == 1:
                if on_skip is None:
                    raise
                on_skip(group[0].index, error)
                return []
        else:
            return list(zip(group, results, strict=True))
        # Not before the error is gone, whose frames hold all that the group had built.
        gc.collect()
        if self.device.is_cuda:
            torch.cuda.empty_cache()
        half = len(group) // 2
        return [*self._measured(group[:half], on_round, on_skip), *self._measured(group[half:], on_round, on_skip)]

    def _measure_group(self, items: Sequence[ItemT], on_round: Callable[[], None] = lambda: None) -> list[ResultT]:
        started = time.perf_counter()
        if self.device.is_cuda:
            gc.collect()  # FBGEMM's modules hold themselves, and nobody tells Python of the memory that they fill
        self.num_groups += 1
        rounds = self._group_settings.rounds
        copies = self._group_settings.num_references
        with intra_op_threads(self._group_settings.num_threads), _faults_as_device_errors(self.device):
            measured = [*[self._reference] * copies, *items]
            kernels = [self._build(item, seed) for seed, item in enumerate(measured)]
            times = time_rounds(
                kernels,
                self._flush,
                rounds,
                seed=self.num_groups,
                num_references=copies,
                on_round=on_round,
                while_queued=self.clocks.note,
            )
        self._timed_s += float(times.forward_ms_SR.sum() + times.backward_ms_SR.sum()) / 1e3
        self._wall_s += time.perf_counter() - started
        self.num_runs += int(times.num_rounds_S.sum())
        self.num_discarded += times.num_discarded
        self.num_waiting += times.num_waiting
        idle_S = [kernel.is_idle for kernel in kernels]
        for ms_SR in (times.forward_ms_SR, times.backward_ms_SR):
            ms_SR[idle_S] = 0.0  # what was timed is the clock itself
        timings = timings_of(times, rounds, copies, _clock_fields(self.clocks.taken()))
        return [self._result(kernel, timing) for kernel, timing in zip(kernels[copies:], timings, strict=True)]


def _clock_fields(clocks: DeviceClocks) -> dict[str, Any]:
    """What timings say of a GPU."""
    return {"sm_clock_mhz": clocks.sm_mhz or 0.0, "throttle_reasons": ",".join(clocks.throttle_reasons)}


def timings_of(times: RoundTimes, rounds: RoundSettings, copies: int, clock_fields: dict[str, Any]) -> list[Timing]:
    """Timings of all but the copies of the reference, which come first.

    What stopped after n rounds is located among all that were in these rounds, so that its drift and its reference are
    those of its own rounds.
    """
    found: dict[int, Timing] = {}
    for num_rounds in np.unique(times.num_rounds_S[copies:]).tolist():
        rows = np.flatnonzero(times.num_rounds_S >= num_rounds)
        forward, backward = (
            locate(ms_SR[rows, :num_rounds], rounds.dropped_of(num_rounds))
            for ms_SR in (times.forward_ms_SR, times.backward_ms_SR)
        )
        references = slice(copies)
        for place in np.flatnonzero(times.num_rounds_S[rows] == num_rounds).tolist():
            found[int(rows[place])] = Timing(
                forward_ms=float(forward.mean_ms_S[place]),
                backward_ms=float(backward.mean_ms_S[place]),
                forward_spread=float(forward.spread_S[place]),
                backward_spread=float(backward.spread_S[place]),
                reference_forward_ms=float(np.mean(forward.mean_ms_S[references])),
                reference_backward_ms=float(np.mean(backward.mean_ms_S[references])),
                num_rounds=num_rounds,
                **clock_fields,
            )
    return [found[row] for row in range(copies, len(times.num_rounds_S))]


@contextmanager
def _faults_as_device_errors(device: BenchDevice) -> Iterator[None]:
    """What a GPU's memory or kernels do not take is one item's fault, which must not end a run."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{device.name} ran out of memory; others may be using it") from error
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if not device.is_cuda:
            raise
        raise DeviceError(f"{device.name} refuses it: {str(error).splitlines()[0]}") from error
