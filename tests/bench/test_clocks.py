"""What NVML tells of clocks, answered in place of a driver."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

from bench.measuring.clocks import ClockWatch, DeviceClocks, GpuDriver, query_driver, throttle_reasons
from bench.measuring.devices import BenchDevice, find_device

CUDA = BenchDevice(device=torch.device("cuda", 1), key="h100", name="NVIDIA H100")


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x0, ()),
        (0x1, ()),  # idle
        (0x2, ()),  # application clocks were set
        (0x110, ()),  # sync boost, display clocks
        (0x4, ("sw_power_cap",)),
        (0x8, ("hw_slowdown",)),
        (0x20, ("sw_thermal_slowdown",)),
        (0x48, ("hw_slowdown", "hw_thermal_slowdown")),
        (0x80, ("hw_power_brake_slowdown",)),
        (0x7, ("sw_power_cap",)),
        (0x401, ("unknown_0x400",)),
    ],
)
def test_the_mask_is_decoded_into_what_holds_the_clock_back(bits, reasons):
    assert throttle_reasons(bits) == reasons


@pytest.fixture
def driver(monkeypatch):
    """Makes NVML answer with clocks and masks, one after the other; None for a question that it does not know."""

    def install(mhz, bits=()):
        answers = {"clock": iter(mhz), "bits": iter(bits)}

        def told(kind, handle):
            assert handle == b"00000000:1b:00.0"  # whatever CUDA_VISIBLE_DEVICES makes its index
            value = next(answers[kind], 0 if kind == "bits" else None)
            if value is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return value

        functions = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByPciBusId": lambda bus_id: bus_id,
            "nvmlDeviceGetClockInfo": lambda handle, _kind: told("clock", handle),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: told("bits", handle),
            "nvmlSystemGetDriverVersion": lambda: b"580.65.06",
            "nvmlDeviceGetMaxClockInfo": lambda _handle, _kind: 1980,
        }
        for name, function in functions.items():
            monkeypatch.setattr(pynvml, name, function)  # of the library itself: each name must be there
        properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)

    return install


def noted(watch, times):
    for _ in range(times):
        watch.note()
    return watch.taken()


def test_the_median_counts_and_the_next_group_begins_anew(driver, capsys):
    driver([1980, 1965, 1980, 1410], [0x0, 0x1, 0x2, 0x4])
    watch = ClockWatch(CUDA)
    assert noted(watch, 3) == DeviceClocks(sm_mhz=1980, lowest_sm_mhz=1965)
    assert noted(watch, 1) == DeviceClocks(sm_mhz=1410, lowest_sm_mhz=1410, throttle_reasons=("sw_power_cap",))
    assert (watch.lowest_mhz, watch.highest_mhz) == (1410, 1980)
    assert not capsys.readouterr().err


def test_a_clock_that_moves_during_a_group_is_said_once(driver, capsys):
    driver([1980, 1755, 1980, 1755])
    watch = ClockWatch(CUDA)
    noted(watch, 2)
    noted(watch, 2)
    err = " ".join(capsys.readouterr().err.split())
    assert err.count("is not locked: it went from 1755 to 1980 MHz") == 1


def test_a_driver_that_does_not_tell_the_clock_is_said_once(driver, capsys):
    driver([None, None], [0x4, 0x0])
    watch = ClockWatch(CUDA)
    assert noted(watch, 2) == DeviceClocks(throttle_reasons=("sw_power_cap",))
    assert capsys.readouterr().err.count("NVML does not tell the clock") == 1


def test_without_a_driver_nothing_is_told(driver, monkeypatch, capsys):
    driver([])

    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert noted(ClockWatch(CUDA), 2) == DeviceClocks()
    assert query_driver(CUDA.device) == GpuDriver()
    assert capsys.readouterr().err.count("NVML does not answer") == 1


def test_the_driver_is_described(driver):
    driver([])
    assert query_driver(CUDA.device) == GpuDriver(version="580.65.06", max_sm_mhz=1980)


def test_a_processor_has_no_such_clocks(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pytest.fail("is not asked"))
    assert noted(ClockWatch(find_device("cpu")), 1) == DeviceClocks()


@pytest.mark.gpu
def test_a_gpu_tells_its_clocks():
    found = noted(ClockWatch(find_device("cuda")), 1)
    assert found.sm_mhz is not None
    assert found.sm_mhz > 0
