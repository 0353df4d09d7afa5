"""The measurement of the flush runs on each device; what it finds is the machine's and asserted nowhere."""

import pytest
import torch

from bench.measuring.caches import device_cache_bytes
from studies.kernels.eviction import measure_eviction


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_flush_is_measured_beside_a_small_write(name):
    device = torch.device(name)
    found = measure_eviction(device, repetitions=1)
    assert found.cache_bytes == device_cache_bytes(device)
    assert 0 < found.buffer_bytes < found.cache_bytes
    assert found.flush_bytes > found.cache_bytes
    assert min(found.again_ms, found.after_flush, found.after_two_flushes) > 0
    assert found.after_small_write > 0


@pytest.mark.smoke
def test_the_command_prints_both_ratios(run_study, capsys):
    assert run_study("eviction", "--device", "cpu", "--repetitions", "1") == 0
    assert "times as long after a flush" in capsys.readouterr().out
