"""Ids in the rooms of messages, whose sizes both ends know."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.ids.jagged import JaggedOrder, Runs
from autoshard.runtime.engine.ids.messages import BufferSizes, with_weights, without_weights
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from studies.engines.host_waits import as_on_a_gpu
from tests import builders as make
from tests.contracts.drawn_layouts import weighted_sums
from tests.ranks import on_ranks

CPU = torch.device("cpu")
SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(SIZES, st.data())
def test_runs_come_into_their_rooms_one_behind_the_other(sizes, data):
    bounds_X = torch.tensor([0, *sizes]).cumsum(0)
    ids_L = torch.arange(100, 100 + int(bounds_X[-1]) + 2)  # and what is no run's
    numbers = st.integers(0, len(sizes) - 1).map(lambda one: (one, one + 1))
    runs_P = data.draw(st.lists(st.lists(numbers, max_size=3), min_size=1, max_size=3))
    rooms_P = tuple(data.draw(st.lists(st.integers(0, 9), min_size=len(runs_P), max_size=len(runs_P))))
    expected = [[int(one) for first, last in of for one in ids_L[bounds_X[first] : bounds_X[last]]] for of in runs_P]
    for kind in (nullcontext, as_on_a_gpu):
        with kind():
            runs = Runs(runs_P, CPU)
            counts_P, ends_S = runs.sizes(bounds_X)
            ids_R = runs.laid_out(ids_L, bounds_X, ends_S, rooms_P, torch.int32)
        assert counts_P.tolist() == [len(of) for of in expected]
        assert ids_R.dtype == torch.int32
        for found, of, room in zip(torch.split(ids_R, list(rooms_P)), expected, rooms_P, strict=True):
            assert found[: len(of)].tolist() == of[:room]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1, 1, 0, 2], []])
def test_an_order_needs_no_number_of_ids(order):
    lengths_NB, ids_L = torch.tensor([[2, 0], [0, 1], [1, 1]], dtype=torch.int32), torch.arange(5)
    pieces = torch.split(ids_L, [2, 1, 2])
    expected = torch.cat([pieces[row] for row in order]) if order else ids_L[:0]
    lengths, ids = JaggedOrder(order, 3, CPU)(lengths_NB, ids_L)
    assert (lengths.tolist(), ids.tolist()) == (lengths_NB[order].tolist(), expected.tolist())
    with as_on_a_gpu():
        lengths, ids = JaggedOrder(order, 3, CPU)(lengths_NB, ids_L)
    assert (lengths.tolist(), ids[: len(expected)].tolist()) == (lengths_NB[order].tolist(), expected.tolist())


def test_ids_and_the_bits_of_their_weights_come_back():
    weights_L = torch.tensor([1.0, -0.0, -2.5, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38])
    ids_L = torch.tensor([0, 1, 2**31 - 1, 2**31 - 2, 5, 6, 7, 2**30])
    for dtype in (torch.int64, torch.int32):
        ids, weights = without_weights(with_weights(ids_L.to(dtype), weights_L), is_weighted=True)
        assert torch.equal(ids, ids_L)
        assert torch.equal(weights.view(torch.int32), weights_L.view(torch.int32))


def bytes_of_ids(plan):
    """That this process sends for a batch, without weights and with them."""
    sent = []
    for one in (plan, weighted_sums(plan)):
        embeddings = ShardedEmbeddings(one, FusedSettings(learning_rate=0.1))
        embeddings(draw_samples(one.tables, 1, embeddings.local_batch_size, (0,)).ids)
        sent.append(embeddings.sent_bytes())
        embeddings.close()
    return [one["ids"] for one in sent], [one["lengths"] for one in sent]


def test_a_weight_travels_as_4_bytes_beside_its_id():
    for ids, lengths in on_ranks(bytes_of_ids, 2, make.table_wise_plan([make.table("a"), make.table("b")], [0, 1])):
        assert 0 < 2 * ids[0] == ids[1]
        assert lengths[0] == lengths[1]


def test_both_ends_of_a_message_know_its_room():
    here, there = BufferSizes(2), BufferSizes(2)
    for num_ids in [100, 90, 400, 0, 0, 30]:
        here.adapt([5, num_ids], [5, 70])
        there.adapt([70, 1], [num_ids, 1])
        assert here.sent[1] == there.received[0]
        assert here.received[1] == there.sent[0]
        assert here.sent[1] >= num_ids


def test_rooms_grow_at_once_and_shrink_slowly():
    rooms = BufferSizes(1)
    rooms.adapt([100_000], [5])
    (large,) = rooms.sent
    rooms.adapt([99_000], [5])
    assert rooms.sent == (large,)
    rooms.adapt([10], [5])
    assert large // 2 < rooms.sent[0] < large
    for _ in range(200):
        rooms.adapt([10], [5])
    assert rooms.sent[0] < 100
