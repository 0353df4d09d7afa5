"""The reference's own arithmetic, against numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch

from autoshard.core import Feature, Optimizer, Pooling
from autoshard.core.errors import InvalidOptionError
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.reference import ReferenceEmbeddings, check_verifiable, global_samples
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make


def one_table(table, learning_rate=0.5):
    reference = ReferenceEmbeddings(
        make.tables(table, batch_size=2), FusedSettings(learning_rate=learning_rate, eps=1.0)
    )
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


#: What torch's own optimizers do where all rows are looked up: decay is decoupled, as AdamW has it.
TORCH = {
    Optimizer.SGD: lambda one: torch.optim.SGD(one, lr=0.1),
    Optimizer.ADAGRAD: lambda one: torch.optim.Adagrad(one, lr=0.1, eps=1e-3),
    Optimizer.ADAM: lambda one: torch.optim.AdamW(one, lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2),
}


@pytest.mark.parametrize("optimizer", TORCH)
def test_optimizers_do_what_those_of_torch_do(optimizer):
    settings = FusedSettings(learning_rate=0.1, eps=1e-3)
    if optimizer.has_decaying_moments:
        settings = replace(settings, beta1=0.8, beta2=0.95, weight_decay=0.2)
    reference = ReferenceEmbeddings(make.tables(make.table("t", 3, 4, optimizer=optimizer), batch_size=2), settings)
    plain = reference.weights["t"].detach().clone().requires_grad_()
    theirs = TORCH[optimizer]([plain])
    every = BatchOfIds(torch.tensor([[2, 1]]), torch.tensor([0, 2, 1]))
    for _ in range(4):
        reference(every).pooled_BC.square().sum().backward()
        theirs.zero_grad()
        torch.stack([plain[0] + plain[2], plain[1]]).square().sum().backward()
        reference.end_step()
        theirs.step()
        torch.testing.assert_close(reference.weights["t"], plain, rtol=1e-5, atol=1e-6)


# The gradient of the first step is [1, 2, 3, 4]: bias correction makes the mean gradient of it the gradient, and the
# mean square its square, or the mean over the row, 7.5. Epsilon is 1, the weights of row 0 are [0, 1, 2, 3].
@pytest.mark.parametrize(
    ("optimizer", "divided"),
    [
        (Optimizer.ADAM, [1 / 2, 2 / 3, 3 / 4, 4 / 5]),
        (Optimizer.PARTIAL_ROWWISE_ADAM, [value / (7.5**0.5 + 1) for value in (1, 2, 3, 4)]),
        (Optimizer.LAMB, [1 / 2, 2 / 3, 3 / 4, 4 / 5]),
        (Optimizer.PARTIAL_ROWWISE_LAMB, [value / (7.5**0.5 + 1) for value in (1, 2, 3, 4)]),
    ],
)
def test_first_steps_of_optimizers_with_two_moments(optimizer, divided):
    reference = one_table(make.table("t", 3, 4, optimizer=optimizer))
    before = reference.weights["t"].detach().clone()
    reference(BATCH).pooled_BC.backward(torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0]]))
    reference.end_step()
    if optimizer.scales_by_norms:
        length = 14**0.5 / sum(value**2 for value in divided) ** 0.5
        divided = [value * length for value in divided]
    moved = (before - reference.weights["t"].detach()) / 0.5
    assert torch.allclose(moved[0], torch.tensor(divided), atol=1e-6)
    assert torch.equal(moved[1], torch.zeros(4))  # not looked up


def test_local_batches_make_the_global_batch():
    features = (Feature(name="a", pooling_factor=1.5), Feature(name="b", pooling_factor=2.0))
    tables = make.tables(make.table("t", features=features), make.table("u"), batch_size=4)
    parts = [draw_samples(tables, 3, 2, (0, 0, process)) for process in range(2)]
    whole = global_samples(parts)
    reference = ReferenceEmbeddings(tables, FusedSettings(learning_rate=1.0, eps=1.0))
    separate = torch.cat([reference(part.ids).pooled_BC for part in parts])
    assert torch.equal(reference(whole.ids).pooled_BC, separate)
    assert torch.equal(whole.labels_B, torch.cat([part.labels_B for part in parts]))
    assert not torch.equal(parts[0].ids.ids_L, parts[1].ids.ids_L)


def test_tables_that_no_process_can_hold_are_not_verified():
    tables = make.tables(make.table("t", 1 << 26, 8), batch_size=2)
    with pytest.raises(InvalidOptionError, match=r"^verify_steps: .* scale them down"):
        check_verifiable(tables)
    check_verifiable(replace(tables, tables=(make.table("t"),)))
