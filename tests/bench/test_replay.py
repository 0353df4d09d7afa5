import io
import json
from dataclasses import fields, replace

import pytest
from rich.console import Console

from autoshard.core import CostBreakdown, Estimate, GradSync, RankCost, Tier
from autoshard.formats import load_tables, load_topology
from autoshard.report.replay_json import REPLAY
from bench.kernels.harness import Harness
from bench.kernels.replay import num_replayed, replay_plans
from bench.kernels.replay_report import replay_result, replay_table
from tests import builders as make


@pytest.fixture(scope="module")
def plans():
    pool = load_tables("metasyn").scaled(2048)
    tables = make.tables(*pool.tables[:8], batch_size=pool.batch_size)
    plans = []
    for topology, rank_of in (("cpu-4", [0, 1, 2, 3, 0, 1, 2, 3]), ("cpu-8", [0, 0, 1, 1, 2, 2, 2, 3])):
        shards = make.table_wise(tables.tables, rank_of)
        plans.append(make.plan(*shards, tables=tables, topology=load_topology(topology)))
    return plans


def predicted(kernel_ms):
    zeros = {item.name: 0 for item in fields(RankCost)}
    ranks = tuple(RankCost(**zeros | {"rank": rank, "kernel_ms": ms}) for rank, ms in enumerate(kernel_ms))
    return CostBreakdown(
        step_ms=Estimate(value=1.0, low=1.0, high=1.0),
        max_kernel_ms=max(kernel_ms),
        balance=1.0,
        exchange_balance=1.0,
        imbalance=1.0,
        floor_kernel_ms=0.0,
        binding_rank=0,
        binding_shard="",
        cost_model="learned:cpu",
        ranks=ranks,
    )


def test_all_ranks_of_all_plans_share_their_rounds(plans, quick_settings):
    done = []
    settings = replace(quick_settings, max_group_sets=100)
    replay = replay_plans(plans, device="cpu", settings=settings, advance=done.append)
    assert replay.num_groups == 1
    assert sum(done) == pytest.approx(num_replayed(plans)) == 4 + 8 + 8
    small, large = replay.plans
    assert [ms > 0 for ms in small.kernel_ms_per_rank] == [True] * 4
    assert [ms > 0 for ms in large.kernel_ms_per_rank] == [True] * 4 + [False] * 4
    assert len(replay.ceiling.kernel_ms_per_rank) == 8
    assert 0 < replay.ceiling.balance < 1  # identical shards, measured apart


def test_copies_are_replayed_with_the_rows_that_other_ranks_hit(plans, quick_settings, monkeypatch):
    """Four ranks hold the first table, and update what all four hit."""
    first, *others = plans[0].shards
    copies = replace(first, tier=Tier.DATA_PARALLEL, replicas=((0,), (1,), (2,), (3,)), grad_sync=GradSync.SPARSE)
    plan = replace(plans[0], shards=(copies, *others))
    measured = []
    original = Harness.measure
    monkeypatch.setattr(Harness, "measure", lambda *args: measured.extend(original(*args)) or measured)
    replay_plans([plan], device="cpu", settings=quick_settings)
    profile, local = first.shard.access()[0], plan.local_shards()[0][0]
    for rank in range(4):
        (place,) = [index for index, one in enumerate(measured[rank].shards) if one.shard.table == local.table]
        expected = profile.expected_distinct(4 * local.num_lookups)
        assert measured[rank].num_updated_S[place] == pytest.approx(expected, rel=0.1)
        assert measured[rank].shards[place].num_distinct < 0.9 * expected


def test_ranks_are_measured_in_several_groups_where_memory_is_short(plans, quick_settings):
    replay = replay_plans(plans, device="cpu", settings=replace(quick_settings, max_group_sets=5))
    assert replay.num_groups == 4
    assert len(replay.plans[0].kernel_ms_per_rank) == 4
    assert min(replay.plans[0].kernel_ms_per_rank) > 0


def test_a_prediction_is_shown_beside_the_measurement(plans, quick_settings):
    replay = replay_plans(plans[:1], device="cpu", settings=quick_settings)
    measured_ms = replay.plans[0].kernel_ms_per_rank
    plan = plans[0].with_predicted(predicted([1.1 * ms for ms in measured_ms]))
    found = replay_result(plan, replay)
    result = REPLAY.to_json(found)
    assert REPLAY.from_json(json.loads(json.dumps(result))) == found
    assert result["max_error"] == pytest.approx(0.1)
    assert result["mean_absolute_error"] == pytest.approx(0.1)
    assert result["balance"] == replay.plans[0].balance
    assert [rank["predicted_ms"] for rank in result["ranks"]] == pytest.approx([1.1 * ms for ms in measured_ms])
    shown = io.StringIO()
    Console(file=shown, width=200).print(replay_table(found))
    assert shown.getvalue().count("+10.0%") == 5  # four ranks and the slowest
    assert replay_result(plans[0], replay).max_error is None
