from pathlib import Path

import pytest

from autoshard.core.machine import MeasuredMachine
from autoshard.hardware import CPU, core_design, is_of_device, this_processor

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
