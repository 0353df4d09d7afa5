"""Times the parts of a step, on the clock of a CPU or the events of a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch


class Part(StrEnum):
    """A part of the embedding work of a step, named as `autoshard.core.RankCost` names its prediction."""

    INPUT = "input_ms"
    FORWARD_KERNEL = "forward_kernel_ms"
    FORWARD_EXCHANGE = "forward_exchange_ms"
    BACKWARD_EXCHANGE = "backward_exchange_ms"
    BACKWARD_KERNEL = "backward_kernel_ms"
    SYNC = "sync_ms"


class StepTimer:
    """Adds up the time between marks, part by part, until it is read.

    On a GPU marks are events of the current stream, so timing does not make the host wait before `take`.

    Args:
        device: Whose clock to read.
        enabled: False for a timer that does nothing, which is what training outside of measurements uses.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._on_gpu = device.type == "cuda"
        self._begun: dict[Part, Any] = {}
        self._spans: list[tuple[Part, Any, Any]] = []

    def begin(self, part: Part) -> None:
        """Marks the start of a part."""
        if self._enabled:
            self._begun[part] = self._mark()

    def end(self, part: Part) -> None:
        """Marks the end of a part; without a start it counts nothing."""
        begun = self._begun.pop(part, None)
        if begun is not None:
            self._spans.append((part, begun, self._mark()))

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Times a block."""
        self.begin(part)
        yield
        self.end(part)

    def measure_backward(self, output: torch.Tensor, part: Part, *, instead_of: Part | None = None) -> None:
        """Times the backward pass of the operation that made `output`, when it comes.

        Args:
            output: What the operation returned.
            part: What to count its backward pass as.
            instead_of: A part that is being measured around it, which stands still meanwhile.
        """
        node = output.grad_fn
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

    def take(self) -> dict[Part, float]:
        """Milliseconds per part since the last call."""
        if self._on_gpu:
            torch.cuda.synchronize()
        total = dict.fromkeys(Part, 0.0)
        for part, begun, ended in self._spans:
            total[part] += begun.elapsed_time(ended) if self._on_gpu else (ended - begun) * 1e3
        self._spans.clear()
        self._begun.clear()
        return total

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
