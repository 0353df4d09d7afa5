import math
import weakref
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from autoshard.core.errors import DeviceError, InvalidOptionError, InvalidTableError
from autoshard.core.machine import gpu_key
from bench.kernels.harness import Harness, Settings, reference_set
from bench.measuring.devices import find_device
from bench.measuring.rounds import timings_of
from bench.measuring.timing import RoundSettings, RoundTimes
from tests import builders as make


def test_measurements_come_in_order(harness):
    sets = [[make.held(f"t{index}", 20 + index)] * (index % 3 + 1) for index in range(6)]
    advanced = []
    results = harness.measure(sets, advanced.append)
    assert [tuple(m.shard for m in result.shards) for result in results] == [tuple(shards) for shards in sets]
    assert advanced == pytest.approx([4 / 3] * 3 + [2 / 3] * 3)  # two groups, three rounds each
    assert [result.group - results[0].group for result in results] == [0, 0, 0, 0, 1, 1]  # max_group_sets is 4
    for result in results:
        assert result.kernel_ms == result.forward_ms + result.backward_ms
        values = (result.forward_ms, result.backward_ms, result.reference_forward_ms, result.reference_backward_ms)
        assert all(math.isfinite(value) and value > 0 for value in values)
        assert result.num_rounds == 3


def test_an_empty_set_takes_no_time(harness):
    empty, full = harness.measure([[], [make.held()]])
    assert (empty.shards, empty.kernel_ms, empty.forward_spread) == ((), 0.0, 0.0)
    assert full.kernel_ms > 0


def test_the_same_object_may_come_several_times(harness):
    shards = [make.held()]
    assert len({id(result) for result in harness.measure([shards] * 4)}) == 4


def test_groups_are_as_large_as_memory_allows(quick_settings):
    shards = [make.held(num_embeddings=20_000, embedding_dim=32)]  # 2.56 MB
    harness = Harness(find_device("cpu"), quick_settings)
    results = harness.measure([shards] * 8)
    sizes = [sum(result.group == group for result in results) for group in sorted({r.group for r in results})]
    assert sizes == [4, 4]
    smaller = Harness(find_device("cpu"), replace(quick_settings, max_bytes=2**23))
    assert len({result.group for result in smaller.measure([shards] * 4)}) == 2


def test_a_set_that_is_large_for_a_group_is_measured_alone(quick_settings):
    small, large = (
        make.held(num_embeddings=10_000, embedding_dim=32),
        make.held(num_embeddings=40_000, embedding_dim=32),
    )
    harness = Harness(find_device("cpu"), replace(quick_settings, group_bytes=2**22))
    first, second, third, fourth = (one.group for one in harness.measure([[small], [small], [large], [small]]))
    assert first == second < third < fourth


def test_a_set_without_room_waits_for_the_next_group_while_others_fill_this_one(quick_settings):
    small, large = (
        make.held(num_embeddings=10_000, embedding_dim=32),
        make.held(num_embeddings=20_000, embedding_dim=32),
    )
    harness = Harness(find_device("cpu"), replace(quick_settings, group_bytes=2**22))
    order = [[small], [large], [small], [large], [small]]
    results = harness.measure(order)
    assert [[one.shard for one in result.shards] for result in results] == order
    groups = [result.group for result in results]
    assert groups[0] == groups[2] < groups[1] < groups[3]


def test_a_set_is_compared_with_the_reference_of_its_own_rounds():
    """The machine is half as fast from the fifth round on, when one set has stopped already."""
    rounds = RoundSettings(num_warmup=0, num_measured=8, num_dropped=1, num_least=4, enough=0.02)
    speed_R = np.array([1.0] * 4 + [2.0] * 4)
    forward_ms_SR = np.outer([10.0, 10.0, 10.0, 5.0, 20.0], speed_R)
    forward_ms_SR[3, 4:] = 0.0
    times = RoundTimes(
        forward_ms_SR=forward_ms_SR, backward_ms_SR=2 * forward_ms_SR, num_rounds_S=np.array([8, 8, 8, 4, 8])
    )
    stopped, longer = timings_of(times, rounds, 3, {})
    assert (stopped.num_rounds, longer.num_rounds) == (4, 8)
    assert (stopped.forward_ms, stopped.reference_forward_ms) == pytest.approx((5.0, 10.0))
    assert longer.forward_ms / longer.reference_forward_ms == pytest.approx(2.0)
    assert longer.reference_backward_ms > stopped.reference_backward_ms
    assert longer.spread == pytest.approx(0.0)


def test_steady_sets_take_fewer_rounds_and_say_so(quick_settings):
    rounds = replace(quick_settings.rounds, num_measured=9, num_least=4, enough=math.inf)
    harness = Harness(find_device("cpu"), replace(quick_settings, rounds=rounds))
    assert {result.num_rounds for result in harness.measure([[make.held()], []])} == {4}
    strict = Harness(find_device("cpu"), replace(quick_settings, rounds=replace(rounds, enough=0.0)))
    assert {result.num_rounds for result in strict.measure([[make.held()]])} == {9}


def test_a_set_that_fits_nowhere_is_an_error(harness):
    with pytest.raises(DeviceError, match=r"a set of 1 shards takes 68,000,000 bytes, more than"):
        harness.measure([[make.held(num_embeddings=1_000_000)]])


def test_nothing_runs_when_a_shard_cannot(harness):
    with pytest.raises(InvalidTableError, match=r"odd\.embedding_dim"):
        harness.measure([[make.held()], [make.held("odd", embedding_dim=5)]])


def test_a_set_whose_runs_disagree_is_measured_again_with_the_next_ones(quick_settings):
    never = replace(quick_settings, max_spread=0.0, max_attempts=3)
    harness = Harness(find_device("cpu"), never)
    before = harness.num_groups
    sets = [[make.held(f"t{index}", 20 + index)] for index in range(6)]
    found = dict(harness.measure_each(sets))
    assert sorted(found) == list(range(6))
    assert [tuple(m.shard for m in found[index].shards) for index in range(6)] == [tuple(shards) for shards in sets]
    for result in found.values():
        assert (result.is_noisy, result.num_attempts) == (True, 3)
    assert harness.num_groups - before == 6  # four sets three times, then two
    always = Harness(find_device("cpu"), replace(never, max_spread=math.inf))
    assert {(r.num_attempts, r.is_noisy) for r in always.measure(sets)} == {(1, False)}


def test_what_waits_when_time_is_up_is_given_as_it_is(quick_settings):
    harness = Harness(find_device("cpu"), replace(quick_settings, max_spread=0.0, max_attempts=1000))
    asked = count()
    sets = ([make.held(f"t{index}")] for index in count())
    found = dict(harness.measure_each(sets, is_over=lambda: next(asked) >= 3))
    assert found
    assert all(result.num_attempts <= 3 for result in found.values())


def test_sets_that_cannot_be_measured_are_reported_and_left_out(harness):
    odd, huge = make.held("odd", embedding_dim=5), make.held(num_embeddings=10**6)
    skipped = []
    found = dict(
        harness.measure_each(
            [[make.held()], [odd], [huge], [make.held()]], on_skip=lambda index, error: skipped.append((index, error))
        )
    )
    assert sorted(found) == [0, 3]
    assert [(index, type(error)) for index, error in skipped] == [(1, InvalidTableError), (2, DeviceError)]


def test_a_group_that_does_not_fit_is_measured_in_halves(quick_settings):
    alive = weakref.WeakSet()

    class Crowded(Harness):
        def _build(self, item, seed):
            if len(alive) > quick_settings.num_references + 1:
                raise torch.OutOfMemoryError("out of memory")
            kernel = super()._build(item, seed)
            alive.add(kernel)
            return kernel

    harness = Crowded(find_device("cpu"), quick_settings)
    before = harness.num_groups
    results = harness.measure([[make.held(f"t{index}")] for index in range(4)])
    assert [result.shards[0].shard.table for result in results] == [f"t{index}" for index in range(4)]
    assert harness.num_groups - before == 3


def test_the_share_of_timed_runs_is_known(quick_settings):
    harness = Harness(find_device("cpu"), quick_settings)
    assert harness.timed_share == 0
    harness.measure([[make.held(num_bags=2048, pooling_factor=10.0)]] * 4)
    assert 0 < harness.timed_share <= 1


def test_one_call_measures(quick_settings):
    (result,) = Harness(find_device("cpu"), quick_settings).measure([[make.held()]])
    assert result.kernel_ms > 0


def test_a_device_measures_with_its_usual_settings(any_device):
    device = find_device(any_device)
    large, small = Harness(device).measure([reference_set(4096), reference_set(64)])
    assert min(large.backward_ms, small.backward_ms) > 0
    assert large.num_rounds == Settings.for_device(device).rounds.num_measured


def test_devices_have_short_keys():
    names = ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090"]
    names += ["NVIDIA H100 80GB HBM3", "NVIDIA A100 80GB PCIe", "NVIDIA H100 NVL"]
    keys = ["h200", "a100", "v100", "rtx-4090", "h100", "a100", "h100"]
    assert [gpu_key(name) for name in names] == keys


def test_the_processor_is_a_device():
    device = find_device("cpu")
    assert device.key == "cpu"
    assert device.name
    assert not device.is_cuda


def test_unknown_devices_are_refused():
    with pytest.raises(InvalidOptionError, match='device: must be one of auto, cpu, cuda, got "tpu"'):
        find_device("tpu")


@pytest.mark.parametrize(("num_rounds", "num_dropped"), [(1, 0), (2, 0), (3, 1), (5, 1), (9, 2), (30, 2)])
def test_collecting_takes_as_many_rounds_as_are_asked_for(num_rounds, num_dropped):
    rounds = Settings.for_collecting(find_device("cpu"), num_rounds).rounds
    assert (rounds.num_measured, rounds.num_dropped, rounds.num_warmup) == (num_rounds, num_dropped, 1)
    assert rounds.num_least == (4 if num_rounds > 4 else None)
    assert Settings.for_collecting(find_device("cpu")).rounds.num_measured == 9
    calibrating = Settings.for_calibrating(find_device("cpu"), num_rounds)
    assert calibrating.rounds == rounds
    assert calibrating.max_spread > Settings.for_collecting(find_device("cpu")).max_spread
