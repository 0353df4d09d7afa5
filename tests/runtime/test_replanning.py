"""A job's plan made anew beside training, by a child process."""

import numpy as np
import pytest
import torch

from autoshard.core import Exchange, GradSync, RowRange, RowsBy, Shard, Split, Tier
from autoshard.formats import write_plan
from autoshard.runtime import RunRequest
from autoshard.runtime.access_counts import AccessCounter
from autoshard.runtime.replanning import Replanner, ReplanSettings
from autoshard.validator import validate_plan
from tests import builders as make
from tests.ranks import executed

NUM_ROWS, NUM_HOT = 50_000, 1_000
ORDER = torch.from_numpy(np.random.default_rng(0).permutation(NUM_ROWS))


def a_plan():
    """The hottest rows on both ranks, the others dealt to both, over slow links."""
    table = make.table("t", NUM_ROWS, 32, 8.0, alpha=1.3)
    hot, cold = (
        Shard(table=table, rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK), columns=(0, 32))
        for start, stop in ((0, NUM_HOT), (NUM_HOT, NUM_ROWS))
    )
    shards = (
        make.placed(hot, Tier.DATA_PARALLEL, make.each(2), grad_sync=GradSync.ALL_GATHER),
        make.placed(cold, Tier.ROW_WISE, ((0, 1),), split=Split.CYCLIC, exchange=Exchange.ROWS),
    )
    return make.plan(*shards, batch_size=512, topology=make.topology(2, bytes_per_s=1e7))


def counts_of(plan, order):
    """What is counted where rows are looked up in this order."""
    counter, access = AccessCounter(plan.tables), plan.tables.tables[0].access
    for key in range(20):
        ids = order[torch.from_numpy(access.sample_ranks(4096, np.random.default_rng(key)))]
        counter.observe(ids, (4096,), 512)
    counter.close()
    return counter.counted()


@pytest.fixture
def planner():
    """Plans every 10 steps."""
    settings = ReplanSettings(every=10, horizon=1e4, time_limit_s=1.0)
    planner = Replanner(a_plan(), {"t": ORDER}, settings)
    yield planner
    planner.close()


def test_a_job_whose_hot_rows_changed_gets_another_plan(planner):
    planner.begin(10, counts_of(a_plan(), ORDER.flip(0)), 1_000)
    assert planner.is_planning
    found = planner.decision(waits=True)
    assert not planner.is_planning
    assert (found.step, found.fault) == (10, "")
    assert found.figures.is_changed
    assert found.figures.horizon_steps == 1_000
    validate_plan(found.plan)
    assert found.plan.tables.batch_size == 512
    if found.row_orders:
        assert found.row_orders["t"][:4].tolist() == ORDER.flip(0)[:4].tolist()
    planner.adopted(found)
    # The new plan is that which the next decision is about.
    planner.begin(20, counts_of(a_plan(), ORDER.flip(0)), None)
    again = planner.decision(waits=True)
    assert (again.step, again.figures.horizon_steps) == (20, 1e4)
    assert again.figures.step_ms_before.value == pytest.approx(found.figures.step_ms_after.value, rel=0.05)
    assert not again.figures.is_changed
    assert (again.plan, again.row_orders) == (None, {})


def test_a_decision_is_not_waited_for_unless_asked(planner):
    planner.begin(10, counts_of(a_plan(), ORDER), 1_000)
    assert planner.decision() is None
    planner.close()
    assert not planner.is_planning


def test_planning_that_fails_is_told_and_the_job_goes_on(planner):
    counts = counts_of(a_plan(), ORDER)
    planner.begin(10, counts, 1_000)
    planner._child.kill()
    found = planner.decision(waits=True)
    assert (found.figures, found.plan) == (None, None)
    assert "ended by signal 9" in found.fault
    planner.begin(20, counts, 1_000)
    assert planner.decision(waits=True).figures is not None


@pytest.mark.parametrize("overlap", ["none", "pipelined"])
def test_a_job_follows_its_data(tmp_path, overlap):
    """Other rows are hot from step 40 on: the plan before is kept, and one for these is taken."""
    write_plan(a_plan(), tmp_path / "plan.json")
    request = RunRequest(
        plan_path=str(tmp_path / "plan.json"), device="cpu", steps=117, drift_every=40, replan_every=30, overlap=overlap
    )
    (result,) = executed([request], 2)
    first, *others = result.job.plan_changes
    assert first.counted_at == 30
    assert any(one.is_changed for one in result.job.plan_changes)
    for one in result.job.plan_changes:
        assert one.counted_at < one.decided_at <= one.counted_at + 30
        assert (one.adopt_ms is not None) == one.is_changed
        assert one.reason
    assert len(others) >= 2
    assert result.job.trained_steps == 120
    assert np.isfinite(result.last_loss)
