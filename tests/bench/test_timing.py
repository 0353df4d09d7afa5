import gc
import time
from dataclasses import replace
from functools import partial
from itertools import cycle

import numpy as np
import pytest
import torch

from autoshard.core.collector import collector_paused
from autoshard.core.errors import InvalidOptionError
from autoshard.runtime.processes.threads import intra_op_threads
from bench.measuring.caches import CacheFlush
from bench.measuring.timing import CudaClock, RoundSettings, led_ms, time_rounds


class Clock:
    """A thread's clock that advances when it is told to."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


class Lasting:
    """Takes known times on a clock, and remembers what was called."""

    is_idle = False

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
        times = time_rounds(kernels, flush, settings)
    assert len(log) == 2 * 6
    assert all(set(log[start : start + 2]) == set(kernels) for start in range(0, 12, 2))
    assert (flush.buffer == (12 if flush_every_run else 6)).all()
    np.testing.assert_allclose(times.forward_ms_SR, [[1.0] * 4, [3.0] * 4], rtol=1e-9)
    np.testing.assert_allclose(times.backward_ms_SR, [[2.0] * 4, [1.0] * 4], rtol=1e-9)
    assert times.num_rounds_S.tolist() == [4, 4]


class Unsteady(Lasting):
    """Takes turns to be faster and slower, after a run for warming up."""

    def __init__(self, forward_s, share, log, clock):
        super().__init__(forward_s, 0.0, log, clock)
        self._factors = cycle([1.0, 1.0 + share, 1.0 - share])

    def forward(self):
        self.clock.now_s += self.forward_s * (next(self._factors) - 1)
        return super().forward()


class Idle(Lasting):
    """Runs nothing; what is timed is the clock's noise."""

    is_idle = True


class TestEarlyStops:
    settings = RoundSettings(num_warmup=1, num_measured=9, num_dropped=2, num_least=4, enough=0.02)

    def times(self, monkeypatch, make, settings=None, num_references=1, **options):
        log, clock = [], Clock()
        monkeypatch.setattr(time, "thread_time", clock)
        kernels = make(log, clock)
        flush = CacheFlush(torch.device("cpu"), cache_bytes=64)
        with intra_op_threads(1):
            times = time_rounds(kernels, flush, settings or self.settings, num_references=num_references, **options)
        assert [log.count(kernel) for kernel in kernels] == [number + 1 for number in times.num_rounds_S]
        return times

    def test_steady_kernels_stop_and_references_go_on_with_the_others(self, monkeypatch):
        def make(log, clock):
            return [Lasting(0.01, 0.0, log, clock), Lasting(0.003, 0.0, log, clock), Unsteady(0.01, 0.3, log, clock)]

        times = self.times(monkeypatch, make)
        assert times.num_rounds_S.tolist() == [9, 4, 9]
        np.testing.assert_allclose(times.forward_ms_SR[1], [3.0] * 4 + [0.0] * 5)

    def test_without_a_least_number_all_rounds_are_run(self, monkeypatch):
        settings = replace(self.settings, num_least=None)
        times = self.times(monkeypatch, lambda log, clock: [Lasting(0.01, 0.0, log, clock)] * 1, settings)
        assert times.num_rounds_S.tolist() == [9]

    def test_rounds_end_with_the_last_kernel_and_are_still_told(self, monkeypatch):
        def make(log, clock):
            return [Unsteady(0.01, 0.3, log, clock), Lasting(0.003, 0.0, log, clock), Idle(1e-9, 0.0, log, clock)]

        told = []
        times = self.times(monkeypatch, make, on_round=lambda: told.append(1))
        assert times.num_rounds_S.tolist() == [4, 4, 4]
        assert len(told) == 10

    def test_a_wider_bound_stops_earlier(self, monkeypatch):
        def make(log, clock):
            return [Lasting(0.01, 0.0, log, clock) for _ in range(3)] + [Unsteady(0.01, 0.05, log, clock)]

        numbers = [
            self.times(monkeypatch, make, replace(self.settings, enough=enough), num_references=3).num_rounds_S[3]
            for enough in (0.01, 0.035, 0.1)
        ]
        assert numbers == sorted(numbers, reverse=True)
        assert numbers[0] == 9
        assert numbers[2] == 4

    @pytest.mark.parametrize("num_least", [2, 10])
    def test_a_least_number_out_of_range_is_refused(self, num_least):
        with pytest.raises(InvalidOptionError, match=f"num_least: must be from 3 to 9 rounds, got {num_least}"):
            replace(self.settings, num_least=num_least)

    def test_fewer_rounds_drop_fewer_runs(self):
        assert [self.settings.dropped_of(number) for number in (3, 4, 5, 8, 9)] == [1, 1, 1, 1, 2]
        assert replace(self.settings, num_dropped=0).dropped_of(5) == 0


def test_the_order_differs_between_rounds():
    log = []
    kernels = [Lasting(0, 0, log, Clock()) for _ in range(8)]
    settings = RoundSettings(num_warmup=0, num_measured=2, num_dropped=0)
    time_rounds(kernels, CacheFlush(torch.device("cpu"), cache_bytes=64), settings)
    assert log[:8] != log[8:]


def test_the_collector_comes_back_after_an_error():
    def interrupted():
        with collector_paused():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.isenabled()


@pytest.mark.parametrize("wrong", [{"num_measured": 4, "num_dropped": 2}, {"num_warmup": -1}, {"num_dropped": -1}])
def test_settings_that_measure_nothing_are_refused(wrong):
    with pytest.raises(InvalidOptionError, match="num_dropped"):
        RoundSettings(**wrong)


class Launched:
    """A kernel of three launches a pass; `reads` makes its backward pass wait for the device."""

    is_idle = False

    def __init__(self, gpu, launch_ms, device_ms, *, compile_ms=0.0, reads=False):
        self.gpu, self.launch_ms, self.device_ms, self.reads = gpu, launch_ms, device_ms, reads
        self.compile_ms, self.runs = compile_ms, 0

    def forward(self):
        self.runs += 1
        self.gpu.host_ms += self.compile_ms if self.runs == 1 else 0.0
        for _ in range(3):
            self.gpu.launch(self.launch_ms, self.device_ms)

    def backward(self, _outputs):
        self.forward()
        self.runs -= 1
        if self.reads:
            self.gpu.wait()


class TestLeads:
    settings = RoundSettings(num_warmup=1, num_measured=5, num_dropped=1)

    def times(self, *kernels, settings=None):
        flush = CacheFlush(torch.device("cpu"), cache_bytes=64)
        return time_rounds(kernels, flush, settings or self.settings, clock=CudaClock())

    def test_a_run_that_is_queued_in_time_counts(self, gpu):
        kernel = Launched(gpu, launch_ms=0.1, device_ms=0.02, compile_ms=3000.0)
        times = self.times(kernel)
        np.testing.assert_allclose(times.forward_ms_SR, 0.06)
        np.testing.assert_allclose(times.backward_ms_SR, 0.06)
        assert (times.num_discarded, times.num_waiting, kernel.runs) == (0, 0, 6)

    def test_a_late_run_is_run_again_behind_a_longer_lead(self, gpu):
        slow, quick = Launched(gpu, launch_ms=1.0, device_ms=0.02), Launched(gpu, launch_ms=0.1, device_ms=0.02)
        times = self.times(slow, quick)
        np.testing.assert_allclose(times.forward_ms_SR, 0.06)
        np.testing.assert_allclose(times.backward_ms_SR, 0.06)
        assert times.num_discarded == slow.runs - 6 == 3  # 6 ms of launches: leads of 1.5, 3 and 6 ms are too short
        assert quick.runs == 6

    def test_without_the_check_launches_would_count(self, gpu, monkeypatch):
        monkeypatch.setattr(CudaClock, "is_late", lambda *_: False)
        times = self.times(Launched(gpu, launch_ms=1.0, device_ms=0.02))
        assert (times.forward_ms_SR + times.backward_ms_SR > 1.0).all()

    def test_a_kernel_that_waits_for_the_device_is_not_run_forever(self, gpu):
        reading, plain = Launched(gpu, 0.1, 0.02, reads=True), Launched(gpu, 0.1, 0.02)
        times = self.times(reading, plain)
        assert times.num_waiting == 1
        assert times.num_discarded == reading.runs - 6 == 5  # leads of 2 to 32 times the shortest
        np.testing.assert_allclose(times.forward_ms_SR[1], 0.06)

    def test_the_clock_is_noted_while_the_device_works(self, gpu):
        ahead_ms = []
        flush, kernel = CacheFlush(torch.device("cpu"), cache_bytes=64), Launched(gpu, 0.1, 0.02)
        time_rounds(
            [kernel],
            flush,
            self.settings,
            clock=CudaClock(),
            while_queued=lambda: ahead_ms.append(gpu.free_ms - gpu.host_ms),
        )
        assert len(ahead_ms) == 5
        assert min(ahead_ms) > 0


class Queued:
    """A collective on a GPU's queue."""

    def __init__(self, gpu, launch_ms):
        self.gpu, self.launch_ms, self.runs, self.prepared = gpu, launch_ms, 0, 0

    def run(self):
        self.runs += 1
        self.gpu.launch(self.launch_ms, 0.01)

    def prepare(self):
        self.prepared += 1


@pytest.mark.parametrize(("late_peers", "runs"), [(0, 20), (2, 60)])
def test_a_gpus_collectives_are_timed_behind_a_lead_until_no_rank_is_late(late_peers, runs, gpu):
    votes = []

    def agree(vote):
        gpu.wait()
        votes.append(vote)
        return vote and len(votes) > late_peers

    bound = Queued(gpu, launch_ms=0.05)
    align = partial(gpu.launch, 0.05, 0.3)
    assert led_ms(bound.run, CudaClock(), times=20, before=align, again=bound.prepare, agree=agree) == pytest.approx(
        0.01
    )
    assert (bound.runs, bound.prepared) == (runs, late_peers)
    assert all(votes)


def test_a_slow_host_lengthens_the_lead(gpu):
    bound = Queued(gpu, launch_ms=0.2)
    assert led_ms(bound.run, CudaClock(), times=20) == pytest.approx(0.01)
    assert bound.runs == 60  # 4 ms of launches: leads of 1.5 and 3 ms are too short, and one of 6 is not
