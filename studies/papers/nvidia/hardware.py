"""The GPU as unfused kernels see it, every figure with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that runs one kernel after the other.

    Attributes:
        bytes_per_s: Memory bandwidth that kernels reach.
        cache_bytes_per_s: Bandwidth of the last cache, from which rows that repeat are read.
        sort_bytes_per_s: Bytes that a radix sort reads and writes per second.
        clock_hz: Clock of the processors.
        num_processors: Streaming multiprocessors.
        lanes: Integer operations per clock and processor.
        max_blocks: Thread blocks that are resident on a processor.
        max_warps: Warps that are.
        latency_cycles: Wait for one access to memory.
        launch_s: Time from the start of a kernel to that of the next, if it has nothing to do.
        matrix_flops_per_s: Of TF32 products, at the share that perceptrons reach.
    """

    bytes_per_s: float
    cache_bytes_per_s: float
    sort_bytes_per_s: float
    clock_hz: float
    num_processors: int
    lanes: int
    max_blocks: int
    max_warps: int
    latency_cycles: float
    launch_s: float
    matrix_flops_per_s: float

    def kernel_s(self, work_s: float = 0.0) -> float:
        """A kernel takes as long as its work, and no less than the next one's launch."""
        return max(self.launch_s, work_s)

    def stream_s(self, num_bytes: float) -> float:
        """Work of a kernel that moves so many bytes."""
        return num_bytes / self.bytes_per_s

    def waves(self, num_blocks: float, threads: int) -> float:
        """Rounds in which blocks of so many threads run, all processors full."""
        resident = min(self.max_blocks, self.max_warps // math.ceil(threads / 32))
        return max(1.0, num_blocks / (self.num_processors * resident))

    @property
    def latency_s(self) -> float:
        """Wait for one access to memory."""
        return self.latency_cycles / self.clock_hz

    @property
    def integer_ops_per_s(self) -> float:
        """Integer operations of all processors."""
        return self.num_processors * self.lanes * self.clock_hz


#: - NVIDIA A100 data sheet: 2,039 GB/s (80 GB, SXM), 1.41 GHz, 108 processors, 156 TF32 TFLOP/s; A100 whitepaper: 5,120
#:   bytes per clock of L2, 64 integer lanes, 32 blocks and 64 warps per processor.
#: - Neo, Appendix B: gathers reach 1,300 of 1,555 GB/s, perceptrons 70.5% of the peak.
#: - Adinets and Merrill, Onesweep (2022), abstract: 29.4 G 32-bit keys per second, of which each is read and written
#:   once per 8-bit digit and read once for the histogram: 36 bytes.
#: - Abdelkhalik et al., Demystifying the Nvidia Ampere Architecture (2022): 290 cycles for an access to memory.
#: - The launch is the assumption that autoshard's analytic model has for all GPUs: 10 microseconds.
A100: Final = Gpu(
    bytes_per_s=2039e9 * 1300 / 1555,
    cache_bytes_per_s=5120 * 1.41e9,
    sort_bytes_per_s=29.4e9 * 36,
    clock_hz=1.41e9,
    num_processors=108,
    lanes=64,
    max_blocks=32,
    max_warps=64,
    latency_cycles=290,
    launch_s=1e-5,
    matrix_flops_per_s=156e12 * 0.705,
)

#: Default time between two rounds of Horovod's background thread: release notes of 0.21.0, "Changed default cycle time
#: from 5ms to 1ms".
HOROVOD_CYCLE_S: Final = 1e-3
