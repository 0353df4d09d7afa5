import re
from pathlib import Path

import pytest
import torch

from autoshard.runtime.engine.rows.huge_pages import advise_huge_pages, huge_zeros

CPU = torch.device("cpu")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes():
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(found[1]) * 1024


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system grants nobody large pages"
)
def test_memory_that_is_written_to_later_is_in_large_pages():
    before = huge_bytes()
    memory = advise_huge_pages(torch.empty(64 * 2**20 // 4))
    memory.fill_(1.0)
    assert huge_bytes() - before > 32 * 2**20
    assert memory.sum() == memory.numel()


def test_zeros_take_memory_when_they_are_written_to():
    before = resident_bytes()
    memory = huge_zeros(64 * 2**20 // 4, torch.float32, CPU)
    assert resident_bytes() - before < 8 * 2**20
    memory[-1] = 1.0
    assert memory.sum() == 1.0
    assert memory.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 1, 1001])
def test_zeros_are_of_any_dtype_and_number(dtype, number):
    memory = huge_zeros(number, dtype, CPU)
    assert (memory.dtype, memory.shape) == (dtype, (number,))
    assert not memory.any()
    memory.fill_(2.0)
    assert memory.sum(dtype=torch.float32) == 2.0 * number


def test_small_and_empty_memory_is_left_alone():
    for size in (0, 1, 1000):
        memory = torch.empty(size)
        assert advise_huge_pages(memory) is memory
