"""Batches whose ids travel while another batch is trained on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass

import torch

from autoshard.core.errors import InputError
from autoshard.core.step import StepCollective
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.clock import Handover, StepClock
from autoshard.runtime.engine.ids.requests import DistributedBatch, InputExchange
from autoshard.runtime.engine.ids.turns import AT_ONCE, Turn
from autoshard.runtime.timing import Part, Span, StepTimer


@dataclass(frozen=True, slots=True, eq=False)
class _Arrived:
    """A batch whose ids have come, how long they took, and the point in a GPU's stream where they are there."""

    distributed: DistributedBatch
    took: Span
    event: torch.cuda.Event | None


class Prefetched:
    """A batch under way to where its rows are looked up.

    Args:
        batch: The batch, or why there is none.
        device: Where batches are.
        timer: Where to count the time.
    """

    def __init__(self, batch: BatchOfIds | InputError, device: torch.device, timer: StepTimer) -> None:
        self.batch, self._device, self._timer = batch, device, timer
        #: Set when it is submitted.
        self.turn, self.under_way = AT_ONCE, deque[Prefetched]()
        #: On a GPU, the work before it: it may be what makes the batch.
        self._after = _event(device)
        self._arrived: Future[_Arrived] = timer.clock.future()

    def distribute(self, exchange: InputExchange, stream: torch.cuda.Stream | None) -> None:
        """Sends the ids, on a thread that may wait for other processes.

        Args:
            exchange: Sends them.
            stream: Of a GPU, beside the current one.
        """
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                if self._after is not None:
                    self._after.wait()
                begun = self._timer.mark()
                distributed = exchange(self.batch, self.turn)
                took = Span(begun, self._timer.mark())
                self._arrived.set_result(_Arrived(distributed, took, _event(self._device)))
        except BaseException as error:  # noqa: BLE001 - `wait` raises it again
            self._arrived.set_exception(error)
            self.turn.fail()

    def wait(self) -> DistributedBatch:
        """The batch where it is looked up.

        Raises:
            InputError: If a process's cannot be looked up: on all processes.
            RuntimeError: If another process is gone.
        """
        with self._timer.measure(Part.INPUT):
            waiting = self._timer.mark()
            while self in self.under_way:
                self.under_way.popleft().turn.let_end()
            arrived = self._arrived.result()
            distributed = self._on_stream(arrived)
            self._timer.count(StepCollective.INPUT, arrived.took, Span(waiting, self._timer.mark()))
        return distributed

    def settle(self) -> None:
        """Returns when it has been distributed, or has not been able to be."""
        self._arrived.exception()

    def arrived(self) -> DistributedBatch | None:
        """The same for the current stream; None while it is under way, or where `wait` raises an error."""
        if not self._arrived.done() or self._arrived.exception() is not None:
            return None
        return self._on_stream(self._arrived.result())

    def _on_stream(self, arrived: _Arrived) -> DistributedBatch:
        if arrived.event is not None:
            arrived.event.wait()
            for tensor in _tensors(arrived.distributed):
                # Or its memory might be given to the next batch while this one's kernels still read it.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return arrived.distributed


class Prefetcher:
    """Distributes batches on a thread of its own, one after the other; on a GPU on a stream of its own.

    The thread ends with the process, even while it waits for others: so an error elsewhere ends the run.

    Args:
        exchange: Over a process group that nobody else uses: collectives of a group come in the same order everywhere.
        device: Where batches are.
        clock: Of the threads.
        on_end: What the thread does last.
    """

    def __init__(
        self, exchange: InputExchange, device: torch.device, clock: StepClock, on_end: Callable[[], None]
    ) -> None:
        self.exchange, self._device, self._on_end = exchange, device, on_end
        #: Whether collectives are launched at fixed places of the training thread.
        self.is_ordered = device.type == "cuda"
        self._under_way: deque[Prefetched] = deque()
        self._waiting: Handover[Prefetched | None] = clock.handover()
        threading.Thread(target=self._work, name="autoshard-prefetch", daemon=True).start()

    def submit(self, prefetched: Prefetched) -> None:
        """Distributes a batch after those before it."""
        prefetched.turn = Turn(is_ordered=True) if self.is_ordered else AT_ONCE
        prefetched.under_way = self._under_way
        self._under_way.append(prefetched)
        self._waiting.put(prefetched)

    @property
    def following(self) -> Prefetched | None:
        """The batch that is trained on next, if it was submitted."""
        return self._under_way[0] if self._under_way else None

    def let_send(self) -> None:
        """Returns when the ids of the next batch that is trained on are on their way, if one is submitted."""
        if self._under_way:
            self._under_way[0].turn.let_send()

    def drain(self) -> None:
        """Returns when all batches that were submitted have been distributed, or have not been able to be."""
        under_way = list(self._under_way)
        self._let_end()
        for prefetched in under_way:
            prefetched.settle()

    def close(self) -> None:
        """Ends the thread when it has distributed all batches."""
        self._let_end()
        self._waiting.put(None)

    def _let_end(self) -> None:
        while self._under_way:
            self._under_way.popleft().turn.let_end()

    def _work(self) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # Its small kernels do not queue behind the training thread's.
            stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        while (prefetched := self._waiting.get()) is not None:
            prefetched.distribute(self.exchange, stream)
            del prefetched  # or the last batch would stay in memory
        self._on_end()


def _event(device: torch.device) -> torch.cuda.Event | None:
    """The point in the device's current stream; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """All tensors on a GPU in a data class or tuple."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
