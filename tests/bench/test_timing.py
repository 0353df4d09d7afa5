import gc
import time

import numpy as np
import pytest
import torch

from autoshard.core.errors import InvalidOptionError
from autoshard.runtime.processes.threads import intra_op_threads
from bench.measuring.caches import CacheFlush
from bench.measuring.timing import RoundSettings, quiet_process, time_rounds


class Clock:
    """A thread's clock that advances when it is told to."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


class Lasting:
    """Takes known times on a clock, and remembers what was called."""

    def __init__(self, forward_s, backward_s, log, clock):
        self.forward_s, self.backward_s, self.log, self.clock = forward_s, backward_s, log, clock

    def forward(self):
        self.log.append(self)
        self.clock.now_s += self.forward_s
        return self

    def backward(self, outputs):
        assert outputs is self
        assert not gc.isenabled()
        self.clock.now_s += self.backward_s


@pytest.mark.parametrize("flush_every_run", [True, False])
def test_every_kernel_runs_once_per_round(flush_every_run, monkeypatch):
    log, clock = [], Clock()
    monkeypatch.setattr(time, "thread_time", clock)  # what kernels of one thread are timed by
    kernels = [Lasting(0.001, 0.002, log, clock), Lasting(0.003, 0.001, log, clock)]
    settings = RoundSettings(num_warmup=2, num_measured=4, num_dropped=1, flush_every_run=flush_every_run)
    flush = CacheFlush(torch.device("cpu"), cache_bytes=64)
    with intra_op_threads(1):
        forward_ms, backward_ms = time_rounds(kernels, flush, settings)
    assert len(log) == 2 * 6
    assert all(set(log[start : start + 2]) == set(kernels) for start in range(0, 12, 2))
    assert (flush._buffer == (12 if flush_every_run else 6)).all()
    np.testing.assert_allclose(forward_ms, [[1.0] * 4, [3.0] * 4], rtol=1e-9)
    np.testing.assert_allclose(backward_ms, [[2.0] * 4, [1.0] * 4], rtol=1e-9)


def test_the_order_differs_between_rounds():
    log = []
    kernels = [Lasting(0, 0, log, Clock()) for _ in range(8)]
    settings = RoundSettings(num_warmup=0, num_measured=2, num_dropped=0)
    time_rounds(kernels, CacheFlush(torch.device("cpu"), cache_bytes=64), settings)
    assert log[:8] != log[8:]


def test_the_collector_comes_back_after_an_error():
    def interrupted():
        with quiet_process():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.isenabled()


@pytest.mark.parametrize("wrong", [{"num_measured": 4, "num_dropped": 2}, {"num_warmup": -1}, {"num_dropped": -1}])
def test_settings_that_measure_nothing_are_refused(wrong):
    with pytest.raises(InvalidOptionError, match="num_dropped"):
        RoundSettings(**wrong)
