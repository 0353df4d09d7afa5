"""`autoshard drift` and `replan`: a plan on the access of today, and one near it for that."""

import json
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import Exchange, Provenance, RowRange, RowsBy, Shard, Tier
from autoshard.formats import read_json, read_plan, write_plan, write_tables
from autoshard.formats.row_orders import read_row_orders, write_row_order
from autoshard.results.plan_drift import DRIFT
from autoshard.results.replanned import REPLAN
from autoshard.validator import validate_plan
from tests import builders as make

NUM_ROWS, NUM_HOT = 100_000, 1_000


def hot_and_cold(table, rank):
    """The hottest rows on each of two ranks, all others on one."""
    hot, cold = (
        Shard(table=table, rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK), columns=(0, 64))
        for start, stop in ((0, NUM_HOT), (NUM_HOT, NUM_ROWS))
    )
    return make.placed(hot, Tier.DATA_PARALLEL, make.each(2)), make.placed(
        cold, replicas=((rank,),), exchange=Exchange.ROWS
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`plan.json`, whose hot rows have the lowest ids, and `today.json`, in which those of table `a` are others."""
    folder = tmp_path_factory.mktemp("drift")
    tables = [make.table(name, NUM_ROWS, 64, 20.0, alpha=1.2) for name in ("a", "b")]
    shards = [placed for rank, table in enumerate(tables) for placed in hot_and_cold(table, rank)]
    topology = make.topology(2, bytes_per_s=1e8)
    plan = make.plan(*shards, topology=topology, tables=make.tables(*tables, batch_size=4096))
    write_plan(plan, folder / "plan.json")
    write_tables(plan.tables, folder / "same.json")
    orders = [(np.arange(NUM_ROWS) + shift) % NUM_ROWS for shift in (NUM_ROWS // 2, 0)]
    today = tuple(
        replace(table, row_order=write_row_order(folder / f"today.rows-{number}.parquet", order[:20_000]))
        for number, (table, order) in enumerate(zip(tables, orders, strict=True))
    )
    write_tables(replace(plan.tables, tables=today), folder / "today.json")
    return folder


def test_the_step_the_hot_rows_and_the_worst_tables_are_told(run, folder, tmp_path):
    out, _ = run("drift", folder / "plan.json", "--access", folder / "today.json")
    assert "as planned, " in out.splitlines()[0]
    assert "forward exchange" in out
    (tmp_path / "drift.json").write_text(
        run("drift", folder / "plan.json", "--access", folder / "today.json", "--json")[0]
    )
    found = DRIFT.read(tmp_path / "drift.json")
    assert DRIFT.to_json(found) == read_json(tmp_path / "drift.json")
    assert [(one.table, one.is_by_rows, one.hot_rows) for one in found.tables] == [("a", True, 1000), ("b", True, 1000)]
    drifted, same = found.tables
    assert drifted.distance > 0.8
    assert drifted.hot_share_now < 0.1 < 0.7 < drifted.hot_share_planned
    assert same.distance == pytest.approx(0, abs=0.005)
    assert same.hot_share_now == pytest.approx(same.hot_share_planned, rel=1e-3)
    assert found.change > 0.1


def test_nothing_changed_on_the_access_that_was_planned_for(run, folder):
    out, _ = run("drift", folder / "plan.json", "--access", folder / "same.json", "--fail-above", "0.01")
    assert "+0.0%" in out


def test_a_longer_step_fails_a_check_of_it(run, folder):
    out, _ = run("drift", folder / "plan.json", "--access", folder / "today.json", "--fail-above", "0.1", code=1)
    assert "on today's access" in out


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("replan nothing.json", "nothing.json: cannot be read"),
        ("replan plan.json --access nothing.json", "nothing.json: cannot be read"),
        ("replan plan.json --topology nowhere", "nowhere"),
        ("replan plan.json --topology cpu-4", "topology: must have the plan's 2 ranks, has 4"),
        ("replan plan.json --horizon 0", "'--horizon': must be a number above 0, got 0"),
        ("replan plan.json --least-gain 2", "'--least-gain'"),
        ("replan plan.json --set nothing=1", "options.nothing: unknown option"),
        ("replan plan.json --time-limit 0", "'--time-limit'"),
        ("drift plan.json", "Missing option '--access'"),
        ("drift nothing.json --access today.json", "nothing.json: cannot be read"),
        ("drift plan.json --access nothing.json", "nothing.json: cannot be read"),
        ("drift plan.json --access DOCUMENTS/tables.json", 'access: must have the plan\'s tables; "a" has 1,000 rows'),
        ("drift plan.json --access today.json --fail-above 2", "'--fail-above': must be a number above 0 and up to 1"),
    ],
)
def test_bad_input_is_one_line(says, folder, line, text):
    words = [str(folder / word) if word in ("plan.json", "today.json") else word for word in line.split()]
    assert text in says(" ".join(words), 2)


SEARCH = ("--set", "steps=50", "--time-limit", "60")


def test_a_plan_for_today_is_written_with_its_row_orders(run, folder, tmp_path):
    new = tmp_path / "new.json"
    files = (folder / "plan.json", "--access", folder / "today.json", "-o", new)
    out, err = run("replan", *files, *SEARCH)
    assert out.startswith("Changed: moving ")
    assert f"Wrote {new}" in err
    plan = read_plan(new)
    validate_plan(plan)
    assert "replanned" in plan.provenance.models
    orders = read_row_orders(plan, new)
    cut = {placed.shard.table.name for placed in plan.shards if placed.shard.rows.by is RowsBy.ACCESS_RANK}
    assert set(orders) == cut
    assert all(table.row_order.file.startswith("new.rows-") for table in plan.tables.tables)
    # On the access that it was made for, it costs what it says.
    drift = DRIFT.from_json(json.loads(run("drift", new, "--access", folder / "today.json", "--json")[0]))
    assert drift.step_ms_now.value == pytest.approx(plan.predicted.step_ms.value, rel=0.01)
    assert drift.tables[0].distance < 0.01


def test_a_plan_that_was_refined_or_made_by_another_version_is_planned_anew_with_the_options_that_remain(
    run, folder, tmp_path
):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    options = {"replay_refine": 2, "of_another_version": 7, "sharding_types": "table_wise,row_wise"}
    made = Provenance(planner="auto", version="0.1.0", options=options)
    write_plan(replace(read_plan(folder / "plan.json"), provenance=made), old)
    assert run("replan", old, "--access", folder / "today.json", "-o", new, *SEARCH)[0].startswith("Changed: ")
    assert read_plan(new).provenance.options["sharding_types"] == "table_wise,row_wise"


def test_an_option_of_the_plan_that_is_not_accepted_is_named_and_can_be_set(run, folder, tmp_path):
    old = tmp_path / "old.json"
    made = Provenance(planner="auto", version="0.1.0", options={"sharding_types": "of_another_version"})
    write_plan(replace(read_plan(folder / "plan.json"), provenance=made), old)
    assert "options.sharding_types: must be one of" in run("replan", old, *SEARCH, code=2)[1]
    assert "Predicted step" in run("replan", old, *SEARCH, "--set", "sharding_types=table_wise")[0]


def test_what_does_not_pay_is_told_and_the_older_plan_written(run, folder, tmp_path):
    best, again = tmp_path / "best.json", tmp_path / "again.json"
    run("replan", folder / "plan.json", "--access", folder / "today.json", "-o", best, *SEARCH)
    files = (best, "--access", folder / "today.json", "-o", again)
    found = REPLAN.from_json(json.loads(run("replan", *files, *SEARCH, "--horizon", "7", "--json")[0]))
    assert (found.is_changed, found.horizon_steps) == (False, 7)
    old, written = read_plan(best), read_plan(again)
    assert written.predicted == old.predicted
    assert [one.replicas for one in written.shards] == [one.replicas for one in old.shards]
    assert "Stays: " in run("replan", *files, *SEARCH)[0]


def test_a_row_order_that_is_not_there_is_named(says, folder, tmp_path):
    lone = tmp_path / "lone"
    lone.mkdir()
    (lone / "today.json").write_bytes((folder / "today.json").read_bytes())
    error = says(f"drift {folder}/plan.json --access {lone}/today.json", 2)
    assert "today.rows-0.parquet" in error
    assert "row_orders.a" in error
