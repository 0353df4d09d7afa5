"""Rows that several processes hold: which are distinct, and how they are updated."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import DType, Optimizer
from autoshard.runtime.engine.ids.distinct import Distinct
from autoshard.runtime.engine.rows.fused import FusedKernel, FusedSettings, UpdateStep
from autoshard.runtime.engine.rows.replicated import places_of
from autoshard.runtime.engine.rows.torch_rows import TorchKernel, TorchRows, summed_by_place

CPU = torch.device("cpu")
ROWS = 7


@given(st.lists(st.lists(st.integers(0, ROWS - 1), max_size=12), min_size=1, max_size=4), st.integers(0, 3))
def test_distinct_rows_are_those_of_torch_and_every_lookup_finds_its_own(places, num_behind):
    counts = torch.tensor([len(of) for of in places])
    ids_L = torch.tensor([*(row for of in places for row in of), *[10**12] * num_behind])
    distinct = Distinct([ROWS] * len(places), [(place, 0) for place in range(len(places))], CPU)(ids_L, counts)
    found = [distinct.rows_U[slice(*ends)].tolist() for ends in pairwise(distinct.ends_K.tolist())]
    assert found == [sorted(set(of)) for of in places]
    hit = distinct.hit()[: int(counts.sum())]
    assert distinct.rows_U[hit].tolist() == [row for of in places for row in of]


def test_gradients_are_summed_over_the_lookups_of_a_row():
    rows_L, source_L = torch.tensor([5, 2, 5, 6]), torch.tensor([0, 1, 1, 0])
    gradients_XD = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    places_L = places_of(rows_L, torch.tensor([1, 2, 5, 6]), ROWS)
    summed = summed_by_place(places_L, 4, source_L, gradients_XD)
    assert summed.tolist() == [[0.0, 0.0], [10.0, 20.0], [11.0, 22.0], [1.0, 2.0]]


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAGRAD])
def test_an_update_of_all_rows_is_that_of_the_rows_with_a_gradient(optimizer):
    num_rows, dim = 3, 1 << 21  # two rows are updated at once
    settings = FusedSettings(learning_rate=0.1, marks_rows=True)
    some, all_rows = (TorchRows(num_rows, dim, DType.FP32, optimizer, settings, CPU) for _ in range(2))
    some.weights_ND.copy_(torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(0)))
    all_rows.weights_ND.copy_(some.weights_ND)
    rows_U, gradients_UD = torch.tensor([0, 2]), torch.randn(2, dim, generator=torch.Generator().manual_seed(1))
    step = UpdateStep(0.1, 1)
    for _ in range(2):
        some.update(rows_U, gradients_UD, step)
        all_rows.update(None, torch.zeros(num_rows, dim).index_copy(0, rows_U, gradients_UD), step)
    assert some.marks_N.tolist() == [3, 0, 3]
    for one, other in zip(some.state.tensors(), all_rows.state.tensors(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(some.marks_N, all_rows.marks_N)


@pytest.mark.parametrize("optimizer", [one for one in Optimizer if one.has_decaying_moments])
def test_rows_that_are_looked_up_move_without_a_gradient_and_others_stay(optimizer):
    settings = FusedSettings(learning_rate=0.1, marks_rows=True)
    some, all_rows = (TorchRows(4, 8, DType.FP32, optimizer, settings, CPU) for _ in range(2))
    some.weights_ND.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    all_rows.weights_ND.copy_(some.weights_ND)
    gradients_ND = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for number, rows in enumerate(([0, 2, 3], [0, 3]), 1):
        rows_U, hits_N = torch.tensor(rows), torch.zeros(4, dtype=torch.bool)
        hits_N[rows_U] = True
        before_ND = some.weights_ND.clone()
        some.update(rows_U, gradients_ND[rows_U], UpdateStep(0.1, number))
        all_rows.update(None, gradients_ND * hits_N[:, None], UpdateStep(0.1, number), hits_N)
        gradients_ND[0] = 0.0  # row 0 goes on by its mean gradient
        moved_N = (some.weights_ND != before_ND).any(dim=1)
        assert moved_N.tolist() == hits_N.tolist()
    assert some.marks_N.tolist() == [3, 0, 3, 3]
    for one, other in zip(some.state.tensors(), all_rows.state.tensors(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("optimizer", [Optimizer.LAMB, Optimizer.PARTIAL_ROWWISE_LAMB])
def test_rows_of_lamb_that_are_first_looked_up_without_a_gradient_stay(optimizer):
    rows = TorchRows(2, 4, DType.FP32, optimizer, FusedSettings(learning_rate=0.1), CPU)
    rows.weights_ND.fill_(1.0)
    rows.update(torch.tensor([0]), torch.zeros(1, 4), UpdateStep(0.1, 1))
    assert torch.equal(rows.weights_ND, torch.ones(2, 4))


@pytest.mark.parametrize("gives_rows", [False, True])
@pytest.mark.parametrize("num_samples", [3, 0])
@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAGRAD])
def test_kernels_of_torch_do_what_those_of_fbgemm_do(optimizer, num_samples, gives_rows):
    generator = torch.Generator().manual_seed(0)
    sizes, features = ([(30, 8)], None) if gives_rows else ([(20, 4), (30, 8)], [0, 0, 1])
    settings = FusedSettings(learning_rate=0.1, eps=1e-3)
    fbgemm, ours = (one(sizes, DType.FP32, optimizer, settings, CPU, features) for one in (FusedKernel, TorchKernel))
    for one, other in zip(fbgemm.states(writes=True), ours.states(writes=True), strict=True):
        one.weights_ND.copy_(torch.randn(one.weights_ND.shape, generator=generator))
        other.weights_ND.copy_(one.weights_ND)
    lengths_FG = torch.randint(4, (3, num_samples), generator=generator)
    ids_L = torch.randint(20, (int(lengths_FG.sum()),), generator=generator)
    expected, found = (one.rows(ids_L) if gives_rows else one.sums(ids_L, lengths_FG) for one in (fbgemm, ours))
    torch.testing.assert_close(found, expected)
    for output in (expected, found):
        output.square().sum().backward()
    for one, other in zip(fbgemm.states(writes=False), ours.states(writes=False), strict=True):
        for pair in zip(other.tensors(), one.tensors(), strict=True):
            torch.testing.assert_close(*pair)
