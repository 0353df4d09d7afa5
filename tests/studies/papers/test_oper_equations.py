"""OPER's equations against the paper's matrices, written out."""

from functools import partial

import numpy as np
import pytest

from autoshard.core import (
    DType,
    MemoryBandwidth,
)
from autoshard.core.errors import InvalidOptionError
from autoshard.evaluation import DEVICE_MEMORY
from studies.papers.oper.equations import (
    duplication_frequency,
    exchange_ms,
    fetch_matrix_ms,
    held_bytes,
    lookup_ms,
    mean_row_bytes,
    topology_frequency,
)
from tests import builders as make

topology = partial(
    make.topology,
    device="a100",
    bytes_per_s=(2e11, 1e10),
    reduce_bytes_per_s=(1e11, 3e10),
    latency_s=1.0,
)


def test_equations_1_to_3_are_those_of_the_binary_matrices():
    rng = np.random.default_rng(0)
    num_groups, num_ranks = 30, 5
    paths_NR = rng.integers(0, num_ranks, (num_groups, num_ranks))
    bytes_N = rng.integers(1, 1000, num_groups)
    rows_N, fetch_RR = rng.random(num_groups), rng.random((num_ranks, num_ranks))
    held, work = np.zeros(num_ranks), np.zeros(num_ranks)
    exchange = np.zeros((num_ranks, num_ranks))
    for k in range(num_groups):
        P = np.zeros((num_ranks, num_ranks))
        P[np.arange(num_ranks), paths_NR[k]] = 1
        for j in range(num_ranks):
            held[j] += bytes_N[k] * (P[:, j].sum() > 0)
            work[j] += rows_N[k] * P[:, j].sum() * fetch_RR[j, j]
            for i in range(num_ranks):
                exchange[i, j] += rows_N[k] * P[i, j] * fetch_RR[i, j]
    np.testing.assert_array_equal(held_bytes(paths_NR, bytes_N, num_ranks), held)
    np.testing.assert_allclose(lookup_ms(paths_NR, rows_N, fetch_RR), work)
    np.testing.assert_allclose(exchange_ms(paths_NR, rows_N, fetch_RR), exchange)


def test_matrix_is_derived_from_the_levels():
    matrix = fetch_matrix_ms(topology(), 256.0)
    near, far = 256 / 2e11 * 1e3, 256 / 1e10 * 1e3
    own = 256 / DEVICE_MEMORY["a100"].gather_bytes_per_s * 1e3
    expected = [[own, near, far, far], [near, own, far, far], [far, far, own, near], [far, far, near, own]]
    np.testing.assert_allclose(matrix, expected)
    assert np.isfinite(fetch_matrix_ms(topology(device="nobody-knows"), 256.0)).all()


def test_ranks_read_their_own_rows_at_the_bandwidth_that_the_topology_states():
    stated = fetch_matrix_ms(topology(memory_bandwidth=MemoryBandwidth(hbm=1.7e12)), 256.0)
    np.testing.assert_allclose(stated.diagonal(), 256 / 1.7e12 * 1e3)
    others = ~np.eye(4, dtype=bool)
    np.testing.assert_array_equal(stated[others], fetch_matrix_ms(topology(), 256.0)[others])


def test_measured_matrix_is_taken_as_it_is():
    measured = tuple(tuple(float(4 * i + j) for j in range(4)) for i in range(4))
    np.testing.assert_array_equal(fetch_matrix_ms(topology(fetch_ms=measured), 256.0), measured)


def test_duplication_pays_above_the_frequency_where_equations_4_and_5_meet():
    num_ranks, batch, size, p2p, all_reduce = 8, 256, 512.0, 2e10, 5e9
    frequency = duplication_frequency(p2p, all_reduce, batch)
    shares = (num_ranks - 1) / num_ranks
    not_duplicated_s = 2 * frequency * batch * shares * size / p2p
    assert not_duplicated_s == pytest.approx(2 * shares * size / all_reduce)
    assert frequency == pytest.approx(4 / 256)


@pytest.mark.parametrize("arguments", [(0.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, 0.0), (float("nan"), 1.0, 1.0)])
def test_duplication_refuses_bandwidths_and_batches_of_nothing(arguments):
    with pytest.raises(InvalidOptionError, match="must be above 0"):
        duplication_frequency(*arguments)


def test_frequency_of_a_topology_weighs_its_levels():
    # One peer at 2e11 and two at 1e10 bytes per second; a ring sends 2 * 3/4 of what is reduced, at 3e10.
    matrix = fetch_matrix_ms(topology(), 64.0)
    p2p = 3 / (1 / 2e11 + 2 / 1e10)
    assert topology_frequency(topology(), matrix, 64.0, 100.0) == pytest.approx(p2p / (100 * 1.5 * 3e10))
    assert topology_frequency(topology(), 0 * matrix, 64.0, 100.0) == float("inf")


def test_average_row_counts_lookups():
    def mean(first, second):
        half = make.table("b", pooling_factor=second, dtype=DType.FP16)
        return mean_row_bytes(make.tables(make.table("a", pooling_factor=first), half))

    assert mean(3.0, 1.0) == 56
    assert mean(0.0, 0.0) == 48
