"""Row orders: what tables say of them, files that list them, and plans that carry them."""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.cli import main
from autoshard.core import ImpliedOrder, RowOrder, RowsBy
from autoshard.core.errors import FormatError, InputError
from autoshard.formats import load_tables, read_plan, read_tables, tables_from_json, tables_to_json, write_tables
from autoshard.formats.row_orders import MovedOrders, read_counted_rows, read_row_orders, write_row_order

TABLE = {
    "name": "t",
    "num_embeddings": 100,
    "embedding_dim": 8,
    "dtype": "fp32",
    "pooling": "sum",
    "features": [{"name": "f", "pooling_factor": 2.0}],
    "access": {"kind": "zipf", "alpha": 1.2},
}


def document(**changes):
    return {"schema": "autoshard.tables/1", "batch_size": 64, "tables": [TABLE | changes]}


def read(folder, row_order):
    path = folder / "tables.json"
    path.write_text(json.dumps(document(row_order=row_order)), encoding="utf-8")
    return read_tables(path)


@pytest.mark.parametrize(
    ("value", "expected"), [("by_id", ImpliedOrder.BY_ID), ("assumed", ImpliedOrder.ASSUMED), (None, None)]
)
def test_orders_without_a_file(value, expected):
    tables = tables_from_json(document(**({} if value is None else {"row_order": value})))
    assert tables.tables[0].row_order is expected
    assert tables_from_json(tables_to_json(tables)) == tables
    assert tables.assuming_orders().tables[0].row_order is (expected or ImpliedOrder.ASSUMED)


def test_a_file_is_described_by_its_digest(tmp_path):
    order = write_row_order(tmp_path / "hot.parquet", np.array([7, 3, 99]))
    tables = read(tmp_path, {"file": "hot.parquet"})
    assert tables.tables[0].row_order == order == RowOrder(file="hot.parquet", digest=order.digest, num_ordered=3)
    for known in ({"digest": order.digest}, {"num_ordered": 3}):
        assert read(tmp_path, {"file": "hot.parquet", **known}) == tables
    write_tables(tables, tmp_path / "again.json")
    assert read_tables(tmp_path / "again.json") == tables
    assert tables.scaled(2).tables[0].row_order is None


@pytest.mark.parametrize(
    ("row_order", "message"),
    [
        ("by-id", r'^tables\[0\].row_order: must be one of by_id, assumed, got "by-id"'),
        ({"file": "none.parquet"}, r"^tables\[0\].row_order.file: none.parquet cannot be read: no such file"),
        ({"file": "../x"}, r"^tables\[0\].row_order.file: must be the name of a file in the same folder"),
        ({"file": "x", "digest": "md5"}, r"^tables\[0\].row_order.file: x cannot be read: no such file"),
        (
            {"file": "x", "digest": "sha256:" + "0" * 64, "num_ordered": 101},
            r"^tables\[0\].row_order.num_ordered: must be in \[1, 100\], got 101",
        ),
    ],
)
def test_what_is_no_order_is_refused(tmp_path, row_order, message):
    with pytest.raises(InputError) as error:
        read(tmp_path, row_order)
    assert re.search(message, str(error.value).split("tables.json: ", 1)[-1])


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"num_ordered": 4}, "row_order.num_ordered: must be 3, as hot.parquet has it, got 4"),
        ({"digest": "sha256:" + "0" * 64}, 'row_order.digest: must be "sha256:'),
        ({"digest": "md5"}, 'as hot.parquet has it, got "md5"'),
    ],
)
def test_what_is_said_of_a_file_has_to_be_so(tmp_path, stated, message):
    write_row_order(tmp_path / "hot.parquet", np.array([7, 3, 99]))
    with pytest.raises(InputError, match=message):
        read(tmp_path, {"file": "hot.parquet", **stated})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"row": [1, 100]}, "must hold different rows from 0 to 99"),
        ({"row": [-1, 1]}, "must hold different rows from 0 to 99"),
        ({"row": [1, 2, 1]}, "must hold different rows from 0 to 99"),
        ({"row": [1, None]}, "must hold different rows from 0 to 99"),
        ({"row": [1.0, 2.0]}, "must hold different rows from 0 to 99"),
        ({"row": []}, "must hold different rows from 0 to 99"),
        ({"id": [1, 2]}, "is no Parquet file with a column 'row'"),
        (pa.table([[1], [2]], names=["row", "row"]), "has 2 columns 'row'; names must differ"),
    ],
)
def test_files_of_other_rows_are_refused(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "hot.parquet")
    with pytest.raises(InputError, match=f"row_order.file: hot.parquet {message}"):
        read(tmp_path, {"file": "hot.parquet"})


def test_shares_that_are_there_twice_are_refused(tmp_path):
    path = tmp_path / "hot.parquet"
    pq.write_table(pa.table([[1], [0.5], [0.5]], names=["row", "share", "share"]), path)
    tables = read(tmp_path, {"file": path.name})
    with pytest.raises(FormatError) as raised:
        read_counted_rows(tables, tmp_path / "tables.json")
    assert str(raised.value) == f"{path}: row_orders.t: has 2 columns 'share'; names must differ"


def test_only_files_can_name_files():
    with pytest.raises(FormatError, match="can only be read from a file that lies beside"):
        tables_from_json(document(row_order={"file": "hot.parquet"}))


def test_bundled_tables_are_in_the_order_of_their_ids():
    for name in ("metasyn", "criteo-kaggle"):
        assert {table.row_order for table in load_tables(name).tables} == {ImpliedOrder.BY_ID}


def test_files_move_with_the_tables(tmp_path):
    write_row_order(tmp_path / "hot.parquet", np.array([7, 3]))
    tables = read(tmp_path, {"file": "hot.parquet"})
    (tmp_path / "plans").mkdir()
    assert MovedOrders(tables, tmp_path, tmp_path / "plan.json").named is tables
    assert MovedOrders(tables, tmp_path, None).named is tables
    moved = MovedOrders(tables, tmp_path, tmp_path / "plans" / "plan.json")
    assert moved.named.tables[0].row_order == replace(tables.tables[0].row_order, file="plan.rows-0.parquet")
    moved.copy()
    copy = tmp_path / "plans" / "plan.rows-0.parquet"
    assert copy.read_bytes() == (tmp_path / "hot.parquet").read_bytes()
    write_row_order(tmp_path / "hot.parquet", np.array([3, 7]))
    with pytest.raises(FormatError, match="is another file than was planned with"):
        moved.copy()


@pytest.fixture
def counted(tmp_path):
    """Tables that were imported from counts, with their row orders: the hottest rows have the highest ids."""
    (tmp_path / "counts").mkdir()
    counts = {"a": np.arange(4000) ** 3, "b": np.r_[np.zeros(10), np.arange(3000) ** 2]}
    for name, of_rows in counts.items():
        pq.write_table(pa.table({"count": of_rows.astype(np.int64)}), tmp_path / "counts" / f"{name}.parquet")
    options = ("--format", "row-counts", "--set", "num_samples=1000000000", "--row-orders")
    assert main(["import", str(tmp_path / "counts"), *options, "-o", str(tmp_path / "tables.json")]) == 0
    return tmp_path / "tables.json"


def test_imported_counts_give_row_orders(counted):
    a, b = read_tables(counted).tables
    assert (a.row_order.file, a.row_order.num_ordered) == ("tables.rows-0.parquet", 3999)
    assert (b.row_order.file, b.row_order.num_ordered) == ("tables.rows-1.parquet", 2999)
    ids = pq.read_table(counted.parent / "tables.rows-1.parquet")["row"].to_numpy()
    assert ids.tolist() == list(range(3009, 10, -1))


def test_plans_carry_the_orders_of_the_tables_that_they_cut(counted, tmp_path):
    plan_path = tmp_path / "plans" / "plan.json"
    plan_path.parent.mkdir()
    options = ("--topology", "cpu-4", "--planner", "oper", "--set", "threshold=0.1", "-o", str(plan_path))
    assert main(["plan", str(counted), *options]) == 0
    plan = read_plan(plan_path)
    cut = {one.shard.table.name for one in plan.shards if one.shard.rows.by is RowsBy.ACCESS_RANK}
    assert cut
    assert cut == set(plan.row_orders)
    orders = read_row_orders(plan, plan_path)
    assert orders["a"].tolist() == list(range(3999, 0, -1))
    for name in ("plans/again.json", "priced.json"):
        assert main(["evaluate", str(plan_path), "-o", str(tmp_path / name)]) == 0
        priced = read_plan(tmp_path / name)
        found = read_row_orders(priced, tmp_path / name)
        assert {table: ids.tolist() for table, ids in found.items()} == {
            table: ids.tolist() for table, ids in orders.items()
        }
        assert priced.row_orders == {table: priced.tables[table].row_order for table in cut}


@pytest.mark.parametrize("planner", ["oper", "flexshard", "auto"])
def test_tables_without_an_order_are_not_cut_by_access_rank_unless_told(tmp_path, planner, capfd):
    tables, plan_path = tmp_path / "tables.json", tmp_path / "plan.json"
    hot = [
        TABLE | {"name": f"t{index}", "features": [{"name": f"f{index}", "pooling_factor": 9.0}]} for index in (0, 1)
    ]
    hot = [one | {"num_embeddings": 400_000, "embedding_dim": 64} for one in hot]
    tables.write_text(json.dumps(document() | {"tables": hot, "batch_size": 4096}), encoding="utf-8")
    asked = ["plan", str(tables), "--topology", "cpu-4", "--planner", planner, "-o", str(plan_path)]

    def kinds():
        plan = read_plan(plan_path)
        return {one.shard.rows.by for one in plan.shards}, plan.provenance.models

    assert main(asked) == 0
    found, notes = kinds()
    assert found == {RowsBy.INDEX}
    assert "row_orders" not in notes
    assert main([*asked, "--assume-row-order"]) == 0
    found, notes = kinds()
    if planner == "oper":  # others may find a plan of whole tables faster
        assert RowsBy.ACCESS_RANK in found
    if RowsBy.ACCESS_RANK in found:
        assert "tables: t0, t1" in notes["row_orders"]
        assert "--row-orders" in notes["row_orders"]
    capfd.readouterr()
