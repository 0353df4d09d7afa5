"""The dense layers around the tables."""

import pytest
import torch

from autoshard.core import DenseLayers
from autoshard.core.errors import InvalidPlanError
from autoshard.evaluation.batch_memory import dense_bytes
from autoshard.runtime.training.dense import DenseModel, default_layers
from tests import builders as make

LAYERS = DenseLayers(num_dense_features=3, bottom_mlp=(5, 4), top_mlp=(6, 1))


def test_equal_dims_interact_by_dot_products():
    model = DenseModel(LAYERS, [4, 4], seed=0)
    assert model.interaction == "dot"
    seen = []
    model.top[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    bottom_BD = torch.tensor([[1.0, 2, 3, 4]])
    logits_B = model(bottom_BD, torch.tensor([[1.0, 0, 0, 0, 0, 1, 0, 2]]))
    assert logits_B.shape == (1,)
    # The bottom output, then its products with both features, then the features' own: 1, 2 + 8, 0.
    assert seen[0].tolist() == [[1, 2, 3, 4, 1, 10, 0]]


@pytest.mark.parametrize(
    ("layers", "dims"),
    [
        (LAYERS, [4, 8]),
        (LAYERS, [8, 8]),
        (DenseLayers(num_dense_features=3, bottom_mlp=(4,), top_mlp=(1,), interaction="cat"), [4]),
    ],
)
def test_everything_else_is_concatenated(layers, dims):
    model = DenseModel(layers, dims, seed=0)
    assert model.interaction == "concat"
    assert model.top[0].in_features == 4 + sum(dims)


def test_plans_without_dense_layers_get_small_ones():
    assert DenseModel(default_layers([16, 16]), [16, 16], seed=0).interaction == "dot"
    assert DenseModel(default_layers([16, 32]), [16, 32], seed=0).interaction == "concat"


def test_what_is_kept_for_the_backward_pass_is_counted():
    layers = DenseLayers(num_dense_features=3, bottom_mlp=(16, 32), top_mlp=(8, 1))
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch_size, dims = 256, [32] * 20
    model = DenseModel(layers, dims, seed=0)
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
    dense_BN, pooled_BC = torch.rand(batch_size, 3), torch.rand(batch_size, sum(dims), requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits_B = model(model.bottom(dense_BN), pooled_BC)
    assert logits_B.requires_grad
    kept_bytes = sum(num_bytes for pointer, num_bytes in kept.items() if pointer not in parameters)
    tables = make.tables(*(make.table(f"t{n}", embedding_dim=dim) for n, dim in enumerate(dims)), dense=layers)
    of_batch = dense_bytes(tables, 2 * batch_size) - dense_bytes(tables, batch_size)
    # As much again for gradients, and the products of all pairs, which are there for a while.
    assert kept_bytes < of_batch < 3 * kept_bytes


def test_the_seed_decides_the_weights_and_leaves_torch_alone():
    before = torch.random.get_rng_state()
    first, same, other = (DenseModel(LAYERS, [4], seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.top[0].weight, same.top[0].weight)
    assert not torch.equal(first.top[0].weight, other.top[0].weight)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"num_dense_features": 0}, "num_dense_features"),
        ({"bottom_mlp": ()}, "bottom_mlp"),
        ({"top_mlp": (0, 1)}, "top_mlp"),
        ({"top_mlp": (4, 2)}, "top_mlp"),
    ],
)
def test_layers_that_make_no_model_are_refused(changed, field):
    values = {"num_dense_features": 3, "bottom_mlp": (4,), "top_mlp": (1,), **changed}
    with pytest.raises(InvalidPlanError, match=f"^tables.dense.{field}: "):
        DenseModel(DenseLayers(**values), [4], seed=0)
