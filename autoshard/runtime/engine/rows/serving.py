"""The fused kernels of a process, and what it looks up with them for all processes.

Shape suffixes: F features, P processes, B samples of a local batch, G samples of the global batch (P * B), O columns of
all sums, L lookups, N jagged rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from autoshard.core import Exchange, MemoryPlacement
from autoshard.runtime.engine.holdings import Holding, KernelContent, Ownership
from autoshard.runtime.engine.ids.prefetch import Prefetched
from autoshard.runtime.engine.ids.requests import DistributedBatch
from autoshard.runtime.engine.rows.averaging import RowStates
from autoshard.runtime.engine.rows.fused import FusedKernel, FusedSettings, UpdateStep, is_fused
from autoshard.runtime.engine.rows.torch_rows import TorchKernel
from autoshard.runtime.timing import Part, StepTimer


@dataclass(frozen=True, slots=True, eq=False)
class LookupOutput:
    """Embeddings that a process has looked up for itself and the others, with kernels that update their own tables.

    Attributes:
        sums_GO: Sums of bags, for all processes.
        rows: Rows, in the order of processes, kernel by kernel.
    """

    sums_GO: torch.Tensor | None
    rows: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A kernel that gives out rows: all of its holdings are one table."""

    kernel: FusedKernel | TorchKernel
    is_trained: bool
    holdings: tuple[int, ...]
    base: dict[int, int]
    """First row of each holding."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """A kernel that gives out sums."""

    kernel: FusedKernel | TorchKernel
    is_trained: bool
    holdings: tuple[int, ...]
    num_features: int


def _fills_ahead(one: _Sums | _Rows) -> bool:
    """Whether rows of the next batch are brought into its cache, where they stay until a backward pass."""
    return one.is_trained and one.kernel.fills_ahead


class FusedKernels:
    """Holds the rows that no other process has copies of, and trains them in the backward pass.

    Args:
        ownership: Who holds what.
        settings: Of the updates.
        process: This process.
        device: Where to hold rows.
        timer: Where to count the time.
        known: Kernels that there are already, by what they keep.

    Attributes:
        by_content: The kernels, by what they keep.
        fills_ahead: Whether some rows lie behind a cache that may be filled ahead of a lookup.
    """

    def __init__(
        self,
        ownership: Ownership,
        settings: FusedSettings,
        process: int,
        device: torch.device,
        timer: StepTimer,
        known: Mapping[KernelContent, FusedKernel | TorchKernel] = MappingProxyType({}),
    ) -> None:
        self._holdings, self._process, self._device, self._timer = ownership.holdings, process, device, timer
        self._sums: list[_Sums] = []
        self._rows: list[_Rows] = []
        self.by_content: dict[KernelContent, FusedKernel | TorchKernel] = {}
        for key in ownership.kernels:
            indices = ownership.of_kernel(key, process)
            if not indices or self._holdings[indices[0]].is_replicated:
                continue
            first, content = self._holdings[indices[0]], ownership.content(key, process)
            is_rows = first.output is Exchange.ROWS
            kernel = known.get(content)
            if kernel is None:
                kernel = self._kernel(indices, settings, is_rows=is_rows)
            self.by_content[content] = kernel
            if is_rows:
                base = ownership.first_rows(key, process)
                self._rows.append(_Rows(kernel, first.is_trained, tuple(base), base))
            else:
                num_features = sum(len(self._holdings[index].of.features) for index in indices)
                self._sums.append(_Sums(kernel, first.is_trained, indices, num_features))
        self._num_sums = sum(one.num_features for one in self._sums)
        self._asked = [ownership.asked(other, process).rows for other in range(ownership.num_processes)]
        self.fills_ahead = any(_fills_ahead(one) for one in self._served)
        self._filled: DistributedBatch | None = None
        #: Where caches are filled, beside the stream that trains.
        self._beside: torch.cuda.Stream | None = None
        if self.fills_ahead and device.type == "cuda":
            self._beside = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        by_feature = [
            other * self._num_sums + feature
            for feature in range(self._num_sums)
            for other in range(ownership.num_processes)
        ]
        is_sorted = by_feature == sorted(by_feature)
        self._by_feature = None if is_sorted else torch.tensor(by_feature, dtype=torch.int32, device=device)

    def _kernel(self, indices: Sequence[int], settings: FusedSettings, *, is_rows: bool) -> FusedKernel | TorchKernel:
        """A kernel of some holdings; one that gives out rows keeps them as one table."""
        held = [self._holdings[index] for index in indices]
        table = held[0].of
        sizes, features = [(one.num_rows(self._process), one.embedding_dim) for one in held], None
        if is_rows:
            sizes = [(sum(rows for rows, _ in sizes), held[0].embedding_dim)]
        else:
            features = [n for n, one in enumerate(held) for _ in one.of.features]
        if is_fused(table.optimizer, table.dtype, settings, self._device):
            memory = self._memory(held)
            return FusedKernel(sizes, table.dtype, table.optimizer, settings, self._device, features, memory)
        return TorchKernel(sizes, table.dtype, table.optimizer, settings, self._device, features)

    def _memory(self, held: Sequence[Holding]) -> MemoryPlacement:
        """Where a kernel keeps its rows, whose holdings share one cache."""
        return replace(held[0].memory, cache_bytes=sum(one.cache_bytes(self._process) for one in held))

    @property
    def _served(self) -> list[_Sums | _Rows]:
        return [*self._sums, *self._rows]

    @property
    def _kernels(self) -> Iterator[FusedKernel | TorchKernel]:
        yield from (one.kernel for one in self._served)

    def set_step(self, step: UpdateStep) -> None:
        """Sets the step of lookups from now on; those that were made keep theirs."""
        for kernel in self._kernels:
            kernel.set_step(step)

    def states(self, *, writes: bool) -> Mapping[int, RowStates]:
        """State of the rows of each holding.

        Args:
            writes: Whether it is written to.
        """
        if writes:
            self._follow_fill(None)
        found: dict[int, RowStates] = {}
        for sums in self._sums:
            found.update(zip(sums.holdings, sums.kernel.states(writes=writes), strict=True))
        for rows in self._rows:
            [state] = rows.kernel.states(writes=writes)
            for index in rows.holdings:
                start = rows.base[index]
                found[index] = state.of(start, start + self._holdings[index].num_rows(self._process))
        return found

    def close(self) -> None:
        """Lets go of the rows."""
        self._sums, self._rows, self.by_content = [], [], {}

    def fill(self, ahead: Prefetched) -> None:
        """Brings the rows of the batch that is looked up next into the caches, while the one before is trained on.

        Called between the lookup of the one before and its backward pass; nothing is done while its ids are under way.
        """
        here = None if self._beside is None else torch.cuda.current_stream(self._device)
        with nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            batch = ahead.arrived()
            if batch is None:
                return
            inputs = (*self._sum_inputs(batch), *((self._row_ids(batch, one), None, None) for one in self._rows))
            for one, (ids_L, lengths_FG, _) in zip(self._served, inputs, strict=True):
                if _fills_ahead(one) and isinstance(one.kernel, FusedKernel):
                    one.kernel.fill(ids_L, lengths_FG, here)
        self._filled = batch

    def _follow_fill(self, batch: DistributedBatch | None) -> None:
        """Before a lookup: what caches were filled for is this batch, which is trained on, or is forgotten."""
        if self._filled is not None and (self._filled is not batch or not torch.is_grad_enabled()):
            for kernel in self._kernels:
                if isinstance(kernel, FusedKernel) and kernel.fills_ahead:
                    kernel.forget_fill()
        self._filled = None

    def look_up(self, batch: DistributedBatch) -> LookupOutput:
        """Looks up what all processes ask for."""
        self._follow_fill(batch)
        sums = [self._timed(one, *of) for one, of in zip(self._sums, self._sum_inputs(batch), strict=True)]
        rows = [self._timed(one, self._row_ids(batch, one)) for one in self._rows]
        if not sums and not rows:  # nothing here; the empty output still has to be in the graph of every process
            num_samples = batch.batch_size * len(batch.served)
            nothing = torch.zeros(num_samples, 0, dtype=torch.float32, device=self._device, requires_grad=True)
            return LookupOutput(nothing, ())
        if torch.is_grad_enabled() and not any(one.requires_grad for one in (*sums, *rows)):
            (*sums, *rows)[0].requires_grad_()  # what is frozen, too: gradients go from process to process
        return LookupOutput(torch.cat(sums, dim=1) if len(sums) > 1 else sums[0] if sums else None, tuple(rows))

    def _sum_inputs(self, batch: DistributedBatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Ids, bag lengths, (F, G), and weights if there are some, of every kernel that gives out sums."""
        if not self._sums:
            return []
        num, asked = self._num_sums, [one.sums for one in batch.served]
        lengths_NB = torch.cat([one.lengths_NB[:num] for one in asked])
        ids_L = torch.cat([one.ids_L[: sum(one.counts_N[:num])] for one in asked])
        given = [one.weights_L[: sum(one.counts_N[:num])] for one in asked if one.weights_L is not None]
        weights_L = torch.cat(given) if given else None
        if self._by_feature is not None:
            lengths_NB, ids_L, weights_L = torch.ops.fbgemm.permute_2D_sparse_data(
                self._by_feature, lengths_NB, ids_L, weights_L, len(ids_L)
            )
        lengths_FG = lengths_NB.view(num, -1)
        inputs, first, start = [], 0, 0
        for one in self._sums:
            last = first + one.num_features
            stop = start + sum(sum(of.counts_N[first:last]) for of in asked)
            weights = None if weights_L is None else weights_L[start:stop]
            inputs.append((ids_L[start:stop].long(), lengths_FG[first:last], weights))
            first, start = last, stop
        return inputs

    def _row_ids(self, batch: DistributedBatch, rows: _Rows) -> torch.Tensor:
        """Rows of a kernel that processes ask for, one process after the other."""
        ids = []
        for asked, request in zip(self._asked, batch.served, strict=True):
            at = 0
            for index, count in zip(asked, request.counts, strict=True):
                if index in rows.base:
                    ids.append(request.ids_L[at : at + count].long() + rows.base[index])
                at += count
        return torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64, device=self._device)

    def _timed(
        self,
        one: _Sums | _Rows,
        ids_L: torch.Tensor,
        lengths_FG: torch.Tensor | None = None,
        weights_L: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernel = one.kernel
        if isinstance(kernel, FusedKernel) and kernel.shares_rows:
            with self._timer.clock.uncounted():
                ids_L = kernel.shared(ids_L, lengths_FG)
        is_trained = one.is_trained and torch.is_grad_enabled()
        with self._timer.measure(Part.FORWARD_KERNEL), torch.set_grad_enabled(is_trained):
            output = kernel.rows(ids_L) if lengths_FG is None else kernel.sums(ids_L, lengths_FG, weights_L)
        self._timer.measure_backward(output, Part.BACKWARD_KERNEL)
        return output
