import gc
import time

import pytest
import torch

from autoshard.core.errors import InvalidOptionError
from autoshard.runtime.threads import intra_op_threads
from bench.measuring.caches import CacheFlush
from bench.measuring.timing import RoundSettings, quiet_process, time_rounds


class Spinning:
    """Keeps the processor busy for known times, and remembers what was called."""

    def __init__(self, forward_s, backward_s, log):
        self.forward_s, self.backward_s, self.log = forward_s, backward_s, log

    def forward(self):
        self.log.append(self)
        self._spin(self.forward_s)
        return self

    def backward(self, outputs):
        assert outputs is self
        assert not gc.isenabled()
        self._spin(self.backward_s)

    def _spin(self, seconds):
        stop = time.thread_time() + seconds
        while time.thread_time() < stop:
            pass


@pytest.mark.parametrize("flush_every_run", [True, False])
def test_every_kernel_runs_once_per_round(flush_every_run):
    log = []
    kernels = [Spinning(0.001, 0.002, log), Spinning(0.003, 0.001, log)]
    settings = RoundSettings(num_warmup=2, num_measured=4, num_dropped=1, flush_every_run=flush_every_run)
    flush = CacheFlush(torch.device("cpu"), cache_bytes=64)
    with intra_op_threads(1):
        forward_ms, backward_ms = time_rounds(kernels, flush, settings)
    assert len(log) == 2 * 6
    assert all(set(log[start : start + 2]) == set(kernels) for start in range(0, 12, 2))
    assert (flush._buffer == (12 if flush_every_run else 6)).all()
    assert forward_ms.shape == backward_ms.shape == (2, 4)
    # The thread's clock stands still while others run, so these bounds hold on a busy machine too.
    assert (forward_ms >= [[1.0], [3.0]]).all()
    assert (backward_ms >= [[2.0], [1.0]]).all()


def test_the_order_differs_between_rounds():
    log = []
    kernels = [Spinning(0, 0, log) for _ in range(8)]
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
