"""Collectives: latency plus bytes over the bandwidth of the level that they cross."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core.costs import LinkBytes
from autoshard.core.errors import InvalidTopologyError
from autoshard.evaluation import AlphaBetaComm
from autoshard.evaluation.communication import link_bytes, link_levels, over_shared_links
from tests.builders import topology

COMM = AlphaBetaComm()
#: Level number n has 10^(9-n) bytes/s and a latency of n + 1 ms.
levels_of = partial(topology, bytes_per_s=(1e9, 1e8, 1e7), latency_s=(1e-3, 2e-3, 3e-3))


def sent(world_size, **entries):
    matrix = np.zeros((world_size, world_size))
    for pair, num_bytes in entries.items():
        matrix[int(pair[1]), int(pair[2])] = num_bytes
    return matrix


def all_to_all_ms(sent_RR, topology):
    return COMM.links_ms(link_bytes(sent_RR, topology), topology)


def test_levels_are_the_innermost_that_hold_both():
    assert link_levels(levels_of(2, 4)).tolist() == [[-1, 0, 1, 1], [0, -1, 1, 1], [1, 1, -1, 0], [1, 1, 0, -1]]


def test_a_rank_waits_for_the_larger_of_sent_and_received():
    # Rank 0 sends 1 MB + 2 MB, rank 1 gets 1 MB, rank 2 gets 2 MB; at 1 GB/s that is 3, 1 and 2 ms, and 1 ms latency.
    times = all_to_all_ms(sent(3, p01=1e6, p02=2e6), levels_of(3))
    assert times.tolist() == pytest.approx([4.0, 2.0, 3.0])


def test_levels_work_side_by_side():
    # Rank 0 sends 1 MB inside its node (1 ms) and 1 MB out of it (10 ms); the outer latency is 2 ms.
    times = all_to_all_ms(sent(4, p01=1e6, p02=1e6), levels_of(2, 4))
    assert times.tolist() == pytest.approx([12.0, 2.0, 12.0, 0.0])


def test_levels_outside_the_node_share_the_port():
    # Rank 0 sends 1 MB to the next node (10 ms) and 1 MB to the next building (100 ms), behind a latency of 3 ms.
    times = all_to_all_ms(sent(8, p02=1e6, p04=1e6), levels_of(2, 4, 8))
    assert times[0] == pytest.approx(113.0)


def test_ranks_that_share_links_wait_for_what_all_of_them_send():
    # 4 MB from rank 0 and nothing from rank 1: 2 MB for each of their halves, at 100 MB/s behind a latency of 2 ms.
    topology = levels_of(2, 4)
    node, cluster = topology.levels
    shared = replace(topology, levels=(node, replace(cluster, shared_links=True)))
    to_node_1 = sent(4, p02=3e6, p03=1e6)
    assert all_to_all_ms(to_node_1, topology).tolist() == pytest.approx([42.0, 0.0, 32.0, 12.0])
    assert all_to_all_ms(to_node_1, shared).tolist() == pytest.approx([22.0] * 4)
    # Where all send alike it makes no difference.
    alike = 1e6 * (1 - np.eye(4))
    assert all_to_all_ms(alike, shared).tolist() == all_to_all_ms(alike, topology).tolist()


@given(seed=st.integers(0, 1000))
def test_links_are_shared_along_any_axes(seed):
    rng = np.random.default_rng(seed)
    topology = levels_of(2, 4, 8)
    node, rack, cluster = topology.levels
    topology = replace(topology, levels=(node, replace(rack, shared_links=True), replace(cluster, shared_links=True)))
    leaving, arriving = rng.uniform(0, 1e6, (2, 3, 5, 8))
    together = COMM.links_ms(LinkBytes(leaving_LR=leaving, arriving_LR=arriving), topology)
    for index in range(5):
        one = LinkBytes(leaving_LR=leaving[:, index], arriving_LR=arriving[:, index])
        np.testing.assert_allclose(together[index], COMM.links_ms(one, topology), rtol=1e-12)
    # The buildings' links by four ranks each.
    spread = over_shared_links(LinkBytes(leaving_LR=leaving, arriving_LR=arriving), topology)
    np.testing.assert_allclose(spread.leaving_LR[2, :, :4], leaving[2, :, :4].mean(axis=1, keepdims=True).repeat(4, 1))
    np.testing.assert_array_equal(spread.arriving_LR[0], arriving[0])


def test_what_stays_is_free():
    assert all_to_all_ms(np.diag([1e9, 1e9]), levels_of(2)).tolist() == [0.0, 0.0]


@given(seed=st.integers(0, 1000))
def test_relabelling_ranks_of_a_node_relabels_their_times(seed):
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, 10**6, (4, 4)).astype(float)
    order = np.concatenate([rng.permutation(2), 2 + rng.permutation(2)])
    times = all_to_all_ms(matrix, levels_of(2, 4))
    relabelled = all_to_all_ms(matrix[np.ix_(order, order)], levels_of(2, 4))
    np.testing.assert_allclose(relabelled, times[order])


def test_all_reduce_takes_the_outermost_collective():
    # 1 MB at 10^8 bytes/s is 10 ms, and 2 ms of latency.
    assert COMM.collective_ms("all_reduce", 1e6, levels_of(2, 4)) == pytest.approx(12.0)
    assert COMM.collective_ms("all_reduce", 0.0, levels_of(2, 4)) == 0.0
    assert COMM.collective_ms("all_reduce", 1e6, levels_of(1)) == 0.0


@pytest.mark.parametrize("shape", [(2, 2), (4,), (4, 3), (3, 3), (5, 5), (4, 4, 1), ()])
def test_refuses_matrices_of_another_world(shape):
    with pytest.raises(InvalidTopologyError, match="sent_bytes: must be 4 rows"):
        link_bytes(np.ones(shape), levels_of(2, 4))
