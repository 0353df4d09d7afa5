"""A job's plan made anew beside training, by a child process."""

import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from autoshard.commands.run import _of_job
from autoshard.core import Exchange, GradSync, RowRange, RowsBy, Shard, Split, Tier
from autoshard.core.errors import DeviceError
from autoshard.formats import digest, plan_to_json, read_plan, write_plan
from autoshard.formats.row_orders import read_row_orders, with_row_orders, write_row_order
from autoshard.runtime import RunRequest, replanning
from autoshard.runtime.access_counts import AccessCounter, AccessCounts
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.checkpoints import Checkpoint
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.processes.session import Session
from autoshard.runtime.replanning import JobReplanning, PlanDecision, Replanner, ReplanSettings
from autoshard.runtime.results import JobReport, PlanChange
from autoshard.validator import validate_plan
from tests import builders as make
from tests.ranks import executed, on_ranks
from tests.runtime.test_training_loop import last_files

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
        counter.observe(ids, (4096, *(0 for _ in plan.tables.tables[1:])), 512)
    counter.close()
    return counter.counted()


@pytest.fixture
def planner():
    """Plans every 10 steps."""
    settings = ReplanSettings(every=10, horizon=1e4, time_limit_s=0.3)
    planner = Replanner(a_plan(), {"t": ORDER}, settings)
    yield planner
    planner.close()


def test_a_job_whose_hot_rows_changed_gets_another_plan(planner):
    planner.begin(10, counts_of(a_plan(), ORDER.flip(0)), 1_000)
    assert planner.is_planning
    found = planner.decision(waits=True)
    assert not planner.is_planning
    assert (found.step, found.reason) == (10, "")
    assert found.figures.is_changed
    assert found.figures.horizon_steps == 1_000
    validate_plan(found.plan)
    assert found.plan.tables.batch_size == 512
    if found.row_orders:
        assert found.row_orders["t"][:4].tolist() == ORDER.flip(0)[:4].tolist()
    planner.adopted(found)
    # The new plan is that which the next decision is about: it was made for these lookups.
    planner.begin(20, counts_of(a_plan(), ORDER.flip(0)), None)
    again = planner.decision()
    assert (again.step, again.figures, again.plan, again.row_orders) == (20, None, None, {})
    assert "of the lookups go to other rows than planned, 10.0% may" in again.reason


def test_a_decision_is_not_waited_for_unless_asked(planner):
    planner.begin(10, counts_of(a_plan(), ORDER.flip(0)), 1_000)
    assert planner.decision() is None
    planner.close()
    assert not planner.is_planning


def test_planning_that_fails_is_told_and_the_job_goes_on(planner):
    planner.begin(10, counts_of(a_plan(), ORDER.flip(0)), 1_000)
    planner._child.kill()
    found = planner.decision(waits=True)
    assert (found.figures, found.plan) == (None, None)
    assert "ended by signal 9" in found.reason
    assert not planner.is_planning


def test_a_child_that_says_much_ends_nevertheless(planner, monkeypatch):
    monkeypatch.setattr(replanning, "_COMMAND", "import sys; print('x' * 1_000_000); sys.exit('it failed')")
    planner.begin(10, counts_of(a_plan(), ORDER.flip(0)), 1_000)
    found = []
    assert becomes_so(lambda: found.append(planner.decision()) or found[-1])
    assert found[-1].reason == "planning failed: it failed"


def test_a_table_that_is_seldom_looked_up_keeps_its_row_order(tmp_path):
    plan = a_plan()
    ids = np.random.default_rng(1).permutation(NUM_ROWS)
    seldom = replace(make.table("u", NUM_ROWS, 32, 0.01), row_order=write_row_order(tmp_path / "u.parquet", ids))
    tables = replace(plan.tables, tables=(*plan.tables.tables, seldom))
    plan = replace(
        plan, tables=tables, shards=(*plan.shards, make.placed(Shard.whole(seldom), Tier.TABLE_WISE, ((0,),)))
    )
    settings = ReplanSettings(every=10, horizon=1e4, time_limit_s=0.3)
    with closing(Replanner(plan, {"t": ORDER}, settings)) as planner:
        planner.begin(10, counts_of(plan, ORDER.flip(0)), 1_000)
        assert planner.decision(waits=True).figures is not None


PLANNING = """
import time
from tests.runtime.test_replanning import ORDER, Replanner, ReplanSettings, a_plan, counts_of
planner = Replanner(a_plan(), {"t": ORDER}, ReplanSettings(every=10, horizon=1e4, time_limit_s=60.0))
planner.begin(10, counts_of(a_plan(), ORDER.flip(0)), 1_000)
print(planner._child.pid, planner._folder.name, flush=True)
time.sleep(60)
"""


def test_planning_ends_with_a_process_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PLANNING], stdout=subprocess.PIPE, text=True) as job:
        child, folder = job.stdout.readline().split()
        assert becomes_so(lambda: b"replan" in ran_by(child))
        time.sleep(0.5)  # until it has asked for it
        job.send_signal(signal.SIGKILL)
    assert becomes_so(lambda: not ran_by(child))  # by itself it would search for a minute
    shutil.rmtree(folder)


def ran_by(pid):
    """The command line of a process; nothing of one that has ended."""
    file = Path("/proc", pid, "cmdline")
    return file.read_bytes() if file.exists() else b""


def becomes_so(is_so):
    """Whether something happens before a test has waited for too long."""
    until_s = time.monotonic() + 30
    while not (found := is_so()) and time.monotonic() < until_s:
        time.sleep(0.02)
    return bool(found)


def test_a_job_follows_its_data():
    """Two processes train on other hot rows than was planned for, until both have gone over to a plan for these."""
    first, second = on_ranks(train_until_changed, 2)
    changes, held = first
    assert second == first
    assert [one["is_changed"] for one in changes] == [False] * (len(changes) - 1) + [True]
    assert changes[-1]["counted_at"] % 10 == 0
    assert changes[-1]["adopt_ms"] > 0
    assert held


def train_until_changed():
    """What was decided, and whether tables are held as the last decision says."""
    plan = a_plan()
    counter = AccessCounter(plan.tables, half_life=5, seed=(0, dist.get_rank()))
    orders = {"t": ORDER}
    embeddings = ShardedEmbeddings(plan, FusedSettings(learning_rate=0.05), row_orders=orders, counter=counter)
    settings = ReplanSettings(every=10, horizon=1e4, time_limit_s=0.3)
    cpu = torch.device("cpu")
    replanning = JobReplanning(embeddings, counter, plan, orders, settings, None, cpu)
    until_s = time.monotonic() + 120
    with closing(replanning):
        for step in range(1, 100_000):
            ranks = plan.tables.tables[0].access.sample_ranks(2048, np.random.default_rng((step, dist.get_rank())))
            ids = BatchOfIds(torch.full((1, 256), 8), ORDER.flip(0)[torch.from_numpy(ranks)])
            embeddings(ids).pooled_BC.sum().backward()
            embeddings.end_step()
            replanning.after(step)
            has_changed = any(one.is_changed for one in replanning.changes)
            is_over = torch.tensor([int(has_changed or time.monotonic() > until_s)])
            dist.all_reduce(is_over)
            if is_over:
                break
            time.sleep(0.02)
    held = [one.of.name for one in embeddings.owners.holdings]
    new = ShardedEmbeddings(replanning.plan, FusedSettings(learning_rate=0.05)).owners.holdings
    is_held = held == [one.of.name for one in new] and [one.ranges for one in embeddings.owners.holdings] == [
        one.ranges for one in new
    ]
    counter.close()
    changes = [{name: getattr(one, name) for name in ("is_changed", "counted_at")} for one in replanning.changes]
    changes[-1]["adopt_ms"] = float(replanning.changes[-1].adopt_ms is not None)
    return changes, is_held


class Scripted(Replanner):
    """Decides on the hot rows of today in a job's fourth step, and on nothing later."""

    def begin(self, step, *_):
        plan, orders = (a_plan(), {"t": ORDER.flip(0)}) if step == 4 else (None, {})
        self._told = PlanDecision(step=step, reason="as scripted", plan=plan, row_orders=orders)

    def adopted(self, decision):
        pass


def scripted(requests):
    """What is executed where decisions are those of the script."""
    replanning.Replanner = Scripted
    return Session(requests, torch.device("cpu"), lambda *_: None).run_all()


@pytest.fixture
def following(tmp_path):
    """A request to train two processes for 24 steps, which change their plan after step 5."""
    path = tmp_path / "plan.json"
    write_plan(with_row_orders(a_plan(), {"t": ORDER.numpy()}, path), path)
    return RunRequest(
        plan_path=str(path), device="cpu", steps=24, warmup_steps=0, replan_every=4, drift_every=6,
        checkpoint_every=5, checkpoints_path=str(tmp_path / "job"),
    )  # fmt: skip


def digest_of(path):
    return digest(plan_to_json(read_plan(path)))


def last_checkpoint(folder):
    return Checkpoint(max(folder.glob("step-*")))


def trained(request, num_processes=2):
    (result,) = on_ranks(scripted, num_processes, [request])[0]
    return result.job


def test_a_job_goes_on_under_the_plan_that_it_has_adopted(following, tmp_path):
    whole = trained(replace(following, checkpoints_path=str(tmp_path / "whole")))
    assert [one.decided_at for one in whole.plan_changes if one.adopt_ms is not None] == [5]
    assert whole.resumed_plan is None
    assert trained(replace(following, steps=13)).resumed_plan is None
    rest = trained(following)
    assert (rest.resumed_from, rest.resumed_plan, rest.has_adopted) == (13, "adopted", True)
    assert not [one for one in rest.plan_changes if one.adopt_ms is not None]
    assert last_files(tmp_path / "job") == last_files(tmp_path / "whole")
    saved, undisturbed = (last_checkpoint(tmp_path / name) for name in ("job", "whole"))
    assert saved.manifest.begun_with == undisturbed.manifest.begun_with == digest_of(following.plan_path)
    assert saved.manifest.plan_digest == undisturbed.manifest.plan_digest != saved.manifest.begun_with
    # The checkpoint has the rows of its plan: it can be executed and planned again.
    orders = read_row_orders(saved.plan, saved.folder / "plan.json")
    assert orders["t"].tolist() == ORDER.flip(0)[:NUM_HOT].tolist()
    assert saved.verify() == []


def test_a_job_whose_command_has_another_plan_or_other_processes_leaves_the_adopted_one(following, tmp_path):
    trained(replace(following, steps=13))
    fewer = trained(replace(following, steps=15), 1)
    assert (fewer.resumed_from, fewer.resumed_plan) == (13, "processes_changed")
    assert last_checkpoint(tmp_path / "job").manifest.begun_with is None
    shutil.rmtree(tmp_path / "job" / "step-000000000015")
    write_plan(
        make.plan(*a_plan().shards, batch_size=512, topology=make.topology(2, bytes_per_s=2e7)), following.plan_path
    )
    other = trained(replace(following, steps=15))
    assert (other.resumed_from, other.resumed_plan) == (13, "plan_changed")
    saved = last_checkpoint(tmp_path / "job").manifest
    assert (saved.step, saved.begun_with, saved.plan_digest) == (15, None, digest_of(following.plan_path))
    # From here on, the job is one of the new plan.
    assert trained(following).resumed_plan is None


def test_planning_without_lookups_is_told(planner):
    planner.begin(10, AccessCounts.nothing(1), 1_000)
    assert planner.is_planning
    assert "0.0% of the lookups go to other rows" in planner.decision().reason
    assert not planner.is_planning


class Full(ShardedEmbeddings):
    """Has no room for the rows of another plan."""

    def adopt(self, *_):
        raise DeviceError("no room for both plans")


@pytest.mark.usefixtures("one_process")
def test_a_plan_that_cannot_be_adopted_is_told_and_the_job_goes_on():
    plan, orders = a_plan(), {"t": ORDER}
    counter = AccessCounter(plan.tables)
    embeddings = Full(plan, FusedSettings(learning_rate=0.05), row_orders=orders)
    settings = ReplanSettings(every=10, horizon=1e4, time_limit_s=0.3)
    replanning = JobReplanning(embeddings, counter, plan, orders, settings, None, torch.device("cpu"))
    ranks = plan.tables.tables[0].access.sample_ranks(20_000, np.random.default_rng(0))
    counter.observe(ORDER.flip(0)[torch.from_numpy(ranks)], (20_000,), 2_500)
    with closing(replanning):
        for step in range(10, 10_000):
            replanning.after(step)
            if replanning.changes:
                break
            time.sleep(0.05)
    (change,) = replanning.changes
    assert not change.is_changed
    assert change.reason == "could not be adopted: no room for both plans"
    assert replanning.plan is plan
    counter.close()
    embeddings.close()


def test_a_run_that_ends_before_a_decision_leaves_nothing_behind(tmp_path):
    write_plan(a_plan(), tmp_path / "plan.json")
    request = RunRequest(plan_path=str(tmp_path / "plan.json"), device="cpu", steps=7, replan_every=5)
    (result,) = executed([request], 2)
    assert result.job.trained_steps == 10
    assert len(result.job.plan_changes) <= 1


def test_the_report_tells_each_decision():
    changed = PlanChange(counted_at=10, decided_at=12, is_changed=True, reason="it pays", gain=0.5, adopt_ms=3.2)
    job = JobReport(
        trained_steps=20, resumed_from=None, restarts=0, is_stopped=False, skipped_lines=0, first_skipped=None,
        plan_changes=(changed, PlanChange(counted_at=15, decided_at=18, is_changed=False, reason="no plan was found")),
    )  # fmt: skip
    assert _of_job(SimpleNamespace(job=replace(job, resumed_from=8, resumed_plan="adopted")))[:2] == [
        "Trained 20 steps, from the checkpoint of step 8 on.",
        "Went on under the plan that the job had adopted.",
    ]
    assert _of_job(SimpleNamespace(job=replace(job, resumed_from=8, resumed_learning_rate=0.05)))[1] == (
        "Went on with the checkpoint's learning rate, 0.05, not the command's."
    )
    assert _of_job(SimpleNamespace(job=job))[-2:] == [
        "Step 12: changed the plan, which took 3 ms (it pays).",
        "Step 18: kept the plan (no plan was found).",
    ]
