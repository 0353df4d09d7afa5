"""Differences of plans: which tables, and how many bytes ranks have to receive."""

import re
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import (
    DType,
    ImpliedOrder,
    ReplicaGroups,
    RowOrder,
    RowRange,
    RowsBy,
    Shard,
    Split,
    Tier,
)
from autoshard.evaluation import evaluate
from autoshard.formats import read_json, write_plan
from autoshard.formats.row_orders import with_row_orders
from autoshard.report.plan_diff import diff_plans
from autoshard.results.plan_diff import DIFF, Change
from tests import builders as make

#: 8 rows of 4 columns in fp32 with a moment per row: 8 x (4 x 4 + 4) = 160 bytes.
TABLE_BYTES = 160


def table(name="t0", **fields):
    return make.table(name, 8, 4, **fields)


def plan(*shards, num_ranks=4, **fields):
    return make.plan(*shards, topology=make.topology(num_ranks), **fields)


def on(rank, of=None):
    return make.placed(of or table(), replicas=((rank,),))


def over(*ranks, **fields):
    return make.placed(table(), Tier.ROW_WISE, (ranks,), **fields)


def copies(*ranks):
    return make.placed(table(), Tier.DATA_PARALLEL, make.each(len(ranks)))


def columns(start, stop, rank):
    shard = Shard(table=table(), rows=RowRange(start=0, stop=8), columns=(start, stop))
    return on(rank, shard)


def rows(rank, start, stop, by=RowsBy.ACCESS_RANK, **fields):
    rows = RowRange(start=start, stop=stop, by=by)
    return on(rank, Shard(table=table(**fields), rows=rows, columns=(0, 4)))


def halves(digest, ranks=(0, 1), by=RowsBy.ACCESS_RANK):
    """Half of the rows on each rank, by the row order of that digest, or of the ids, or by one that is unknown."""
    order = ImpliedOrder.ASSUMED if digest is None else ImpliedOrder.BY_ID
    listed = {"t0": RowOrder(file="x.parquet", digest=digest, num_ordered=4)} if digest else {}
    shards = (rows(ranks[half], 4 * half, 4 * half + 4, by, row_order=order) for half in range(2))
    return plan(*shards, row_orders=listed)


@pytest.mark.parametrize(
    ("before", "after", "change", "received"),
    [
        ([on(0)], [on(1)], Change.MOVED, 160),
        ([on(0)], [over(0, 1, 2, 3)], Change.RESHARDED, 120),  # three ranks get a quarter each
        ([over(0, 1, 2, 3)], [on(0)], Change.RESHARDED, 120),
        ([over(0, 1, 2, 3)], [over(1, 0, 2, 3)], Change.MOVED, 80),  # two ranks swap their quarters
        # Each rank keeps a quarter of its quarter: 160 x 3/4.
        ([over(0, 1, 2, 3)], [over(0, 1, 2, 3, split=Split.CYCLIC)], Change.RESHARDED, 120),
        ([over(0, 1, 2, 3, split=Split.HASH)], [over(1, 0, 2, 3, split=Split.HASH)], Change.MOVED, 80),
        ([on(0)], [copies(0, 1, 2, 3)], Change.RESHARDED, 480),
        ([copies(0, 1, 2, 3)], [on(2)], Change.RESHARDED, 0),
        # Two columns with a moment per row of their own: 8 x (8 + 4) = 96 bytes; those of rank 0 stay.
        ([on(0)], [columns(0, 2, 0), columns(2, 4, 1)], Change.RESHARDED, 96),
        ([rows(0, 0, 2), rows(1, 2, 8)], [rows(0, 0, 4), rows(1, 4, 8)], Change.RESHARDED, 40),
        # The rows are in the order of their ids: each rank keeps its own.
        (
            [rows(0, 0, 4, RowsBy.INDEX), rows(1, 4, 8, RowsBy.INDEX)],
            [rows(0, 0, 4), rows(1, 4, 8)],
            Change.RESHARDED,
            0,
        ),
        # Their order is unknown, and taken as independent: of its 4 rows each rank keeps 4 x 4 / 8.
        (
            [rows(0, 0, 4, RowsBy.INDEX), rows(1, 4, 8, RowsBy.INDEX)],
            [rows(0, 0, 4, row_order=ImpliedOrder.ASSUMED), rows(1, 4, 8, row_order=ImpliedOrder.ASSUMED)],
            Change.RESHARDED,
            80,
        ),
    ],
)
def test_ranks_receive_what_they_do_not_hold_yet(before, after, change, received):
    found = diff_plans(plan(*before), plan(*after))
    assert [(one.table, one.change, one.received_bytes) for one in found.tables] == [("t0", change, received)]
    assert (found.received_bytes, found.num_alike) == (received, 0)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        (halves("a"), halves("b"), ("reordered", None)),
        (halves("a"), halves(""), ("reordered", None)),
        (halves("a"), halves(None), ("reordered", None)),
        (halves("a"), halves("b", ranks=(2, 3)), ("moved", None)),
        (halves("a"), halves("a"), None),
        (halves(""), halves(""), None),
        (halves(None), halves(None), None),
        (halves("a", by=RowsBy.INDEX), halves("b", by=RowsBy.INDEX), None),
        (plan(rows(0, 0, 8), row_orders=halves("a").row_orders), plan(rows(0, 0, 8)), None),  # all rows, in any order
    ],
)
def test_bytes_between_row_orders_that_are_not_at_hand_are_unknown(before, after, changed):
    found = diff_plans(before, after)
    assert [(one.change, one.received_bytes) for one in found.tables] == ([changed] if changed else [])
    assert found.received_bytes == (None if changed else 0)
    assert found.is_empty is (changed is None)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        # Each rank gets two rows for two others: 4 x 20 bytes.
        ([0, 1, 2, 3], [0, 1, 4, 5], ("reordered", 80)),
        ([0, 1, 2, 3], [3, 2, 1, 0], ("reordered", 0)),
        ([4, 5, 6, 7], [0, 1, 2, 3], ("reordered", 160)),
        ([4, 5, 6, 7], None, ("reordered", 160)),  # by id
        ([4, 5, 6, 7], [4, 5, 6, 7], None),
    ],
)
def test_row_orders_say_which_rows_ranks_receive(before, after, changed):
    orders = [{} if ids is None else {"t0": np.array(ids)} for ids in (before, after)]
    found = diff_plans(halves("a"), halves("" if after is None else "b"), *orders)
    assert [(one.change, one.received_bytes) for one in found.tables] == ([changed] if changed else [])


def test_tables_come_go_and_change_their_size():
    before = plan(on(0), on(0, table("old")), on(1, table("wide")))
    after = plan(on(0), on(0, table("new")), on(1, table("wide", dtype=DType.FP16)), batch_size=128)
    found = diff_plans(before, after)
    assert {one.table: (one.change, one.received_bytes) for one in found.tables} == {
        "new": (Change.ADDED, TABLE_BYTES),
        "wide": (Change.RESIZED, 8 * (4 * 2 + 4)),
        "old": (Change.REMOVED, 0),
    }
    assert [(one.name, one.before, one.after) for one in found.task] == [("batch_size", 64, 128)]
    assert found.num_alike == 1


def test_each_group_of_ranks_receives_its_copy():
    before = plan(on(0))
    # Groups of two ranks across the node: ranks 0 and 1 are number 0 of their groups.
    after = plan(on(0), replica_groups=ReplicaGroups(num_groups=2))
    assert diff_plans(before, after).received_bytes == TABLE_BYTES
    assert diff_plans(after, before).received_bytes == 0


def priced(one):
    return one.with_predicted(evaluate(one, make.costs()))


def test_prices_differ_by_step_part_and_rank():
    first, second = priced(plan(on(0), num_ranks=2)), priced(plan(on(1), num_ranks=2))
    found = diff_plans(first, second)
    assert [one.rank for one in found.ranks] == [0, 1]
    assert found.ranks[0].hbm_bytes_before == found.ranks[1].hbm_bytes_after == TABLE_BYTES
    assert found.is_within_intervals
    assert diff_plans(first, first).is_empty
    assert diff_plans(first, replace(first, predicted=None)).step_ms_after is None


def test_the_command_prints_both_plans_side_by_side(run, tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, made in zip(files, (priced(plan(on(0))), priced(plan(over(0, 1, 2, 3)))), strict=True):
        write_plan(made, file)
    out, _ = run("diff", *files)
    assert "Tables that differ: 1, held alike: 0; ranks would receive 120 B" in out
    assert "table_wise on 0" in out
    assert "row_wise on 0-3" in out
    (tmp_path / "diff.json").write_text(run("diff", *files, "--json")[0])
    assert DIFF.to_json(DIFF.read(tmp_path / "diff.json")) == read_json(tmp_path / "diff.json")
    assert run("diff", files[0], files[0])[0] == "The plans hold all 1 tables alike, at the same price.\n"


def test_the_command_reads_row_orders_beside_the_plans(run, tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, ids in zip(files, ([0, 1, 2, 3], [0, 1, 4, 5]), strict=True):
        write_plan(with_row_orders(halves(""), {"t0": np.array(ids)}, file), file)
    out, _ = run("diff", *files)
    assert "Tables that differ: 1, held alike: 0; ranks would receive 80 B\n" in out
    assert "reordered" in out
    (tmp_path / "b.rows-0.parquet").write_bytes((tmp_path / "a.rows-0.parquet").read_bytes())  # another than planned
    out, _ = run("diff", *files)
    assert "ranks would receive 0 B, and unknown bytes of 1 whose row orders are not at hand\n" in out
    assert re.search(r"t0 +reordered .* unknown", out)
    (tmp_path / "diff.json").write_text(run("diff", *files, "--json")[0])
    found = DIFF.read(tmp_path / "diff.json")
    assert (found.received_bytes, found.tables[0].received_bytes) == (None, None)
    assert "The plans hold all 1 tables alike" in run("diff", files[0], files[0])[0]
