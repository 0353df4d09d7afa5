from pathlib import Path

import pytest

from autoshard.core.machine import MeasuredMachine
from autoshard.hardware import CPU, core_design, free_host_bytes, is_of_device, this_processor

AMD = (
    "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f\n"
)
INTEL = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 79\nflags\t\t: fpu avx2\n"
ARM = "CPU implementer\t: 0x41\nCPU part\t: 0xd40\nFeatures\t: fp asimd sve\n"


@pytest.mark.parametrize(
    ("cpuinfo", "design"),
    [
        (AMD, "amd-25-17-avx512"),
        (INTEL, "intel-6-79-avx2"),
        (ARM, "arm-0x41-0xd40-sve"),
        ("model name\t: Abacus\n", ""),
    ],
)
def test_designs_of_cores(cpuinfo, design, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    assert core_design(file) == design
    assert core_design(Path(tmp_path, "missing")) == ""


def test_keys_mean_machines():
    here, abacus = this_processor(), MeasuredMachine(device_name="Abacus")
    assert is_of_device(here, CPU)
    assert is_of_device(here, here.key_in(CPU))
    assert not is_of_device(abacus, CPU)
    assert is_of_device(abacus, "cpu:abacus")
    assert not is_of_device(here, "cpu:abacus")
    assert is_of_device(abacus, "h200")


def test_a_container_limits_the_memory(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       32000000 kB\nMemAvailable:   16000000 kB\n")
    assert free_host_bytes(meminfo, tmp_path) == 16_000_000 * 1024
    (tmp_path / "memory.max").write_text("8000000000\n")
    (tmp_path / "memory.current").write_text("3000000000\n")
    assert free_host_bytes(meminfo, tmp_path) == 5_000_000_000
    # What was read of files leaves when processes need its memory.
    (tmp_path / "memory.stat").write_text("anon 900\nfile 9000\ninactive_file 700\nactive_file 80\nshmem 5\n")
    assert free_host_bytes(meminfo, tmp_path) == 5_000_000_780
    (tmp_path / "memory.current").write_text("8100000000\n")
    assert free_host_bytes(meminfo, tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(meminfo, tmp_path) == 16_000_000 * 1024


def test_all_memory_counts_as_free_where_the_system_does_not_say(tmp_path):
    assert free_host_bytes(tmp_path / "missing", tmp_path) == this_processor().memory_bytes
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "memory.current").write_text("0\n")
    assert free_host_bytes(tmp_path / "missing", tmp_path) == 4096
