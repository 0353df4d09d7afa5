import json
from dataclasses import replace

import pytest

from autoshard.cli import main
from autoshard.core import Pooling, ShardingPlan, TableSet
from autoshard.core.shard import PlacedShard, Shard
from autoshard.formats import load_tables, load_topology, write_plan, write_tables
from autoshard.formats.samples import read_samples, write_samples


@pytest.fixture(scope="module")
def tables():
    pool = load_tables("metasyn").scaled(1024)  # a batch of 64
    return TableSet(batch_size=pool.batch_size, tables=pool.tables[:12])


@pytest.fixture(scope="module")
def plan(tables):
    topology = load_topology("a100-8")
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), index % 7) for index, table in enumerate(tables.tables))
    return ShardingPlan(tables=tables, topology=topology, shards=shards)


@pytest.fixture(scope="module")
def store(tables, tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected")
    write_tables(tables, folder / "tables.json")
    arguments = ["--tables", str(folder / "tables.json"), "--scale", "2", "--max-tables", "3", "--seed", "1"]
    store = folder / "store"
    assert main(["collect", "--store", str(store), "--device", "cpu", "--num-samples", "40", *arguments]) == 0
    return store


def test_collect_appends_samples_of_the_tables(store, tables):
    samples = read_samples(store).samples
    assert len(samples) == 40
    rows = {table.name: table.num_embeddings // 2 for table in tables.tables}
    for sample in samples:
        assert 1 <= len(sample.shards) <= 3
        for shard in sample.local_shards:
            assert (shard.num_embeddings, shard.num_bags) == (max(1, rows[shard.table]), 32)


def test_collect_says_what_it_added(tables, tmp_path, capsys):
    write_tables(tables, tmp_path / "tables.json")
    arguments = ["--tables", str(tmp_path / "tables.json"), "--scale", "1", "--seconds", "0.001", "--device", "cpu"]
    assert main(["collect", "--store", str(tmp_path / "store"), *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device"] == "cpu"
    assert result["num_samples"] == len(read_samples(tmp_path / "store")) > 0
    assert [str(file) for file in (tmp_path / "store").rglob("*.parquet")] == result["files"]


def test_collect_refuses_a_store_that_is_a_file(tmp_path, capsys):
    file = tmp_path / "store"
    file.write_text("")
    assert main(["collect", "--store", str(file)]) == 1
    assert f"{file}: is no folder" in capsys.readouterr().err


def test_samples_shows_a_store(store, capsys):
    assert main(["samples", str(store), "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["device"], device["num_samples"], sum(device["sources"].values())) == ("cpu", 40, 40)
    assert device["num_repeated"] >= 1
    assert device["repeatability"] > 0
    assert main(["samples", str(store)]) == 0
    assert "40 (" in capsys.readouterr().out


def test_samples_finds_what_was_tampered_with(store, tmp_path, capsys, monkeypatch):
    honest = read_samples(store).samples[0]
    monkeypatch.setattr("autoshard.formats.measured.content_hash", lambda sample: honest.sample_id)
    write_samples(tmp_path, [replace(honest, forward_ms=0.125)])
    monkeypatch.undo()
    assert main(["samples", str(tmp_path)]) == 1
    assert "1 of 1 samples of cpu do not match their id" in capsys.readouterr().err


def test_replay_measures_every_rank(plan, tmp_path, capsys):
    write_plan(plan, tmp_path / "plan.json")
    assert main(["replay", str(tmp_path / "plan.json"), "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    kernel_ms = [rank["kernel_ms"] for rank in result["ranks"]]
    assert [rank["num_shards"] for rank in result["ranks"]] == [2, 2, 2, 2, 2, 1, 1, 0]
    assert kernel_ms[7] == 0.0
    assert min(kernel_ms[:7]) > 0
    assert result["max_kernel_ms"] == max(kernel_ms)
    assert result["balance"] == 0.0  # one rank has nothing to do
    assert 0 < result["ceiling_balance"] < 1
    assert result["num_groups"] == 1
    assert result["predicted_max_kernel_ms"] is None


def test_replay_refuses_what_it_cannot_measure(plan, tables, tmp_path, capsys):
    odd = replace(tables.tables[0], pooling=Pooling.SEQUENCE)
    changed = replace(tables, tables=(odd, *tables.tables[1:]))
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), 0) for table in changed.tables)
    write_plan(replace(plan, tables=changed, shards=shards), tmp_path / "plan.json")
    assert main(["replay", str(tmp_path / "plan.json"), "--device", "cpu"]) == 2
    assert f"{odd.name}.pooling: the benchmark measures sum or mean, got sequence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["samples", "missing"], 1, "missing: "),
        (["collect", "--store", "s", "--scale", "0"], 2, "scale: must be above 0, got 0"),
        (["collect", "--store", "s", "--seconds", "-1"], 2, "seconds: must be above 0, got -1.0"),
        (["collect", "--store", "s", "--num-samples", "0"], 2, "num_samples: must be above 0, got 0"),
        (["collect", "--store", "s", "--seed", "-1"], 2, "seed: must be at least 0, got -1"),
        (["collect", "--store", "s", "--max-tables", "0"], 2, "max_tables: must be at least 1, got 0"),
        (["collect", "--store", "s", "--device", "tpu"], 2, "device: must be auto, cpu or cuda, got 'tpu'"),
        (["collect", "--store", "s", "--tables", "nonesuch"], 2, "nonesuch"),
        (["replay", "missing.json"], 2, "missing.json"),
    ],
)
def test_bad_input_is_one_line(arguments, code, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
