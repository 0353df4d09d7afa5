"""What the allocator of a process keeps of memory that steps give back and take again.

Memory that a step takes anew is given out by the system page by page: 4 KiB cost 2 us of a virtual AMD EPYC on one day,
and 10 on another (November 2026).
"""

from __future__ import annotations

import ctypes
from typing import Final

#: Environment of processes, for glibc's allocator: the largest block that is kept, and how much in all. Memory that
#: was taken anew was half to three quarters of the time that the splitting of 780,000 ids took.
KEPT_BYTES: Final = {"MALLOC_MMAP_THRESHOLD_": 64 << 20, "MALLOC_TRIM_THRESHOLD_": 256 << 20}
#: Of what is free between what is taken, which is about what a step takes and gives back, so much is made ready at the
#: heap's end, in whole blocks; at most half of what is kept.
_READY_SHARE, _MOST_READY_BYTES = 2, KEPT_BYTES["MALLOC_TRIM_THRESHOLD_"] // 2
#: Smaller than the largest block that is kept, and larger than what is mostly free between what is taken.
_BLOCK_BYTES = KEPT_BYTES["MALLOC_MMAP_THRESHOLD_"] // 2
#: What glibc counts, in its order.
_COUNTED = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _Usage(ctypes.Structure):
    """See mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTED]


def make_heap_ready(most_bytes: int) -> None:
    """Lets the heap have the memory that it otherwise gets bit by bit during some hundred steps.

    Of 8 processes that trained six plans in turn, one or another took 4 MiB anew in two of three steps of 40 ms, and
    all waited 10 ms for it (virtual AMD EPYC, November 2026). To be called after a warm-up, once the tables are there.
    Where the allocator is not glibc's of 2021 or later nothing is done.

    Args:
        most_bytes: What it may have at most.
    """
    libc = ctypes.CDLL(None)
    try:
        usage, take, give = libc.mallinfo2, libc.malloc, libc.free
    except AttributeError:
        return
    usage.restype, take.restype = _Usage, ctypes.c_void_p
    take.argtypes, give.argtypes = (ctypes.c_size_t,), (ctypes.c_void_p,)
    used = usage()
    num_bytes = min(_READY_SHARE * (used.fordblks - used.keepcost), _MOST_READY_BYTES)
    number = min(num_bytes, most_bytes) // _BLOCK_BYTES
    blocks = [block for _ in range(number) if (block := take(_BLOCK_BYTES))]
    for block in blocks:
        ctypes.memset(block, 0, _BLOCK_BYTES)
    for block in blocks:
        give(block)
