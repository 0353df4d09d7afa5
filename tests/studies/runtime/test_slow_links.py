"""Plans on slow links: tasks, what contests are summed up to, and real contests on processes of this machine."""

import json
from dataclasses import asdict, replace

import pytest

from autoshard.core import Collective, GradSync, Pooling, Tier
from autoshard.core.errors import DeviceError
from autoshard.core.step import StepPart
from autoshard.planning import make_costs
from autoshard.runtime import Engine
from autoshard.runtime.processes.launch import LOCAL
from autoshard.whatif.trials import local_topology
from studies.cluster.network import check_support
from studies.papers.flexshard.models import MODELS
from studies.planners.step_runs import StepRun
from studies.runtime.slow_links.contests import (
    TIER_LABELS,
    TORCHREC_WHOLE,
    Contest,
    ContestResult,
    Effort,
    Entry,
    EntryRun,
    StreamBytes,
    flexshard_contest,
    groups_contest,
    oper_contest,
    run_contests,
    sums_contest,
)
from studies.runtime.slow_links.models import TaskKind, drawn_task
from studies.runtime.slow_links.study import summarised
from tests import builders as make

TINY = Effort(steps=2, warmup_steps=1, repeats=2)


def entry_run(label, predicted_ms, measured_ms, sent=(100.0, 80.0)):
    step = StepRun(
        trial={"planner": label},
        predicted_ms=predicted_ms,
        low_ms=0.9 * predicted_ms,
        high_ms=1.1 * predicted_ms,
        measured_ms=measured_ms,
        spread=0.01,
        parts={part.value: (1.0, 1.0) for part in StepPart},
        models={},
    )
    executed, predicted = sent
    return EntryRun(
        label=label, step=step, sent={"ids": StreamBytes(executed=executed, predicted=predicted, across_share=0.5)}
    )


def contest_result(name, *entries):
    return ContestResult(name=name, group=TaskKind.SKEWED.value, num_tables=20, batch_size=64, entries=entries)


@pytest.mark.smoke
def test_a_rate_is_summed_up_over_its_drawn_tasks():
    first = contest_result(
        "task-0",
        entry_run("auto", 10.0, 10.0),
        entry_run("neo", 12.0, 20.0),
        replace(entry_run(TORCHREC_WHOLE, 10.0, 30.0, sent=(1e9, 1.0)), engine=Engine.TORCHREC),
    )
    second = contest_result(
        "task-1",
        entry_run("auto", 15.0, 21.0),
        entry_run("neo", 20.0, 20.0),
        EntryRun(label="oper", failure="too large"),
    )
    paper = replace(contest_result("rm-1", entry_run("row-wise", 1.0, 1.0)), group="flexshard")
    found = summarised([first, second, paper])
    assert (found.num_tasks, found.wins) == (2, {"auto": 1, "neo": 1})
    assert found.auto_over_best == (1.0, 1.05)
    assert found.auto_near == {"2%": 0.5, "5%": 1.0, "10%": 1.0}
    assert found.torchrec_over_auto == (3.0,)
    assert found.over_auto["neo"] == pytest.approx((2.0 + 20 / 21) / 2)
    assert "oper" not in found.over_auto
    # Of the four runs of the thin engine, the first two are in order, the others not.
    assert (found.tau_of_task, found.steps.num_runs) == (0.0, 4)
    assert (found.steps.share_within, found.steps.coverage) == (0.5, 0.5)
    assert found.sent["ids"] == pytest.approx(1.25)
    assert json.loads(json.dumps(asdict(found), allow_nan=False))["wins"] == found.wins


@pytest.mark.smoke
def test_kinds_of_tasks_take_turns_and_have_what_they_are_named_for():
    tasks = [drawn_task(number, 3, most_tables=30) for number in range(6)]
    assert [kind for kind, _ in tasks] == 2 * list(TaskKind)
    assert all(20 <= len(tables.tables) <= 30 for _, tables in tasks)
    assert drawn_task(4, 3, most_tables=30)[1] == tasks[4][1]
    assert drawn_task(4, 4, most_tables=30)[1] != tasks[4][1]
    for kind, tables in tasks:
        has_sequences = any(table.pooling is Pooling.SEQUENCE for table in tables.tables)
        hottest = max(table.access.coverage(1) * table.num_embeddings for table in tables.tables)
        assert has_sequences == (kind is TaskKind.SEQUENCES)
        assert (hottest == pytest.approx(1.0)) == (kind is TaskKind.UNIFORM)


@pytest.mark.smoke
def test_contests_of_papers_keep_their_proportions():
    contest = flexshard_contest(MODELS[0], 8)
    (table,) = contest.tables.tables
    assert table.num_embeddings == pytest.approx(MODELS[0].num_rows / 512, rel=0.01)
    assert table.pooling_factor == pytest.approx(MODELS[0].measured_length)
    assert contest.tables.batch_size == 4096 * 8 // 512
    assert [one.label for one in contest.entries] == list(TIER_LABELS)
    # All but the row-wise tier's lookups stay within a node: the paper's volumes follow from its tiers.
    for entry, run in zip(contest.entries, MODELS[0].runs, strict=True):
        stops = [stop for tier, stop in entry.tiers if tier is not Tier.ROW_WISE]
        leaving = 1 - table.access.coverage(max(stops, default=0))
        assert leaving == pytest.approx(run.volume / MODELS[0].row_wise_run.volume, abs=0.03)
    assert [one.grad_sync for one in oper_contest(8).entries[:3]] == [
        GradSync.SPARSE,
        GradSync.DENSE,
        GradSync.ALL_GATHER,
    ]
    assert groups_contest(16).tables.batch_size % 16 == 0


@pytest.mark.smoke
def test_entries_change_how_sums_and_gradients_travel(tmp_path):
    contest, topology = sums_contest(2), local_topology("cpu", 2, 1 << 30)
    request = make.request(contest.tables, topology, costs=make_costs(contest.tables, topology, tmp_path))
    for entry, collective in zip(contest.entries, (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL), strict=True):
        plan = entry.plan(request)
        assert {(placed.tier, placed.collective) for placed in plan.shards} == {(Tier.ROW_WISE, collective)}
    assert Entry(label="neo", planner="neo").changed(plan) is plan


@pytest.mark.timeout(240)
def test_a_contest_on_two_processes(tmp_path):
    kind, tables = drawn_task(1, 0, most_tables=20)
    small = replace(tables.scaled(64), batch_size=16)
    contest = Contest(
        name="task-1",
        group=kind.value,
        tables=small,
        entries=(
            Entry(
                label="row-wise",
                planner="flexshard",
                options={"tiers": 1, "exchange": "partial_sums"},
                collective=Collective.REDUCE_SCATTER,
            ),
            Entry(label="torchrec", planner="torchrec"),
            Entry(label=TORCHREC_WHOLE, planner="torchrec", engine=Engine.TORCHREC),
            Entry(label="tiers", planner="flexshard", engine=Engine.TORCHREC),
        ),
    )
    done = []
    topology = local_topology("cpu", 2, 1 << 30)
    [result] = run_contests([(contest, topology)], tmp_path, LOCAL, TINY, lambda steps, _: done.append(steps))
    assert (result.num_tables, result.batch_size) == (len(small.tables), 16)
    assert done == list(range(1, 1 + 3 * TINY.repeats * (TINY.steps + TINY.warmup_steps)))
    *ran, refused = result.entries
    scattered = ran[0].sent["forward"]
    assert scattered.predicted > 0
    assert scattered.executed == pytest.approx(scattered.predicted)
    assert all(one.step.measured_ms > 0 and one.step.predicted_ms > 0 for one in ran)
    assert (refused.step, "row" in refused.failure) == (None, True)
    # Whole tables send every bag's vector, whatever is drawn.
    forward = ran[1].sent["forward"]
    assert forward.executed == pytest.approx(forward.predicted)
    assert forward.across == 0.0
    assert not ran[2].sent


@pytest.mark.timeout(0)
def test_a_small_study_on_a_cluster(tmp_path, run_study, capsys):
    try:
        check_support()
    except DeviceError as error:
        pytest.skip(str(error))
    options = {
        "--parts": tmp_path / "parts",
        "--kernel-samples": "docs/data/samples-epyc",
        "--kernel-updates": 50,
        "--rates": 400,
        "--tasks": 1,
        "--num-nodes": 2,
        "--ranks-per-node": 1,
        "--max-tables": 20,
        "--calibration-runs": 4,
        "--steps": 2,
        "--repeats": 1,
        "--max-bytes": 2**20,
    }
    words = [word for pair in options.items() for word in pair]
    assert run_study("slow-links", *words, "--no-papers", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (rate,) = found["rates"]
    assert rate["summary"]["num_tasks"] == 1
    assert rate["models"]["topology"]["world_size"] == 2
    assert set(rate["models"]["metrics"]) == {"collectives", "step"}
    steps = [one["step"] for one in rate["contests"][0]["entries"]]
    assert sum(step is not None for step in steps) >= 7
    # Each rank is a node of its own.
    assert rate["contests"][0]["entries"][0]["sent"]["ids"]["across_share"] == 1.0
    # What is done is not run again.
    assert run_study("slow-links", *words, "--no-papers", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rates"] == found["rates"]
