"""Processor caches: how large the last one is, and how it is emptied between runs."""

from __future__ import annotations

from pathlib import Path

import torch

from autoshard.hardware import SYSFS_CACHES, cache_bytes_by_level

#: Taken when the machine does not tell: larger than the last-level cache of most servers.
FALLBACK_CPU_BYTES = 64 * 2**20
#: Taken when the device does not tell: larger than the L2 of any NVIDIA GPU up to the B200 (126 MiB).
FALLBACK_CUDA_BYTES = 128 * 2**20
#: How much more than a CPU's cache is touched: replacement is not strictly the oldest first.
_EXCESS = 1.1
#: Of a GPU's: an H100's L2 is hashed and in two halves, each with copies of the other's lines.
_CUDA_EXCESS = 4
#: Least bytes that a flush of a GPU reads.
_LEAST_CUDA_BYTES = 256 * 2**20


def last_level_cache_bytes(sysfs: Path = SYSFS_CACHES) -> int:
    """Bytes of the CPU's largest cache of the highest level, or `FALLBACK_CPU_BYTES` where the machine does not tell.

    Args:
        sysfs: See `cache_bytes_by_level`.
    """
    found = cache_bytes_by_level(sysfs)
    return found[max(found)] if found else FALLBACK_CPU_BYTES


def device_cache_bytes(device: torch.device) -> int:
    """Bytes of the last cache before the device's memory."""
    if device.type == "cpu":
        return last_level_cache_bytes()
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0)) or FALLBACK_CUDA_BYTES


class CacheFlush:
    """Touches a buffer larger than the last cache, on the device itself.

    A GPU reads the buffer alone: lines that were written would be written back during the run that is timed. A CPU
    reads and writes it, as it did when the samples were measured that cost models are trained on. The study
    `eviction` measures what is left in the cache.

    Source:
        AutoShard Algorithm 2, line 1. The peers' code writes a CPU tensor, which leaves a GPU's cache as it was.
    """

    def __init__(self, device: torch.device, cache_bytes: int | None = None) -> None:
        """Allocates the buffer.

        Args:
            device: Where the buffer lives.
            cache_bytes: Size of the cache; asked of the device when left out.
        """
        self._cache_bytes = device_cache_bytes(device) if cache_bytes is None else cache_bytes
        self._only_reads = device.type == "cuda"
        num_bytes = (
            max(_LEAST_CUDA_BYTES, _CUDA_EXCESS * self._cache_bytes)
            if self._only_reads
            else int(self._cache_bytes * _EXCESS)
        )
        self.buffer = torch.zeros(-(-num_bytes // 4), dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes that one flush touches."""
        return self.buffer.numel() * 4

    @property
    def device(self) -> torch.device:
        """Where the buffer lives."""
        return self.buffer.device

    def __call__(self) -> None:
        """Flushes; on a GPU the work is queued on the current stream."""
        if self._only_reads:
            torch.sum(self.buffer, dim=0, out=self._sum)
        else:
            self.buffer.add_(1.0)
