"""Traffic counted while a model is used: the profiles of what was looked up."""

import gc
import weakref

import pytest
import torch
from tensordict import TensorDict
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from autoshard.core.errors import InputError, InvalidOptionError
from autoshard.formats import read_tables
from autoshard.formats.imports import id_batches
from autoshard.torchrec import record, shard, tables_of
from tests import builders as make

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on torchrec's own import


@pytest.fixture
def model():
    config = {"num_embeddings": 10, "embedding_dim": 4}
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="t", feature_names=["a", "b"], **config),
            EmbeddingBagConfig(name="unseen", feature_names=["c"], **config),
        ]
    )


def batch(ids_of):
    values = [torch.tensor(ids, dtype=torch.int64) for ids in ids_of.values()]
    lengths = torch.tensor([length for ids in ids_of.values() for length in (len(ids), 0)])
    return KeyedJaggedTensor(keys=list(ids_of), values=torch.cat(values), lengths=lengths)


IDS = {"a": [3, 3, 3, 3, 7, 7], "b": [3, 3], "c": []}


def test_what_was_looked_up_is_written(model, tmp_path):
    recorder = record(model, every=1, batch_size=64)
    model(batch(IDS))
    model(features=batch({"c": [], "b": [3, 3], "a": [3, 3, 3, 3, 7, 7]}))
    assert recorder.num_counted == 2
    recorder.write(tmp_path / "tables.json")
    table, unseen = read_tables(tmp_path / "tables.json").tables
    # Bags of 6 and 0 ids, and of 2 and 0: of 16 lookups, 12 are of row 3 and 4 of row 7.
    assert [feature.pooling_factor for feature in table.features] == [3.0, 1.0]
    assert [feature.pooling_p99 for feature in table.features] == [6.0, 2.0]
    assert table.access.coverage(1) == pytest.approx(0.75)
    assert table.access.coverage(2) == pytest.approx(1.0)
    assert unseen.features[0].pooling_factor == 0
    assert recorder.tables().batch_size == 64


def test_dicts_of_jagged_tensors_are_counted(model):
    recorder = record(model, every=1)
    jagged = {
        name: torch.nested.nested_tensor_from_jagged(torch.tensor(ids), offsets=torch.tensor([0, len(ids), len(ids)]))
        for name, ids in (("a", [3, 3, 3, 7]), ("b", [7, 7]), ("c", [0]))
    }
    model(TensorDict(jagged, batch_size=[2]))
    assert recorder.num_counted == 1
    table, other = recorder.tables().tables
    assert [feature.pooling_factor for feature in (*table.features, *other.features)] == [2.0, 1.0, 0.5]
    assert table.access.coverage(1) == pytest.approx(1 / 2)


def test_one_pass_in_so_many_is_counted_until_it_is_closed(model):
    recorder = record(model, every=3)
    for _ in range(7):
        model(batch(IDS))
    assert recorder.num_counted == 3
    recorder.close()
    for _ in range(3):
        model(batch(IDS))
    assert recorder.num_counted == 3


def test_all_calls_of_a_module_at_several_paths_are_counted_in_a_pass(model):
    both = torch.nn.ModuleList([model, model])
    recorder = record(both, every=2)
    for step in range(4):
        for path, tower in enumerate(both):
            tower(batch({"a": [2 * step + path] * 4, "b": [], "c": []}))
    # The first and the third pass, with the ids of both calls.
    assert recorder.num_counted == 4
    counted = recorder.tables().tables[0]
    assert counted.access.coverage(4) == pytest.approx(1.0)
    assert counted.access.coverage(2) == pytest.approx(0.5)


@pytest.mark.usefixtures("one_process")
def test_all_calls_of_a_sharded_module_at_several_paths_are_counted_in_a_pass(model):
    for parameter in model.parameters():
        parameter._optimizer_classes = [torch.optim.SGD]
    both = torch.nn.ModuleList([model, model])
    tables = tables_of(both, batch_size=2)
    plan = make.plan(*make.table_wise(tables.tables, [0, 0]), tables=tables, topology=make.topology(1))
    recorder = record(both, every=2)
    sharded = shard(both, plan, learning_rate=0.1)
    for collection in sharded.collections.values():
        recorder.watch(collection)
    for _ in range(3):
        for tower, ids in zip(both, ([1, 1, 1, 1], [2, 2]), strict=True):
            tower(batch({"a": ids, "b": [], "c": []}))
    assert recorder.num_counted == 4
    counted = recorder.tables().tables[0]
    # Bags of 4, 0, 2 and 0 ids, twice.
    assert counted.features[0].pooling_factor == 1.5
    assert counted.access.coverage(1) == pytest.approx(2 / 3)
    sharded.close()


def one_table():
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["id"])]
    )


def test_modules_whose_features_share_a_name_are_counted_apart():
    model = torch.nn.ModuleDict({"user": one_table(), "item": one_table()})
    recorder = record(model, every=1)
    model["user"](batch({"id": [1, 1, 1, 1]}))
    model["item"](batch({"id": [2, 3]}))
    other = one_table()
    recorder.watch(other, path="item")
    other(batch({"id": [2, 3]}))
    user, item = recorder.tables().tables
    assert (user.name, item.name) == ("user.t", "item.t")
    assert [user.features[0].pooling_factor, item.features[0].pooling_factor] == [2.0, 1.0]
    assert [user.access.coverage(1), item.access.coverage(1)] == pytest.approx([1.0, 0.5])
    with pytest.raises(InputError, match=r'^path: must be given, one of "user", "item", since several look up feature'):
        recorder.watch(other)
    with pytest.raises(InputError, match=r'^path: must be one of "user", "item", got "shop"'):
        recorder.watch(other, path="shop")


def test_a_module_in_two_places_is_counted_in_both():
    model = torch.nn.ModuleDict({"user": one_table(), "item": one_table()})
    recorder = record(model, every=2)
    both = one_table()
    for path in model:
        recorder.watch(both, path=path)
    for ids in ([1, 1], [2, 2]):
        both(batch({"id": ids}))
    assert recorder.num_counted == 2
    assert [one.features[0].pooling_factor for one in recorder.tables().tables] == [1.0, 1.0]
    assert [one.access.coverage(1) for one in recorder.tables().tables] == pytest.approx([1.0, 1.0])


@pytest.mark.usefixtures("one_process")
def test_modules_that_were_replaced_are_let_go_of():
    model = torch.nn.ModuleDict({"bags": one_table()})
    tables, replaced = tables_of(model, batch_size=2), weakref.ref(model["bags"])
    plan = make.plan(*make.table_wise(tables.tables, [0]), tables=tables, topology=make.topology(1))
    recorder = record(model, every=1)
    sharded = shard(model, plan, learning_rate=0.1)
    gc.collect()
    assert replaced() is None
    recorder.watch(sharded.collections["bags"])
    sharded.collections["bags"](batch({"id": [1, 1]}))
    assert recorder.num_counted == 1
    sharded.close()


def test_features_that_share_a_table_are_counted_by_its_rows(model):
    recorder = record(model, every=1)
    model(batch({"a": [1, 1, 1, 2], "b": [2, 2, 2, 3], "c": []}))
    access = recorder.tables().tables[0].access
    # Each feature looks up one row in three of four lookups, but not the same: row 2 gets four of eight.
    assert access.coverage(1) == pytest.approx(4 / 8)
    assert access.coverage(2) == pytest.approx(7 / 8)


def test_tables_with_too_many_ids_are_counted_no_more_and_training_goes_on(model, monkeypatch, caplog):
    monkeypatch.setattr(id_batches, "MAX_DISTINCT_IDS", 2)
    monkeypatch.setattr(id_batches, "_MIN_PENDING", 1)
    recorder = record(model, every=1)
    for ids in ([1, 1], [2, 3, 4], [5]):
        model(batch({"a": ids, "b": [], "c": [0]}))
    (warning,) = caplog.records
    assert warning.message == 'table "t" has too many distinct ids: it is counted no more'
    table, other = recorder.tables().tables
    assert table.access.coverage(1) == pytest.approx(2 / 5)
    assert [feature.pooling_factor for feature in (*table.features, *other.features)] == [1.0, 0.0, 0.5]


def test_nothing_is_written_that_was_not_counted(model, tmp_path):
    recorder = record(model)
    assert recorder.tables() == tables_of(model)
    with pytest.raises(InputError, match=r"^recorder: has counted no batch"):
        recorder.write(tmp_path / "tables.json")
    with pytest.raises(InvalidOptionError, match=r"^every: must be a whole number of at least 1, got 0"):
        record(model, every=0)
