"""The rows of a process that other processes have copies of, kernel by kernel.

Shape suffixes: B samples of a local batch, W columns of a block of sums, D embedding dim, L lookups, X bags or lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist

from autoshard.core.step import StepCollective
from autoshard.runtime.engine.holdings import KernelContent, KernelKey, Ownership
from autoshard.runtime.engine.ids.hits import HitRows, replica_slots
from autoshard.runtime.engine.ids.messages import Request
from autoshard.runtime.engine.rows.averaging import RowStates
from autoshard.runtime.engine.rows.fused import FusedSettings, UpdateStep
from autoshard.runtime.engine.rows.replicated import GradientSync, SyncedRows, holder_groups, places_of
from autoshard.runtime.engine.rows.torch_rows import (
    TorchRows,
    one_below_the_other,
    side_by_side,
    summed_by_place,
    weighted,
)
from autoshard.runtime.timing import Part, StepTimer


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaLookups:
    """Embeddings of one request for replicated rows, and what their gradients belong to.

    Attributes:
        sums_BW: Sums of bags; None if none are asked for.
        rows: Rows, kernel by kernel.
        slots: For each block of columns with one kernel: the key, rows, bags and, where they are weighted, weights of
            its lookups, and its first column and number of features.
        asked: For each of `rows` the key and the rows' numbers.
    """

    sums_BW: torch.Tensor | None
    rows: tuple[torch.Tensor, ...]
    slots: tuple[tuple[KernelKey, torch.Tensor, torch.Tensor, torch.Tensor | None, int, int], ...]
    asked: tuple[tuple[KernelKey, torch.Tensor], ...]


#: Of a process that has no replicas.
NO_LOOKUPS = ReplicaLookups(None, (), (), ())


@dataclass(slots=True, eq=False)
class _Kernel:
    """Storage of one kernel of replicas."""

    rows: TorchRows
    base: Mapping[int, int]
    """First row of each holding."""
    lookups: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    num_gradients: int = 0

    def summed(self, rows_U: torch.Tensor | None) -> torch.Tensor:
        """Gradients of some rows or, for None, of all, (U, D), of all that was collected; forgets it.

        Where rows move without a gradient, those of all have one more column: how often each was looked up.
        """
        num_rows, dim = self.rows.weights_ND.shape
        num_places = num_rows if rows_U is None else len(rows_U)
        counts_hits = rows_U is None and self.rows.moves_without_gradient
        if not self.lookups:
            return self.rows.weights_ND.new_zeros(num_places, dim + counts_hits, dtype=torch.float32)
        rows_L, gradients_XD = torch.cat(self.lookups), torch.cat(self.gradients)
        if counts_hits:
            gradients_XD = torch.nn.functional.pad(gradients_XD, (0, 1), value=1.0)
        places_L = rows_L if rows_U is None else places_of(rows_L, rows_U, num_rows)
        summed = summed_by_place(places_L, num_places, torch.cat(self.sources), gradients_XD)
        self.lookups, self.sources, self.gradients, self.num_gradients = [], [], [], 0
        return summed

    def update(self, rows_U: torch.Tensor | None, gradients_UD: torch.Tensor, step: UpdateStep) -> None:
        """Takes a step of the optimizer for rows whose gradients have met, as `summed` has them."""
        hits_U = None
        if rows_U is None and self.rows.moves_without_gradient:
            hits_U, gradients_UD = gradients_UD[:, -1] > 0, gradients_UD[:, :-1]
        self.rows.update(rows_U, gradients_UD, step, hits_U)


class Replicas:
    """Looks up replicated rows, and updates them once a step from the gradients of all copies.

    Args:
        ownership: Who holds what.
        settings: Of the updates.
        group: The processes.
        device: Where to hold rows.
        timer: Where to count the time.
        all_groups: Ranks in the world of each group of processes that makes an engine of the same plan now; None for
            this one alone, which is all processes then.
        known: Rows that there are already, by what they are.

    Attributes:
        by_content: The rows of each kernel, by what they are.
        step: Of lookups from now on.
    """

    def __init__(
        self,
        ownership: Ownership,
        settings: FusedSettings,
        group: dist.ProcessGroup,
        device: torch.device,
        timer: StepTimer,
        all_groups: Sequence[Sequence[int]] | None = None,
        known: Mapping[KernelContent, TorchRows] = MappingProxyType({}),
    ) -> None:
        self._timer, self._device = timer, device
        self.step = UpdateStep(settings.learning_rate, 1)
        process = group.rank()
        self._kernels: dict[KernelKey, _Kernel] = {}
        self.by_content: dict[KernelContent, TorchRows] = {}
        replicated = [one for one in ownership.holdings if one.is_replicated]
        holders = sorted({processes for one in replicated for processes in one.sync_groups()})
        ranks = [dist.get_global_rank(group, process) for process in range(group.size())]
        groups = holder_groups(holders, group, all_groups or [ranks])
        together: dict[tuple[int, ...], dict[KernelKey, SyncedRows]] = {}
        for key in ownership.kernels:
            indices = ownership.of_kernel(key, process)
            if not indices or not ownership.holdings[indices[0]].is_replicated:
                continue
            first = ownership.holdings[indices[0]]
            rows = sum(ownership.holdings[index].num_rows(process) for index in indices)
            processes = ownership.holders(key, process)
            content = ownership.content(key, process)
            storage = known.get(content)
            if storage is None:
                table = first.of
                storage = TorchRows(rows, first.embedding_dim, table.dtype, table.optimizer, settings, device)
            self.by_content[content] = storage
            self._kernels[key] = _Kernel(rows=storage, base=ownership.first_rows(key, process))
            if first.is_trained:
                together.setdefault(processes, {})[key] = SyncedRows(rows, first.embedding_dim)
        #: What each process asks this one for, and last what this one reads itself.
        self._slots = [
            replica_slots(of, ownership, process, device)
            for of in (*(ownership.asked(other, process) for other in range(group.size())), ownership.local(process))
        ]
        self._trained = {key for of in together.values() for key in of}
        self._syncs = [
            (tuple(of), GradientSync(groups[processes], tuple(of.values()))) for processes, of in together.items()
        ]

    @property
    def is_empty(self) -> bool:
        """Whether this process has no replicas."""
        return not self._kernels

    def close(self) -> None:
        """Lets go of the rows."""
        self._kernels, self.by_content = {}, {}

    @property
    def sent_bytes(self) -> int:
        """Bytes that this process has put into collectives of rows and gradients."""
        return sum(sync.sent_bytes for _, sync in self._syncs)

    def states(self) -> Mapping[int, RowStates]:
        """State of the rows of each holding."""
        found = {}
        for kernel in self._kernels.values():
            ends = [*list(kernel.base.values())[1:], len(kernel.rows.weights_ND)]
            for (index, start), end in zip(kernel.base.items(), ends, strict=True):
                found[index] = kernel.rows.state.of(start, end)
        return found

    def look_up(self, request: Request, reader: int, B: int) -> ReplicaLookups:
        """Embeddings of the replicated part of a request.

        Args:
            request: The request.
            reader: The process whose it is; the number of processes for this one's own.
            B: Samples of a local batch.
        """
        sums, known, rows, wanted, column = [], [], [], [], 0
        for of in self._slots[reader]:
            kernel, rows_L, num_slots = self._kernels[of.key], of.rows(request), len(of.slots)
            if not of.is_pooled:
                rows.append(kernel.rows.rows(rows_L))
                wanted.append((of.key, rows_L))
                continue
            lengths_X = request.sums.lengths_NB[of.slots.start : of.slots.stop].reshape(-1)
            weights_L = of.weights(request)
            sums.append(side_by_side(kernel.rows.sums(rows_L, lengths_X, weights_L), num_slots, B))
            bags = torch.arange(len(lengths_X), device=self._device)
            bags_L = torch.repeat_interleave(bags, lengths_X, output_size=len(rows_L))
            known.append((of.key, rows_L, bags_L, weights_L, column, num_slots))
            column += sums[-1].shape[1]
        sums_BW = None if not sums else sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
        return ReplicaLookups(sums_BW, tuple(rows), tuple(known), tuple(wanted))

    def collect(self, looked: ReplicaLookups, sums_BW: torch.Tensor | None, rows: Sequence[torch.Tensor]) -> None:
        """Takes the gradients of a request, to be applied by `update`."""
        for key, rows_L, bags_L, weights_L, column, num_features in looked.slots:
            assert sums_BW is not None, "sums were asked for"
            dim = self._kernels[key].rows.weights_ND.shape[1]
            gradients_XD = one_below_the_other(sums_BW[:, column : column + num_features * dim], num_features)
            if weights_L is not None:
                bags_L, gradients_XD = weighted(bags_L, gradients_XD, weights_L)
            self._add(key, rows_L, bags_L, gradients_XD)
        for (key, rows_L), gradients_LD in zip(looked.asked, rows, strict=True):
            self._add(key, rows_L, torch.arange(len(rows_L), device=self._device), gradients_LD)

    def _add(self, key: KernelKey, rows_L: torch.Tensor, sources_L: torch.Tensor, gradients_XD: torch.Tensor) -> None:
        if key not in self._trained:
            return
        kernel = self._kernels[key]
        kernel.lookups.append(rows_L)
        kernel.sources.append(sources_L + kernel.num_gradients)
        kernel.gradients.append(gradients_XD)
        kernel.num_gradients += len(gradients_XD)

    def update(self, hits: Sequence[HitRows], step: UpdateStep) -> None:
        """Sums the gradients of all copies, and takes a step of the optimizer.

        Args:
            hits: Rows of the batch whose gradients meet, kernel by kernel; of other kernels those of all rows do.
            step: That of the lookup.
        """
        of_kernel = {one.key: one for one in hits}
        for keys, sync in self._syncs:
            kernels, hit = [self._kernels[key] for key in keys], [of_kernel.get(key) for key in keys]
            with self._timer.measure(Part.BACKWARD_KERNEL):
                own = [kernel.summed(rows) for kernel, rows in zip(kernels, sync.own_rows(hit), strict=True)]
            with self._timer.measure(Part.SYNC, StepCollective.ALL_REDUCE):
                gradients = sync(own, hit)
            with self._timer.measure(Part.BACKWARD_KERNEL):
                for kernel, one, gradients_UD in zip(kernels, hit, gradients, strict=True):
                    kernel.update(None if one is None else one.all_U, gradients_UD, step)
