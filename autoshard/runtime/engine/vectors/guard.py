"""Gradients of embeddings as the model gives them: clipped, and kept from the tables where they are no numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from autoshard.core.errors import DivergedError
from autoshard.core.optimizers import BadGradients, UpdateSettings
from autoshard.runtime.engine.groups import JoinedGroups, WeakGroup
from autoshard.runtime.engine.rows.fused import Verdict


class _Told(NamedTuple):
    """What is told of a step, on its way to the host."""

    first: torch.Tensor
    event: torch.cuda.Event | None


class GradientGuard:
    """Looks at the gradients of embeddings before they are sent to the rows.

    That is done on the device: the host waits for nothing, but where bad ones are an error, for the step before.

    Args:
        settings: What is done about bad ones, and the limit of the others.
        groups: The processes: of this one's replica group, and of its place in all of them.
        device: Where gradients are.

    Attributes:
        is_idle: Whether there is nothing to do.
    """

    _group = WeakGroup[dist.ProcessGroup]()
    _peers = WeakGroup[dist.ProcessGroup | None]()

    def __init__(self, settings: UpdateSettings, groups: JoinedGroups, device: torch.device) -> None:
        self._settings, self._policy = settings, settings.on_bad_gradients
        self._group, self._peers, self._device = groups.own, groups.peers, device
        # The tables see the mean over the processes of a group, whose gradients are divided by their number.
        self._limit = None if settings.max_gradient is None else settings.max_gradient * groups.own.size()
        self._num_bad = torch.zeros((), dtype=torch.int64, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self._late: list[_Told] = []
        self.is_idle = self._policy is BadGradients.IGNORE and self._limit is None

    def over(self, groups: JoinedGroups) -> GradientGuard:
        """The same over other groups of the processes, with what was found up to now."""
        other = GradientGuard(self._settings, groups, self._device)
        other._num_bad, other._late = self._num_bad, self._late
        return other

    @property
    def num_bad(self) -> int:
        """Steps with bad gradients on any process since this was made; the host waits for the device."""
        return int(self._num_bad)

    def watch(self, verdict: Verdict, embeddings: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The same embeddings, whose gradients are looked at."""
        found: tuple[torch.Tensor, ...] = _Watched.apply(self, verdict, *embeddings)  # type: ignore[no-untyped-call]
        return found

    def of_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, whose gradients are no numbers where it is none itself: an infinite one may have finite ones."""
        if self._policy is BadGradients.IGNORE:
            return loss
        return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)

    def checked(self, verdict: Verdict, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Gradients as they go to the rows; all processes call it."""
        if self._policy is not BadGradients.IGNORE:
            self._first = self._first_bad(_is_bad(gradients))
            is_bad = self._first > 0
            self._num_bad += is_bad
            if self._policy is not BadGradients.CLIP:
                verdict.is_bad = is_bad
        kept = self._kept_out(verdict, gradients, self._limit)
        return kept if self._limit is None else [one.clamp(-self._limit, self._limit) for one in kept]

    def keep_from_layers(self, verdict: Verdict, layers: torch.nn.Module) -> None:
        """Does with bad gradients of dense layers, whose means over all processes these are, as with the tables'."""
        gradients = [one.grad for one in layers.parameters() if one.grad is not None]
        if self._policy is BadGradients.IGNORE or not gradients:
            return
        if verdict.is_bad is not None:
            verdict.is_bad |= _is_bad(gradients)
        for own, kept in zip(gradients, self._kept_out(verdict, gradients, self._settings.max_gradient), strict=True):
            own.copy_(kept)

    def end_step(self, number: int) -> None:
        """Raises the error of a step, on all processes alike: on a GPU that of the one before.

        Args:
            number: Of the step that ends, from 1.

        Raises:
            DivergedError: Naming the process and the step.
        """
        if self._policy is not BadGradients.ERROR:
            return
        told = _Told(self._first.to("cpu", non_blocking=True), None)
        if self._device.type == "cuda":
            told = told._replace(event=torch.cuda.current_stream(self._device).record_event())
            self._late.append(told)
            if len(self._late) < 2:
                return
            told, number = self._late.pop(0), number - 1
            assert told.event is not None
            told.event.synchronize()
        if first := int(told.first):
            raise DivergedError(
                f"step {number}: gradients of the batch of process {dist.get_world_size() - first} are not finite; no "
                "table was changed by them"
            )

    def _kept_out(
        self, verdict: Verdict, gradients: Sequence[torch.Tensor], limit: float | None
    ) -> Sequence[torch.Tensor]:
        """Gradients whose bad numbers are replaced, by the limit where infinite; zeros for a step that is kept out."""
        if verdict.is_bad is not None:
            gradients = [torch.where(verdict.is_bad, torch.zeros_like(one), one) for one in gradients]
        if limit is not None and self._policy is BadGradients.CLIP:
            gradients = [one.nan_to_num(0.0, limit, -limit) for one in gradients]
        return gradients

    def check_finite(self, step: int, loss: torch.Tensor | None, layers: torch.nn.Module) -> None:
        """Refuses a job's state that has diverged; all processes call it, and the host waits for the device.

        Losses do not tell where bad gradients are skipped or clipped: one may be of a bad batch.

        Args:
            step: Steps that the job has made.
            loss: Of the last one; None where none was made.
            layers: Dense layers, which are alike on all processes.

        Raises:
            DivergedError: On all processes.
        """
        numbers = [one.detach() for one in layers.parameters()]
        if loss is not None and self._policy not in (BadGradients.SKIP, BadGradients.CLIP):
            numbers.append(loss)
        if int(self._first_bad(_is_bad(numbers))):
            raise DivergedError(f"training diverged by step {step}: the loss or the dense layers are not finite")

    def _first_bad(self, is_bad: torch.Tensor) -> torch.Tensor:
        """The first of all processes with bad gradients, counted back from the number of them; 0 if none has."""
        first = torch.where(is_bad, dist.get_world_size() - dist.get_rank(), 0)
        for group in (self._group, self._peers):
            if group is not None and group.size() > 1:
                dist.all_reduce(first, op=dist.ReduceOp.MAX, group=group)
        return first


def _is_bad(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether any number is none, bool of shape (): a sum takes one pass, and is none if any of what is added is."""
    return ~torch.stack([(one * 0).sum(dtype=torch.float32) for one in gradients]).isfinite().all()


class _Watched(torch.autograd.Function):
    """Passes embeddings on; its backward pass looks at their gradients."""

    @staticmethod
    def forward(
        ctx: Any, guard: GradientGuard, verdict: Verdict, *embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.guard, ctx.verdict = guard, verdict
        return tuple(one.view_as(one) for one in embeddings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.guard.checked(ctx.verdict, gradients)
