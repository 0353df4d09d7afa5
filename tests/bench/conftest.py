import pytest
import torch

from bench.kernels.harness import Harness, Settings
from bench.measuring.devices import find_device
from bench.measuring.timing import RoundSettings


@pytest.fixture(scope="session")
def quick_settings():
    rounds = RoundSettings(num_warmup=0, num_measured=3, num_dropped=1, flush_every_run=False)
    return Settings(rounds=rounds, max_group_sets=4, max_bytes=2**24, reference_bags=8, max_attempts=1)


@pytest.fixture(scope="session")
def harness(quick_settings):
    return Harness(find_device("cpu"), quick_settings)


class Gpu:
    """A GPU's queue beside a host: what is launched begins when all before it is done, never before its launch."""

    CYCLES_PER_MS = 2_000_000

    def __init__(self, monkeypatch):
        self.host_ms = self.free_ms = 0.0
        self.waits = 0
        gpu = self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self):
                self.at_ms = gpu.free_ms = max(gpu.free_ms, gpu.host_ms)

            def query(self):
                return self.at_ms <= gpu.host_ms

            def elapsed_time(self, stop):
                assert stop.query(), "is read after the wait"
                return stop.at_ms - self.at_ms

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(0.0, cycles / self.CYCLES_PER_MS))
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def launch(self, host_ms, device_ms):
        """Takes the host a while, then the device, once it is done with all before."""
        self.host_ms += host_ms
        self.free_ms = max(self.free_ms, self.host_ms) + device_ms

    def wait(self):
        self.waits += 1
        self.host_ms = max(self.host_ms, self.free_ms)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)
