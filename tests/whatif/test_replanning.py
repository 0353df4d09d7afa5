"""Plans near an older one: what pays for its way is changed, all else stays."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import Exchange, GradSync, Pooling, RowRange, RowsBy, Shard, Split, Tier
from autoshard.core.access.counted import CountedRows
from autoshard.core.access.orders import BY_ID
from autoshard.core.errors import InvalidOptionError, InvalidPlanError
from autoshard.evaluation import AlphaBetaComm, evaluate
from autoshard.evaluation.drift import AccessedPlan, planned_rows
from autoshard.evaluation.migration import migration
from autoshard.planners.planner import PlanRequest
from autoshard.validator import validate_plan
from autoshard.whatif.replanning import replan
from tests import builders as make

NUM_ROWS, NUM_HOT, NUM_RANKS = 100_000, 2_000, 4
ROTATED = (np.arange(NUM_ROWS) + NUM_ROWS // 2) % NUM_ROWS
SLOW = {"bytes_per_s": 2e7}
#: Steps: enough to move all tables, the hot rows of the drifted ones, those of the one with few, and none.
HORIZONS = (1e6, 5, 0.5, 0.3)


def table(name, **fields):
    return make.table(name, NUM_ROWS, 32, 8.0, alpha=1.3, **fields)


def hot_and_cold(of, num_hot=NUM_HOT):
    """The hottest rows on every rank, the others dealt to all."""
    hot, cold = (
        Shard(table=of, rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK), columns=(0, 32))
        for start, stop in ((0, num_hot), (num_hot, NUM_ROWS))
    )
    everywhere = make.placed(hot, Tier.DATA_PARALLEL, make.each(NUM_RANKS), grad_sync=GradSync.ALL_GATHER)
    ranks = tuple(range(NUM_RANKS))
    return everywhere, make.placed(cold, Tier.ROW_WISE, (ranks,), split=Split.CYCLIC, exchange=Exchange.ROWS)


def a_plan(num_tables=2):
    shards = [placed for number in range(num_tables) for placed in hot_and_cold(table(f"t{number}"))]
    return make.plan(*shards, batch_size=1024, topology=make.topology(NUM_RANKS, **SLOW))


def accessed(plan, **orders):
    """The plan where these tables have another order of their rows today."""
    rows_now = {one.name: CountedRows.of_order(one.access, orders.get(one.name, BY_ID)) for one in plan.tables.tables}
    return AccessedPlan(plan=plan, now=plan.tables, planned=planned_rows(plan, {}), rows_now=rows_now)


def request(plan, **fields):
    return PlanRequest(
        tables=plan.tables, topology=plan.topology, costs=make.costs(), options={"steps": 100, "policy": False},
        time_limit_s=60.0, **fields,
    )  # fmt: skip


def replanned(one, *, horizon_steps=1e4, least_gain=0.02, **fields):
    return replan(one, request(one.plan, **fields), horizon_steps=horizon_steps, least_gain=least_gain)


@pytest.fixture(scope="module")
def best():
    """A plan that the planner cannot improve."""
    first = replanned(accessed(a_plan()))
    return first.plan


def test_a_plan_of_the_same_access_stays(best):
    found = replanned(accessed(best))
    assert not found.figures.is_changed
    assert found.plan is best
    assert found.figures.gain <= 0.02


class TestDrifted:
    @pytest.fixture(scope="class")
    @classmethod
    def found(cls):
        one = accessed(a_plan(), t0=ROTATED)
        return one, replanned(one)

    def test_what_pays_is_changed(self, found):
        one, new = found
        validate_plan(new.plan)
        figures = new.figures
        assert figures.is_changed
        assert figures.step_ms_before == evaluate(one.today, make.costs()).step_ms
        assert figures.step_ms_after == new.plan.predicted.step_ms
        assert figures.gain > 0.02
        assert figures.pays_off_after_steps * (figures.step_ms_before.value - figures.step_ms_after.value) == (
            pytest.approx(figures.migration_ms)
        )
        assert figures.pays_off_after_steps < figures.horizon_steps == 1e4

    def test_what_moves_is_what_ranks_lack(self, found):
        one, new = found
        moves = migration(one.plan, new.plan, {}, new.orders)
        assert new.figures.migration_bytes == pytest.approx(moves.num_bytes)
        assert new.figures.migration_ms == pytest.approx(moves.ms(new.plan, AlphaBetaComm()))
        assert {moved.table: moved.received_bytes for moved in new.figures.tables} == pytest.approx(moves.bytes_of)

    def test_todays_rows_are_the_hot_ones(self, found):
        _, new = found
        assert new.orders["t0"][:5].tolist() == ROTATED[:5].tolist()
        assert "t1" not in new.orders


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"horizon_steps": 0.1}, "pays off after"),
        ({"least_gain": 100.0}, "shorter, and has to be more than 10000.0%"),
    ],
)
def test_what_does_not_pay_stays(settings, reason):
    one = accessed(a_plan(), t0=ROTATED)
    found = replanned(one, **settings)
    assert not found.figures.is_changed
    assert reason in found.figures.reason or "no plan was found" in found.figures.reason
    assert found.plan is one.plan
    assert found.orders == {}


def test_the_shorter_the_horizon_the_less_moves():
    one = accessed(a_plan(4), t0=ROTATED, t1=np.roll(np.arange(NUM_ROWS), 3))
    found = [replanned(one, horizon_steps=horizon, least_gain=0.0) for horizon in HORIZONS]
    moved = [new.figures.migration_bytes if new.figures.is_changed else 0.0 for new in found]
    assert moved[0] > moved[1] > moved[2] > moved[3] == 0
    assert [len(new.figures.tables) for new in found] == [4, 2, 1, 0]
    for new, horizon in zip(found, HORIZONS, strict=True):
        figures = new.figures
        cost = figures.step_ms_after.value + figures.migration_ms / horizon
        assert (cost < figures.step_ms_before.value) == figures.is_changed


def test_rows_that_are_no_longer_listed_keep_their_order_behind_todays():
    plan = a_plan(1)
    one = accessed(plan, t0=np.array([70_000, 80_000]))
    one = replace(one, planned={"t0": CountedRows.of_order(plan.tables["t0"].access, np.array([9, 70_000, 5]))})
    found = replanned(one, least_gain=0.0)
    assert found.figures.is_changed
    assert found.orders["t0"].tolist() == [70_000, 80_000, 9, 5]


def test_a_plan_that_no_longer_fits_is_changed_whatever_it_costs():
    plan = make.plan(
        *(make.placed(table(f"t{number}")) for number in range(3)), topology=make.topology(NUM_RANKS, **SLOW)
    )
    smaller = make.topology(NUM_RANKS, hbm=int(1.5 * plan.tables.tables[0].storage_bytes), **SLOW)
    one = accessed(plan)
    task = replace(request(plan), topology=smaller, options={"steps": 100, "policy": False, "count_activations": False})
    found = replan(one, task, horizon_steps=1e-3, least_gain=0.5)
    assert (found.figures.is_changed, found.figures.reason) == (True, "the older plan does not fit the topology")
    validate_plan(found.plan)


@pytest.mark.parametrize("horizon_steps", [1e4, 5, 0.5])
def test_memory_that_has_to_stay_free_does(horizon_steps):
    plan, task = a_plan(4), request(a_plan(4))
    one = accessed(plan, **{f"t{number}": np.arange(90_000, 90_100)[::-1] for number in range(4)})
    # The plan takes 15.2 MB of each rank, one without copies 13.7.
    reserved = {"reserved_bytes": plan.topology.memory_bytes.hbm - 14_000_000}
    found = replan(one, replace(task, options=task.options | reserved), horizon_steps=horizon_steps, least_gain=0.0)
    assert found.figures.is_changed
    assert found.figures.reason == "the older plan leaves less memory free than it has to"
    assert max(rank.used_bytes for rank in found.plan.predicted.ranks) <= 14_000_000


def test_a_plan_that_has_no_room_left_for_training_is_changed_whatever_it_costs():
    tables = [replace(table(f"t{number}"), pooling=Pooling.SEQUENCE) for number in range(4)]
    topology = make.topology(NUM_RANKS, hbm=50_000_000, **SLOW)
    plan = make.plan(*make.table_wise(tables, [0, 0, 1, 1]), batch_size=1024, topology=topology)
    longer = [replace(one, features=(replace(one.features[0], pooling_factor=50.0),)) for one in tables]
    now = replace(plan.tables, tables=tuple(longer))
    one = AccessedPlan(plan=plan, now=now, planned=planned_rows(plan, {}), rows_now={})
    found = replan(one, replace(request(plan), tables=now), horizon_steps=1e-3, least_gain=0.5)
    assert found.figures.reason == "the older plan leaves less memory free than it has to"
    assert max(rank.used_bytes for rank in found.plan.predicted.ranks) <= 50_000_000
    # One that never had room by the model stays.
    before = replace(one, plan=one.today)
    assert not replan(before, replace(request(plan), tables=now), horizon_steps=1e-3, least_gain=0.5).figures.is_changed


def test_the_least_gain_is_a_share_of_the_step():
    one = accessed(a_plan(1), t0=ROTATED)
    gain = replanned(one, least_gain=0.0).figures.gain
    shorter = gain / (1 + gain)
    assert replanned(one, least_gain=0.99 * shorter).figures.is_changed
    stays = replanned(one, least_gain=1.01 * shorter).figures
    assert not stays.is_changed
    assert stays.reason.startswith(f"the step would be {shorter:.1%} shorter")


def test_other_numbers_of_ranks_are_refused(best):
    task = replace(request(best), topology=make.topology(2))
    with pytest.raises(InvalidPlanError, match="topology: must have the plan's 4 ranks, has 2; load a checkpoint"):
        replan(accessed(best), task, horizon_steps=1.0, least_gain=0.0)


@pytest.mark.parametrize(
    ("settings", "text"), [({"horizon_steps": 0.0}, "horizon: must be"), ({"least_gain": -1.0}, "least_gain: must be")]
)
def test_numbers_out_of_range_are_refused(best, settings, text):
    with pytest.raises(InvalidOptionError, match=text):
        replanned(accessed(best), **settings)
