"""TorchRec's models as tables: what they say is carried, what plans cannot hold is refused by name."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from autoshard.core import DType, Optimizer, Pooling, Tier
from autoshard.core.errors import FormatError, InvalidTableError
from autoshard.formats import import_tables
from autoshard.formats.torchrec.child import main
from autoshard.formats.torchrec.modules import read_model
from autoshard.formats.torchrec.places import Place

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


def test_weighted_lookups_are_noted():
    found = read_model(bags(is_weighted=True))
    assert "weights of lookups are not priced: model" in found.notes
    processor = PositionWeightedModuleCollection({"f": 4}, META)
    processed = read_model(
        torch.nn.ModuleDict({"fp": FeatureProcessedEmbeddingBagCollection(bags(is_weighted=True), processor)})
    )
    assert processed.places == {"t": Place("fp", "t")}


REFUSED = {
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
        ({"t": ParameterConstraints(pooling_factors=[1.0, 2.0])}, r"constraints\.t\.pooling_factors: must be one for"),
        ({"t": ParameterConstraints(sharding_types=["by_magic"])}, r"constraints\.t\.sharding_types: must be of"),
        ({"u": ParameterConstraints()}, r"constraints\.u: is no table of the model"),
    ],
)
def test_constraints_that_are_not_kept_are_refused_by_name(constraint, message):
    with pytest.raises(InvalidTableError, match=f"^{message}"):
        read_model(bags(), constraints=constraint)


def test_an_optimizer_that_is_not_known_is_refused():
    module = bags()
    next(module.parameters())._optimizer_classes = [torch.optim.Rprop]
    with pytest.raises(InvalidTableError, match=r"^t\.optimizer: must be one of SGD, .*, got Rprop"):
        read_model(module)
