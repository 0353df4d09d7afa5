"""Times the parts of a step, on the clock of a CPU or the events of a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from autoshard.core.step import EMBEDDING_PARTS, CollectiveTime, StepCollective, StepPart
from autoshard.runtime.clock import WALL, StepClock


class Part(StrEnum):
    """A part of the embedding work of a step, named as `autoshard.core.RankCost` names its prediction."""

    INPUT = "input_ms"
    FORWARD_KERNEL = "forward_kernel_ms"
    FORWARD_EXCHANGE = "forward_exchange_ms"
    BACKWARD_EXCHANGE = "backward_exchange_ms"
    BACKWARD_KERNEL = "backward_kernel_ms"
    SYNC = "sync_ms"


class Span(NamedTuple):
    """Time between two marks of a `StepTimer`."""

    begun: Any
    ended: Any

    @property
    def ms(self) -> float:
        """Milliseconds; a GPU has to have come to the end."""
        if isinstance(self.begun, float):
            return float(self.ended - self.begun) * 1e3
        return float(self.begun.elapsed_time(self.ended))


@dataclass(frozen=True, slots=True)
class Timings:
    """What a timer has counted, read after `StepTimer.wait`.

    Attributes:
        spans: Time of parts, each with its part.
        awaited: Time of collectives: their kind, from start to end, and while the step waited for them.
        work_ms: What the thread computed in each part of the step, waits left out; nothing on a GPU. What it computed
            between parts, and while gradients are summed, is that of `dense`.
    """

    spans: Sequence[tuple[Part, Span]]
    awaited: Sequence[tuple[StepCollective, Span, Span]]
    work_ms: Mapping[StepPart, float] = field(default_factory=dict)

    @property
    def parts(self) -> Mapping[Part, float]:
        """Milliseconds per part."""
        parts = dict.fromkeys(Part, 0.0)
        for part, span in self.spans:
            parts[part] += span.ms
        return parts

    @property
    def collectives(self) -> Mapping[StepCollective, CollectiveTime]:
        """Time of each kind of collective."""
        return {
            kind: CollectiveTime(
                serialised_ms=_union_ms([took for one, took, _ in self.awaited if one is kind]),
                exposed_ms=sum(waited.ms for one, _, waited in self.awaited if one is kind),
            )
            for kind in StepCollective
        }


class StepTimer:
    """Adds up the time between marks, by part and by collective, until it is read.

    On a GPU marks are events of the current stream, so the host waits for none of them before `wait`.

    Args:
        device: Whose clock to read.
        enabled: False for a timer that does nothing, which is what training outside of measurements uses.
        clock: The time of a CPU.

    Attributes:
        clock: The time of a CPU, which threads of a step hand over with what they give each other.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True, clock: StepClock = WALL) -> None:
        self._enabled, self.clock = enabled, clock
        self._on_gpu = device.type == "cuda"
        self._begun: dict[Part, Any] = {}
        #: What the thread had computed when it came to the start of a part, and when the counts were taken last.
        self._worked_s: dict[Part, float] = {}
        self._taken_s, self._work_s = 0.0, dict.fromkeys(Part, 0.0)
        self._named: dict[Part, record_function] = {}
        self._spans: list[tuple[Part, Span]] = []
        self._collectives: list[tuple[StepCollective, Span, Span]] = []

    def begin(self, part: Part) -> None:
        """Marks the start of a part, which a profiler's trace shows by its name."""
        if self._enabled:
            if is_profiled():
                self._named[part] = named = record_function(f"autoshard: {part.removesuffix('_ms')}")
                named.__enter__()  # type: ignore[no-untyped-call]
            self._begun[part], self._worked_s[part] = self.mark(), self._worked()

    def end(self, part: Part) -> None:
        """Marks the end of a part; without a start it counts nothing."""
        begun = self._begun.pop(part, None)
        if begun is not None:
            self._spans.append((part, Span(begun, self.mark())))
            self._work_s[part] += self._worked() - self._worked_s[part]
        if (named := self._named.pop(part, None)) is not None:
            named.__exit__(None, None, None)

    @contextmanager
    def measure(self, part: Part, collective: StepCollective | None = None) -> Iterator[None]:
        """Times a block, as a collective that the step waits for if it names one."""
        self.begin(part)
        yield
        self.end(part)
        if self._enabled and collective is not None:
            _, span = self._spans[-1]
            self._collectives.append((collective, span, span))

    def count(self, collective: StepCollective, took: Span, waited: Span) -> None:
        """Counts a collective that ran beside the step.

        Args:
            collective: Its kind.
            took: From its start to its end.
            waited: While the step waited for it.
        """
        if self._enabled:
            self._collectives.append((collective, took, waited))

    def measure_backward(self, output: torch.Tensor, part: Part, *, instead_of: Part | None = None) -> None:
        """Times the backward pass of the operation that made `output`, when it comes.

        Args:
            output: What the operation returned.
            part: What to count its backward pass as.
            instead_of: A part that is being measured around it, which stands still meanwhile.
        """
        node = output.grad_fn
        while node is not None and node.name() == "BackwardHookFunctionBackward":  # torch's, around a module with hooks
            node = node.next_functions[0][0]
        if not self._enabled or node is None:
            return

        def before(_: object) -> None:
            if instead_of is not None:
                self.end(instead_of)
            self.begin(part)

        def after(*_: object) -> None:
            self.end(part)
            if instead_of is not None:
                self.begin(instead_of)

        node.register_prehook(before)
        node.register_hook(after)

    def take(self) -> Timings:
        """What was counted since the last call; on a GPU it is read after `wait`."""
        worked_s = self._worked()
        work_ms = {part: 1e3 * self._work_s[Part(f"{part}_ms")] for part in EMBEDDING_PARTS}
        work_ms[StepPart.DENSE] = 1e3 * (worked_s - self._taken_s) - sum(work_ms.values())
        timings = Timings(self._spans, self._collectives, work_ms)
        self._spans, self._collectives = [], []
        self._taken_s, self._work_s = worked_s, dict.fromkeys(Part, 0.0)
        self._begun.clear()
        return timings

    def wait(self) -> None:
        """Waits until a GPU has come to all marks."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def _worked(self) -> float:
        return 0.0 if self._on_gpu or not self._enabled else self.clock.worked_s()

    def mark(self) -> Any:
        """The clock of a CPU, or an event of the current stream of a GPU; None if the timer does nothing."""
        if not self._enabled:
            return None
        if not self._on_gpu:
            return self.clock.now_s()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def is_profiled() -> bool:
    """Whether torch's profiler is on; names of phases cost time where it is not."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def phase(name: str) -> AbstractContextManager[object]:
    """Names what is done within, for a profiler's trace."""
    return record_function(f"autoshard: {name}") if is_profiled() else nullcontext()


def _union_ms(spans: Sequence[Span]) -> float:
    """Time in which any of the spans runs."""
    since_ms = [(Span(spans[0].begun, one.begun).ms, Span(spans[0].begun, one.ended).ms) for one in spans]
    total_ms, until_ms = 0.0, -math.inf
    for begun_ms, ended_ms in sorted(since_ms):
        total_ms += max(0.0, ended_ms - max(begun_ms, until_ms))
        until_ms = max(until_ms, ended_ms)
    return total_ms
