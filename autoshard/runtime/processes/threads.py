"""How many threads torch may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def intra_op_threads(num_threads: int) -> Iterator[None]:
    """Runs torch's operators on this many threads.

    Networks of this project are so small that a second thread brings next to nothing, and on a busy machine the first
    waits for it: placing 80 tables took 319 ms with two threads and 73 ms with one (2 cores of a Xeon at a load of
    5, `autoshard plan --planner policy`, November 2026).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
