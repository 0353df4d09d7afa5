"""Files with one fault: every command that reads them names the file, the field and the numbers in one line."""

import json
import math
import re
from copy import deepcopy

import pyarrow as pa
import pyarrow.parquet
import pytest

from autoshard.planners.registry import planner_names
from tests import builders as make

#: What reads a document; `FILE` is it.
READERS = {
    "tables": (
        "plan FILE --topology DOCUMENTS/topology.json --planner random -o out",
        "compare FILE --topology DOCUMENTS/topology.json --planners random --output-dir out --json",
        "import FILE -o out",
    ),
    "topology": (
        "plan DOCUMENTS/tables.json --topology FILE --planner random -o out",
        "compare DOCUMENTS/tables.json --topology FILE --planners random",
    ),
    "plan": ("evaluate FILE -o out", "show FILE --html out", "run FILE --nproc 2 --json", "replay FILE"),
}
#: In place of a value: the field is left out.
LEFT_OUT = object()


def curve(*knots):
    """An access curve of these points."""
    return {"kind": "curve", "knots": [list(knot) for knot in knots]}


KNOTS = "tables[1].access.knots: "
#: The document, a field of it or nothing for the whole text, what is put there or how it is changed, what is said.
FAULTS = [
    ("tables", "", "{", "is not JSON"),
    ("tables", "", "", "is not JSON"),
    ("tables", "", "3", "must be "),
    ("tables", "", b"\x80\x02}q\x00.", "is not UTF-8 text"),
    ("tables", "", "[" * 100_000, "is nested too deep"),
    ("tables", "", '{"schema": "autoshard.tables/1", "schema": "x"}', "is there twice"),
    ("tables", "schema", "autoshard.tables/9", "schema"),
    ("tables", "batch_size", "64", "batch_size"),
    ("tables", "tables", [], "tables"),
    ("tables", "tables.1.colour", 1, "tables[1].colour"),
    ("tables", "tables.1.dtype", LEFT_OUT, "tables[1].dtype: is missing"),
    ("tables", "tables.1.name", "a", '"a" is used twice'),
    ("tables", "tables.0.num_embeddings", -1, "tables[0].num_embeddings"),
    ("tables", "tables.0.features.0.pooling_factor", math.nan, "tables[0].features[0].pooling_factor"),
    ("tables", "tables.0.access.alpha", math.inf, "alpha"),
    *(
        ("tables", "tables.1.access", curve(*knots), said)
        for knots, said in [
            (((0, 0), (10, 0.5), (1000, 0.9)), f"{KNOTS}must end at cumulative probability 1, got 0.9"),
            (((0, 0), (10, 0.5), (1000, 1.5)), f"{KNOTS}must end at cumulative probability 1, got 1.5"),
            (((0, 0), (10, 1)), f"{KNOTS}must end at access rank 1000, the table's rows, got 10"),
            (((0, 0), (2000, 1)), "got 2000"),
            (((0, 0.1), (1000, 1)), f"{KNOTS}must start at [0, 0], got [0, 0.1] at knot 0"),
            (
                ((0, 0), (10, 0.9), (20, 0.8), (1000, 1)),
                f"{KNOTS}cumulative probabilities must not fall, got [20, 0.8] at knot 2",
            ),
            (((0, 0), (20, 0.8), (10, 0.9), (1000, 1)), f"{KNOTS}access ranks must rise, got [10, 0.9] at knot 2"),
            (((0, 0), (500, 0.1), (1000, 1)), "slopes must not rise, got [1000, 1] at knot 2"),
            (((0, 0),), f"{KNOTS}must hold 2 to"),
            (((0, 0), (1000, math.nan)), f"{KNOTS}must hold finite numbers only, got [1000, nan] at knot 1"),
        ]
    ),
    ("topology", "world_size", -4, "world_size: "),
    ("topology", "levels.0.size", 3, "levels[1].size: must be a whole multiple of the level inside it (3), got 4"),
    *(
        (
            "topology",
            f"levels.{level}.{collective}.bytes_per_s",
            value,
            f"levels[{level}].{collective}.bytes_per_s: must be a",
        )
        for level in (0, 1)
        for collective in ("all_to_all", "all_reduce")
        for value in (0, 0.0, -1.0, math.nan, math.inf, "fast", None)
    ),
    *(("topology", "device", value, "device: must ") for value in ("a/b", "..", "", "-", "a b", "gpu\n", "x" * 101, 3)),
    ("plan", "", '{"schema": "autoshard.plan/1', "is not JSON"),
    ("plan", "schema", "autoshard.tables/1", "schema"),
    ("plan", "shards.0.colour", 1, "shards[0].colour"),
    ("plan", "shards", lambda shards: shards[:1], "'b'"),
    ("plan", "shards", lambda shards: shards * 2, "shards"),
    ("plan", "shards.0.replicas", [[9]], "shards[0].replicas"),
    ("plan", "topology.memory_bytes.hbm", 10, "more than its 10 B"),
    ("plan", "predicted.balance", math.nan, "predicted.balance"),
    ("plan", "replica_groups.num_groups", 3, "replica_groups.num_groups: must divide the 4 ranks, got 3"),
    ("plan", "replica_groups.num_groups", 8, "replica_groups.num_groups: must divide the 4 ranks, got 8"),
    ("plan", "replica_groups.num_groups", 0, "replica_groups.num_groups: must be a whole number in [1, "),
]


def spoiled(document, place, value):
    """A document as bytes, with a field of it changed, or something else in its place."""
    if not place:
        return value if isinstance(value, bytes) else value.encode()
    *path, last = (int(step) if step.isdigit() else step for step in place.split("."))
    made = part = deepcopy(document)
    for step in path:
        part = part[step]
    if value is LEFT_OUT:
        del part[last]
    else:
        part[last] = value(part[last]) if callable(value) else value
    return json.dumps(made).encode()


def named(part):
    """The same in every process that collects."""
    return "changed" if callable(part) else "left out" if part is LEFT_OUT else str(part)[:40]


@pytest.mark.parametrize(("name", "place", "value", "said"), FAULTS, ids=named)
def test_a_fault(says, documents, tmp_path, name, place, value, said):
    file = tmp_path / f"{name}.json"
    content = spoiled(json.loads((documents / file.name).read_text()), place, value)
    file.write_bytes(content)
    for line in READERS[name]:
        error = says(line, 2, FILE=file)
        assert f"{file}: " in error
        assert said in error
    assert file.read_bytes() == content


#: Counts of the rows of a table of 1,000.
BAD_COUNTS = {
    "shorter": ([1] * 999, "access.file: must hold one count per row: the table has 1000, the file 999"),
    "longer": ([1] * 1001, "access.file: must hold one count per row: the table has 1000, the file 1001"),
    "negative": ([1] * 700 + [-3] * 300, "access.counts: must be finite and at least 0, got -3 in row 700"),
    "null": ([1] * 999 + [None], "access.counts: must be finite and at least 0, got null in row 999"),
    "not a number": ([math.nan] + [1.0] * 999, "access.counts: must be finite and at least 0, got nan in row 0"),
    "infinite": ([1.0] * 999 + [math.inf], "access.counts: must be finite and at least 0, got inf in row 999"),
    "all zero": ([0] * 1000, "access.counts: must have a positive sum, got 0"),
    "texts": (["1"] * 1000, "access.file: counts.parquet must have one column of numbers named count, has string"),
    "lists": ([[1]] * 1000, "access.file: counts.parquet must have one column of numbers named count, has list"),
}


@pytest.fixture
def counted(documents, tmp_path):
    """Writes tables of which the second has its counts in a file; returns their file."""

    def write(name):
        document = json.loads((documents / "tables.json").read_text())
        document["tables"][1]["access"] = {"kind": "counts", "file": name}
        file = tmp_path / "tables.json"
        file.write_text(json.dumps(document))
        return file

    return write


def write_counts(file, counts, column="count"):
    file.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pa.table({column: counts}), file)


@pytest.mark.parametrize(("counts", "said"), BAD_COUNTS.values(), ids=BAD_COUNTS)
def test_counts(says, counted, tmp_path, counts, said):
    write_counts(tmp_path / "counts.parquet", counts)
    file = counted("counts.parquet")
    assert f"{file}: tables[1].{said}" in says(READERS["tables"][0], 2, FILE=file)


def test_counts_under_another_name_or_none(says, counted, tmp_path):
    file, line = counted("counts.parquet"), READERS["tables"][0]
    assert "tables[1].access.file: there is no file counts.parquet beside tables.json" in says(line, 2, FILE=file)
    write_counts(tmp_path / "counts.parquet", [1] * 1000, column="lookups")
    assert "one column of numbers named count, has 0" in says(line, 2, FILE=file)


def test_a_folder_of_counts_that_is_too_short(says, counted, tmp_path):
    for number in range(3):
        write_counts(tmp_path / "counts" / f"{number}.parquet", [1] * 300)
    error = says(READERS["tables"][0], 2, FILE=counted("counts"))
    assert "one count per row: the table has 1000, the 3 files 900" in error


def test_imported_counts(says, tmp_path):
    file = tmp_path / "t.parquet"
    write_counts(file, [4, -1])
    line = "import FILE --format row-counts -o out"
    assert "options.num_samples: is missing" in says(line, 2, FILE=file)
    assert "options.num_samples: must be a whole number in [1, " in says(f"{line} --set num_samples=0", 2, FILE=file)
    error = says(f"{line} --set num_samples=10", 2, FILE=file)
    assert f"{file}: counts: must be finite and at least 0, got -1 in row 1" in error


#: All but those that need a trained model, or others' packages.
OWN_PLANNERS = sorted({*planner_names()} - {"policy", "torchrec"})


@pytest.mark.parametrize("planner", OWN_PLANNERS)
@pytest.mark.parametrize("rows", [10**9, 40_000_000], ids=["no rank", "not all"])
def test_memory_that_nothing_fits(says, documents, tmp_path, planner, rows):
    tables, topology = (json.loads((documents / f"{name}.json").read_text()) for name in ("tables", "topology"))
    for table in tables["tables"]:
        table["num_embeddings"] = rows
    topology["memory_bytes"]["hbm"] = 10**8
    for name, document in (("tables", tables), ("topology", topology)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    error = says(
        f"plan FOLDER/tables.json --topology FOLDER/topology.json --planner {planner} -o out", 3, FOLDER=tmp_path
    )
    assert re.search(make.AMOUNT, error)
