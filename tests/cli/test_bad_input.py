"""Bad input: exit 2 or 3, one line on standard error that names the file and what is wrong, and nothing written."""

import copy
import json

import pytest

from autoshard.cli import main
from autoshard.formats.bundled import load_topology
from autoshard.formats.documents.topology_json import topology_to_json


def tables_document():
    return {
        "schema": "autoshard.tables/1",
        "batch_size": 64,
        "tables": [
            {
                "name": name,
                "num_embeddings": 1000,
                "embedding_dim": 8,
                "dtype": "fp32",
                "pooling": "sum",
                "features": [{"name": f"f_{name}", "pooling_factor": 2.0}],
                "access": {"kind": "uniform"},
            }
            for name in ("a", "b")
        ],
    }


def changed(document, *path, value=None, remove=False):
    """The document with the value at a path replaced, added or removed."""
    made = copy.deepcopy(document)
    target = made
    for step in path[:-1]:
        target = target[step]
    if remove:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return made


TABLES = tables_document()
BAD_TABLES = {
    "malformed": ("{", "is not JSON"),
    "empty": ("", "is not JSON"),
    "not an object": ("3", "must be "),
    "not text": (b"\x80\x02}q\x00.", "is not UTF-8 text"),
    "nested too deep": ("[" * 100_000, "is nested too deep"),
    "unknown field": (changed(TABLES, "tables", 1, "colour", value=1), "tables[1].colour"),
    "missing field": (changed(TABLES, "tables", 1, "dtype", remove=True), "tables[1].dtype: is missing"),
    "wrong schema": (changed(TABLES, "schema", value="autoshard.tables/9"), "schema"),
    "wrong type": (changed(TABLES, "batch_size", value="64"), "batch_size"),
    "not a number": (
        changed(TABLES, "tables", 0, "features", 0, "pooling_factor", value=float("nan")),
        "tables[0].features[0].pooling_factor",
    ),
    "infinite": (changed(TABLES, "tables", 0, "access", value={"kind": "zipf", "alpha": float("inf")}), "alpha"),
    "negative": (changed(TABLES, "tables", 0, "num_embeddings", value=-1), "tables[0].num_embeddings"),
    "no tables": (changed(TABLES, "tables", value=[]), "tables"),
    "duplicate name": (changed(TABLES, "tables", 1, "name", value="a"), '"a" is used twice'),
    "a key twice": ('{"schema": "autoshard.tables/1", "schema": "x"}', "is there twice"),
}


@pytest.fixture
def fails(capfd, tmp_path):
    """Runs a command that must fail; returns its only line on standard error."""

    def run(arguments, code):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        capfd.readouterr()
        assert main([str(argument) for argument in arguments]) == code
        captured = capfd.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.endswith("\n")
        assert captured.err.count("\n") == 1, captured.err
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        return captured.err

    return run


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("fault", BAD_TABLES)
@pytest.mark.parametrize(
    "command",
    [
        ("plan", "TABLES", "--topology", "cpu-4", "--planner", "random", "-o", "OUT"),
        ("compare", "TABLES", "--topology", "cpu-4", "--planners", "random", "--output-dir", "OUT", "--json"),
        ("import", "TABLES", "-o", "OUT"),
    ],
    ids=lambda command: command[0],
)
def test_tables_that_cannot_be_used(fails, tmp_path, command, fault):
    content, message = BAD_TABLES[fault]
    file = write(tmp_path / "tables.json", content)
    arguments = [{"TABLES": file, "OUT": tmp_path / "out"}.get(part, part) for part in command]
    error = fails(arguments, 2)
    assert str(file) in error
    assert message in error


@pytest.fixture(scope="module")
def plan_document(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    tables = write(folder / "tables.json", TABLES)
    output = folder / "plan.json"
    assert main(["plan", str(tables), "--topology", "cpu-4", "--planner", "cost-greedy", "-o", str(output)]) == 0
    return json.loads(output.read_text(encoding="utf-8"))


PLAN_FAULTS = {
    "malformed": (lambda plan: json.dumps(plan)[:-9], "is not JSON"),
    "tables, not a plan": (lambda _: TABLES, "schema"),
    "unknown field": (lambda plan: changed(plan, "shards", 0, "colour", value=1), "shards[0].colour"),
    "a table without shards": (lambda plan: changed(plan, "shards", value=plan["shards"][:1]), "'b'"),
    "a rank that is not there": (
        lambda plan: changed(plan, "shards", 0, "replicas", value=[[9]]),
        "shards[0].replicas",
    ),
    "a table twice": (lambda plan: changed(plan, "shards", value=plan["shards"] * 2), "shards"),
    "too little memory": (
        lambda plan: changed(plan, "topology", "memory_bytes", "hbm", value=10),
        "bytes",
    ),
    "not a number": (
        lambda plan: changed(plan, "predicted", "balance", value=float("nan")),
        "predicted.balance",
    ),
}


@pytest.mark.parametrize("fault", PLAN_FAULTS)
@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "PLAN", "-o", "OUT"),
        ("show", "PLAN", "--html", "OUT"),
        ("run", "PLAN", "--nproc", "2", "--json"),
        ("replay", "PLAN"),
    ],
    ids=lambda command: command[0],
)
def test_plans_that_cannot_be_used(fails, tmp_path, plan_document, command, fault):
    make, message = PLAN_FAULTS[fault]
    file = write(tmp_path / "plan.json", make(plan_document))
    arguments = [{"PLAN": file, "OUT": tmp_path / "out"}.get(part, part) for part in command]
    error = fails(arguments, 2)
    assert str(file) in error
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "criteo-kaggle", "--topology", "TOPOLOGY"], "world_size: "),
        (["compare", "criteo-kaggle", "--topology", "TOPOLOGY", "--planners", "random"], "world_size: "),
    ],
)
def test_topologies_that_cannot_be_used(fails, tmp_path, arguments, message):
    file = write(tmp_path / "topology.json", changed(topology_to_json(load_topology("cpu-4")), "world_size", value=-4))
    error = fails([file if part == "TOPOLOGY" else part for part in arguments], 2)
    assert str(file) in error
    assert message in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "TABLES", "--topology", "cpu-4", "--planner", "cost-greedy", "-o", "OUT"],
        ["plan", "TABLES", "--topology", "cpu-4", "--planner", "random", "-o", "OUT", "--json"],
        ["compare", "TABLES", "--topology", "cpu-4", "--planners", "random,size-greedy", "--output-dir", "OUT"],
    ],
)
def test_what_does_not_fit_exits_with_3_and_says_by_how_much(fails, tmp_path, arguments):
    large = changed(TABLES, "tables", 0, "num_embeddings", value=10**9)
    file = write(tmp_path / "tables.json", large)
    error = fails([{"TABLES": file, "OUT": tmp_path / "out"}.get(part, part) for part in arguments], 3)
    assert "bytes" in error
    assert "a" in error.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "'nonsense'"),
        (["plan"], "'TABLES'"),
        (["plan", "criteo-kaggle"], "--topology"),
        (["plan", "criteo-kaggle", "--topology", "cpu-8", "--nonsense"], "--nonsense"),
        (["plan", "criteo-kaggle", "--topology", "cpu-8", "--seed", "x"], "--seed"),
        (["plan", "criteo-kaggle", "--topology", "cpu-8", "--seed", "-1"], "--seed"),
        (["plan", "criteo-kaggle", "--topology", "cpu-8", "--registry", "/nowhere"], "/nowhere"),
        (["plan", "criteo-kaggle", "--topology", "cpu-8", "--planner", "nobody"], "cost-greedy"),
        (["plan", "criteo-kaggle", "--topology", "cpu-8", "--set", "x"], "KEY=VALUE"),
        (["plan", "criteo-kaggle", "--topology", "cpu-8", "--planner", "random", "--set", "x=1"], "options.x"),
        (["plan", "criteo-kaggle", "--topology", "cpu-8", "--set", "x=1", "--set", "x=2"], "twice"),
        (["plan", "criteo", "--topology", "cpu-8"], "criteo-kaggle"),
        (["plan", "criteo-kaggle", "--topology", "cpu"], "cpu-8"),
        (["compare", "criteo-kaggle", "--topology", "cpu-8", "--planners", ","], "--planners"),
        (["compare", "criteo-kaggle", "--topology", "cpu-8", "--planners", "random,random"], "twice"),
        (["compare", "criteo-kaggle", "--topology", "cpu-8", "--planners", "random,nobody"], "nobody"),
        (["import", "metasyn", "--num-tables", "857", "-o", "OUT"], "num_tables"),
        (["import", "metasyn", "--num-tables", "0", "-o", "OUT"], "--num-tables"),
        (["import", "metasyn", "--scale", "0", "-o", "OUT"], "--scale"),
        (["import", "metasyn", "--part", "5/4", "-o", "OUT"], "--part"),
        (["import", "metasyn", "--part", "1", "-o", "OUT"], "K/N"),
        (["import", "metasyn", "--format", "csv", "-o", "OUT"], "csv"),
        (["import", "metasyn", "--set", "embedding_dim=x", "-o", "OUT"], "embedding_dim"),
        (["import", "/proc", "-o", "OUT"], "is a folder with no .json, .parquet or .pt files"),
        (["import", "/nowhere", "--format", "tbe-data-config", "-o", "OUT"], "/nowhere: cannot be read"),
        (["import", "/nowhere", "--format", "id-batches", "-o", "OUT"], "/nowhere: cannot be read"),
        (["import", "/x", "--format", "id-batches", "--set", "seed=1", "-o", "OUT"], "embedding_dim, batch_size"),
        (["import", "metasyn"], "--output"),
        (["list", "nonsense"], "planners"),
        (["show", "/nowhere/plan.json"], "/nowhere/plan.json"),
        (["show", "/"], "/"),
        (["train"], "train --help"),
        (["serve", "--port", "70000"], "--port"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_options_that_cannot_be_used(fails, tmp_path, arguments, message):
    error = fails([tmp_path / "out" if part == "OUT" else part for part in arguments], 2)
    assert message in error


@pytest.mark.parametrize("target", ["file/inside.json", "folder", "/proc/nothing/plan.json", "/dev/full"])
def test_outputs_that_cannot_be_written(fails, tmp_path, target):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    output = tmp_path / target
    error = fails(["plan", "criteo-kaggle", "--topology", "cpu-8", "--planner", "random", "-o", output], 2)
    assert str(output) in error
