"""Per-row counts in Parquet: any layout of files and row groups, little memory, and faults by row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from autoshard.core.errors import FormatError, InputError, InvalidOptionError, InvalidTableError
from autoshard.formats import import_tables
from autoshard.formats.documents.row_counts import read_row_counts
from tests.builders import profile_of

COUNTS = np.random.default_rng(3).zipf(1.3, 5000).clip(max=10**12)


def write(path, counts, *, column="count", **layout):
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pa.table({column: counts}), path, **layout)
    return path


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"row_group_size": 1},
        {"row_group_size": 777},
        {"use_dictionary": False, "compression": "none", "data_page_size": 64},
        {"compression": "zstd", "data_page_version": "2.0"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [pa.int64(), pa.uint64(), pa.float64()])
def test_any_layout_of_a_file_gives_the_profile_of_its_counts(tmp_path, layout, dtype):
    file = write(tmp_path / "counts.parquet", pa.array(COUNTS, dtype), **layout)
    assert read_row_counts(file, num_rows=len(COUNTS)).profile() == profile_of(COUNTS)


def test_a_folder_is_one_table_and_other_columns_and_files_do_not_count(tmp_path):
    for number, part in enumerate(np.split(COUNTS, [0, 17, 4000])):
        rows = {"id": np.arange(len(part)), "count": part}
        pyarrow.parquet.write_table(pa.table(rows), tmp_path / f"part-{number}.parquet")
    write(tmp_path / "_metadata.parquet", ["no counts"])
    write(tmp_path / ".hidden.parquet", ["no counts"])
    (tmp_path / "_SUCCESS").touch()
    shares = []
    histogram = read_row_counts(tmp_path, num_rows=len(COUNTS), advance=shares.append)
    assert histogram.profile() == profile_of(COUNTS)
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ([1, 2, -7], InvalidTableError, "counts: must be finite and at least 0, got -7 in row 5"),
        ([1.0, np.nan], InvalidTableError, "counts: must be finite and at least 0, got nan in row 4"),
        ([1, None, 3], InvalidTableError, "counts: must be finite and at least 0, got null in row 4"),
        (["a"], FormatError, "b.parquet must have one column of numbers named count, has string"),
        ([True], FormatError, "b.parquet must have one column of numbers named count, has bool"),
        ([[1]], FormatError, "b.parquet must have one column of numbers named count, has list"),
    ],
)
def test_faults_are_named_with_file_or_row(tmp_path, counts, error, message):
    write(tmp_path / "counts" / "a.parquet", [5, 6, 7])
    write(tmp_path / "counts" / "b.parquet", counts)
    with pytest.raises(error, match=message):
        read_row_counts(tmp_path / "counts")


@pytest.mark.parametrize(("num_rows", "lengths"), [(4, "2 files 5"), (6, "2 files 5")])
def test_a_folder_shorter_or_longer_than_the_table(tmp_path, num_rows, lengths):
    write(tmp_path / "a.parquet", [5, 6, 7])
    write(tmp_path / "b.parquet", [-1, -1])  # looked at only when the length is right
    with pytest.raises(FormatError, match=f"one count per row: the table has {num_rows}, the {lengths}"):
        read_row_counts(tmp_path, num_rows=num_rows)


def test_what_is_no_file_of_counts(tmp_path):
    with pytest.raises(FormatError, match=r"holds no \.parquet files"):
        read_row_counts(tmp_path)
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(FormatError, match="must be a regular file, got a pipe"):
        read_row_counts(tmp_path / "pipe.parquet")
    content = write(tmp_path / "cut.parquet", COUNTS).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(FormatError, match="no readable Parquet file"):
        read_row_counts(tmp_path / "cut.parquet")


class TestImporting:
    def test_files_and_folders_within_a_folder_are_tables(self, tmp_path):
        write(tmp_path / "users.parquet", COUNTS)
        for number, part in enumerate(np.split(COUNTS, [2000])):
            write(tmp_path / "items.parquet" / f"{number}.parquet", part)
        (tmp_path / "empty").mkdir()
        tables = import_tables(tmp_path, "row-counts", num_samples=10**9, embedding_dim=16, batch_size=256)
        items, users = tables.tables
        assert (items.name, users.name, tables.batch_size) == ("items", "users", 256)
        for table in (items, users):
            assert table.access == profile_of(COUNTS)
            assert (table.num_embeddings, table.embedding_dim) == (len(COUNTS), 16)
            assert table.pooling_factor == pytest.approx(COUNTS.sum() / 10**9)

    def test_a_file_is_one_table(self, tmp_path):
        tables = import_tables(write(tmp_path / "t.parquet", [3, 1]), "row-counts", num_samples=2)
        assert [(table.name, table.pooling_factor) for table in tables.tables] == [("t", 2.0)]

    def test_the_number_of_samples_is_needed(self, tmp_path):
        with pytest.raises(InvalidOptionError, match=r"options\.num_samples: is missing"):
            import_tables(write(tmp_path / "t.parquet", [3, 1]), "row-counts")

    @pytest.mark.parametrize(("counts", "message"), [([], "1 to"), ([0, 0], "positive sum, got 0"), ([-1], "row 0")])
    def test_faults_name_the_file(self, tmp_path, counts, message):
        write(tmp_path / "good.parquet", [3, 1])
        bad = write(tmp_path / "table.parquet", pa.array(counts, pa.int64()))
        with pytest.raises(InputError, match=message) as caught:
            import_tables(tmp_path, "row-counts", num_samples=1)
        assert caught.value.source == str(bad)

    def test_a_folder_without_tables(self, tmp_path):
        with pytest.raises(FormatError, match=r"holds no \.parquet files"):
            import_tables(tmp_path, "row-counts", num_samples=1)
        for nothing in (tmp_path / "nothing", "no\0thing"):
            with pytest.raises(FormatError, match="cannot be read"):
                import_tables(nothing, "row-counts", num_samples=1)


#: Reads a path in a process of its own and says by how much its peak memory grew.
_READER = """
import json, resource, sys
from pathlib import Path
import pyarrow.parquet
from autoshard.formats.documents.row_counts import read_row_counts
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
histogram = read_row_counts(Path(sys.argv[1]))
histogram.profile()
print(json.dumps({"rows": histogram.num_rows, "grown": peak() - before}))
"""


def read_apart(path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _READER, str(path)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)


def test_a_row_group_is_not_held_as_a_whole(tmp_path):
    num_rows = 24_000_000
    counts = pa.array(np.arange(num_rows) % 70_000)
    file = write(tmp_path / "one.parquet", counts, row_group_size=num_rows, use_dictionary=False, compression="none")
    assert pyarrow.parquet.ParquetFile(file).num_row_groups == 1
    seen = read_apart(file)
    assert seen["rows"] == num_rows
    # The column takes 192 MB, as the file does. Measured: 60 to 75 MB, most of it pyarrow's and the chunk's.
    assert seen["grown"] < 120e6 < file.stat().st_size


@pytest.mark.slow
def test_billions_of_rows_take_no_more_memory(tmp_path):
    """2.5 billion rows, 25 names of one file of 100 million: 69 s and 73 MiB on a core of a Xeon, November 2026."""
    rng = np.random.default_rng(0)
    with pyarrow.parquet.ParquetWriter(tmp_path / "00.parquet", pa.schema([("count", pa.int64())])) as writer:
        for _ in range(100):
            ranks = rng.integers(1, 2_500_000_001, 1_000_000).astype(np.float64)
            writer.write_table(pa.table({"count": rng.poisson(1e9 * ranks**-1.05)}))
    for number in range(1, 25):
        os.link(tmp_path / "00.parquet", tmp_path / f"{number:02d}.parquet")
    seen = read_apart(tmp_path)
    assert seen["rows"] == 2_500_000_000
    assert seen["grown"] < 256e6
