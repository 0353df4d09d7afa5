"""Bad access curves, counts, links, groups and budgets: one line each, with the field and the numbers."""

import copy
import json
import math

import pyarrow as pa
import pyarrow.parquet
import pytest

from autoshard.cli import main
from autoshard.planners.registry import planner_names

NUM_ROWS = 1000
#: All but those that need a trained model, or others' packages.
OWN_PLANNERS = sorted({*planner_names()} - {"policy", "torchrec"})


def link(bytes_per_s=1e9):
    return {"bytes_per_s": bytes_per_s, "latency_s": 1e-6}


def topology_document(**changes):
    levels = [
        {"name": "node", "size": 2, "all_to_all": link(), "all_reduce": link()},
        {"name": "cluster", "size": 4, "all_to_all": link(), "all_reduce": link()},
    ]
    return {
        "schema": "autoshard.topology/1",
        "world_size": 4,
        "device": "cpu",
        "memory_bytes": {"hbm": 10**9},
        "levels": levels,
        **changes,
    }


def tables_document(access=None, **changes):
    tables = [
        {
            "name": name,
            "num_embeddings": NUM_ROWS,
            "embedding_dim": 8,
            "dtype": "fp32",
            "pooling": "sum",
            "features": [{"name": f"f_{name}", "pooling_factor": 2.0}],
            "access": {"kind": "zipf", "alpha": 1.0},
        }
        for name in ("a", "b")
    ]
    tables[1].update({"access": access} if access else {}, **changes)
    return {"schema": "autoshard.tables/1", "batch_size": 64, "tables": tables}


def written(path, document):
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.fixture
def fails(capfd, tmp_path):
    """Runs a command that must fail and write nothing; returns its only line that is no warning."""

    def run(*arguments, code=2):
        output = tmp_path / "out.json"
        capfd.readouterr()
        assert main([str(output if part == "OUT" else part) for part in arguments]) == code
        captured = capfd.readouterr()
        assert captured.out == ""
        error = "".join(line for line in captured.err.splitlines(keepends=True) if not line.startswith("warning: "))
        assert error.startswith("error: ")
        assert error.count("\n") == 1, error
        assert not output.exists()
        return error

    return run


def curve(*knots):
    return {"kind": "curve", "knots": [list(knot) for knot in knots]}


WHOLE_CURVE = "tables[1].access.knots: "
BAD_CURVES = {
    "does not reach 1": (
        curve((0, 0), (10, 0.5), (NUM_ROWS, 0.9)),
        WHOLE_CURVE + "must end at cumulative probability 1, got 0.9",
    ),
    "goes beyond 1": (
        curve((0, 0), (10, 0.5), (NUM_ROWS, 1.5)),
        WHOLE_CURVE + "must end at cumulative probability 1, got 1.5",
    ),
    "ends before the table": (
        curve((0, 0), (10, 1)),
        WHOLE_CURVE + "must end at access rank 1000, the table's rows, got 10",
    ),
    "ends after the table": (curve((0, 0), (2000, 1)), "got 2000"),
    "does not start at 0": (
        curve((0, 0.1), (NUM_ROWS, 1)),
        WHOLE_CURVE + "must start at [0, 0], got [0, 0.1] at knot 0",
    ),
    "falls": (
        curve((0, 0), (10, 0.9), (20, 0.8), (NUM_ROWS, 1)),
        WHOLE_CURVE + "cumulative probabilities must not fall, got [20, 0.8] at knot 2",
    ),
    "goes back": (
        curve((0, 0), (20, 0.8), (10, 0.9), (NUM_ROWS, 1)),
        WHOLE_CURVE + "access ranks must rise, got [10, 0.9] at knot 2",
    ),
    "is not concave": (curve((0, 0), (500, 0.1), (NUM_ROWS, 1)), "slopes must not rise, got [1000, 1] at knot 2"),
    "is one point": (curve((0, 0)), WHOLE_CURVE + "must hold 2 to"),
    "has a number that is none": (
        curve((0, 0), (NUM_ROWS, math.nan)),
        WHOLE_CURVE + "must hold finite numbers only, got [1000, nan] at knot 1",
    ),
}


@pytest.mark.parametrize("fault", BAD_CURVES)
@pytest.mark.parametrize("command", ["plan", "import"])
def test_curves(fails, tmp_path, command, fault):
    access, message = BAD_CURVES[fault]
    file = written(tmp_path / "tables.json", tables_document(access))
    error = fails("import", file, "-o", "OUT") if command == "import" else planned(fails, tmp_path, file)
    assert str(file) in error
    assert message in error


def planned(fails, tmp_path, file, *options, topology=None, planner="random", code=2):
    ranks = written(tmp_path / "topology.json", topology or topology_document())
    return fails("plan", file, "--topology", ranks, "--planner", planner, *options, "-o", "OUT", code=code)


BAD_COUNTS = {
    "shorter": ([1] * 999, "tables[1].access.file: must hold one count per row: the table has 1000, the file 999"),
    "longer": ([1] * 1001, "tables[1].access.file: must hold one count per row: the table has 1000, the file 1001"),
    "negative": ([1] * 700 + [-3] * 300, "tables[1].access.counts: must be finite and at least 0, got -3 in row 700"),
    "null": ([1] * 999 + [None], "tables[1].access.counts: must be finite and at least 0, got null in row 999"),
    "not a number": (
        [math.nan] + [1.0] * 999,
        "tables[1].access.counts: must be finite and at least 0, got nan in row 0",
    ),
    "infinite": (
        [1.0] * 999 + [math.inf],
        "tables[1].access.counts: must be finite and at least 0, got inf in row 999",
    ),
    "all zero": ([0] * 1000, "tables[1].access.counts: must have a positive sum, got 0"),
    "texts": (["1"] * 1000, "access.file: counts.parquet must have one column of numbers named count, has string"),
    "lists": ([[1]] * 1000, "access.file: counts.parquet must have one column of numbers named count, has list"),
}


@pytest.mark.parametrize("fault", BAD_COUNTS)
def test_counts(fails, tmp_path, fault):
    counts, message = BAD_COUNTS[fault]
    pyarrow.parquet.write_table(pa.table({"count": counts}), tmp_path / "counts.parquet")
    file = written(tmp_path / "tables.json", tables_document({"kind": "counts", "file": "counts.parquet"}))
    error = planned(fails, tmp_path, file)
    assert str(file) in error
    assert message in error


def test_counts_under_another_name_or_none(fails, tmp_path):
    file = written(tmp_path / "tables.json", tables_document({"kind": "counts", "file": "counts.parquet"}))
    assert "tables[1].access.file: there is no file counts.parquet beside tables.json" in planned(fails, tmp_path, file)
    pyarrow.parquet.write_table(pa.table({"lookups": [1] * NUM_ROWS}), tmp_path / "counts.parquet")
    assert "one column of numbers named count, has 0" in planned(fails, tmp_path, file)


def test_a_folder_of_counts_that_is_too_short(fails, tmp_path):
    for number in range(3):
        (tmp_path / "counts").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pa.table({"count": [1] * 300}), tmp_path / "counts" / f"{number}.parquet")
    file = written(tmp_path / "tables.json", tables_document({"kind": "counts", "file": "counts"}))
    assert "one count per row: the table has 1000, the 3 files 900" in planned(fails, tmp_path, file)


def test_imported_counts(fails, tmp_path):
    pyarrow.parquet.write_table(pa.table({"count": [4, -1]}), tmp_path / "t.parquet")
    command = ("import", tmp_path / "t.parquet", "--format", "row-counts", "-o", "OUT")
    assert "options.num_samples: is missing" in fails(*command)
    assert "options.num_samples: must be a whole number in [1, " in fails(*command, "--set", "num_samples=0")
    error = fails(*command, "--set", "num_samples=10")
    assert f"{tmp_path / 't.parquet'}: counts: must be finite and at least 0, got -1 in row 1" in error


@pytest.mark.parametrize("collective", ["all_to_all", "all_reduce"])
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("bytes_per_s", [0, 0.0, -1.0, math.nan, math.inf, "fast", None])
def test_links(fails, tmp_path, collective, level, bytes_per_s):
    topology = topology_document()
    topology["levels"][level][collective]["bytes_per_s"] = bytes_per_s
    file = written(tmp_path / "tables.json", tables_document())
    error = planned(fails, tmp_path, file, topology=topology)
    assert f"{tmp_path / 'topology.json'}: levels[{level}].{collective}.bytes_per_s: must be a" in error
    assert "got " in error


def test_ranks_that_levels_do_not_divide(fails, tmp_path):
    topology = topology_document()
    topology["levels"][0]["size"] = 3
    file = written(tmp_path / "tables.json", tables_document())
    error = planned(fails, tmp_path, file, topology=topology)
    assert "levels[1].size: must be a whole multiple of the level inside it (3), got 4" in error


@pytest.mark.parametrize(
    "command", [("evaluate", "PLAN", "-o", "OUT"), ("show", "PLAN"), ("run", "PLAN", "--nproc", "4")]
)
@pytest.mark.parametrize(
    ("num_groups", "message"),
    [
        (3, "replica_groups.num_groups: must divide the 4 ranks, got 3"),
        (8, "replica_groups.num_groups: must divide the 4 ranks, got 8"),
        (0, "replica_groups.num_groups: must be a whole number in [1, "),
    ],
)
def test_groups_that_do_not_divide_the_ranks(fails, tmp_path, command, num_groups, message):
    plan = tmp_path / "plan.json"
    tables = written(tmp_path / "tables.json", tables_document())
    ranks = written(tmp_path / "topology.json", topology_document())
    assert main(["plan", str(tables), "--topology", str(ranks), "--planner", "random", "-o", str(plan)]) == 0
    document = json.loads(plan.read_text(encoding="utf-8"))
    document["replica_groups"]["num_groups"] = num_groups
    written(plan, document)
    error = fails(*(plan if part == "PLAN" else part for part in command))
    assert f"{plan}: {message}" in error


@pytest.mark.parametrize("planner", OWN_PLANNERS)
@pytest.mark.parametrize("rows", [10**9, 40_000_000], ids=["no rank", "not all"])
def test_memory_that_nothing_fits(fails, tmp_path, planner, rows):
    document = tables_document()
    for table in document["tables"]:
        table["num_embeddings"] = rows
    file = written(tmp_path / "tables.json", document)
    ranks = copy.deepcopy(topology_document(memory_bytes={"hbm": 10**8}))
    error = planned(fails, tmp_path, file, topology=ranks, planner=planner, code=3)
    assert " bytes" in error
    assert any(letter.isdigit() for letter in error)


@pytest.mark.parametrize(
    ("planner", "setting", "message"),
    [
        ("flexshard", "memory_multiplier=-2", "options.memory_multiplier: must be at least 0, got -2"),
        ("flexshard", "memory_budget_bytes=x", 'options.memory_budget_bytes: must be a whole number, got "x"'),
        ("flexshard", "memory_multiplier=nan", 'options.memory_multiplier: must be a number, got "nan"'),
        ("oper", "extra_memory_ratio=-1", "options.extra_memory_ratio: must be"),
        ("replica-groups", "num_groups=3", "options.num_groups: must divide the 4 ranks, got 3"),
        ("replica-groups", "num_groups=8", "options.num_groups: must divide the 4 ranks, got 8"),
        ("replica-groups", "num_groups=-1", "options.num_groups: must be at least 0, got -1"),
    ],
)
def test_options_that_make_no_sense(fails, tmp_path, planner, setting, message):
    file = written(tmp_path / "tables.json", tables_document())
    assert message in planned(fails, tmp_path, file, "--set", setting, planner=planner)


@pytest.mark.parametrize("rule", ["frontier", "paper"])
def test_a_budget_that_no_cut_is_within(fails, tmp_path, rule):
    file = written(tmp_path / "tables.json", tables_document())
    options = ("--set", f"rule={rule}", "--set", "memory_budget_bytes=-1000000")
    error = planned(fails, tmp_path, file, *options, planner="flexshard", code=3)
    assert "options.memory_budget_bytes: " in error
    assert " bytes over row-wise sharding, got -1,000,000" in error


@pytest.mark.parametrize("device", ["a/b", "..", "", "-", "a b", "gpu\n", "x" * 101, 3])
def test_a_device_that_is_no_key(fails, tmp_path, device):
    file = written(tmp_path / "tables.json", tables_document())
    error = planned(fails, tmp_path, file, topology=topology_document(device=device))
    assert f"{tmp_path / 'topology.json'}: device: must " in error
