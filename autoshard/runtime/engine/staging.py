"""Numbers on a device: how the host sends them there and reads them, and what torch calls their formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.core import DType

#: As torch calls them.
TORCH_DTYPES = {
    DType.FP32: torch.float32,
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.INT8: torch.int8,
}


def staged(
    numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Numbers on the device, for the current stream; the host does not wait.

    A GPU copies them from pinned memory, which torch gives to nobody else before. From other memory the host would
    wait for all work that the stream still has.

    Args:
        numbers: The numbers, or rows of them.
        device: Where they go.
        dtype: As what.
    """
    on_host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def waits(device: torch.device) -> bool:
    """Whether the host waits for the device's work when it reads a number of it: not on a CPU."""
    return device.type != "cpu"


def room_for(counts: torch.Tensor, at_most: int) -> int:
    """How many ids to make room for: as many as there are, or at most are where the host would wait for the number.

    Args:
        counts: Their numbers, whose sum they are.
        at_most: At least the sum.
    """
    return at_most if waits(counts.device) else int(counts.sum())
