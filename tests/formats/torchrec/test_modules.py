"""TorchRec's models as tables: what they say is carried, what plans cannot hold is refused by name."""

import contextlib
import dataclasses
import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim import LAMB, LarsSGD, PartialRowWiseAdam
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from autoshard.core import DType, Optimizer, Pooling, Tier
from autoshard.core.errors import FormatError, InvalidTableError
from autoshard.formats import import_tables
from autoshard.formats.torchrec.child import main
from autoshard.formats.torchrec.config_fields import LEFT_CONFIG, READ_CONFIG, REFUSED_CONFIG
from autoshard.formats.torchrec.modules import READ_CONSTRAINTS, REFUSED_CONSTRAINTS, UNKEPT_CONSTRAINTS, read_model
from autoshard.formats.torchrec.places import Place
from autoshard.formats.torchrec.sharding import TorchRecType

META = torch.device("meta")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on torchrec's own import


def bags(*, is_weighted=False, **changes):
    config = {"name": "t", "num_embeddings": 10, "embedding_dim": 8, "feature_names": ["f"], **changes}
    return EmbeddingBagCollection(device=META, tables=[EmbeddingBagConfig(**config)], is_weighted=is_weighted)


@pytest.fixture
def models(monkeypatch):
    """The module of models, where child processes find it, too."""
    folder = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", folder)
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    import models

    return models


def test_what_a_model_says_of_its_tables_is_carried(models):
    model, constraints = models.make_constrained()
    found = read_model(model, batch_size=64, pooling_factor=2.0, constraints=constraints)
    user, item, history = found.tables.tables
    assert found.tables.batch_size == 64
    assert (user.name, user.num_embeddings, user.embedding_dim, user.dtype) == ("user", 1000, 16, DType.FP16)
    assert (user.pooling, item.pooling, history.pooling) == (Pooling.MEAN, Pooling.SUM, Pooling.SEQUENCE)
    assert [(one.name, one.pooling_factor) for one in user.features] == [("user", 3.0), ("friend", 0.5)]
    assert (user.optimizer, history.optimizer) == (Optimizer.ROWWISE_ADAGRAD, Optimizer.SGD)
    assert set(Tier) - set(user.constraints.forbidden_tiers) == {Tier.ROW_WISE, Tier.TABLE_WISE}
    assert item.constraints.forbidden_tiers == ()


def test_tables_and_features_of_one_name_are_told_apart_by_their_modules(models):
    found = read_model(models.make())
    names = [table.name for table in found.tables.tables]
    assert names == ["user", "sparse.bags.item", "history.item"]
    assert [found.tables[name].features[0].name for name in names[1:]] == [
        "item@sparse.bags.item",
        "item@history.item",
    ]
    assert found.places == {
        "user": Place("sparse.bags", "user"),
        "sparse.bags.item": Place("sparse.bags", "item"),
        "history.item": Place("history", "item"),
    }


def test_a_factory_runs_in_a_process_of_its_own(models, capfd, caplog):
    found = import_tables("models:make", "torchrec", batch_size=32, pooling_factor=5)
    assert found == read_model(models.make(), batch_size=32, pooling_factor=5).tables
    assert capfd.readouterr().err.count("made") == 1
    assert "looked up alike" in caplog.text


@pytest.mark.usefixtures("models")
def test_places_come_with_the_tables(tmp_path):
    output = tmp_path / "model.json"
    main(["models:make_constrained", str(output), '{"batch_size": 8}'])
    document = json.loads(output.read_text())
    assert document["places"]["sparse.bags.item"] == ["sparse.bags", "item"]
    assert document["tables"]["batch_size"] == 8
    assert any("looked up alike" in note for note in document["notes"])


@pytest.mark.slow
@pytest.mark.usefixtures("models")
def test_a_factory_that_fails_is_told_in_a_line(capfd):
    with pytest.raises(FormatError, match=r'^models: must be MODULE:FACTORY, got "models"'):
        import_tables("models", "torchrec")
    with pytest.raises(InvalidTableError, match=r"^models:fail: failed: ValueError: no data here"):
        import_tables("models:fail", "torchrec")
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("factory", "error"),
    [
        ("models:make_nothing", {"field": "model", "message": "holds no EmbeddingBagCollection and no EmbeddingColl"}),
        ("models:META", {"field": None, "message": "failed: TypeError: "}),
        (
            "models:make_without_torchrec",
            {
                "field": None,
                "message": "failed: ModuleNotFoundError: No module named 'torchrec'; `autoshard doctor` says how",
            },
        ),
    ],
)
def test_a_factory_without_tables_is_told_in_a_line(tmp_path, factory, error):
    output = tmp_path / "model.json"
    with contextlib.suppress(TypeError, ModuleNotFoundError):
        main([factory, str(output), "{}"])
    told = json.loads(output.read_text())["error"]
    assert told["field"] == error["field"]
    assert told["message"].startswith(error["message"])


def test_tables_of_weighted_modules_are_weighted():
    both = torch.nn.ModuleDict({"plain": bags(), "weighted": bags(is_weighted=True)})
    assert [table.weighted for table in read_model(both).tables.tables] == [False, True]
    processor = PositionWeightedModuleCollection({"f": 4}, META)
    processed = read_model(
        torch.nn.ModuleDict({"fp": FeatureProcessedEmbeddingBagCollection(bags(is_weighted=True), processor)})
    )
    assert processed.places == {"t": Place("fp", "t")}


class Holder:
    """An object of the user's own that is no module."""

    def __init__(self, held):
        self.held = held


def holding(**attributes):
    """A model with such attributes."""
    model = torch.nn.Module()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def towers(one):
    """A module of tables at paths of every kind: attributes, below other modules, in a list and a dict."""
    parts = torch.nn.ModuleDict({"a": holding(bags=one), "b": holding(bags=one)})
    return holding(first=one, second=one, parts=parts, several=torch.nn.ModuleList([torch.nn.Identity(), one]))


@pytest.mark.parametrize("kind", ["pooled", "sequence", "processed"])
def test_a_module_at_several_paths_is_one(kind):
    processor = PositionWeightedModuleCollection({"f": 4}, META)
    one = {
        "pooled": bags,
        "sequence": lambda: EmbeddingCollection(
            device=META,
            tables=[EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])],
        ),
        "processed": lambda: FeatureProcessedEmbeddingBagCollection(bags(is_weighted=True), processor),
    }[kind]()
    found = read_model(towers(one))
    assert [table.name for table in found.tables.tables] == ["t"]
    [collection] = found.collections
    assert collection.paths == ("first", "second", "parts.a.bags", "parts.b.bags", "several.1")
    assert found.places == {"t": Place("first", "t")}
    assert any(note.startswith("first stands at second, parts.a.bags, ") for note in found.notes)


def tied(of, name):
    """A module whose parameter of that name is the weights of the first table of another."""
    module = of.embedding_bags["t"]
    other = torch.nn.Linear(8, 10, bias=False, device=META)
    other.register_parameter(name, module.weight)
    return other


def tied_bags():
    one, other = bags(), bags(name="u", feature_names=["g"])
    other.embedding_bags["u"].weight = one.embedding_bags["t"].weight
    return holding(one=one, other=other)


def tied_storage():
    one = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])]
    )
    head = torch.nn.Linear(8, 10, bias=False)
    head.weight = torch.nn.Parameter(one.embedding_bags["t"].weight.data)
    return holding(one=one, head=head)


def both_whole_and_part():
    inner = bags(is_weighted=True)
    processed = FeatureProcessedEmbeddingBagCollection(inner, PositionWeightedModuleCollection({"f": 4}, META))
    return holding(processed=processed, raw=inner)


def held_beside(how):
    """A model whose one module of tables is also where no submodule is."""

    def make():
        one = bags()
        return holding(bags=one, extra=how(one))

    return make


def lost(one):
    """Held by a module that is no part of the model."""
    return [holding(inner=one)]


REFUSED = {
    r"extra\[0\]: is EmbeddingBagCollection in an attribute that is no submodule": held_beside(lambda one: [one]),
    r"extra\[0\]\._modules.*: is EmbeddingBagCollection in an attribute": held_beside(lost),
    r'extra\["a"\]\[1\]: is EmbeddingBagCollection in an attribute': held_beside(lambda one: {"a": (0, one)}),
    r"extra\.held: is EmbeddingBagCollection in an attribute": held_beside(Holder),
    r"extra\.__self__: is EmbeddingBagCollection in an attribute": held_beside(lambda one: one.forward),
    r"extra\.func\.__self__: is EmbeddingBagCollection in an": held_beside(lambda one: functools.partial(one.forward)),
    r"extra\.one: is EmbeddingBagCollection in an attribute": held_beside(lambda one: lambda batch: one(batch)),
    r"towers\[0\]: is EmbeddingBagCollection in an attribute": lambda: holding(towers=[bags()]),
    r"head\.weights: shares its weights with table bags\.t": lambda: (
        lambda one: holding(bags=one, head=tied(one, "weights"))
    )(bags()),
    r"head\.weight: shares its weights with table one\.t": tied_storage,
    r"other\.u: shares its weights with one\.t": tied_bags,
    r"raw: is a part of processed, too": both_whole_and_part,
    "t.use_virtual_table: is set": lambda: bags(use_virtual_table=True),
    "t.num_embeddings_post_pruning: is set": lambda: bags(num_embeddings_post_pruning=5),
    "model: EmbeddingTower is sharded with its interaction": lambda: EmbeddingTower(bags(), torch.nn.Identity()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_plans_do_not_hold_is_refused_by_name(message):
    with pytest.raises(InvalidTableError, match=f"^{message}"):
        read_model(REFUSED[message]())


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"t": ParameterConstraints(batch_sizes=[4])}, r"constraints\.t\.batch_sizes: is set"),
        ({"t": ParameterConstraints(batch_sizes=[32, 16])}, r"constraints\.t\.batch_sizes: is set"),
        ({"t": ParameterConstraints(num_poolings=[1.0, 2.0])}, r"constraints\.t\.num_poolings: is set"),
        ({"t": ParameterConstraints(pooling_factors=[1.0, 2.0])}, r"constraints\.t\.pooling_factors: must be one for"),
        ({"t": ParameterConstraints(sharding_types=["by_magic"])}, r"constraints\.t\.sharding_types: must be of"),
        ({"u": ParameterConstraints()}, r"constraints\.u: is no table of the model"),
    ],
)
def test_constraints_that_are_not_kept_are_refused_by_name(constraint, message):
    with pytest.raises(InvalidTableError, match=f"^{message}"):
        read_model(bags(), batch_size=64, world_size=2, constraints=constraint)


def test_constraints_that_repeat_torchrecs_defaults_change_nothing():
    constraint = ParameterConstraints(num_poolings=[1.0, 1], batch_sizes=[32, 32])
    two = bags(feature_names=["f", "g"])
    same = read_model(two, batch_size=64, world_size=2, constraints={"t": constraint}).tables
    assert same == read_model(two, batch_size=64).tables
    with pytest.raises(InvalidTableError, match=r"^constraints\.t\.batch_sizes: is set"):
        read_model(two, batch_size=64, constraints={"t": constraint})  # by how many ranks is not known


@pytest.mark.parametrize(("given", "factor"), [({}, 5.0), ({"pooling_factors": [2.0]}, 2.0)])
def test_a_pooling_factor_is_that_of_all_features_whose_constraints_do_not_say_it(given, factor):
    constraint = ParameterConstraints(min_partition=4, **given)
    [table] = read_model(bags(), pooling_factor=5.0, constraints={"t": constraint}).tables.tables
    assert table.features[0].pooling_factor == factor


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (ParameterConstraints, [*READ_CONSTRAINTS, *UNKEPT_CONSTRAINTS, *REFUSED_CONSTRAINTS]),
        (EmbeddingBagConfig, [*READ_CONFIG, *LEFT_CONFIG, *REFUSED_CONFIG]),
        (EmbeddingConfig, [*READ_CONFIG[:-1], *LEFT_CONFIG, *REFUSED_CONFIG]),
    ],
)
def test_every_field_is_read_refused_or_noted(config, known):
    assert sorted(one.name for one in dataclasses.fields(config)) == sorted(known)


@pytest.mark.parametrize("field", UNKEPT_CONSTRAINTS)
def test_a_constraint_that_is_not_kept_is_noted_with_what_does_the_same(field):
    notes = read_model(bags(), constraints={"t": ParameterConstraints(**{field: 8})}).notes
    assert f"constraints.t.{field} is not kept: {UNKEPT_CONSTRAINTS[field]}" in notes
    usual = read_model(bags(), constraints={"t": ParameterConstraints()}).notes
    assert not any("is not kept" in note for note in usual)


@pytest.mark.parametrize(
    ("types", "others"),
    [
        (["table_wise"], "column_wise, table_column_wise"),
        (["column_wise"], "table_wise"),
        (["table_column_wise"], "column_wise, table_wise"),
        (["row_wise", "grid_shard"], "table_row_wise"),
        (["table_row_wise", "data_parallel"], "grid_shard"),
        (["table_wise", "column_wise"], None),  # with all columns of table_column_wise
        (["table_row_wise", "grid_shard"], None),
        (["row_wise"], None),
        (["data_parallel"], None),
        (list(TorchRecType), None),
        (None, None),
    ],
)
def test_sharding_types_whose_tiers_allow_more_are_noted(types, others):
    found = read_model(bags(), constraints={"t": ParameterConstraints(sharding_types=types)}).notes
    notes = [note for note in found if "sharding_types" in note]
    assert len(notes) == (others is not None)
    for note in notes:
        assert note.startswith(f"sharding_types of t are kept as tiers, which allow {others}, too: autoshard.torchrec.")


def test_one_note_names_the_first_tables_whose_tiers_allow_more():
    tables = [
        EmbeddingBagConfig(name=f"t{index}", num_embeddings=10, embedding_dim=8, feature_names=[f"f{index}"])
        for index in range(11)
    ]
    kinds = ["row_wise", "grid_shard", *["table_wise"] * 9]
    constraints = {f"t{index}": ParameterConstraints(sharding_types=[kind]) for index, kind in enumerate(kinds)}
    found = read_model(EmbeddingBagCollection(device=META, tables=tables), constraints=constraints)
    [note] = [note for note in found.notes if "sharding_types" in note]
    assert note.startswith(
        "sharding_types of t1, t2, t3, t4, t5, t6, t7, t8 are kept as tiers, which allow column_wise, "
        "table_column_wise, table_row_wise, too: "
    )


@pytest.mark.parametrize(("dtype", "row_bytes"), [(torch.qint8, 32), (torch.float16, 48)])
@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_quantised_tables_have_no_optimizer(kind, dtype, row_bytes):
    config = {"name": "t", "num_embeddings": 10, "embedding_dim": 20, "feature_names": ["f"]}
    module = (
        EmbeddingBagCollection(tables=[EmbeddingBagConfig(**config)])
        if kind == "pooled"
        else EmbeddingCollection(tables=[EmbeddingConfig(**config)])
    )
    model = quantize_embeddings(
        torch.nn.ModuleDict({"q": module}),
        dtype=dtype,
        inplace=True,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: QuantEmbeddingCollection},
    )
    found = read_model(model)
    [table] = found.tables.tables
    held = sum(weights.numel() * weights.element_size() for weights in model.buffers())
    assert (table.optimizer, table.storage_bytes) == (Optimizer.NONE, held) == (Optimizer.NONE, 10 * row_bytes)
    assert any(note.startswith("quantised tables have no optimizer") for note in found.notes)


@pytest.mark.parametrize(
    ("data_type", "nearest"), [("INT4", "INT8"), ("INT2", "INT8"), ("NFP8", "INT8"), ("INT32", "FP32")]
)
def test_other_number_formats_name_the_nearest(data_type, nearest):
    message = rf"^t\.data_type: must be one of FP32, .*, got .*{data_type}.*; the nearest is {nearest}$"
    with pytest.raises(InvalidTableError, match=message):
        read_model(bags(data_type=getattr(DataType, data_type)))


@pytest.mark.parametrize(
    ("kind", "optimizer"), [(LAMB, Optimizer.LAMB), (PartialRowWiseAdam, Optimizer.PARTIAL_ROWWISE_ADAM)]
)
def test_optimizers_with_two_moments_are_read(kind, optimizer):
    module = bags()
    next(module.parameters())._optimizer_classes = [kind]
    [table] = read_model(module).tables.tables
    assert table.optimizer is optimizer


def test_other_optimizers_name_the_nearest():
    module = bags()
    next(module.parameters())._optimizer_classes = [LarsSGD]
    with pytest.raises(InvalidTableError, match=r"^t\.optimizer: must be .* got LarsSGD; Adagrad has the"):
        read_model(module)


def test_an_optimizer_that_is_not_known_is_refused():
    module = bags()
    next(module.parameters())._optimizer_classes = [torch.optim.Rprop]
    with pytest.raises(InvalidTableError, match=r"^t\.optimizer: must be one of SGD, .*, got Rprop"):
        read_model(module)


def test_two_optimizers_of_a_table_are_refused():
    module = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])]
    )
    for kind in (torch.optim.SGD, torch.optim.Adam):
        apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1})
    with pytest.raises(InvalidTableError, match=r"^bags\.t\.optimizer: must be one, as TorchRec trains .* got 2"):
        read_model(torch.nn.ModuleDict({"bags": module}))


@pytest.mark.parametrize(
    ("given", "optimizer"),
    [("ADAM", Optimizer.ADAM), ("EXACT_SGD", Optimizer.SGD), ("PARTIAL_ROWWISE_LAMB", Optimizer.PARTIAL_ROWWISE_LAMB)],
)
def test_optimizers_of_sharders_are_read(given, optimizer):
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType[given]})
    found = read_model(bags(), sharders=[sharder])
    assert found.tables.tables[0].optimizer is optimizer
    assert not any("have no optimizer" in note for note in found.notes)


def test_an_optimizer_of_sharders_that_is_not_known_is_refused():
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.LARS_SGD})
    message = r"^t\.optimizer: must be one of SGD, EXACT_SGD, .* got LARS_SGD; EXACT_ADAGRAD has the nearest state"
    with pytest.raises(InvalidTableError, match=message):
        read_model(bags(), sharders=[sharder])
