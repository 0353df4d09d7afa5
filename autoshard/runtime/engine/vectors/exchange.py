"""How embeddings reach the processes whose samples they belong to, and their gradients the rows.

Shape suffixes: P processes, B samples of a local batch, G samples of the global batch (P * B), C columns of all pooled
features, O columns of one process's fused sums, W columns of a block, D embedding dim, L lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autoshard.core import DType, Exchange
from autoshard.core.plan import Payload
from autoshard.core.step import StepCollective
from autoshard.evaluation.traffic import Stream
from autoshard.runtime.engine.groups import WeakGroup
from autoshard.runtime.engine.holdings import KernelKey, Ownership
from autoshard.runtime.engine.ids.requests import DistributedBatch
from autoshard.runtime.engine.rows.fused import UpdateStep
from autoshard.runtime.engine.rows.replicas import (
    NO_LOOKUPS,
    ReplicaLookups,
    Replicas,
)
from autoshard.runtime.engine.rows.serving import LookupOutput
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.engine.vectors.assembly import (
    NOT_ASSEMBLED,
    NOT_TAKEN,
    Assembled,
    Assembly,
    ReceivedVectors,
    TakenApart,
)
from autoshard.runtime.engine.vectors.payload import AllGather, PayloadExchange, ReduceScatter, wire_format
from autoshard.runtime.engine.vectors.reading import Reading
from autoshard.runtime.engine.vectors.reduced import ReducedSums
from autoshard.runtime.timing import Part, StepTimer


class OutputExchange:
    """Sends embeddings to those who asked for them, and their gradients back: one all-to-all each way.

    Sums that are added up on the way have a reduce-scatter and an all-gather of their own. Sending and receiving are
    apart, forward and backward, so that others may compute while embeddings travel.

    Gradients are divided by the number of processes: each process's loss is the mean over its own batch, so the
    tables see the gradient of the mean over the global batch. TorchRec does the same.

    Args:
        ownership: Who holds what.
        reading: How this process puts together what it reads.
        replicas: Rows here that other processes have copies of.
        payload: Number formats on the wire.
        output: As what this process's kernels give embeddings out, and take gradients.
        group: The processes.
        device: Where batches are.
        timer: Where to count the time.
    """

    _group = WeakGroup[dist.ProcessGroup]()

    def __init__(
        self,
        ownership: Ownership,
        reading: Reading,
        replicas: Replicas,
        payload: Payload,
        output: DType,
        group: dist.ProcessGroup,
        device: torch.device,
        timer: StepTimer,
    ) -> None:
        self._device = device
        self.reading, self.replicas, self.timer = reading, replicas, timer
        self._payload, self._output, self._group = payload, TORCH_DTYPES[output], group
        self._num_processes, self._process = ownership.num_processes, group.rank()
        holdings = ownership.holdings
        self._asked = [ownership.asked(self._process, owner) for owner in range(self._num_processes)]
        self._served = [ownership.asked(other, self._process) for other in range(self._num_processes)]
        self._dim = [one.embedding_dim for one in holdings]
        #: Columns of the blocks of sums that this process asks each other for, and that it serves.
        self._asked_widths, self._served_widths = (
            [sum(self._dim[slot.holding] for slot in ownership.sent_apart(one)) for one in several]
            for several in (self._asked, self._served)
        )
        self._key = [one.kernel_key for one in holdings]
        fused_rows = {
            one.kernel_key: one.embedding_dim
            for one in holdings
            if not one.is_replicated and one.output is Exchange.ROWS and one.num_rows(self._process)
        }
        #: Kernels of this process that give out rows and update their own tables, in their order.
        self.row_keys = [key for key in ownership.kernels if key in fused_rows]
        self._row_dims = [fused_rows[key] for key in self.row_keys]
        self.reduced = ReducedSums(ownership, group)
        self._is_all_reduced = all(one.is_reduced for one in holdings)
        self._assembly = Assembly(ownership, reading, device)
        #: Called before gradients are sent: what else is launched there.
        self.before_gradients: Callable[[], None] = _nothing_else
        #: Bytes that this process has sent to each process.
        self.sent_bytes = {stream: [0.0] * self._num_processes for stream in (Stream.FORWARD, Stream.BACKWARD)}

    def close(self) -> None:
        """Lets go of the processes: batches that have been looked up are no longer trained on."""
        del self._group

    def start(self, looked: LookupOutput, batch: DistributedBatch) -> StartedExchange:
        """Sends embeddings on their way."""
        step = _Step(batch, self.replicas.step)
        travelling: torch.Tensor = _SendVectors.apply(self, step, looked.sums_GO, *looked.rows)  # type: ignore[no-untyped-call]
        return StartedExchange(self, step, travelling)

    # -- forward ------------------------------------------------------------------------------------------------------

    def send(self, step: _Step, sums_GO: torch.Tensor | None, rows: Sequence[torch.Tensor]) -> None:
        """Sends embeddings."""
        batch, B = step.batch, step.batch.batch_size
        step.remote = [NO_LOOKUPS] * self._num_processes
        if not self.replicas.is_empty:
            with self.timer.measure(Part.FORWARD_KERNEL):
                asked = enumerate([*batch.served, batch.local])
                *step.remote, step.local = [self.replicas.look_up(request, reader, B) for reader, request in asked]
        with self.timer.measure(Part.FORWARD_EXCHANGE):
            apart_GA, mine_GM = self.reduced.split(sums_GO)
            step.embeddings = self._forward_exchange(step, apart_GA, rows)
            step.sums = self._reduce_scatter(mine_GM, B)

    def receive(self, step: _Step) -> list[torch.Tensor]:
        """Puts together the embeddings that come."""
        with self.timer.measure(Part.FORWARD_EXCHANGE):
            sent = self._received(step.embeddings, torch.float32)
            reduced_BW = None if step.sums is None else step.sums.wait()
            step.embeddings = step.sums = None
            pieces = torch.split(sent, step.received_sizes)
            came = [self._came(step, one, owner) for owner, one in enumerate(pieces)]
            outputs, step.assembled = self._assembly.put_together(step.batch, came, step.local, reduced_BW, sent)
            return outputs

    def _forward_exchange(
        self, step: _Step, sums_GO: torch.Tensor | None, rows: Sequence[torch.Tensor]
    ) -> PayloadExchange | None:
        B = step.batch.batch_size
        rows_of_P = [self._rows_for(step, rows, process) for process in range(self._num_processes)]
        if sums_GO is not None and not any(rows_of_P) and not any(one.sums_BW is not None for one in step.remote):
            flat, sizes = sums_GO.reshape(-1), [B * sums_GO.shape[1]] * self._num_processes
        else:
            pieces = [
                [*self._sums_for(sums_GO, step, process), *(of.reshape(-1) for of in rows_of_P[process])]
                for process in range(self._num_processes)
            ]
            flat = torch.cat([one for of in pieces for one in of]) if any(pieces) else self._nothing()
            sizes = [sum(len(one) for one in of) for of in pieces]
        step.received_sizes = [
            B * width + self._row_values(step, owner) for owner, width in enumerate(self._asked_widths)
        ]
        step.sent_sizes = sizes
        self._count(Stream.FORWARD, self._payload.forward, sizes)
        return self._exchange(flat, sizes, step.received_sizes, self._payload.forward, StepCollective.FORWARD_EXCHANGE)

    def _exchange(
        self, flat: torch.Tensor, sent: list[int], received: list[int], dtype: DType, collective: StepCollective
    ) -> PayloadExchange | None:
        """One all-to-all; None where all sums are added up on the way."""
        if self._is_all_reduced:
            return None
        return PayloadExchange(flat, sent, received, dtype, self._group, collective, self.timer)

    def _received(self, exchange: PayloadExchange | None, dtype: torch.dtype) -> torch.Tensor:
        """What has come from all processes, of one dimension."""
        return self._nothing() if exchange is None else exchange.wait().to(dtype)

    def _reduce_scatter(self, mine_GM: torch.Tensor | None, B: int) -> ReduceScatter | None:
        if not self.reduced.width:
            return None
        self._count(Stream.FORWARD, self._payload.forward, [B * self.reduced.width] * self._num_processes)
        sums_GW = self.reduced.filled(mine_GM, B, TORCH_DTYPES[self._payload.forward], self._device)
        return ReduceScatter(sums_GW, self._payload.forward, self._group, StepCollective.FORWARD_EXCHANGE, self.timer)

    def _sums_for(self, sums_GO: torch.Tensor | None, step: _Step, process: int) -> list[torch.Tensor]:
        B, remote = step.batch.batch_size, step.remote[process].sums_BW
        own = [] if sums_GO is None else [sums_GO[process * B : (process + 1) * B]]
        blocks = own if remote is None else [*own, remote]
        return (
            [] if not blocks else [torch.cat(blocks, dim=1).reshape(-1) if len(blocks) > 1 else blocks[0].reshape(-1)]
        )

    def _rows_for(self, step: _Step, rows: Sequence[torch.Tensor], process: int) -> list[torch.Tensor]:
        """Rows for a process: of kernels that update their own tables, then of replicas."""
        fused = []
        for number, of_kernel in enumerate(rows):
            counts = [self._kernel_rows(step, other, number) for other in range(self._num_processes)]
            start = sum(counts[:process])
            fused.append(of_kernel[start : start + counts[process]])
        return [one for one in (*fused, *step.remote[process].rows) if len(one)]

    def _kernel_rows(self, step: _Step, process: int, number: int) -> int:
        """Rows that a process asks a kernel for."""
        asked, request = self._served[process], step.batch.served[process]
        key = self.row_keys[number]
        return sum(count for index, count in zip(asked.rows, request.counts, strict=True) if self._key[index] == key)

    def _row_values(self, step: _Step, owner: int) -> int:
        return sum(self._dim[index] * count for index, count in self._asked_rows(step, owner))

    def _asked_rows(self, step: _Step, owner: int) -> list[tuple[int, int]]:
        """Holdings whose rows an owner sends, and how many rows."""
        asked = self._asked[owner].rows
        if not asked:
            return []
        assert step.batch.rows is not None, "rows were asked for"
        return list(zip(asked, step.batch.rows.num_rows[owner], strict=True))

    def _came(self, step: _Step, flat: torch.Tensor, owner: int) -> ReceivedVectors:
        B, width = step.batch.batch_size, self._asked_widths[owner]
        rows: dict[KernelKey, torch.Tensor] = {}
        at = B * width
        for key, size, dim in self._row_blocks(step, owner):
            rows[key] = flat[at : at + size * dim].view(size, dim)
            at += size * dim
        return ReceivedVectors(flat[: B * width].view(B, width), rows)

    def _row_blocks(self, step: _Step, owner: int) -> list[tuple[KernelKey, int, int]]:
        """Kernels whose rows an owner sends, with their number and width."""
        sizes: dict[KernelKey, list[int]] = {}
        for index, count in self._asked_rows(step, owner):
            known = sizes.setdefault(self._key[index], [0, self._dim[index]])
            known[0] += count
        return [(key, size, dim) for key, (size, dim) in sizes.items()]

    # -- backward -----------------------------------------------------------------------------------------------------

    def send_gradients(self, step: _Step, gradients: Sequence[torch.Tensor]) -> None:
        """Sends gradients to those who hold the rows."""
        self.before_gradients()
        with self.timer.measure(Part.BACKWARD_EXCHANGE):
            scaled = [one / self._num_processes for one in gradients]
            step.taken = self._assembly.take_apart(step.assembled, scaled)
            step.gradients = self._backward_exchange(step, step.taken)
            step.gathered = self._all_gather(step.taken.reduced_BW)

    def receive_gradients(self, step: _Step) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Gradients of fused sums, (G, O), and of their rows; replicas are updated with theirs."""
        with self.timer.measure(Part.BACKWARD_EXCHANGE):
            received = torch.split(self._received(step.gradients, self._output), step.sent_sizes)
            of_sums_GM = None if step.gathered is None else self.reduced.mine(step.gathered.wait().to(self._output))
            step.gradients = step.gathered = None
            fused = self._fused_gradients(step, received, of_sums_GM)
        if not self.replicas.is_empty:
            with self.timer.measure(Part.BACKWARD_KERNEL):
                self._collect(step, step.taken, received)
            self.replicas.update(step.batch.hits, step.update)
        return fused

    def _backward_exchange(self, step: _Step, taken: TakenApart) -> PayloadExchange | None:
        flat = taken.sums
        step.first_local = dict.fromkeys(taken.rows, 0)
        if taken.rows:
            pieces: list[torch.Tensor] = []
            for owner, sums_BW in enumerate(taken.sums_P):
                pieces.append(sums_BW.reshape(-1))
                for key, size, _ in self._row_blocks(step, owner):
                    start = step.first_local[key]
                    pieces.append(taken.rows[key][start : start + size].reshape(-1))
                    step.first_local[key] += size
            flat = torch.cat(pieces)
        self._count(Stream.BACKWARD, self._payload.backward, step.received_sizes)
        return self._exchange(
            flat, step.received_sizes, step.sent_sizes, self._payload.backward, StepCollective.BACKWARD_EXCHANGE
        )

    def _all_gather(self, gradients_BW: torch.Tensor) -> AllGather | None:
        """Sends gradients of sums that were added up on the way to all processes."""
        if not self.reduced.width:
            return None
        self._count(Stream.BACKWARD, self._payload.backward, [gradients_BW.numel()] * self._num_processes)
        return AllGather(
            gradients_BW, self._payload.backward, self._group, StepCollective.BACKWARD_EXCHANGE, self.timer
        )

    def _fused_gradients(
        self, step: _Step, received: Sequence[torch.Tensor], reduced_GM: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        B, fused = step.batch.batch_size, self.reduced.apart_width
        sums_GA = None
        if fused:
            pairs = zip(received, self._served_widths, strict=True)
            blocks = [one[: B * width].view(B, width)[:, :fused] for one, width in pairs]
            sums_GA = torch.cat(blocks)
        rows = []
        for number in range(len(self.row_keys)):
            pieces = []
            for process, one in enumerate(received):
                start, size, dim = self._fused_rows_at(step, process, number)
                pieces.append(one[start : start + size * dim].view(size, dim))
            rows.append(torch.cat(pieces))
        return self.reduced.joined(sums_GA, reduced_GM), rows

    def _fused_rows_at(self, step: _Step, process: int, number: int) -> tuple[int, int, int]:
        """Where a process's gradients of a kernel's rows start, their number and width."""
        start = step.batch.batch_size * self._served_widths[process]
        for before in range(number):
            start += self._kernel_rows(step, process, before) * self._row_dims[before]
        return start, self._kernel_rows(step, process, number), self._row_dims[number]

    def _collect(
        self,
        step: _Step,
        taken: TakenApart,
        received: Sequence[torch.Tensor],
    ) -> None:
        """Gives gradients of replicated rows to the replicas."""
        B = step.batch.batch_size
        for process, (looked, flat) in enumerate(zip(step.remote, received, strict=True)):
            width = self._served_widths[process]
            sums_BW = flat[: B * width].view(B, width)[:, self.reduced.apart_width :]
            start = B * width + sum(
                self._kernel_rows(step, process, number) * dim for number, dim in enumerate(self._row_dims)
            )
            self.replicas.collect(looked, sums_BW.float(), _cut_rows(flat[start:].float(), looked.rows))
        local_rows = [taken.rows[key][step.first_local[key] :] for key, _ in step.local.asked]
        self.replicas.collect(step.local, taken.local_BW, local_rows)

    def _count(self, stream: Stream, dtype: DType, sizes: Sequence[int]) -> None:
        form, counted = wire_format(dtype), self.sent_bytes[stream]
        for process, size in enumerate(sizes):
            counted[process] += form.num_elements(size) * dtype.num_bytes

    def _nothing(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.float32, device=self._device)


@dataclass(slots=True, eq=False)
class _Step:
    """What sending and receiving, forward and backward, have to know of each other."""

    batch: DistributedBatch
    update: UpdateStep
    remote: list[ReplicaLookups] = field(default_factory=list)
    local: ReplicaLookups = NO_LOOKUPS
    sent_sizes: list[int] = field(default_factory=list)
    received_sizes: list[int] = field(default_factory=list)
    first_local: dict[KernelKey, int] = field(default_factory=dict)
    assembled: Assembled = NOT_ASSEMBLED
    embeddings: PayloadExchange | None = None
    sums: ReduceScatter | None = None
    taken: TakenApart = NOT_TAKEN
    gradients: PayloadExchange | None = None
    gathered: AllGather | None = None


class StartedExchange:
    """Embeddings of one batch on their way.

    Args:
        exchanger: Sent them.
        step: Of the batch.
        travelling: An empty tensor, whose gradient comes when those of the embeddings have been sent.
    """

    def __init__(self, exchanger: OutputExchange, step: _Step, travelling: torch.Tensor) -> None:
        self._exchanger, self._step, self._travelling = exchanger, step, travelling

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Embeddings of the local batch's samples: pooled ones, and for each sequence feature (L, D)."""
        pooled_BC, *sequences = _ReceiveVectors.apply(  # type: ignore[no-untyped-call]
            self._exchanger, self._step, self._travelling
        )
        batch = self._step.batch
        return (pooled_BC[: batch.num_samples] if batch.num_samples < batch.batch_size else pooled_BC, *sequences)


def _nothing_else() -> None:
    """Where no batch is distributed ahead."""


def _cut_rows(flat: torch.Tensor, alike: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [one.numel() for one in alike]
    return [one.view(of.shape) for one, of in zip(torch.split(flat, sizes), alike, strict=True)] if sizes else []


class _SendVectors(torch.autograd.Function):
    """Sends embeddings; its backward pass receives their gradients.

    Autograd goes back in reverse order: what was computed between `_SendVectors` and `_ReceiveVectors` forward is
    computed between sending and receiving the gradients, too.
    """

    @staticmethod
    def forward(
        ctx: Any, exchanger: OutputExchange, step: _Step, sums_GO: torch.Tensor | None, *rows: torch.Tensor
    ) -> torch.Tensor:
        ctx.exchanger, ctx.step = exchanger, step
        exchanger.send(step, sums_GO, rows)
        return _empty(step)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums_GO, rows = ctx.exchanger.receive_gradients(ctx.step)
        return None, None, sums_GO, *rows


class _ReceiveVectors(torch.autograd.Function):
    """Receives embeddings; its backward pass sends their gradients."""

    @staticmethod
    def forward(ctx: Any, exchanger: OutputExchange, step: _Step, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchanger, ctx.step = exchanger, step
        return tuple(exchanger.receive(step))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.exchanger.send_gradients(ctx.step, gradients)
        return None, None, _empty(ctx.step)


def _empty(step: _Step) -> torch.Tensor:
    return step.batch.lengths_FB.new_empty(0, dtype=torch.float32)
