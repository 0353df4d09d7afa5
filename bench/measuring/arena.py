"""Memory that the weights of measured sets are mapped onto."""

from __future__ import annotations

import torch

from autoshard.core import DType
from autoshard.core.errors import DeviceError
from autoshard.hardware import free_host_bytes
from autoshard.runtime.engine.rows.huge_pages import advise_huge_pages
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.memory import free_device_bytes

#: What every number starts as: not zero, so that pages exist and no denormal slows the arithmetic.
_INITIAL = 0.01
#: Bytes that a piece starts at a multiple of: one cache line.
_ALIGNMENT_BYTES = 64
#: Share of a CPU's free memory that the weights of one format may fill; other formats, moments, inputs, outputs and the
#: flush buffer need the rest.
_SHARE_OF_FREE = 0.3
#: Of a GPU, where weights and optimizer state of sets share it: inputs, outputs, their gradients and the flush buffer
#: need the rest. 60 GB of a rank's shards are measured beside a reference on a card of 80.
_SHARE_OF_FREE_CUDA = 0.85


class Arena:
    """A block of numbers of one kind, dealt out in pieces that never overlap until it is cleared.

    Allocating, zeroing and freeing the weights of every set would cost more time than measuring it. Memory is
    reserved at first and touched when first dealt out, so a large limit costs nothing until it is used.
    """

    def __init__(self, max_numbers: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Reserves room for `max_numbers` numbers.

        Raises:
            DeviceError: If the system grants no such block.
        """
        self._item_bytes = dtype.itemsize
        try:
            self._memory = advise_huge_pages(torch.empty(max_numbers, dtype=dtype, device=device))
        except RuntimeError as error:  # torch has no narrower type for it on a CPU
            raise DeviceError(f"{self._item_bytes * max_numbers:,} bytes of memory cannot be reserved") from error
        self._alignment = _ALIGNMENT_BYTES // self._item_bytes
        self._touched = 0
        self._used = 0

    @property
    def max_numbers(self) -> int:
        """Numbers that can be dealt out."""
        return self._memory.numel()

    def take(self, num_numbers: int) -> torch.Tensor:
        """A piece that overlaps none taken since the last `clear`.

        Raises:
            DeviceError: If there is not enough left.
        """
        start = self._used
        stop = start + num_numbers
        if stop > self.max_numbers:
            raise DeviceError(
                f"{self._item_bytes * stop:,} bytes of weights do not fit in the "
                f"{self._item_bytes * self.max_numbers:,} set apart"
            )
        if stop > self._touched:
            self._memory[self._touched : stop].fill_(_INITIAL)
            self._touched = stop
        self._used = -(-stop // self._alignment) * self._alignment
        return self._memory[start:stop]

    def clear(self) -> None:
        """Takes all pieces back; their content stays."""
        self._used = 0


class Arenas:
    """An arena for the weights of each number format, and one for optimizer state.

    Formats are kept apart: bits of one, read as another, can be denormal numbers, which slow the arithmetic.
    """

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        """Reserves `max_bytes` for each; whoever deals out has to count."""
        self._weights = {
            dtype: Arena(max_bytes // dtype.num_bytes, device, TORCH_DTYPES[dtype])
            for dtype in (DType.FP32, DType.FP16, DType.BF16)
        }
        self._moments = Arena(max_bytes // 4, device)

    def weights(self, num_numbers: int, dtype: DType) -> torch.Tensor:
        """Memory for weights."""
        return self._weights[dtype].take(num_numbers)

    def moments(self, num_numbers: int) -> torch.Tensor:
        """Memory for optimizer state, fp32."""
        return self._moments.take(num_numbers)

    def clear(self) -> None:
        """Takes everything back."""
        for arena in (*self._weights.values(), self._moments):
            arena.clear()


def free_bytes(device: torch.device) -> int:
    """Memory of a device that sets of shards may fill at once."""
    if device.type == "cuda":
        return int(free_device_bytes(device) * _SHARE_OF_FREE_CUDA)
    return int(free_host_bytes() * _SHARE_OF_FREE)
