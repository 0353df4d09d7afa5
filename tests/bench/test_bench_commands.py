import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from autoshard.cli import main
from autoshard.core import DType
from autoshard.core.shard import PlacedShard, Shard
from autoshard.formats import load_tables, load_topology, write_plan, write_tables
from autoshard.formats.stores.samples import KERNEL_SAMPLES, read_sample_file, read_samples, write_samples
from bench.collecting.options import CollectOptions
from bench.collecting.ray_collector import KernelWorker
from bench.collecting.run import set_source
from bench.collecting.store_lock import (
    CollectorBusyError,
    CollectorLock,
    Measuring,
    device_claimed,
    device_lock_name,
)
from bench.kernels.harness import Settings
from bench.measuring.devices import find_device
from tests import builders as make


@pytest.fixture(scope="module")
def tables():
    pool = load_tables("metasyn").scaled(1024)  # a batch of 64
    return make.tables(*pool.tables[:12], batch_size=pool.batch_size)


@pytest.fixture(scope="module")
def plan(tables):
    topology = load_topology("a100-8")
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), index % 7) for index, table in enumerate(tables.tables))
    return make.plan(*shards, tables=tables, topology=topology)


@pytest.fixture(scope="module")
def store(tables, tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected")
    write_tables(tables, folder / "tables.json")
    arguments = [
        "--tables",
        str(folder / "tables.json"),
        "--scale",
        "2",
        "--max-tables",
        "3",
        "--seed",
        "1",
        "--strategies",
        "random",
    ]
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


def test_collect_says_what_it_added(run, tables, tmp_path, published):
    write_tables(tables, tmp_path / "tables.json")
    arguments = [
        "--tables",
        str(tmp_path / "tables.json"),
        "--scale",
        "1",
        "--seconds",
        "0.001",
        "--strategies",
        "random",
    ]
    out, _ = run("collect", "--store", tmp_path / "store", *arguments, "--device", "cpu", "--json")
    result = published("collected", out)
    assert result["device"] == "cpu"
    assert result["num_samples"] == len(read_samples(tmp_path / "store")) > 0
    assert [str(file) for file in (tmp_path / "store").rglob("*.parquet")] == result["files"]
    (part,) = result["parts"]
    assert (part["kind"], sum(part["added"].values())) == ("kernels", result["num_samples"])
    assert not result["is_terminated"]


def test_collect_goes_where_the_model_is_in_doubt_once_there_are_samples(store, tmp_path):
    device = find_device("cpu")
    empty = CollectOptions(store=tmp_path / "none", tables="metasyn", scale=1024)
    assert set_source(empty, device).samples is None
    filled = replace(empty, store=store)
    assert set_source(filled, device).samples is not None
    seeded = replace(filled, seed=3)  # the same sets again, whatever has been measured since
    assert set_source(seeded, device).samples is None
    assert set_source(replace(seeded, strategies="uncertain"), device).samples is not None


@pytest.mark.slow
def test_collect_goes_on_where_it_ended(run, tables, tmp_path):
    write_tables(tables, tmp_path / "tables.json")
    arguments = [
        "--tables",
        str(tmp_path / "tables.json"),
        "--scale",
        "1",
        "--device",
        "cpu",
        "--strategies",
        "random=2,singles",
    ]
    arguments += ["--max-tables", "6", "--store", str(tmp_path / "store"), "--num-samples", "5", "--json"]
    for _ in range(2):
        again = json.loads(run("collect", *arguments, "--seed", 5)[0])
    assert again["parts"][0]["added"].keys() <= {"random", "singles", "repeat"}
    held = read_samples(tmp_path / "store").samples
    assert len(held) == 10
    ids = [sample.set_id for sample in held if sample.source != "repeat"]
    assert len(ids) == len(set(ids))
    assert len(list((tmp_path / "store" / "streams").iterdir())) == 1


def test_only_one_collector_measures_on_a_device(run, tmp_path, published):
    arguments = ["collect", "--store", tmp_path, "--device", "cpu", "--num-samples", "1"]
    with CollectorLock(tmp_path, device_lock_name(find_device("cpu"))) as lock:
        _, message = run(*arguments, code=1)
        assert f"{lock.file}: another collector (process {os.getpid()}) is measuring here" in message
        assert run(*arguments, "--if-busy", "skip")[0].startswith("Skipped: ")
        skipped = published("collected", run(*arguments, "--if-busy", "skip", "--json")[0])
        assert skipped == {"schema": skipped["schema"], "store": str(tmp_path), "is_busy": True, "num_samples": 0}
    assert not list(tmp_path.rglob("*.parquet"))


def test_collect_and_workers_of_ray_keep_each_other_from_a_device(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    device = find_device("cpu")
    arguments = ["collect", "--store", tmp_path / "store", "--device", "cpu", "--num-samples", "1"]
    with device_claimed(device, Measuring.RAY), device_claimed(device, Measuring.RAY):
        assert "another collector (of ray) is measuring on cpu of this host" in run(*arguments, code=1)[1]
    settings = Settings.for_collecting(device)
    busy = pytest.raises(CollectorBusyError, match=r"another collector \(of collect\) is measuring on cpu")
    with device_claimed(device, Measuring.COLLECT), device_claimed(device, Measuring.COLLECT), busy:
        KernelWorker("cpu", settings).machine()
    worker = KernelWorker("cpu", settings)
    assert worker.machine().device.key == "cpu"
    with pytest.raises(CollectorBusyError, match="of ray"), device_claimed(device, Measuring.COLLECT):
        pass
    del worker
    assert list((tmp_path / "autoshard-locks").iterdir())


@pytest.mark.slow
def test_sigterm_ends_collect_cleanly_and_frees_the_device(tables, tmp_path):
    write_tables(tables, tmp_path / "tables.json")
    store = tmp_path / "store"
    command = [sys.executable, "-W", "ignore", "-c", "import sys; from autoshard.cli import main; sys.exit(main())"]
    command += [
        "collect",
        "--store",
        str(store),
        "--device",
        "cpu",
        "--seconds",
        "600",
        "--strategies",
        "random",
        "--json",
    ]
    command += ["--tables", str(tmp_path / "tables.json"), "--scale", "1", "--max-tables", "3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 200
        while not list(store.glob("device=cpu/part-*.parquet")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143
    result = json.loads(out)
    assert result["is_terminated"]
    assert result["num_samples"] == len(read_samples(store)) > 0
    with CollectorLock(store, device_lock_name(find_device("cpu"))):
        pass


def test_collect_refuses_a_store_of_another_version(run, store, tmp_path):
    (file,) = list(store.glob("device=cpu/*.parquet"))[:1]
    folder = tmp_path / "store" / "device=h200"
    folder.mkdir(parents=True)
    changed = pq.read_table(file).replace_schema_metadata({b"autoshard.schema": b"autoshard.samples/1"})
    pq.write_table(changed, folder / "part-old.parquet")
    _, err = run("collect", "--store", tmp_path / "store", "--device", "cpu", "--num-samples", 1, code=2)
    assert "must be autoshard.samples/6, got autoshard.samples/1; collect into another folder" in err
    assert not (tmp_path / "store" / "device=cpu").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_collect_without_the_gpu_that_is_asked_for(run, tmp_path):
    _, err = run("collect", "--store", tmp_path / "store", "--device", "cuda", code=1)
    assert "torch finds no GPU here" in err
    assert not (tmp_path / "store").exists()


def test_samples_shows_coverage_and_quality(run, store, tmp_path, published):
    part = next(store.glob("device=cpu/*.parquet"))
    folder = tmp_path / "store" / "device=cpu"
    folder.mkdir(parents=True)
    for name in ("part-1.parquet", "part-2.parquet"):
        (folder / name).write_bytes(part.read_bytes())
    throttled = replace(read_samples(store).samples[0], throttle_reasons="sw_power_cap", num_attempts=2, is_noisy=True)
    write_samples(tmp_path / "store", [throttled])
    html = tmp_path / "coverage.html"
    out, _ = run("samples", tmp_path / "store", "--html", html, "--json")
    (device,) = published("store", out)["devices"]
    held = read_sample_file(part)
    assert device["num_duplicates"] == len(held)
    assert device["num_samples"] == len(held) + 1
    assert device["num_throttled"] == 1
    assert device["num_noisy"] == 1 + sum(sample.is_noisy for sample in held)
    assert device["num_measured_again"] == 1 + sum(sample.num_attempts > 1 for sample in held)
    assert device["schema"] == "autoshard.samples/6"
    assert "<html" in html.read_text()


def test_samples_draws_the_pictures_of_its_page(run, store, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr("bench.store.command.draw", lambda figures, image: drawn.update({image: figures}))
    image = tmp_path / "coverage.svg"
    run("samples", store, "--image", image, "--tables", "criteo-kaggle", "--scale", 1024)
    figures = drawn[image]
    assert list(figures)[:2] == ["pairs", "shards-rows-and-dim"]
    assert len(figures) == 1 + 6 + 3
    num_points = sum(len(points.x) for points in figures["pairs"].data if points.showlegend)
    assert num_points == len(read_samples(store))
    shown = [int(text or 0) for line in figures["sets-shards-and-lookups"].data[0].text for text in line]
    assert sum(shown) == len(read_samples(store))
    run("samples", store, "--image", "coverage.pdf", code=2)
    assert "--html or --image" in run("samples", store, "--tables", "metasyn", code=2)[1]


def test_samples_shows_a_store(run, store, published):
    (device,) = published("store", run("samples", store, "--json")[0])["devices"]
    assert (device["device"], device["num_samples"], sum(device["sources"].values())) == ("cpu", 40, 40)
    assert device["num_repeated"] >= 1
    assert device["repeatability"] > 0
    assert "40 (" in run("samples", store)[0]


def test_samples_finds_what_was_tampered_with(run, store, tmp_path, monkeypatch):
    honest = read_samples(store).samples[0]
    monkeypatch.setattr(KERNEL_SAMPLES, "content_id", lambda _: honest.sample_id)
    write_samples(tmp_path, [replace(honest, forward_ms=0.125)])
    monkeypatch.undo()
    assert "1 of 1 samples of cpu do not match their id" in run("samples", tmp_path, code=1)[1]


@pytest.mark.slow
def test_replay_measures_every_rank(run, plan, tmp_path):
    write_plan(plan, tmp_path / "plan.json")
    out, said = run("replay", tmp_path / "plan.json", "--device", "cpu", "--json")
    assert "warning: Measured on cpu, but the plan is for a100." in said
    result = json.loads(out)
    kernel_ms = [rank["kernel_ms"] for rank in result["ranks"]]
    assert [rank["num_shards"] for rank in result["ranks"]] == [2, 2, 2, 2, 2, 1, 1, 0]
    assert kernel_ms[7] == 0.0
    assert min(kernel_ms[:7]) > 0
    assert result["max_kernel_ms"] == max(kernel_ms)
    assert result["balance"] == 0.0  # one rank has nothing to do
    assert 0 < result["ceiling_balance"] < 1
    assert result["num_groups"] == 1
    assert result["predicted_max_kernel_ms"] is None


def test_replay_refuses_what_it_cannot_measure(run, plan, tables, tmp_path):
    odd = replace(tables.tables[0], dtype=DType.BF16)
    changed = replace(tables, tables=(odd, *tables.tables[1:]))
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), 0) for table in changed.tables)
    write_plan(replace(plan, tables=changed, shards=shards), tmp_path / "plan.json")
    _, err = run("replay", tmp_path / "plan.json", "--device", "cpu", code=2)
    assert f"{odd.name}.dtype: the benchmark measures fp32 or fp16 on a CPU, got bf16" in err


@pytest.mark.slow
def test_samples_checks_dense_layers_too(run, tmp_path):
    store = tmp_path / "store"
    arguments = ["--kinds", "dense", "--device", "cpu", "--num-samples", "1", "--seed", "3"]
    run("collect", "--store", store, *arguments)
    assert "dense layers on cpu: 1 samples" in run("samples", store)[0]
    (file,) = store.rglob("part-*.parquet")
    held = pq.ParquetFile(file).read()
    rows = [row | {"num_rounds": row["num_rounds"] + 1} for row in held.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, held.schema), file)
    assert "1 of 1 samples of cpu do not match their id" in run("samples", store, code=1)[1]
