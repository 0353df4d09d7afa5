import json
import shutil

import pyarrow.parquet as pq
import pytest

from autoshard.cli import main
from autoshard.formats.samples import read_samples, write_samples
from costmodel.learned import LearnedCostModel
from costmodel.registry import Registry


@pytest.fixture
def own_store(store, tmp_path):
    return shutil.copytree(store, tmp_path / "samples")


@pytest.fixture
def registry(tmp_path):
    return tmp_path / "registry"


def train(store, registry, *arguments):
    return main(["train", "cost", "--store", str(store), "--registry", str(registry), "--updates", "60", *arguments])


def damage(store, change):
    (file,) = store.rglob("*.parquet")
    table = pq.read_table(file, partitioning=None)
    pq.write_table(change(table), file)


def test_train_cost_publishes_a_model(store, registry, capsys):
    assert train(store, registry, "--json", "--seed", "3") == 0
    result = json.loads(capsys.readouterr().out)
    model = LearnedCostModel.load(Registry(registry), "cpu")
    assert model.card.metrics.relative_error == result["metrics"]["relative_error"]
    assert (result["metrics"]["num_samples"], result["training"]["num_samples"]) == (80, 320)
    assert (result["kind"], result["name"], result["num_bags"]) == ("cost", "cpu", 1024)
    assert result["training"]["seed"] == 3
    assert Registry(registry).production_id("cost", "cpu") == result["id"]

    assert train(store, registry, "--json", "--seed", "3") == 0
    assert json.loads(capsys.readouterr().out)["id"] == result["id"]


def test_train_cost_shows_metrics(store, registry, capsys):
    assert train(store, registry) == 0
    shown = capsys.readouterr().out
    for text in ("80 held-out samples", "mean relative error", "Kendall's tau", "90% interval", "1024"):
        assert text in shown


def test_models_lists_what_was_trained(store, registry, capsys):
    assert main(["models", "--registry", str(registry)]) == 0
    assert "No models" in capsys.readouterr().out
    ids = []
    for seed in ("1", "2"):
        assert train(store, registry, "--seed", seed, "--json") == 0
        ids.append(json.loads(capsys.readouterr().out)["id"])
    assert main(["models", "--registry", str(registry), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [item["id"] for item in result["models"]] == ids
    assert [item["production"] for item in result["models"]] == [False, True]
    assert main(["models", "--registry", str(registry)]) == 0
    shown = capsys.readouterr().out
    assert all(id_ in shown for id_ in ids)
    assert "held-out error" in shown


def fails(capsys, code, *said):
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    for text in said:
        assert text in printed.err
    return code


def test_too_few_samples(samples, tmp_path, registry, capsys):
    write_samples(tmp_path / "few", samples.samples[:20])
    assert train(tmp_path / "few", registry) == fails(capsys, 1, "at least 50 samples, there are 20")
    assert not registry.exists()


def test_latencies_that_are_no_numbers(own_store, registry, capsys):
    def spoil(table):
        column = table["forward_ms"].to_pylist()
        column[7] = float("nan")
        index = table.schema.get_field_index("forward_ms")
        return table.set_column(index, table.schema.field(index), [column])

    damage(own_store, spoil)
    assert train(own_store, registry) == fails(capsys, 2, "part-", "forward_ms", "must be finite")
    assert not registry.exists()


def test_samples_of_another_schema(own_store, registry, capsys):
    damage(own_store, lambda table: table.replace_schema_metadata({b"autoshard.schema": b"autoshard.samples/9"}))
    assert train(own_store, registry) == fails(capsys, 2, "autoshard.samples/2", "autoshard.samples/9")


def test_stores_and_devices_that_are_not_there(store, tmp_path, registry, capsys):
    assert train(tmp_path / "none", registry) == fails(capsys, 1, "none")
    assert train(store, registry, "--device", "a100") == fails(capsys, 1, "a100", "cpu")
    assert train(store, registry, "--num-bags", "7") == fails(capsys, 1, "1024")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "-1"], "seed"),
        (["--updates", "0"], "num_updates"),
        (["--recipe", "paper"], "updates: goes with the default recipe"),
    ],
)
def test_options_that_make_no_sense(store, registry, capsys, arguments, said):
    assert train(store, registry, *arguments) == fails(capsys, 2, said)


def test_a_damaged_model_is_named(store, registry, capsys):
    assert train(store, registry) == 0
    capsys.readouterr()
    (card,) = registry.rglob("card.json")
    card.write_text("{}", encoding="utf-8")
    assert main(["models", "--registry", str(registry)]) == fails(capsys, 1, "card.json", "damaged")


def test_the_committed_samples_are_intact(store):
    assert read_samples(store).damaged() == ()
