"""Files of training samples: read in blocks from any place, with what is no sample counted and named."""

import gzip
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.core import Feature
from autoshard.core.errors import FormatError, InputError
from autoshard.formats import sample_files
from autoshard.formats.sample_files import FilePlace, open_samples
from tests import builders as make

CRITEO_TABLES = make.tables(*(make.table(f"c{index}", 1000) for index in range(26)))
TABLES = make.tables(make.table("a", 50), make.table("b", 50))


def criteo_line(label="1", counts=("3",) * 13, categories=("0000002a",) * 26):
    return "\t".join([label, *counts, *categories])


def write_parquet(path, **columns):
    values = {"label": [0, 1, 1], "int_0": [0.5, None, 2.0], "a_f": [1, None, 49], "b_f": [[1, 2], [], None], **columns}
    table = pa.table({name: value for name, value in values.items() if value is not None})
    pq.write_table(table, path, row_group_size=2)
    return path


def read(path, tables=CRITEO_TABLES, num_dense=13, begin=None):
    files = open_samples(path)
    files.check(tables, num_dense)
    return list(files.blocks(tables, num_dense, begin or FilePlace()))


def test_criteos_counts_become_logarithms_and_categories_rows(tmp_path):
    counts = ("", "0", "-2", "9", *("1",) * 9)
    categories = ("", "ffffffff", "7", *("000003e9",) * 23)
    (tmp_path / "day_0").write_text(criteo_line("0", counts, categories) + "\n", encoding="utf-8")
    (block,) = read(tmp_path / "day_0")
    (row,) = block.rows.to_pylist()
    assert row["label"] == 0
    assert [row[f"int_{index}"] for index in range(4)] == pytest.approx([0, 0, 0, math.log(10)])
    assert [row[f"c{index}_f"] for index in range(4)] == [None, 0xFFFFFFFF % 1000, 7, 1]


def test_lines_that_are_no_samples_are_counted_and_the_first_is_named(tmp_path):
    lines = [
        criteo_line(),
        "1\t2",
        "",
        criteo_line(label="x"),
        criteo_line(counts=("1.5", *("3",) * 12)),
        criteo_line(categories=("\x1b[2J", *("1",) * 25)),
        criteo_line(categories=("caf\xe9", *("1",) * 25)),
        criteo_line(),
    ]
    (tmp_path / "day_0").write_text("\n".join(lines), encoding="latin-1")
    (block,) = read(tmp_path / "day_0")
    assert (len(block.rows), block.num_bad) == (2, 6)
    assert block.first_bad == f"{tmp_path}/day_0: line 2: must have 40 columns, got 2"
    assert block.after == FilePlace(0, len("\n".join(lines)), 8)
    (tmp_path / "day_0").write_text("\n".join(lines[3:]), encoding="latin-1")
    assert read(tmp_path / "day_0")[0].first_bad == f'{tmp_path}/day_0: line 1: label must be 0 or 1, got "x"'
    (tmp_path / "day_0").write_text("\n".join(lines[5:]), encoding="latin-1")
    first_bad = read(tmp_path / "day_0")[0].first_bad
    assert first_bad.startswith(f"{tmp_path}/day_0: line 1: c0_f must be up to 8 hexadecimal digits, got ")
    assert first_bad.isprintable()


@pytest.mark.parametrize("name", ["day_0", "clicks.tsv.gz"])
def test_reading_goes_on_at_the_end_of_any_block(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sample_files, "_BLOCK_BYTES", 700)
    text = "".join(criteo_line(categories=(f"{index:x}",) * 26) + "\n" for index in range(40)).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    blocks = read(tmp_path / name)
    assert len(blocks) > 3
    whole = pa.concat_tables([block.rows for block in blocks])
    assert whole["c0_f"].to_pylist() == list(range(40))
    for number, block in enumerate(blocks):
        rest = read(tmp_path / name, begin=block.after)
        assert rest == blocks[number + 1 :]


def test_days_come_in_the_order_of_their_numbers(tmp_path):
    for day in (10, 2, 0):
        (tmp_path / f"day_{day}").write_text(criteo_line(categories=(f"{day:x}",) * 26), encoding="utf-8")
    (tmp_path / "notes.md").write_text("no samples", encoding="utf-8")
    blocks = read(tmp_path)
    assert [block.rows["c0_f"][0].as_py() for block in blocks] == [0, 2, 10]
    files = open_samples(tmp_path)
    assert [files.share_before(FilePlace(number)) for number in range(4)] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_parquet_has_ids_and_lists_of_ids_in_row_groups(tmp_path):
    path = write_parquet(tmp_path / "clicks.parquet")
    first, second = read(path, TABLES, 1)
    assert first.rows.to_pylist() == [
        {"label": 0.0, "int_0": 0.5, "a_f": 1, "b_f": [1, 2]},
        {"label": 1.0, "int_0": 0.0, "a_f": None, "b_f": []},
    ]
    assert (first.after, second.after) == (FilePlace(0, 1, 2), FilePlace(0, 2, 3))
    assert read(path, TABLES, 1, begin=first.after) == [second]
    assert open_samples(path).share_before(first.after) == pytest.approx(2 / 3)


WHOLE = pa.int64()


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (pa.array([1, None, 3], pa.uint8()), [1, None, 3]),
        (pa.array([[1, None, 3], None, [None]], pa.list_(pa.int32())), [[1, 3], [], []]),
        (pa.array([[1, 2], [], [2**40]], pa.large_list(WHOLE)), [[1, 2], [], [2**40]]),
        (pa.array([[1, 2], [3, None], None], pa.list_(WHOLE, 2)), [[1, 2], [3], []]),
    ],
)
def test_ids_are_numbers_or_lists_without_those_that_are_missing(tmp_path, ids, found):
    first, second = read(write_parquet(tmp_path / "clicks.parquet", a_f=ids), TABLES, 1)
    rows = pa.concat_tables([first.rows, second.rows])
    assert rows["a_f"].type == (WHOLE if found[0] == 1 else pa.large_list(WHOLE))
    assert rows["a_f"].to_pylist() == found


def test_a_column_is_the_ids_of_all_tables_that_share_it(tmp_path):
    tables = make.tables(
        *(make.table(name, 50, features=(Feature(name=f"a_f@{name}", pooling_factor=1.0),)) for name in "tu")
    )
    path = write_parquet(tmp_path / "clicks.parquet")
    first, _ = read(path, tables, 1)
    assert first.rows.column_names == ["label", "int_0", "a_f@t", "a_f@u"]
    assert first.rows["a_f@t"].to_pylist() == first.rows["a_f@u"].to_pylist() == [1, None]
    both, _ = read(write_parquet(path, **{"a_f@t": [7, 8, 9]}), tables, 1)
    assert (both.rows["a_f@t"].to_pylist(), both.rows["a_f@u"].to_pylist()) == ([7, 8], [1, None])
    with pytest.raises(InputError, match=r'has no column "a_f@t"'):
        read(write_parquet(path, a_f=None), tables, 1)


def test_dense_features_are_as_many_as_all_files_have_without_a_gap(tmp_path):
    path = write_parquet(tmp_path / "clicks.parquet", int_1=[0.0] * 3, int_2=[1] * 3, int_x=[1] * 3, int_99=[1] * 3)
    assert open_samples(path).num_dense == 3
    (tmp_path / "clicks").mkdir()
    for number, columns in enumerate(({"int_1": [1] * 3, "int_2": [1] * 3}, {"int_1": [1] * 3})):
        write_parquet(tmp_path / f"clicks/{number}.parquet", **columns)
    assert open_samples(tmp_path / "clicks").num_dense == 2
    assert open_samples(write_parquet(path, int_0=None)).num_dense == 1  # which is missing, and is named then
    (tmp_path / "day_0").write_text(criteo_line(), encoding="utf-8")
    assert open_samples(tmp_path / "day_0").num_dense == 13


def test_rows_without_a_label_are_left_out(tmp_path):
    path = write_parquet(tmp_path / "clicks.parquet", label=[0, 7, None])
    first, second = read(path, TABLES, 1)
    assert (len(first.rows), first.num_bad, len(second.rows), second.num_bad) == (1, 1, 0, 1)
    assert first.first_bad == f"{path}: row 1: label must be 0 or 1, got 7.0"
    assert second.first_bad == f"{path}: row 2: label must be 0 or 1, got None"


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"b_f": None}, 'has no column "b_f"'),
        ({"int_0": None}, 'has no column "int_0"'),
        ({"a_f": ["x", "y", "z"]}, 'column "a_f" must be whole numbers or lists of these, got string'),
        ({"label": ["0", "1", "1"]}, 'column "label" must be a number, got string'),
    ],
)
def test_a_column_that_is_missing_is_named_before_anything_is_read(tmp_path, columns, text):
    path = write_parquet(tmp_path / "clicks.parquet", **columns)
    with pytest.raises(InputError) as raised:
        open_samples(path).check(TABLES, 1)
    assert str(raised.value) == f"{path}: data: {text}"


@pytest.mark.parametrize("name", ["label", "int_0", "b_f"])
def test_a_column_that_is_there_twice_is_named(tmp_path, name):
    path = write_parquet(tmp_path / "clicks.parquet")
    table = pq.read_table(path)
    pq.write_table(table.append_column(name, table[name]), path)
    with pytest.raises(InputError) as raised:
        open_samples(path).check(TABLES, 1)
    assert str(raised.value) == f'{path}: data: has 2 columns "{name}"; names must differ'
    pq.write_table(table.append_column("other", table[name]).append_column("other", table[name]), path)
    assert len(read(path, TABLES, 1)) == 1  # what is not read may be there twice


def test_paths_without_samples_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"^data: is not there: .*nowhere$"):
        open_samples(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds no files of samples"):
        open_samples(tmp_path)
    (tmp_path / "day_0").touch()
    (tmp_path / "day_1.parquet").touch()
    with pytest.raises(InputError, match=r"holds Parquet and text: use one of the two"):
        open_samples(tmp_path)
    with pytest.raises(FormatError, match=r"day_1.parquet: cannot be read"):
        open_samples(tmp_path / "day_1.parquet").check(TABLES, 1)
    with pytest.raises(InputError, match=r"day_0: data: Criteo's lines have 26 categories, the plan's model has 2"):
        open_samples(tmp_path / "day_0").check(TABLES, 13)
    with pytest.raises(InputError, match=r"have 13 dense features, the plan's model has 4"):
        open_samples(tmp_path / "day_0").check(CRITEO_TABLES, 4)
    (tmp_path / "torn.tsv.gz").write_bytes(gzip.compress(b"1\t2\n" * 1000)[:-20])
    with pytest.raises(FormatError, match=r"torn.tsv.gz: cannot be read"):
        read(tmp_path / "torn.tsv.gz")
    whole = bytearray(gzip.compress(criteo_line().encode()))
    whole[10] = 0xFF  # of no kind of block
    (tmp_path / "torn.tsv.gz").write_bytes(whole)
    with pytest.raises(FormatError, match=r"torn.tsv.gz: cannot be read: Error -3 while decompressing data"):
        read(tmp_path / "torn.tsv.gz")
