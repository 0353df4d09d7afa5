"""Memory that the weights of measured sets are mapped onto."""

from __future__ import annotations

from pathlib import Path

import torch

from autoshard.core.errors import DeviceError

#: What every number starts as: not zero, so that pages exist and no denormal slows the arithmetic.
_INITIAL = 0.01
#: Floats that a piece starts at a multiple of: one cache line.
_ALIGNMENT = 16
#: Share of the free memory that sets may fill; the rest is for the flush buffer, inputs, outputs, and others.
_SHARE_OF_FREE = 0.4


class Arena:
    """A block of fp32 memory, dealt out in pieces that never overlap until it is cleared.

    Allocating, zeroing and freeing the weights of every set would cost more time than measuring it. Memory is
    reserved at first and touched when first dealt out, so a large limit costs nothing until it is used.
    """

    def __init__(self, max_floats: int, device: torch.device) -> None:
        """Reserves room for `max_floats` numbers.

        Raises:
            DeviceError: If the system grants no such block.
        """
        try:
            self._memory = torch.empty(max_floats, dtype=torch.float32, device=device)
        except RuntimeError as error:  # torch has no narrower type for it on a CPU
            raise DeviceError(f"{4 * max_floats:,} bytes of memory cannot be reserved") from error
        self._touched = 0
        self._used = 0

    @property
    def max_floats(self) -> int:
        """Numbers that can be dealt out."""
        return self._memory.numel()

    def take(self, num_floats: int) -> torch.Tensor:
        """A piece that overlaps none taken since the last `clear`.

        Raises:
            DeviceError: If there is not enough left.
        """
        start = self._used
        stop = start + num_floats
        if stop > self.max_floats:
            raise DeviceError(f"{4 * stop:,} bytes of weights do not fit in the {4 * self.max_floats:,} set apart")
        if stop > self._touched:
            self._memory[self._touched : stop].fill_(_INITIAL)
            self._touched = stop
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return self._memory[start:stop]

    def clear(self) -> None:
        """Takes all pieces back; their content stays."""
        self._used = 0


def free_bytes(device: torch.device) -> int:
    """Memory of a device that sets of shards may fill at once."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_FREE)
    return int(_available_bytes() * _SHARE_OF_FREE)


def _available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that a process can still take, also inside a container with a limit."""
    available = 4 * 2**30
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
        return max(0, min(available, int(limit) - int(used)))
    except (OSError, ValueError):  # no such file, or the limit is "max"
        return available
