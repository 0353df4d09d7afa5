"""What nvidia-smi tells, from lines in its format."""

import os

import pytest

from bench.measuring.clocks import DeviceClocks, parse_clocks, query_clocks, read_clocks
from bench.measuring.devices import find_device

H100 = "1980, 0x0000000000000000\n"
BUS_ID = "00000000:1b:00.0"


def test_a_line_is_read():
    assert parse_clocks(H100) == DeviceClocks(sm_mhz=1980, throttle_reasons=())


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        ("0x0000000000000001", ()),  # idle
        ("0x0000000000000002", ()),  # application clocks were set
        ("0x0000000000000110", ()),  # sync boost, display clocks
        ("0x0000000000000004", ("sw_power_cap",)),
        ("0x0000000000000008", ("hw_slowdown",)),
        ("0x0000000000000020", ("sw_thermal_slowdown",)),
        ("0x0000000000000048", ("hw_slowdown", "hw_thermal_slowdown")),
        ("0x0000000000000080", ("hw_power_brake_slowdown",)),
        ("0x0000000000000007", ("sw_power_cap",)),
        ("0x0000000000000401", ("unknown_0x400",)),
        ("[N/A]", ()),
    ],
)
def test_the_mask_is_decoded_into_what_holds_the_clock_back(mask, reasons):
    clocks = parse_clocks(f"1350, {mask}\n")
    assert clocks.throttle_reasons == reasons


@pytest.mark.parametrize("nothing", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]"])
def test_fields_that_are_not_told_are_none(nothing):
    assert parse_clocks(f"{nothing}, {nothing}\n") == DeviceClocks(sm_mhz=None)
    assert parse_clocks(f"{nothing}, 0x0000000000000004\n").throttle_reasons == ("sw_power_cap",)


@pytest.mark.parametrize("text", ["", "\n", "No devices were found\n", H100 + H100, "1980\n", "1980, 1980, 0x0\n"])
def test_anything_else_is_no_answer(text):
    assert parse_clocks(text) is None


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of that name first on the PATH; it notes its arguments and runs some lines of shell."""

    def install(script):
        program, log = tmp_path / "nvidia-smi", tmp_path / "arguments"
        program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return log

    return install


def test_the_device_is_asked_by_its_own_name(nvidia_smi):
    log = nvidia_smi(f"printf '{H100.strip()}\\n'")
    assert query_clocks(BUS_ID) == parse_clocks(H100)
    (arguments,) = log.read_text().splitlines()
    assert f"--id={BUS_ID} " in arguments
    assert "clocks_event_reasons.active --format=csv,noheader,nounits" in arguments


def test_drivers_that_know_the_older_name_only_are_asked_by_it(nvidia_smi):
    log = nvidia_smi(
        'case "$*" in *clocks_event_reasons*)\n'
        "echo 'Field \"clocks_event_reasons.active\" is not a valid field to query.'; exit 2;; esac\n"
        "echo '1410, 0x0000000000000004'"
    )
    assert query_clocks(BUS_ID).throttle_reasons == ("sw_power_cap",)
    assert "clocks_throttle_reasons.active" in log.read_text().splitlines()[1]


def test_a_driver_that_does_not_answer_tells_nothing(nvidia_smi):
    nvidia_smi('echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9')
    assert query_clocks(BUS_ID) is None


def test_without_the_program_nothing_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_clocks(BUS_ID) is None


def test_a_processor_has_no_such_clocks(nvidia_smi):
    log = nvidia_smi(f"printf '{H100.strip()}\\n'")
    assert read_clocks(find_device("cpu")) is None
    assert not log.exists()


@pytest.mark.gpu
def test_a_gpu_tells_its_clocks():
    clocks = read_clocks(find_device("cuda"))
    assert clocks is not None
    assert clocks.sm_mhz > 0
