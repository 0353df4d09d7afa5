"""Number formats of embeddings and gradients on the wire, and the collectives that carry them.

Shape suffixes: V values, B rows of one process, G rows of all, W columns.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from autoshard.core import DType
from autoshard.core.step import StepCollective
from autoshard.evaluation.traffic import INT8_BLOCK
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.pending import Pending
from autoshard.runtime.releases import all_gather, reduce_scatter
from autoshard.runtime.timing import StepTimer


class WireFormat(Protocol):
    """Writes values for the wire and reads them back."""

    def num_elements(self, num_values: int) -> int:
        """Elements that so many values take on the wire."""
        ...

    def encode(self, values_V: torch.Tensor) -> torch.Tensor:
        """The values as they travel, one-dimensional."""
        ...

    def decode(self, wire: torch.Tensor, num_values: int) -> torch.Tensor:
        """The values, of shape (V,)."""
        ...


class CastFormat:
    """Values as they are, or cast to fp16 or bf16."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = TORCH_DTYPES[dtype]

    def num_elements(self, num_values: int) -> int:
        """One for each value."""
        return num_values

    def encode(self, values_V: torch.Tensor) -> torch.Tensor:
        """Casts."""
        return values_V.to(self._dtype)

    def decode(self, wire: torch.Tensor, num_values: int) -> torch.Tensor:
        """The values as they travelled: whoever needs fp32 casts what it has put together."""
        assert len(wire) == num_values, "one element for each value"
        return wire


class Int8Format:
    """fp32 as int8, with a scale and an offset of fp32 for each block of 64; the last block is filled up with 0."""

    def num_elements(self, num_values: int) -> int:
        """Bytes of the blocks."""
        return -(-num_values // INT8_BLOCK) * (INT8_BLOCK + 8)

    def encode(self, values_V: torch.Tensor) -> torch.Tensor:
        """Quantises block by block."""
        missing = -len(values_V) % INT8_BLOCK
        padded = torch.nn.functional.pad(values_V, (0, missing)) if missing else values_V
        quantised: torch.Tensor = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(padded.view(-1, INT8_BLOCK))
        return quantised.view(-1)

    def decode(self, wire: torch.Tensor, num_values: int) -> torch.Tensor:
        """Reads the blocks."""
        values: torch.Tensor = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(wire.view(-1, INT8_BLOCK + 8))
        return values.view(-1)[:num_values]


def wire_format(dtype: DType) -> WireFormat:
    """The format of a payload."""
    return Int8Format() if dtype is DType.INT8 else CastFormat(dtype)


class PayloadExchange:
    """One all-to-all of values, under way.

    Args:
        sent: The values for all processes, one process after the other, of one dimension.
        sent_sizes: How many of them each process is sent.
        received_sizes: How many values come from each process.
        dtype: Format on the wire.
        group: The processes.
        collective: What to count its time as.
        timer: Where to count it.
    """

    def __init__(
        self,
        sent: torch.Tensor,
        sent_sizes: list[int],
        received_sizes: list[int],
        dtype: DType,
        group: dist.ProcessGroup,
        collective: StepCollective,
        timer: StepTimer,
    ) -> None:
        self._form, self._sizes = wire_format(dtype), received_sizes
        if isinstance(self._form, CastFormat):
            encoded = self._form.encode(sent)
        else:
            encoded = torch.cat([self._form.encode(one) for one in torch.split(sent, sent_sizes)])
        self._elements = [self._form.num_elements(size) for size in received_sizes]
        self._wire = encoded.new_empty(sum(self._elements))
        elements = [self._form.num_elements(size) for size in sent_sizes]
        work = dist.all_to_all_single(self._wire, encoded, self._elements, elements, group, async_op=True)
        self._pending = Pending(work, collective, timer)

    def wait(self) -> torch.Tensor:
        """What came, process after process, of one dimension: fp32, or fp16 or bf16 as it travelled."""
        self._pending.wait()
        if isinstance(self._form, CastFormat):
            return self._form.decode(self._wire, len(self._wire))
        came = zip(torch.split(self._wire, self._elements), self._sizes, strict=True)
        return torch.cat([self._form.decode(one, size) for one, size in came])


class ReduceScatter:
    """Sums over processes of values, under way; they are added up in the format on the wire.

    On a CPU, where gloo makes a reduce-scatter of an all-reduce, an all-to-all and a sum here took 0.6 to 0.85 of its
    time (4 processes on 2 cores of an AMD EPYC, 64 and 512 rows each of 512 and 4,096 columns, November 2026). Groups
    whose `sums_on_the_way` is true stand for links that add up, as NCCL's: virtual time's on a topology's numbers.

    Args:
        sent_GW: Rows for all processes, process by process.
        dtype: fp32, fp16 or bf16.
        group: The processes.
        collective: What to count its time as.
        timer: Where to count it.
    """

    def __init__(
        self,
        sent_GW: torch.Tensor,
        dtype: DType,
        group: dist.ProcessGroup,
        collective: StepCollective,
        timer: StepTimer,
    ) -> None:
        encoded_GW = CastFormat(dtype).encode(sent_GW).contiguous()
        is_summed = encoded_GW.is_cuda or getattr(group, "sums_on_the_way", False)
        self._num_terms = 1 if is_summed else group.size()
        num_rows = len(encoded_GW) // group.size() * self._num_terms
        self._wire = encoded_GW.new_empty(num_rows, encoded_GW.shape[1])
        start = reduce_scatter if is_summed else dist.all_to_all_single
        self._pending = Pending(start(self._wire, encoded_GW, group=group, async_op=True), collective, timer)

    def wait(self) -> torch.Tensor:
        """The sums of this process's rows, fp32 of shape (B, W)."""
        self._pending.wait()
        return self._wire.float().view(self._num_terms, -1, self._wire.shape[1]).sum(0)


class AllGather:
    """Rows of all processes, under way.

    Args:
        sent_BW: Rows of this process, as many on each.
        dtype: fp32, fp16 or bf16.
        group: The processes.
        collective: What to count its time as.
        timer: Where to count it.
    """

    def __init__(
        self,
        sent_BW: torch.Tensor,
        dtype: DType,
        group: dist.ProcessGroup,
        collective: StepCollective,
        timer: StepTimer,
    ) -> None:
        encoded_BW = CastFormat(dtype).encode(sent_BW).contiguous()
        self._wire = encoded_BW.new_empty(len(encoded_BW) * group.size(), encoded_BW.shape[1])
        work = all_gather(self._wire, encoded_BW, group=group, async_op=True)
        self._pending = Pending(work, collective, timer)

    def wait(self) -> torch.Tensor:
        """The rows, process by process, as they travelled, of shape (G, W)."""
        self._pending.wait()
        return self._wire
