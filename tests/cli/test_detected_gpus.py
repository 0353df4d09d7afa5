"""GPUs as NVML and the system describe them: answers of machines that are not here."""

import json
from types import SimpleNamespace

import pynvml
import pytest

from autoshard.commands import machine
from autoshard.commands.machine import found_gpus

#: Names, bytes, NVLinks and MB/s of each, as `nvidia-smi nvlink --status` and NVIDIA's data sheets have them.
H100 = ("NVIDIA H100 80GB HBM3", 85_520_809_984, 18, 26_562)
L4 = ("NVIDIA L4", 24_152_899_584, 0, 0)


@pytest.fixture
def driver(monkeypatch):
    """Makes NVML answer as on a machine with these GPUs."""

    def answer(gpus):
        def link_state(gpu, link):
            if link >= gpu[2]:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return 1

        def fields(gpu, wanted):
            assert wanted == [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
            return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=gpu[3]))]

        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
            "nvmlDeviceGetName": lambda gpu: gpu[0],
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=gpu[1]),
            "nvmlDeviceGetNvLinkState": link_state,
            "nvmlDeviceGetFieldValues": fields,
            "nvmlDeviceGetPciInfo": lambda _: SimpleNamespace(busId="00000000:1B:00.0"),
        }
        for name, function in answers.items():
            monkeypatch.setattr(pynvml, name, function)  # of the library itself: each name must be there
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return answer


@pytest.fixture
def bus(tmp_path):
    device = tmp_path / "0000:1b:00.0"
    device.mkdir()
    (device / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    (device / "max_link_width").write_text("16\n")
    return tmp_path


def test_nvml_describes_gpus_and_their_links(driver, bus, monkeypatch):
    driver([H100, H100])
    first, second = found_gpus(bus)
    assert first == second
    assert (first.name, first.memory_bytes, first.num_nvlinks) == ("NVIDIA H100 80GB HBM3", 85_520_809_984, 18)
    assert first.nvlink_bytes_per_s == 18 * 26_562e6
    assert first.pcie_bytes_per_s == pytest.approx(31.5e9, rel=0.001)  # 16 GT/s on 16 lanes, 128 bits in 130
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(found_gpus(bus)) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert found_gpus(bus) == []


def test_without_a_driver_torch_is_asked(monkeypatch):
    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    about = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total_memory=85_000_000_000)
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: about)
    (gpu,) = found_gpus()
    assert (gpu.name, gpu.memory_bytes, gpu.num_nvlinks, gpu.peak_bytes_per_s) == (about.name, 85_000_000_000, None, 0)


def detected(run, *options):
    out, err = run("detect", *options, "--json")
    return json.loads(out), err


def test_gpus_with_nvlink_have_the_links_of_their_machine(driver, run):
    driver([H100] * 8)
    found, err = detected(run)
    assert (found["device"], found["world_size"], found["memory_bytes"]["hbm"]) == ("h100", 8, 85_520_809_984)
    assert "those of bundled dgx-h100, not measured; 18 NVLinks of 478 GB/s at most" in err


def test_gpus_without_nvlink_have_the_links_of_their_bus(driver, bus, run, monkeypatch):
    driver([L4] * 4)
    monkeypatch.setattr(machine, "found_gpus", lambda: found_gpus(bus))
    found, err = detected(run)
    assert "PCIe without NVLink of 32 GB/s at most, not measured" in err
    (level,) = found["levels"]
    assert level["all_to_all"]["bytes_per_s"] == pytest.approx(31.5e9, rel=0.001)
    # A ring of four sends 1.5 bytes for each byte that is reduced.
    assert level["all_reduce"]["bytes_per_s"] == pytest.approx(31.5e9 / 1.5, rel=0.001)


def test_infiniband_ports_link_machines(driver, tmp_path, run, monkeypatch):
    for number, state in enumerate(["4: ACTIVE", "4: ACTIVE", "1: DOWN"]):
        port = tmp_path / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    driver([H100] * 8)
    ports = list(machine.infiniband_ports(tmp_path))
    monkeypatch.setattr(machine, "infiniband_ports", lambda: ports)
    found, err = detected(run, "--nodes", "2")
    assert "800 Gbit/s of 2 InfiniBand ports, shared by 8 ranks" in err
    assert found["levels"][1]["all_to_all"]["bytes_per_s"] == 800e9 / 8 / 8


def interface(folder, name, speed, *, is_device=False, members=None):
    (folder / name).mkdir()
    (folder / name / "speed").write_text(f"{speed}\n")
    if is_device:
        (folder / name / "device").mkdir()
    if members is not None:
        (folder / name / "bonding").mkdir()
        (folder / name / "bonding" / "slaves").write_text(members)


def test_network_cards_count_and_what_the_system_makes_up_does_not(tmp_path):
    for name in ("docker0", "veth3f21", "tun0"):
        interface(tmp_path, name, 10_000)
    interface(tmp_path, "bond1", 20_000, members="veth3f21\n")
    assert machine._network_card(tmp_path) == (1.25e9, "10 Gbit/s, since the system does not say")
    interface(tmp_path, "eth0", 1_000, is_device=True)
    interface(tmp_path, "eth1", -1, is_device=True)  # without a cable
    assert machine._network_card(tmp_path) == (125e6, "1,000 Mbit/s of eth0")
    interface(tmp_path, "bond0", 2_000, members="eth0 eth1\n")
    assert machine._network_card(tmp_path) == (250e6, "2,000 Mbit/s of bond0")
    interface(tmp_path, "bond2", 0, members="")
    assert machine._network_card(tmp_path) == (250e6, "2,000 Mbit/s of bond0")
