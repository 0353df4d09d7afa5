"""Rows behind caches: hit rates of both policies, what crosses the link to the host, and what that adds to kernels."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    DType,
    MemoryBandwidth,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    set_costs,
)
from autoshard.evaluation import AnalyticCostModel, UpperEndKernels, evaluate
from autoshard.evaluation.cached_rows import (
    LFU,
    LRU,
    ROW_SHARE_OF_LINK,
    CacheTraffic,
    TransferSpeeds,
    behind_cache,
    behind_caches,
    cache_traffic,
    transfer_seconds,
)
from autoshard.evaluation.device_memory import DEVICE_MEMORY, SSD
from tests.builders import costs, held, placed, plan, profile_of, table, topology

#: Two rows get nine lookups of ten, a thousand share the rest.
SKEWED = profile_of(np.array([450.0, 450.0] + [0.1] * 1000))
SHARD = held(
    num_embeddings=1002,
    embedding_dim=32,
    num_bags=100,
    pooling_factor=5.0,
    access=SKEWED,
    level=MemoryLevel.DDR,
    cache_bytes=2 * 128,
    cache_policy=LFU,
)
A100 = topology(1, device="a100")
#: Four seconds per gigabyte; accesses of 32 bytes.
SPEEDS = TransferSpeeds(host_bytes_per_s=0.25e9)


def traffic(access, num_lookups, num_cached_rows, policy):
    return CacheTraffic.of(access, num_lookups=num_lookups, num_cached_rows=num_cached_rows, policy=policy)


def test_a_cache_that_evicts_by_frequency_hits_what_the_curve_covers():
    found = traffic(SKEWED, 500, 2, LFU)
    assert found.hit_rate == pytest.approx(SKEWED.coverage(2), rel=1e-12)
    assert found.hit_rate == pytest.approx(0.9, rel=1e-6)
    # 50 lookups of a thousand rows: Poisson counts of 0.05 each.
    assert found.num_missed == pytest.approx(1000 * (1 - np.exp(-0.05)), rel=0.01)
    assert found.num_distinct == pytest.approx(SKEWED.expected_distinct(500), rel=1e-12)


def test_alike_rows_are_hit_by_their_number_whatever_the_policy():
    # Che's T for rows of chance 1/n: n (1 - exp(-T/n)) = C, so that the hit rate is C/n.
    access = AccessProfile.uniform(1000)
    for policy in (LRU, LFU):
        found = traffic(access, 100, 250, policy)
        assert found.hit_rate == pytest.approx(0.25, rel=1e-6)
        assert found.num_missed == pytest.approx(0.75 * access.expected_distinct(100), rel=1e-6)


@pytest.mark.parametrize(("alpha", "num_cached"), [(0.8, 400), (1.1, 100), (1.1, 600)])
def test_a_cache_that_evicts_by_age_does_as_a_real_one(alpha, num_cached):
    """An LRU cache played through batch by batch, every distinct row looked for once (2,000 rows, 300 lookups)."""
    access, rng = AccessProfile.zipf(2000, alpha), np.random.default_rng(0)
    cache: OrderedDict[int, None] = OrderedDict()
    missed = []
    for _ in range(300):
        drawn = access.sample_ranks(300, rng)
        missed.append(sum(row not in cache for row in set(drawn.tolist())))
        for row in drawn.tolist():
            cache[row] = None
            cache.move_to_end(row)
            if len(cache) > num_cached:
                cache.popitem(last=False)
    found = traffic(access, 300, num_cached, LRU)
    assert found.num_missed == pytest.approx(np.mean(missed[50:]), rel=0.03)


@given(
    alpha=st.floats(0, 2),
    num_rows=st.integers(1, 10**9),
    num_lookups=st.floats(0, 1e8),
    share=st.floats(0, 1.2),
    more=st.floats(1, 3),
)
def test_larger_caches_and_better_policies_never_miss_more(alpha, num_rows, num_lookups, share, more):
    access, cached = AccessProfile.zipf(num_rows, alpha), share * num_rows
    by_age, by_frequency = (traffic(access, num_lookups, cached, policy) for policy in (LRU, LFU))
    for policy, found in ((LRU, by_age), (LFU, by_frequency)):
        assert 0 <= found.num_missed <= found.num_distinct * (1 + 1e-9)
        assert 0 <= found.hit_rate <= 1
        larger = traffic(access, num_lookups, more * cached, policy)
        assert larger.num_missed <= found.num_missed * (1 + 1e-6) + 1e-9
    assert by_frequency.num_missed <= by_age.num_missed * (1 + 1e-6) + 1e-9


def test_missing_rows_cross_the_link_before_and_after():
    found = cache_traffic(SHARD)
    forward_s, backward_s = transfer_seconds(SHARD, SPEEDS)
    assert forward_s == backward_s == pytest.approx(found.num_missed * 128 * 4e-9)


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [(Optimizer.SGD, 0), (Optimizer.ADAGRAD, 128), (Optimizer.ADAM, 256), (Optimizer.PARTIAL_ROWWISE_ADAM, 128)],
)
def test_states_of_all_rows_of_a_batch_cross_the_link_both_ways_but_for_one_number_a_row(optimizer, state_bytes):
    forward_s, backward_s = transfer_seconds(replace(SHARD, optimizer=optimizer), SPEEDS)
    state_s = cache_traffic(SHARD).num_distinct * 2 * state_bytes * 4e-9
    assert backward_s - forward_s == pytest.approx(state_s)


def test_everything_is_fetched_without_a_cache_and_nothing_with_a_large_one():
    distinct = SKEWED.expected_distinct(500)
    for policy in (LRU, LFU):
        shard = replace(SHARD, optimizer=Optimizer.SGD, cache_policy=policy)
        assert transfer_seconds(replace(shard, cache_bytes=0), SPEEDS)[0] == pytest.approx(distinct * 128 * 4e-9)
        assert transfer_seconds(replace(shard, cache_bytes=1002 * 128), SPEEDS) == (0, 0)
    assert transfer_seconds(replace(SHARD, level=MemoryLevel.HBM), SPEEDS) == (0, 0)


def test_a_cache_of_wider_numbers_holds_fewer_rows():
    # Neo Sec. 5.2: a high-precision cache before a low-precision table.
    half = replace(SHARD, dtype=DType.FP16, cache_bytes=128)
    assert cache_traffic(half).hit_rate == pytest.approx(0.9, rel=1e-6)
    wide = replace(half, cache_dtype=DType.FP32)
    assert cache_traffic(wide).hit_rate == pytest.approx(0.45, rel=1e-6)
    for shard, row_bytes in ((half, 32 * 2), (wide, 32 * 4)):
        behind = behind_cache(shard, MemoryLevel.DDR, 2)
        assert (behind.cache_bytes, behind.cache_dtype) == (2 * row_bytes, shard.cache_dtype)


def test_a_disk_moves_pages():
    missed = cache_traffic(SHARD).num_missed
    # The data sheet's 900,000 reads and 200,000 writes of 4 KiB per second are slower than its bandwidths.
    assert (SSD.fetch_s, SSD.store_s) == pytest.approx((1 / 900e3, 1 / 200e3))
    on_disk = replace(SHARD, level=MemoryLevel.SSD)
    assert transfer_seconds(on_disk, SPEEDS) == pytest.approx((missed / 900e3, missed / 200e3))
    # A row of 1,024 numbers takes 4,096 bytes, and one page more with its state.
    wide = replace(on_disk, embedding_dim=1024, cache_bytes=2 * 4096)
    assert transfer_seconds(wide, SPEEDS)[0] == pytest.approx(2 * missed / 900e3)


def test_a_topology_may_know_its_own_bandwidths():
    assert TransferSpeeds.of(A100).host_bytes_per_s == ROW_SHARE_OF_LINK * 32e9
    assert TransferSpeeds.of(topology(1, device="never-heard-of")).host_bytes_per_s == ROW_SHARE_OF_LINK * 16e9
    known = TransferSpeeds.of(replace(A100, memory_bandwidth=MemoryBandwidth(ddr=5e9, ssd=4.096e9)))
    assert known.host_bytes_per_s == 5e9
    assert (known.disk.fetch_s, known.disk.store_s) == pytest.approx((1e-6, 1e-6))


def test_device_memory_is_fifty_times_as_fast_as_the_link_to_the_host():
    # Neo Sec. 5.2, on A100 with PCIe 4.0.
    assert DEVICE_MEMORY["a100"].bytes_per_s / DEVICE_MEMORY["a100"].host_bytes_per_s == pytest.approx(50, rel=0.05)


def test_a_device_that_works_in_host_memory_fetches_nothing_from_there():
    assert transfer_seconds(SHARD, TransferSpeeds.of(topology(1))) == (0, 0)


def test_evaluate_prices_transfers_and_counts_caches_as_device_memory():
    one = table("t", SHARD.num_embeddings, SHARD.embedding_dim, pooling_factor=SHARD.pooling_factor, access=SKEWED)
    machine = replace(A100, memory_bandwidth=MemoryBandwidth(ddr=0.25e9))

    def cost_of(memory):
        of_one = plan(placed(one, memory=memory), batch_size=SHARD.num_bags, topology=machine)
        return evaluate(of_one, costs("a100"))

    near = cost_of(MemoryPlacement())
    cached = cost_of(MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=2 * 128, policy=LFU))
    transfers_ms = 1e3 * sum(transfer_seconds(SHARD, SPEEDS))
    assert cached.max_kernel_ms - near.max_kernel_ms == pytest.approx(transfers_ms, rel=1e-4)
    assert cached.step_ms.value - near.step_ms.value == pytest.approx(transfers_ms, rel=1e-4)
    assert cached.step_ms.high > near.step_ms.high
    assert (near.ranks[0].hbm_bytes, near.ranks[0].ddr_bytes) == (one.storage_bytes, 0)
    # Two slots of the cache; for each row an LFU cache's index, and a moment.
    in_device = 256 + 2 * 8 + (12 + 4) * one.num_embeddings
    assert (cached.ranks[0].hbm_bytes, cached.ranks[0].ddr_bytes) == (in_device, one.weight_bytes)
    assert cached.cost_model == near.cost_model == "analytic:a100"


class TestModel:
    NEAR = replace(SHARD, level=MemoryLevel.HBM, cache_bytes=0)

    def test_kernels_are_those_of_rows_in_device_memory_and_transfers_come_on_top(self):
        kernels = AnalyticCostModel.for_device("a100")
        model = behind_caches(kernels, A100)
        plain, cached = set_costs(kernels, [[self.NEAR, self.NEAR]]), set_costs(model, [[self.NEAR, SHARD]])
        forward_s, backward_s = transfer_seconds(SHARD, TransferSpeeds.of(A100))
        assert cached.forward_ms_S[0] - plain.forward_ms_S[0] == pytest.approx(1e3 * forward_s, rel=1e-4)
        assert cached.backward_ms_S[0] - plain.backward_ms_S[0] == pytest.approx(1e3 * backward_s, rel=1e-4)
        assert model.predict_ms(model.encode([SHARD]))[0] == pytest.approx(set_costs(model, [[SHARD]]).kernel_ms_S[0])

    def test_the_analytic_model_says_the_same_of_its_device(self):
        kernels = AnalyticCostModel.for_device("a100")
        priced = set_costs(behind_caches(kernels, A100), [[SHARD]]).kernel_ms_S
        assert priced == pytest.approx(set_costs(kernels, [[SHARD]]).kernel_ms_S, rel=1e-4)

    def test_plain_shards_cost_what_they_cost_without_it(self):
        kernels = AnalyticCostModel.for_device("a100")
        sets = [[], [self.NEAR], [self.NEAR] * 3]
        one, other = set_costs(kernels, sets), set_costs(behind_caches(kernels, A100), sets)
        assert one.kernel_ms_S.tolist() == other.kernel_ms_S.tolist()
        assert one.high_ms_S.tolist() == other.high_ms_S.tolist()

    def test_intervals_hold_and_upper_ends_stay_upper_ends(self):
        model = behind_caches(AnalyticCostModel.for_device("a100"), A100)
        costs = set_costs(model, [[SHARD]])
        assert costs.low_ms_S[0] < costs.kernel_ms_S[0] < costs.high_ms_S[0]
        upper = behind_caches(UpperEndKernels(AnalyticCostModel.for_device("a100")), A100)
        assert set_costs(upper, [[SHARD]]).kernel_ms_S == pytest.approx(costs.high_ms_S)
        assert behind_caches(upper, A100) == upper
