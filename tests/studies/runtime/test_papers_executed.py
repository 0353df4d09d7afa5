"""Settings of the papers at a size that one machine executes, and what their results say."""

from dataclasses import replace

import pytest

from autoshard.core import GradSync, Tier
from autoshard.core.errors import InvalidOptionError
from autoshard.planning import plan_costs
from studies.papers import neo, two_d
from studies.papers.flexshard.models import MODELS
from studies.planners.step_runs import StepRun
from studies.runtime import papers_executed as executed
from studies.runtime.slow_links.contests import ContestResult, Effort, EntryRun, request_of


def run(label, predicted_ms, *steps_ms):
    step = StepRun(
        trial={},
        predicted_ms=predicted_ms,
        low_ms=predicted_ms,
        high_ms=predicted_ms,
        measured_ms=min(steps_ms),
        spread=0.0,
        parts=dict.fromkeys(executed.StepPart, (1.0, 2.0)),
        models={},
    )
    return EntryRun(label=label, step=step, steps_ms=steps_ms, work_ms={"input": 3.0})


def result(name, paper, *runs, ranks=32, batch=128, share=1.0):
    contest = ContestResult(name=name, group=paper, num_tables=1, batch_size=batch, entries=runs)
    return executed.Executed(name=name, paper=paper, share=share, slower=100.0, num_ranks=(ranks,), contests=(contest,))


@pytest.mark.smoke
def test_links_are_as_much_slower_as_gives_the_wire_its_share(tmp_path):
    setting = executed.two_d_settings()[0]
    divisor = executed.slowdown(setting, tmp_path)
    contest, topology = setting.reference
    slower = executed.with_links(topology, divisor)
    assert slower.levels[0].all_to_all.bytes_per_s == pytest.approx(24e9 / divisor)
    plan = contest.entries[0].plan(request_of(contest, slower, tmp_path))
    costs = plan_costs(plan, tmp_path)
    wire_ms, work_ms = executed.wire_and_work_ms(plan, costs)
    # The planner sees the slower links, so that its plan is not always the one that they were made for.
    assert wire_ms / work_ms == pytest.approx(setting.share, rel=0.05)
    twice = replace(plan, topology=executed.with_links(slower, 2.0))
    assert executed.wire_and_work_ms(twice, costs) == pytest.approx((2 * wire_ms, work_ms))


@pytest.mark.smoke
def test_flexshard_keeps_what_its_tiers_cover_and_heats_no_single_rank():
    model = MODELS[0]
    settings = executed.flexshard_settings()
    assert settings[0].share == pytest.approx(307 / 102, rel=0.01)
    for setting, scale in zip(settings, (1024, 2048, 2048), strict=True):
        ((contest, topology),) = setting.contests
        (table,) = contest.tables.tables
        assert (topology.world_size, topology.local_world_size) == (32, 8)
        assert contest.tables.batch_size == 32 * 4096 // scale
        shares = (model.two_tier.coverage, model.replicated.coverage + model.flexed.coverage)
        for entry, share in zip(contest.entries[1:], shares, strict=True):
            held = max(stop for tier, stop in entry.tiers if tier is not Tier.ROW_WISE)
            assert table.access.coverage(held) == pytest.approx(share, abs=0.005)
        assert table.access.coverage(1) < 0.3 / 32


@pytest.mark.smoke
def test_groups_of_eight_have_a_rank_in_each_host_and_rows_as_many_lookups_as_the_papers():
    settings = executed.two_d_settings()
    assert [setting.contests[0][1].world_size for setting in settings] == [8, 32, 64]
    for setting in settings[1:]:
        ((contest, topology),) = setting.contests
        assert topology.num_nodes == 8
        assert [entry.options["num_groups"] for entry in contest.entries] == [1, topology.world_size // 8]
    ((contest, _),) = settings[0].contests
    paper = two_d.EXFM.tables(256 * 1152)

    def lookups_a_row(tables):
        rows = sum(table.num_embeddings for table in tables.tables)
        return tables.batch_size * sum(table.pooling_factor for table in tables.tables) / rows

    assert lookups_a_row(contest.tables) == pytest.approx(lookups_a_row(paper), rel=0.03)


@pytest.mark.slow
def test_neo_has_as_many_nodes_as_the_paper_and_tables_in_as_much_of_its_memory():
    optimised, *scaling = executed.neo_settings()
    assert [setting.contests[0][1].num_nodes for setting in scaling] == [1, 16]
    ((contest, topology),) = scaling[-1].contests
    paper = neo.request_of(neo.throughput_runs("neo")[-1])

    def filled(tables, topology):
        return sum(table.storage_bytes for table in tables.tables) / topology.memory_bytes.hbm / topology.world_size

    assert filled(contest.tables, topology) == pytest.approx(filled(paper.tables, paper.topology), rel=0.02)
    assert len({setting.share for setting in scaling}) == 1
    base, *_, last = (contest for contest, _ in optimised.contests)
    assert (len(base.tables.tables), last.tables.batch_size // base.tables.batch_size) == (125, 4)


@pytest.mark.smoke
def test_ratios_are_of_the_same_round_and_beside_the_papers():
    share = executed.flexshard_settings()[0].share
    tiers = (run("row-wise", 9.0, 30.0, 60.0), run("2-tier", 6.0, 15.0, 40.0), run("3-tier", 4.5, 10.0, 20.0))
    flex = [result("f", "flexshard", *tiers, share=share), result("g", "flexshard", *tiers, share=1.5)]
    grouped = [
        result("t8", "two-d", run("full", 10.0, 10.0, 10.0), ranks=8),
        result("t32", "two-d", run("full", 12.5, 20.0, 20.0), run("groups", 10.0, 12.5, 12.5), ranks=32),
    ]
    found = executed.ratios([*flex, *grouped])
    assert [line.published for line in found] == [0.61, 0.81, None, None, pytest.approx(-0.203), pytest.approx(-0.04)]
    assert found[0].predicted == pytest.approx(0.5)
    # Rounds give 2.0 and 1.5, not medians of steps over each other.
    assert (found[0].executed.median, found[0].executed.num_tasks) == (pytest.approx(0.75), 2)
    assert [line.executed.median for line in found[4:]] == [pytest.approx(-0.5), pytest.approx(-0.2)]
    assert found[4].label == "32 ranks, full"
    cells = executed.part_table("flexshard", flex).rows[0]
    assert cells[2:4] == ("9.0 / 45.0", "1.0 / 2.0")
    assert cells[-1] == "3.0"
    marks = executed.ratio_figure(found).data[-1]
    assert list(marks.y) == pytest.approx([1.61, 1.81, 0.797, 0.96])


@pytest.mark.smoke
def test_optimisations_count_samples_not_steps():
    runs = [10.0, 10.0, 10.0, 5.0, 20.0]
    contests = tuple(
        ContestResult(
            name=str(number), group="neo", num_tables=1, batch_size=batch, entries=(run(str(number), ms, ms, ms),)
        )
        for number, (ms, batch) in enumerate(zip(runs, (64, 64, 64, 64, 256), strict=True))
    )
    one = executed.Executed(name="n", paper="neo", share=1.0, slower=1.0, num_ranks=(16,) * 5, contests=contests)
    lines = executed.ratios([one])
    assert [line.executed.median for line in lines] == pytest.approx([0.0, 0.0, 1.0, 0.0, 1.0])
    assert [line.published for line in lines] == [0.20, 0.20, 0.30, 0.25, 0.87]


@pytest.mark.smoke
def test_an_unknown_paper_is_refused():
    with pytest.raises(InvalidOptionError, match="must be any of flexshard, oper, two-d, neo, got 'dlrm'"):
        executed.PapersExecutedOptions(papers="dlrm").wanted()


@pytest.mark.slow
def test_a_setting_is_executed_round_by_round(tmp_path):
    setting = executed.two_d_settings()[0]
    found = executed.executed(setting, tmp_path, Effort(steps=1, warmup_steps=1, repeats=2, virtual_time=True))
    ((entry,),) = (contest.entries for contest in found.contests)
    assert (entry.failure, len(entry.steps_ms), found.num_ranks) == ("", 2, (8,))
    assert min(entry.steps_ms) > 0
    assert 0 < sum(entry.work_ms.values()) < 2 * max(entry.steps_ms)


@pytest.mark.slow
def test_oper_sums_gradients_of_the_same_copies_in_each_way(tmp_path):
    (setting,) = executed.oper_settings()
    ((contest, topology),) = setting.contests
    assert (topology.num_nodes, topology.local_world_size) == (4, 4)
    plans = {
        entry.label: entry.plan(request_of(contest, topology, tmp_path))
        for entry in contest.entries
        if entry.label.startswith(("5%", "1%"))
    }
    whole = sum(table.storage_bytes for table in contest.tables.tables)
    for label, plan in plans.items():
        held = sum(shard.memory_bytes for shards in plan.local_shards() for shard in shards)
        assert held / whole - 1 == pytest.approx(0.05 if label.startswith("5%") else 0.01, rel=0.1)
        syncs = {placed.grad_sync for placed in plan.shards if len(placed.replicas) > 1}
        assert syncs == {{"dense": GradSync.DENSE, "sparse": GradSync.SPARSE}.get(label[4:], GradSync.ALL_GATHER)}
    cut = {label: [placed.shard.rows for placed in plan.shards] for label, plan in plans.items()}
    assert cut["5%, dense"] == cut["5%, sparse"] != cut["1%, sparse"]
