"""Devices that are not there, and memory that is not."""

import pytest
import torch

from autoshard.core.errors import DeviceError
from autoshard.runtime.ownership import ownership_of
from autoshard.runtime.processes.devices import check_memory, choose_device
from autoshard.runtime.results import Device
from autoshard.runtime.state import free_host_bytes


@pytest.fixture
def more_processes_than_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torch.cuda.device_count() + 2))


@pytest.mark.usefixtures("more_processes_than_gpus")
def test_processes_without_a_gpu_each_use_the_cpu():
    assert choose_device({Device.AUTO}) == torch.device("cpu")
    assert choose_device({Device.CUDA, Device.CPU}) == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"processes need a GPU each, this machine has"):
        choose_device({Device.AUTO, Device.CUDA})


def test_tables_that_do_not_fit_are_refused(make_plan, make_table, monkeypatch):
    # Plans are checked against their own topology, which may be larger than the machine that executes them.
    owners = ownership_of(make_plan([make_table("t", 1000, 16)], [0]), 2)
    check_memory(owners, 0, torch.device("cpu"))
    monkeypatch.setattr("autoshard.runtime.processes.devices.free_host_bytes", lambda: 67_999)
    with pytest.raises(DeviceError, match=r"^the tables need 68,000 bytes on this cpu, 67,999 are free: scale them"):
        check_memory(owners, 0, torch.device("cpu"))


def test_free_memory_is_read_from_the_system():
    assert 1 << 20 < free_host_bytes() < 1 << 50
