"""Doors to other tools: plans to and from TorchRec, files to start from, what is installed."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.core import DType, MemoryLevel, MemoryPlacement, Payload
from autoshard.formats import load_tables, read_plan, read_tables, read_topology, write_plan, write_tables
from autoshard.formats.torchrec import parameter_constraints
from tests import builders as make

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on torchrec's own import


@pytest.fixture
def files(run, tmp_path):
    """A task and a plan of it that TorchRec can say."""
    tables, plan = tmp_path / "tables.json", tmp_path / "plan.json"
    write_tables(load_tables("metasyn").sample(6, seed=1).scaled(64), tables)
    run("plan", tables, "--topology", "cpu-4", "--planner", "cost-greedy", "-o", plan)
    return tmp_path


def test_a_plan_goes_to_torchrec_and_back(run, files):
    plan, stored, back = files / "plan.json", files / "plan.pt", files / "back.json"
    result = json.loads(run("export", plan, "-o", stored, "--json")[0])
    assert (result["format"], result["num_tables"], result["changes"]) == ("torchrec", 6, [])
    task = ("--tables", files / "tables.json", "--topology", "cpu-4")
    run("evaluate", stored, *task, "-o", back)
    assert read_plan(back).shards == read_plan(plan).shards
    assert read_plan(back).predicted.step_ms == read_plan(plan).predicted.step_ms
    assert "PLAN: needs --tables and --topology" in run("evaluate", stored, code=2)[1]
    assert "--tables: needs a .pt file" in run("evaluate", plan, *task, code=2)[1]


def test_constraints_are_fields_of_torchrecs_own(run, files):
    from torchrec.distributed.planner.types import ParameterConstraints

    output = files / "constraints.json"
    out, _ = run("export", files / "plan.json", "--format", "torchrec-constraints", "-o", output)
    assert "6 tables" in out
    made = {name: ParameterConstraints(**fields) for name, fields in json.loads(output.read_text()).items()}
    assert {one.sharding_types[0] for one in made.values()} == {"table_wise"}
    assert made == parameter_constraints(read_plan(files / "plan.json"))


@pytest.mark.slow
def test_the_tables_of_two_towers_go_to_torchrec_and_back(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "formats" / "torchrec"))
    factory, task = "models:make_towers", ("--topology", "cpu-4")
    run("import", factory, "--format", "torchrec", "-o", "tables.json")
    run("plan", "tables.json", *task, "--planner", "cost-greedy", "-o", "plan.json")
    run("export", "plan.json", "--model", factory, "-o", "plan.pt")
    run("evaluate", "plan.pt", "--tables", "tables.json", *task, "-o", "back.json")
    assert read_plan("back.json").shards == read_plan("plan.json").shards
    run("export", "plan.json", "--format", "torchrec-constraints", "--model", factory, "-o", "constraints.json")
    assert list(json.loads(Path("constraints.json").read_text())) == ["t"]
    other = ("--model", "models:make", "-o", "other.pt")
    assert "tables.user.t: is no table of the model" in run("export", "plan.json", *other, code=2)[1]


def test_constraints_are_exported_with_a_model(run, files):
    command = ("export", files / "plan.json", "--format", "torchrec-constraints", "-o", files / "x.json")
    assert 'must be MODULE:FACTORY, got "models"' in run(*command, "--model", "models", code=2)[1]


def test_constraints_of_caches_are_read_as_the_docs_say(run, tmp_path, monkeypatch):
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import DataType

    monkeypatch.chdir(tmp_path)
    caches = {
        "near": MemoryPlacement(),
        "wide": MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=4 * 16 * 4, policy="lfu", cache_dtype=DType.FP32),
        "same": MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=10 * 16 * 2),
    }
    shards = [make.placed(make.table(name, 40, 16, dtype=DType.FP16), memory=memory) for name, memory in caches.items()]
    plan = make.plan(*shards, topology=make.topology(2, device="a100", ddr=1 << 30))
    plan = replace(plan, payload=Payload(forward=DType.BF16, backward=DType.BF16))
    write_plan(plan, "plan.json")
    run("export", "plan.json", "--format", "torchrec-constraints", "-o", "constraints.json")
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "use-with-torchrec.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*def read_constraint.*?)```", page, re.DOTALL)
    exec(code, names := {})
    found = names["constraints"]
    assert found == parameter_constraints(plan)
    assert found["wide"].cache_params == CacheParams(CacheAlgorithm.LFU, load_factor=0.1, precision=DataType.FP32)
    assert found["same"].cache_params == CacheParams(CacheAlgorithm.LRU, load_factor=0.25)
    assert found["near"].cache_params is None
    assert {one.output_dtype for one in found.values()} == {DataType.BF16}


def test_a_plan_that_torchrec_cannot_say_is_refused_with_every_reason(run, files):
    path = files / "plan.json"
    document = json.loads(path.read_text())
    for shard in document["shards"][:2]:
        rows = shard["rows"]["stop"]
        document["shards"].append({**shard, "rows": {**shard["rows"], "start": rows // 2}})
        shard["rows"] = {**shard["rows"], "stop": rows // 2}
    path.write_text(json.dumps(document))
    _, err = run("export", path, "-o", files / "plan.pt", code=2)
    assert err.count("has several ranges of rows") == 2
    assert "shards[0]: TorchRec splits all rows of a table alike" in err
    assert not (files / "plan.pt").exists()


def test_init_writes_files_that_can_be_planned(run, tmp_path, monkeypatch, published):
    monkeypatch.chdir(tmp_path)
    answers = ["--num-tables", "4", "--num-embeddings", "1000", "--embedding-dim", "16", "--pooling-factor", "5"]
    command = ["init", *answers, "--batch-size", "64", "--topology", "cpu-4", "--json"]
    written = published("init", run(*command)[0])
    assert (written["tables"], written["topology"]) == ("tables.yaml", "topology.yaml")
    assert len(read_tables("tables.yaml").tables) == 4
    assert read_topology("topology.yaml").world_size == 4
    run("plan", "tables.yaml", "--topology", "topology.yaml", "--planner", "size-greedy")
    assert "tables.yaml: is there already; --force writes over it" in run(*command, code=2)[1]
    run(*command, "--force")


def test_a_table_list_is_imported_and_planned_with_its_mapping_told(run, tmp_path, monkeypatch, published):
    monkeypatch.chdir(tmp_path)
    Path("list.csv").write_text(
        'Table Name,#Rows,Dim,Avg Pooling,size,owner\nuser,"1,234",64.0,2.5,9,a\nad,1K,8,1,9,b\n'
    )
    command = ["import", "list.csv", "-o", "tables.json", "--json"]
    _, err = run(*command, code=2)
    assert [line.split(";")[0] for line in err.splitlines()] == [
        'error: list.csv: column "size": may mean rows or bytes',
        'error: list.csv: column "owner": is no field that is known',
    ]
    assert not Path("tables.json").exists()
    out, err = run(*command, "--map", "size=", "--map", "owner=")
    written = published("imported", out)
    read = {"Table Name": "name", "#Rows": "num_embeddings", "Dim": "embedding_dim", "Avg Pooling": "pooling_factor"}
    assert written["columns"] == {**read, "size": "", "owner": ""}
    assert written["batch_size"] == 65_536
    assert err.startswith('columns: "Table Name" is name, "#Rows" is num_embeddings, ')
    assert "warning: the list says no batch size: 65,536 samples over all ranks are taken" in err
    assert "--set batch_size=N" in err
    assert [table.num_embeddings for table in read_tables("tables.json").tables] == [1234, 1000]
    assert "batch size" not in run(*command, "--map", "size=", "--map", "owner=", "--set", "batch_size=64")[1]
    Path("short.csv").write_text("rows,dim,batch\n1000,8,64\n")
    _, err = run("plan", "short.csv", "--topology", "cpu-4", "--planner", "size-greedy")
    assert 'columns: "rows" is num_embeddings, "dim" is embedding_dim, "batch" is batch_size' in err
    for wrong, message in {
        "size": '--map: must be COLUMN=FIELD, or COLUMN= to ignore it, got "size"',
        "nothing=name": 'list.csv: column "nothing": is not there to be mapped; there are "Table Name"',
        "size=rows": 'list.csv: column "size": "rows" is no field; these are: name, num_embeddings',
    }.items():
        assert f"error: {message}" in run(*command, "--map", wrong, code=2)[1]
    _, err = run("import", "tables.json", "-o", "x.json", "--map", "a=name", code=2)
    assert "columns: format tables-json has no columns to map; table-list has" in err


def test_init_asks_for_what_is_left_out(run, tmp_path, monkeypatch):
    asked = []

    def prompt(question, default, **_):
        asked.append(question)
        return 2 if question == "Embedding tables" else default

    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    run("init", tmp_path, "--topology", "cpu-4", "--embedding-dim", "8")
    assert asked == ["Embedding tables", "Rows of each", "Ids per sample of each", "Samples per step over all ranks"]
    tables = read_tables(tmp_path / "tables.yaml").tables
    assert [(table.num_embeddings, table.embedding_dim) for table in tables] == [(100_000, 8)] * 2


def test_detect_describes_a_topology(run, tmp_path, monkeypatch):
    output = tmp_path / "topology.json"
    monkeypatch.setattr("autoshard.commands.machine.found_gpus", list)
    out, err = run("detect", "--ranks", "4", "--nodes", "2", "-o", output)
    topology = read_topology(output)
    assert (topology.world_size, topology.local_world_size, topology.device) == (8, 4, "cpu")
    assert topology.levels[1].shared_links
    assert "8 ranks of cpu on 2 machines" in out
    assert "links inside a machine: those of bundled cpu-8, not measured" in err


def test_detect_describes_a_torchrun_job(run, monkeypatch):
    monkeypatch.setattr("autoshard.commands.machine.found_gpus", list)
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = json.loads(run("detect", "--json")[0])
    assert (found["world_size"], [level["size"] for level in found["levels"]]) == (6, [2, 6])


def test_doctor_says_what_is_there_and_what_is_missing(run, monkeypatch):
    found = json.loads(run("doctor", "--json")[0])
    versions = {one["name"]: one["version"] for one in found["packages"]}
    assert versions["torch"]
    assert found["devices"][0]["key"] == "cpu"
    assert found["models"][0]["device"] == "cpu"

    def version(name):
        raise PackageNotFoundError(name)

    from importlib.metadata import PackageNotFoundError

    monkeypatch.setattr("autoshard.commands.packages.version", version)
    out, _ = run("doctor")
    assert "Missing:" in out
    assert "torchrec for TorchRec's models, planner and engine: pip install" in out
    assert len(out.splitlines()) < 24


def test_the_version_comes_with_what_is_missing(run, monkeypatch):
    """The version alone is standard output, for whoever reads it from there."""
    from importlib.metadata import PackageNotFoundError

    from autoshard import __version__

    def version(name):
        if name == "torch":
            return "2.13.0"
        raise PackageNotFoundError(name)

    monkeypatch.setattr("autoshard.commands.packages.version", version)
    out, err = run("--version")
    assert out == f"autoshard {__version__}\n"
    assert "missing: fbgemm-gpu or fbgemm-gpu-cpu for embedding kernels: pip install 'autoshard[cpu]'" in err
    assert "missing: torch " not in err
