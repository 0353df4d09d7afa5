"""Kernels that a trained model has not seen, priced by another model beside it.

Shape suffixes: N shards, S sets of shards, H width of a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from autoshard.core import CostModel, Exchange, KernelCosts, LocalShard, Update
from autoshard.core.costs import (
    CodeArray,
    KernelErrors,
    KernelFloor,
    MeasuredRange,
    MsArray,
    OutsideRange,
    kernel_floor,
    recorded_errors,
)
from autoshard.core.errors import ModelError
from autoshard.core.machine import KnowsMachine, MeasuredMachine
from autoshard.evaluation.upper_end import UpperEndKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenKernelsModel:
    """A model, and another one for the kernels that it has not seen; times of both add up.

    A code is the model's, then the other's; each is 0 where the other one prices the shard. Made with `covering`.

    Attributes:
        model: Prices all kernels that it has seen.
        other: Prices those that it has not; knows every kernel.
        unseen: Kinds of these kernels (`LocalShard.kernel_kind`).
        widths: Widths of the codes of both.
    """

    model: CostModel
    other: CostModel
    unseen: frozenset[str]
    widths: tuple[int, int]

    @classmethod
    def covering(cls, model: CostModel, other: CostModel, shards: Sequence[LocalShard]) -> tuple[CostModel, list[str]]:
        """What prices some shards, and why.

        Args:
            model: The model to price with, where it can.
            other: Prices any kernel.
            shards: What is to be priced.

        Returns:
            The model where it has seen all kernels, the other one where it has seen none, else one of this class; and
            the kinds of kernels that the model has not seen.
        """
        first: dict[str, LocalShard] = {}
        for shard in shards:
            first.setdefault(shard.kernel_kind, shard)
        unseen, width = [], 0
        for kind, shard in first.items():
            try:
                width = model.encode([shard]).shape[1]
            except ModelError:
                unseen.append(kind)
        if len(unseen) in (0, len(first)):
            return (other if unseen else model), unseen
        other_width = other.encode(shards[:1]).shape[1]
        return cls(model=model, other=other, unseen=frozenset(unseen), widths=(width, other_width)), unseen

    @property
    def name(self) -> str:
        """Both names: the step was calibrated with the first one."""
        return f"{self.model.name} and {self.other.name}"

    @property
    def measured_on(self) -> MeasuredMachine | None:
        """That of the model, if it knows it."""
        return self.model.measured_on if isinstance(self.model, KnowsMachine) else None

    @property
    def errors(self) -> KernelErrors | None:
        """Those of the model, if they are on record: the other's intervals, to which they refer, are wider."""
        return recorded_errors(self.model)

    def notes(self, shards: Sequence[LocalShard]) -> tuple[OutsideRange, ...]:
        """Those of the model on the shards that it prices."""
        seen = [shard for shard in shards if not self.is_unseen(shard)]
        return self.model.notes(seen) if seen and isinstance(self.model, MeasuredRange) else ()

    def is_unseen(self, shard: LocalShard) -> bool:
        """Whether the other model prices a shard."""
        return shard.kernel_kind in self.unseen

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of single shards, shape (N, H)."""
        is_unseen_N = np.array([self.is_unseen(shard) for shard in shards], dtype=np.bool_)
        codes_NH = np.zeros((len(shards), sum(self.widths)), dtype=np.float32)
        first_NH, second_NH = self._split(codes_NH)
        for model, side_NH, is_its_N in ((self.model, first_NH, ~is_unseen_N), (self.other, second_NH, is_unseen_N)):
            if is_its_N.any():
                side_NH[is_its_N] = model.encode([shards[index] for index in np.flatnonzero(is_its_N).tolist()])
        return codes_NH

    def predict_ms(self, codes_SH: CodeArray) -> MsArray:
        """Forward plus backward, shape (S,)."""
        first_SH, second_SH = self._split(codes_SH)
        return np.asarray(self.model.predict_ms(first_SH) + self.other.predict_ms(second_SH))

    def predict_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """Forward, backward and the interval, whose ends add up."""
        first_SH, second_SH = self._split(codes_SH)
        ours, theirs = self.model.predict_parts(first_SH), self.other.predict_parts(second_SH)
        return KernelCosts(
            forward_ms_S=ours.forward_ms_S + theirs.forward_ms_S,
            backward_ms_S=ours.backward_ms_S + theirs.backward_ms_S,
            low_ms_S=ours.low_ms_S + theirs.low_ms_S,
            high_ms_S=ours.high_ms_S + theirs.high_ms_S,
        )

    def floor(self, codes_NH: CodeArray) -> KernelFloor:
        """Of each shard that of the model that prices it; the lower one of both bases."""
        first_NH, second_NH = self._split(codes_NH)
        ours, theirs = kernel_floor(self.model, first_NH), kernel_floor(self.other, second_NH)
        is_unseen_N = second_NH.any(axis=1)
        num_ours = int(ours.kernel_N.max(initial=0)) + 1
        return KernelFloor(
            forward_ms_N=np.where(is_unseen_N, theirs.forward_ms_N, ours.forward_ms_N),
            backward_ms_N=np.where(is_unseen_N, theirs.backward_ms_N, ours.backward_ms_N),
            kernel_N=np.where(is_unseen_N, num_ours + theirs.kernel_N, ours.kernel_N),
            forward_base_ms=min(ours.forward_base_ms, theirs.forward_base_ms),
            backward_base_ms=min(ours.backward_base_ms, theirs.backward_base_ms),
            is_proven=ours.is_proven and theirs.is_proven,
        )

    def _split(self, codes_SH: CodeArray) -> tuple[CodeArray, CodeArray]:
        return codes_SH[:, : self.widths[0]], codes_SH[:, self.widths[0] :]


def kernels_of(shards: Sequence[LocalShard]) -> list[LocalShard]:
    """Shards in every kernel that parts of them may run in: fused or all-reduced, giving sums or rows."""
    first = {shard.kernel_kind: shard for shard in shards}
    return [
        replace(shard, update=update, output=output)
        for shard, update, output in product(first.values(), Update, Exchange)
    ]


def pricing(model: CostModel, shards: Sequence[LocalShard]) -> CostModel:
    """The model that prices some shards: of two, the one that prices all of them, if one does."""
    if isinstance(model, UpperEndKernels):
        return UpperEndKernels(pricing(model.model, shards))
    if not isinstance(model, UnseenKernelsModel):
        return model
    unseen = {model.is_unseen(shard) for shard in shards}
    return model if len(unseen) > 1 else model.other if unseen == {True} else model.model
