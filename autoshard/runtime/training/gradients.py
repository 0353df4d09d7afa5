"""Gradients of the dense layers, averaged over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from autoshard.core.step import StepCollective
from autoshard.runtime.engine.pieces import within
from autoshard.runtime.pending import Pending
from autoshard.runtime.timing import StepTimer

#: Bytes of gradients that travel together: small enough that the first leave while others are still computed.
BUCKET_BYTES = 1 << 20

Leave: TypeAlias = Callable[[torch.Tensor], None]


class GradientBuckets:
    """Makes every parameter's gradient the mean over the processes', bucket by bucket.

    Buckets, and so the sums to the last bit, are the same whether they leave early or not.

    Args:
        model: Its parameters' gradients are averaged.
        group: The processes.
        timer: Where to count the time.
        early: Whether a bucket leaves in the backward pass, as soon as its gradients are there; else all leave when
            `average` is called.
        bucket_bytes: Bytes of a bucket, but for a larger parameter, which has its own.

    Attributes:
        asks: Whether this process asks for something in this step; set before the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        timer: StepTimer,
        *,
        early: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group, self._timer = group, timer
        self._buckets = _buckets(list(model.parameters()), bucket_bytes)
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent: dict[int, tuple[torch.Tensor, Pending]] = {}
        self.asks = False
        if early:
            for number, bucket in enumerate(self._buckets):
                for parameter in bucket:
                    parameter.register_post_accumulate_grad_hook(self._leaver(number))  # type: ignore[no-untyped-call]

    def average(self) -> torch.Tensor:
        """Averages, after the backward pass; what has left already is only waited for.

        Returns:
            How many processes ask for something, shape (1,): it travels with the first bucket.
        """
        for number in range(len(self._buckets)):
            if number not in self._sent:
                self._send(number)
        asked = None
        for number, (flat, pending) in self._sent.items():
            pending.wait()
            if number == 0:
                flat, asked = flat[:-1], flat[-1:]
            flat.div_(self._group.size())
            gradients = self._gradients(number)
            means = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))
        self._sent.clear()
        self._missing = [len(bucket) for bucket in self._buckets]
        assert asked is not None, "a model has parameters"
        return asked

    def _leaver(self, number: int) -> Leave:
        def leave(_: torch.Tensor) -> None:
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._send(number)

        return leave

    def _gradients(self, number: int) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._buckets[number] if parameter.grad is not None]

    def _send(self, number: int) -> None:
        pieces = [gradient.reshape(-1) for gradient in self._gradients(number)]
        if number == 0:
            pieces.append(pieces[0].new_full((1,), float(self.asks)))
        flat = torch.cat(pieces)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._sent[number] = (flat, Pending(work, StepCollective.ALL_REDUCE, self._timer))


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in buckets, the last first: gradients come in about that order."""
    buckets = within(((parameter, parameter.nbytes) for parameter in reversed(parameters)), bucket_bytes)
    # In the model's order within a bucket.
    return [bucket[::-1] for bucket in buckets]
