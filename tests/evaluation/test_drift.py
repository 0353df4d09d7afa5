"""Plans on other access than they were made for."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import AccessProfile, Exchange, ImpliedOrder, MemoryLevel, RowRange, RowsBy, Shard, Tier
from autoshard.core.access.counted import CountedRows
from autoshard.core.access.orders import BY_ID
from autoshard.core.errors import InvalidTableError
from autoshard.core.shard import MemoryPlacement
from autoshard.evaluation import evaluate
from autoshard.evaluation.drift import (
    AccessedPlan,
    cache_hits,
    distance,
    hot_rows,
    planned_rows,
    with_access,
)
from tests import builders as make

NUM_ROWS, NUM_HOT = 10_000, 500
ROTATED = (np.arange(NUM_ROWS) + NUM_ROWS // 2) % NUM_ROWS


def table(**fields):
    return make.table("t", NUM_ROWS, alpha=1.2, **fields)


def hot_and_cold(of=None):
    """The hottest rows on each of two ranks, all others on the first."""
    ends = {"hot": (0, NUM_HOT), "cold": (NUM_HOT, NUM_ROWS)}
    hot, cold = (
        Shard(table=of or table(), rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK), columns=(0, 16))
        for start, stop in ends.values()
    )
    shards = (make.placed(hot, Tier.DATA_PARALLEL, make.each(2)), make.placed(cold, exchange=Exchange.ROWS))
    return make.plan(*shards, batch_size=1024, topology=make.topology(2, bytes_per_s=1e6))


def rows(order, access=None):
    return CountedRows.of_order(access or table().access, order)


def on_access(plan, now, planned, rows_now):
    return AccessedPlan(plan=plan, now=now, planned=planned, rows_now=rows_now).today


def priced(plan):
    return evaluate(plan, make.costs())


class TestOnAccess:
    def test_the_same_access_costs_the_same(self):
        plan = hot_and_cold()
        today = on_access(plan, plan.tables, {"t": rows(BY_ID)}, {"t": rows(BY_ID)})
        assert priced(today) == priced(plan)

    def test_hot_rows_that_are_cold_now_are_of_no_use(self):
        plan = hot_and_cold()
        today = on_access(plan, plan.tables, {"t": rows(BY_ID)}, {"t": rows(ROTATED)})
        share = plan.tables["t"].access.coverage(NUM_HOT)
        first, second = (one.shards[0].shard.access()[1] for one in (plan, today))
        assert first == share
        assert second == pytest.approx(
            plan.tables["t"].access.slice(NUM_ROWS // 2, NUM_ROWS // 2 + NUM_HOT)[1], rel=0.01
        )
        # What was looked up where it is crosses the link: (1 - 0.02) / (1 - 0.73) times as much.
        exchange = [one.ranks[0].forward_exchange_ms for one in (priced(plan), priced(today))]
        assert exchange[1] / exchange[0] > 1.5
        assert hot_rows(plan) == {"t": NUM_HOT}

    def test_a_plan_in_todays_order_costs_what_it_did(self):
        plan = hot_and_cold()
        today = on_access(plan, plan.tables, {"t": rows(ROTATED)}, {"t": rows(ROTATED)})
        assert priced(today) == priced(plan)

    def test_whole_tables_only_care_for_the_curve(self):
        plan = make.table_wise_plan([table(), make.table("u")], [0, 1])
        flat = replace(plan.tables, tables=(table(access=AccessProfile.uniform(NUM_ROWS)), plan.tables.tables[1]))
        assert priced(on_access(plan, plan.tables, {}, {"t": rows(ROTATED)})) == priced(plan)
        assert priced(on_access(plan, flat, {}, {})).step_ms.value > priced(plan).step_ms.value

    def test_caches_hit_what_they_hit_today(self):
        memory = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=200 * 64, policy="lfu")
        plan = make.plan(make.placed(table(), memory=memory))
        flat = replace(plan.tables, tables=(table(access=AccessProfile.uniform(NUM_ROWS)),))
        assert cache_hits(plan) == {"t": pytest.approx(float(table().access.coverage(200)))}
        assert cache_hits(on_access(plan, flat, {}, {})) == {"t": pytest.approx(200 / NUM_ROWS)}
        assert cache_hits(hot_and_cold()) == {}


class TestDistance:
    ACCESS = table().access

    def test_rows_that_are_looked_up_instead_of_others_are_told(self):
        def to(order):
            return distance(self.ACCESS, self.ACCESS, rows(BY_ID), rows(order))

        assert to(np.arange(2_000)) == pytest.approx(0, abs=0.002)
        assert to(ROTATED) == pytest.approx(0.9, abs=0.1)
        swapped = np.arange(NUM_ROWS)
        swapped[[0, 9_999]] = [9_999, 0]
        first, last = self.ACCESS.probability_at(np.array([0.0, 9_999.0]))
        assert to(swapped) == pytest.approx(first - last)

    def test_rows_that_were_hardly_seen_count_together(self):
        """A sample of the same access: most of its rows were hit once or twice."""
        ids, hits = np.unique(self.ACCESS.sample_ranks(20_000, np.random.default_rng(0)), return_counts=True)
        falling = np.argsort(-hits)
        ids, shares = ids[falling], hits[falling] / 20_000
        known = int((hits >= 16).sum())
        seen = CountedRows(order_N=ids, ids_N=ids, shares_N=shares, num_known=known, num_rows=NUM_ROWS)
        assert distance(self.ACCESS, self.ACCESS, rows(BY_ID), seen) < 0.05

    @pytest.mark.parametrize(("hottest", "moved"), [(0.0, 1.0), (0.5, 0.5)])
    def test_lookups_that_become_flat_are_told(self, hottest, moved):
        """Half of the lookups, or all, go evenly to all rows, of which none is known one by one."""
        shares = np.full(NUM_ROWS, (1 - hottest) / NUM_ROWS)
        shares[0] += hottest
        seen = CountedRows(
            order_N=np.arange(NUM_ROWS),
            ids_N=np.arange(NUM_ROWS),
            shares_N=shares,
            num_known=int(hottest > 0),
            num_rows=NUM_ROWS,
            least_share=2 / NUM_ROWS,
        )
        ten = make.profile_of(np.concatenate([[0.5], np.full(9, 0.5 / 9), np.zeros(NUM_ROWS - 10)]) * 1e9)
        planned = rows(BY_ID, ten)
        assert distance(ten, self.ACCESS, planned, seen) == pytest.approx(moved, abs=0.01)
        # Without the share from which on rows are known, that of the last known row is taken.
        assert replace(seen, least_share=None).known_from == (shares[0] if hottest else 1.0)

    def test_without_orders_curves_are_compared(self):
        flat = AccessProfile.uniform(NUM_ROWS)
        assert distance(self.ACCESS, self.ACCESS, None, rows(ROTATED)) == 0
        hottest = np.arange(1, NUM_ROWS + 1)
        gap = self.ACCESS.coverage(hottest) - flat.coverage(hottest)
        assert distance(self.ACCESS, flat, None, None) == pytest.approx(gap.max(), rel=0.01)


class TestTables:
    def test_rows_of_plans(self):
        plan = hot_and_cold(table(row_order=None))
        assert planned_rows(plan, {})["t"].order_N is BY_ID
        assert planned_rows(plan, {"t": ROTATED})["t"].order_N is ROTATED
        assert planned_rows(make.table_wise_plan([table(row_order=None)], [0]), {}) == {}
        assert list(planned_rows(make.table_wise_plan([table()], [0]), {})) == ["t"]

    def test_lookups_curves_and_orders_are_todays_and_all_else_is_the_plans(self):
        plan = hot_and_cold()
        other = make.table("t", NUM_ROWS, 99, 7.0, alpha=0.5, row_order=None)
        found = with_access(plan.tables, make.tables(make.table("u"), other, batch_size=3))
        assert found.batch_size == 1024
        assert found.tables == (
            replace(table(), access=other.access, features=other.features, row_order=ImpliedOrder.BY_ID),
        )

    @pytest.mark.parametrize(
        ("other", "text"),
        [
            (make.table("u"), r'access: must have the plan\'s tables; there is no table "t"'),
            (make.table("t", 5), r'access: must have the plan\'s tables; "t" has 5 rows, 10,000 in the plan'),
            (
                make.table("t", NUM_ROWS, features=make.table("x").features),
                r'access: must have the plan\'s features; "t" needs t_f',
            ),
        ],
    )
    def test_other_tables_are_refused(self, other, text):
        with pytest.raises(InvalidTableError, match=text):
            with_access(hot_and_cold().tables, make.tables(other))
