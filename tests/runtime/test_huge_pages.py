import re
from pathlib import Path

import pytest
import torch

from autoshard.runtime.engine.rows.huge_pages import advise_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes():
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(found[1]) * 1024


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system grants nobody large pages"
)
def test_memory_that_is_written_to_later_is_in_large_pages():
    before = huge_bytes()
    memory = advise_huge_pages(torch.empty(64 * 2**20 // 4))
    memory.fill_(1.0)
    assert huge_bytes() - before > 32 * 2**20
    assert memory.sum() == memory.numel()


def test_small_and_empty_memory_is_left_alone():
    for size in (0, 1, 1000):
        memory = torch.empty(size)
        assert advise_huge_pages(memory) is memory
