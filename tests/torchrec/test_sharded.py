"""What a model, its configs and their optimizers say is executed by `shard`, or refused by name; in a group of one."""

import copy
import re

import pytest
import torch
from tensordict import TensorDict
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import SGD, Adam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from autoshard.core.errors import InputError, InvalidPlanError
from autoshard.torchrec import shard, tables_of
from tests import builders as make

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch.jit, on torchrec's own import
]

BATCH = KeyedJaggedTensor(keys=["f", "g"], values=torch.tensor([1, 2, 3, 4, 5, 1]), lengths=torch.tensor([2, 1, 1, 2]))


def bags(device="cpu", names=("t",), **config):
    torch.manual_seed(0)
    usual = {"num_embeddings": 10, "embedding_dim": 8, "feature_names": ["f", "g"]} | config
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name=name, **usual) for name in names], device=torch.device(device)
    )


def plan_of(model):
    tables = tables_of(model, batch_size=2)
    return make.plan(
        *make.table_wise(tables.tables, [0] * len(tables.tables)), tables=tables, topology=make.topology(1)
    )


@pytest.mark.parametrize(
    ("optimizer", "argument", "value"),
    [
        (torch.optim.SGD, "weight_decay", 0.5),
        (torch.optim.SGD, "momentum", 0.9),
        (torch.optim.SGD, "maximize", True),
        (torch.optim.Adagrad, "lr_decay", 0.1),
        (torch.optim.Adagrad, "initial_accumulator_value", 0.1),
        (RowWiseAdagrad, "weight_decay", 0.1),
    ],
)
def test_arguments_of_optimizers_that_are_not_executed_are_refused_by_name(optimizer, argument, value):
    model = bags()
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1, argument: value})
    with pytest.raises(InputError, match=rf"^model\.t\.optimizer\.{argument}: "):
        shard(model, plan_of(model))


def test_arguments_that_change_nothing_are_taken_and_fused_modules_name_theirs():
    model = bags()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.0, "foreach": True})
    shard(model, plan_of(model)).close()
    tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])]
    options = {"tables": tables, "optimizer_type": torch.optim.SGD, "device": torch.device("cpu")}
    shard(plain := FusedEmbeddingBagCollection(optimizer_kwargs={"lr": 0.1}, **options), plan_of(plain)).close()
    decayed = FusedEmbeddingBagCollection(optimizer_kwargs={"lr": 0.1, "weight_decay": 0.1}, **options)
    with pytest.raises(InputError, match="weight_decay"):
        shard(decayed, plan_of(decayed))


ADAM = {"lr": 0.1, "betas": (0.5, 0.8), "eps": 1e-3}
#: The same by FBGEMM's names, which optimizers of TorchRec take.
BY_FBGEMM = {"learning_rate": 0.1, "beta1": 0.5, "beta2": 0.8, "eps": 1e-3}


def of_two_tables(*optimizers, frozen=()):
    """A model of two tables, each with an optimizer and its arguments."""
    model = bags(names=("t", "u"))
    for holder, (optimizer, arguments) in zip(model.embedding_bags.values(), optimizers, strict=True):
        apply_optimizer_in_backward(optimizer, holder.parameters(), arguments)
    for name in frozen:
        model.embedding_bags[name].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "made",
    [
        lambda: of_two_tables((torch.optim.Adam, ADAM), (torch.optim.SGD, {"lr": 0.1})),
        lambda: of_two_tables((torch.optim.Adam, ADAM | {"betas": [0.5, 0.8]}), (torch.optim.Adam, ADAM)),
        lambda: of_two_tables((torch.optim.Adam, ADAM), (torch.optim.Adam, {"lr": 0.2}), frozen=["u"]),
        lambda: of_two_tables((Adam, BY_FBGEMM), (SGD, {"learning_rate": 0.1})),
    ],
    ids=["beside sgd", "betas in a list", "beside a frozen table", "names of FBGEMM"],
)
def test_adam_in_the_backward_pass_is_that_of_torch(made):
    sharded = shard(model := made(), plan_of(model))
    weights = sharded.table_state("t").weights_ND.clone().requires_grad_()
    plain = torch.optim.Adam([weights], **ADAM)
    every = KeyedJaggedTensor(keys=["f", "g"], values=torch.arange(10), lengths=torch.tensor([3, 2, 4, 1]))
    for _ in range(3):
        sharded(every).values()[:, :16].pow(2).sum().backward()
        sharded.end_step()
        plain.zero_grad()
        torch.stack([one.sum(dim=0) for one in weights.split([3, 2, 4, 1])]).pow(2).sum().backward()
        plain.step()
    torch.testing.assert_close(sharded.table_state("t").weights_ND, weights.detach(), rtol=1e-5, atol=1e-6)
    sharded.close()


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            (torch.optim.SGD, {"lr": 0.1}),
            (torch.optim.Adagrad, {}),
            "learning_rate: must be given where tables have none",
        ),
        (
            (torch.optim.SGD, {"lr": 0.1}),
            (torch.optim.SGD, {"lr": 0.2}),
            "learning_rate: must be given where tables have",
        ),
        (
            (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}),
            (torch.optim.Adagrad, {"lr": 0.1}),
            "eps: must be given where",
        ),
        (
            (torch.optim.Adam, {"lr": 0.1, "betas": (0.9, 0.99)}),
            (torch.optim.Adam, {"lr": 0.1}),
            "betas: must be the same for all tables, got (0.9, 0.99) and (0.9, 0.999)",
        ),
    ],
)
def test_arguments_that_differ_between_tables_are_refused_by_name(one, other, said):
    model = of_two_tables(one, other)
    with pytest.raises(InputError, match="^" + re.escape(said)):
        shard(model, plan_of(model))


def test_optimizers_of_torchrec_set_the_learning_rate():
    model = bags()
    sharded = shard(model, plan_of(model), learning_rate=1.0)
    dense = KeyedOptimizerWrapper({"w": torch.nn.Parameter(torch.ones(1))}, lambda of: torch.optim.SGD(of, lr=1.0))
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    warmed = WarmupOptimizer(CombinedOptimizer([sharded.fused_optimizer, dense]), stages, lr=0.4)
    rates = []
    for _ in range(4):
        rates.append(sharded.optimizer.learning_rate)
        sharded.optimizer.load_state_dict(sharded.optimizer.state_dict())
        warmed.zero_grad()
        warmed.step()
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert warmed.param_groups[1]["lr"] == sharded.optimizer.learning_rate


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad, torch.optim.Adam])
@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_frozen_tables_stay_as_they_are_with_moments_of_training_too_and_others_are_trained(optimizer, kind):
    def opened(frozen):
        if kind == "bags":
            model = bags(names=("old", "new"))
            holders = model.embedding_bags
        else:
            configs = [
                EmbeddingConfig(name=name, num_embeddings=10, embedding_dim=8, feature_names=[feature])
                for name, feature in (("old", "f"), ("new", "g"))
            ]
            model = EmbeddingCollection(tables=configs)
            holders = model.embeddings
        apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
        for name in frozen:
            holders[name].weight.requires_grad_(False)
        return shard(model, plan_of(model))

    def train(sharded):
        for _ in range(2):
            output = sharded(BATCH)
            output = output.values() if kind == "bags" else torch.cat([rows.values() for rows in output.values()])
            output.pow(2).sum().backward()
            sharded.end_step()

    trained, sharded = opened(frozen=()), opened(frozen=["old"])
    train(trained)
    sharded.load_state_dict(trained.state_dict())
    before = state_of(sharded, "old")
    for one in (trained, sharded):
        train(one)
    for name, of in state_of(sharded, "old").items():
        assert torch.equal(of, before[name]), name
    for name, of in state_of(sharded, "new").items():
        assert torch.equal(of, state_of(trained, "new")[name]), name
    with torch.no_grad():
        sharded(BATCH)
    train(opened(frozen=["old", "new"]))


def state_of(sharded, name):
    state = sharded.table_state(name)
    return {"weights": state.weights_ND, **state.moments}


def test_features_that_a_module_does_not_look_up_do_not_change_what_it_returns():
    towers = torch.nn.ModuleDict({"user": bags(), "item": bags(names=("i",), feature_names=["i"])})
    ids, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([2, 1, 0, 2])
    alone = KeyedJaggedTensor(keys=["f", "g"], values=ids, lengths=lengths)
    expected = towers["user"](alone).values().detach()
    sharded = shard(towers, plan_of(towers), learning_rate=0.1)
    batch = KeyedJaggedTensor(
        keys=["f", "g", "i"],
        values=torch.cat([ids, torch.arange(3)]),
        lengths=torch.cat([lengths, torch.tensor([0, 1, 2, 0, 0, 0])]),
        stride_per_key_per_rank=[[2], [2], [6]],
    )
    found = sharded.module["user"](batch)
    assert isinstance(found, KeyedTensor)
    assert found.values().shape == (2, 16)
    torch.testing.assert_close(found.values(), expected)
    assert sharded.module["item"](batch).values().shape == (6, 8)
    sharded.close()


def test_dicts_of_jagged_tensors_are_taken_as_by_the_module():
    model = bags()
    jagged = {
        name: torch.nested.nested_tensor_from_jagged(torch.tensor(ids), lengths=None, offsets=torch.tensor(offsets))
        for name, ids, offsets in (("f", [1, 2, 3], [0, 2, 3]), ("g", [4, 5, 1], [0, 1, 3]))
    }
    features = TensorDict(jagged, batch_size=[2])
    expected = model(features).values().detach()
    sharded = shard(model, plan_of(model), learning_rate=0.1)
    torch.testing.assert_close(sharded(features).values(), expected)
    with pytest.raises(InputError, match=r"^batch: cannot be read: TypeError: "):
        sharded(TensorDict({"f": torch.ones(2), "g": torch.ones(2)}, batch_size=[2]))
    sharded.close()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"pooling": PoolingType.MEAN}, "pooling"),
        ({"num_embeddings": 12}, "num_embeddings"),
        ({"embedding_dim": 16}, "embedding_dim"),
        ({"data_type": DataType.FP16}, "dtype"),
        ({"feature_names": ["f", "g", "h"]}, "features"),
    ],
)
def test_a_plan_of_a_model_that_changed_is_refused_by_name(config, field):
    plan = plan_of(bags())
    with pytest.raises(InvalidPlanError, match=rf"^tables\.t\.{field}: must be .* as in the model, got "):
        shard(bags("meta", **config), plan, learning_rate=0.1)


def test_a_plan_of_another_optimizer_than_the_model_names_is_refused():
    model = bags()
    plan = plan_of(model)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(InvalidPlanError, match="must be sgd as in the model, got rowwise_adagrad"):
        shard(model, plan)


@pytest.mark.parametrize(
    ("config", "low", "high"),
    [
        ({"init_fn": lambda weights: torch.nn.init.constant_(weights, 0.5)}, 0.5, 0.5),
        ({"weight_init_min": 1.0, "weight_init_max": 2.0}, 1.0, 2.0),
        ({"init_fn": torch.nn.init.zeros_}, 0.0, 0.0),
        ({}, -(10**-0.5), 10**-0.5),
    ],
)
def test_tables_on_the_meta_device_are_drawn_as_their_configs_say(config, low, high):
    def drawn(seed):
        model = bags("meta", names=("t", "u"), **config)
        sharded = shard(model, plan_of(model), learning_rate=0.1, seed=seed)
        return [sharded.table_state(name).weights_ND for name in "tu"]

    t, u = drawn(0)
    assert low <= t.min() <= t.max() <= high
    assert torch.equal(t, drawn(0)[0])
    is_constant = low == high
    assert torch.equal(t, u) == torch.equal(t, drawn(1)[0]) == is_constant


@pytest.mark.parametrize(("setting", "value"), [("padding_idx", 0), ("max_norm", 1.0), ("scale_grad_by_freq", True)])
def test_settings_of_tables_that_are_not_executed_are_refused_by_name(setting, value):
    model = bags()
    setattr(model.embedding_bags["t"], setting, value)
    with pytest.raises(InputError, match=rf"^model\.t\.{setting}: "):
        shard(model, plan_of(model), learning_rate=0.1)


def test_hooks_on_a_tables_gradient_are_refused():
    model = bags()
    model.embedding_bags["t"].weight.register_hook(torch.nn.functional.normalize)
    with pytest.raises(InputError, match=r"^model\.t: has hooks"):
        shard(model, plan_of(model), learning_rate=0.1)


def test_sharded_models_are_neither_copied_nor_frozen():
    model = bags()
    sharded = shard(model, plan_of(model), learning_rate=0.1)
    with pytest.raises(InputError, match="neither copied nor pickled"):
        copy.deepcopy(sharded)
    with pytest.raises(InputError, match="not frozen"):
        sharded.requires_grad_(False)
    with pytest.raises(InputError, match="not frozen"):
        sharded.collections[""].requires_grad_(False)
    sharded.requires_grad_()
