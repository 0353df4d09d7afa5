"""The reference's own arithmetic, against numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch

from autoshard.core import Feature, Optimizer, Pooling
from autoshard.core.errors import InvalidOptionError
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.training.reference import ReferenceEmbeddings, check_verifiable, global_samples
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make


def one_table(table, learning_rate=0.5):
    reference = ReferenceEmbeddings(make.tables(table, batch_size=2), learning_rate=learning_rate, eps=1.0, seed=0)
    reference.weights[table.name].data.copy_(torch.arange(12.0).view(3, 4))
    return reference


BATCH = BatchOfIds(torch.tensor([[2, 1]]), torch.tensor([0, 2, 2]))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (Pooling.SUM, [[8.0, 10.0, 12.0, 14.0], [8.0, 9.0, 10.0, 11.0]]),
        (Pooling.MEAN, [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]),
    ],
)
def test_bags_are_pooled(pooling, expected):
    reference = one_table(make.table("t", 3, 4, pooling=pooling))
    assert reference(BATCH).pooled_BC.tolist() == expected


# The gradient is [1, 2, 3, 4] for the first bag and [2, 0, 0, 0] for the second: row 0 gets the first, row 2 the
# sum [3, 2, 3, 4], row 1 none. Learning rate 0.5 and epsilon 1, outside of the root.
# Row-wise moments are the means of the squares: 30 / 4 = 7.5 and 38 / 4 = 9.5.
@pytest.mark.parametrize(
    ("optimizer", "step_0", "step_2"),
    [
        (Optimizer.SGD, [1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 3.0, 4.0]),
        (
            Optimizer.ROWWISE_ADAGRAD,
            [value / (7.5**0.5 + 1) for value in (1, 2, 3, 4)],
            [value / (9.5**0.5 + 1) for value in (3, 2, 3, 4)],
        ),
        (Optimizer.ADAGRAD, [1 / 2, 2 / 3, 3 / 4, 4 / 5], [3 / 4, 2 / 3, 3 / 4, 4 / 5]),
    ],
)
def test_optimizers_take_the_step_of_their_formula(optimizer, step_0, step_2):
    reference = one_table(make.table("t", 3, 4, optimizer=optimizer))
    before = reference.weights["t"].detach().clone()
    reference(BATCH).pooled_BC.backward(torch.tensor([[1.0, 2, 3, 4], [2, 0, 0, 0]]))
    reference.end_step()
    moved = (before - reference.weights["t"].detach()) / 0.5
    assert torch.allclose(moved, torch.tensor([step_0, [0.0] * 4, step_2]), atol=1e-6)
    assert reference.weights["t"].grad is None


def test_local_batches_make_the_global_batch():
    features = (Feature(name="a", pooling_factor=1.5), Feature(name="b", pooling_factor=2.0))
    tables = make.tables(make.table("t", features=features), make.table("u"), batch_size=4)
    parts = [draw_samples(tables, 3, 2, (0, 0, process)) for process in range(2)]
    whole = global_samples(parts)
    reference = ReferenceEmbeddings(tables, learning_rate=1.0, eps=1.0, seed=0)
    separate = torch.cat([reference(part.ids).pooled_BC for part in parts])
    assert torch.equal(reference(whole.ids).pooled_BC, separate)
    assert torch.equal(whole.labels_B, torch.cat([part.labels_B for part in parts]))
    assert not torch.equal(parts[0].ids.ids_L, parts[1].ids.ids_L)


def test_tables_that_no_process_can_hold_are_not_verified():
    tables = make.tables(make.table("t", 1 << 26, 8), batch_size=2)
    with pytest.raises(InvalidOptionError, match=r"^verify_steps: .* scale them down"):
        check_verifiable(tables)
    check_verifiable(replace(tables, tables=(make.table("t"),)))
