"""The planner `replica-groups`: what it chooses and why, what it drops and why, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import (
    AccessProfile,
    Constraints,
    GroupLayout,
    Link,
    Optimizer,
    SyncRows,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, UnknownNameError
from autoshard.core.quoting import write_bytes
from autoshard.evaluation import evaluate
from autoshard.evaluation.executable import plan_note
from autoshard.formats.documents.plan_json import read_plan, write_plan
from autoshard.planners.auto_options import AutoOptions
from autoshard.planners.registry import get_planner
from autoshard.planners.replica_groups import ReplicaGroupsOptions, ReplicaGroupsPlanner
from autoshard.planners.space.options import ShardingType
from autoshard.planning import make_plan
from autoshard.validator import validate_plan
from tests import builders as make

COSTS = make.costs("a100")
BATCH = 1 << 16
ACROSS, WITHIN = GroupLayout.ACROSS_NODES, GroupLayout.WITHIN_NODES


def tables(num_tables=40, batch_size=BATCH, **fields):
    """Tables of which the last are looked up most: one is ten times as costly as the mean."""
    pooling = np.sort(np.random.default_rng(0).lognormal(2, 1, num_tables))
    fields = {"num_embeddings": 100_000, "embedding_dim": 32, "alpha": 1.05, **fields}
    of = (make.table(f"t{index}", pooling_factor=float(factor), **fields) for index, factor in enumerate(pooling))
    return make.tables(*of, batch_size=batch_size)


def machine(world_size=16, node=4, **fields):
    usual = {"device": "a100", "hbm": 1 << 36, "bytes_per_s": (100e9, 10e9)}
    return make.topology(node, world_size, **{**usual, **fields})


def request_of(of_tables=None, topology=None, **options):
    return make.request(of_tables or tables(), topology or machine(), costs=COSTS, options=options, time_limit_s=5.0)


def planned(*args, **options):
    request = request_of(*args, **options)
    plan = ReplicaGroupsPlanner().plan(request)
    validate_plan(plan)
    assert (plan.tables, plan.topology) == (request.tables, request.topology)
    return plan


def step_ms(plan):
    return evaluate(plan, COSTS).step_ms.value


def test_the_fastest_number_and_layout_is_taken():
    chosen = planned()
    others = [
        planned(num_groups=num_groups, layout=layout.value) for num_groups in (1, 2, 4, 8, 16) for layout in GroupLayout
    ]
    assert step_ms(chosen) == pytest.approx(min(map(step_ms, others)))
    assert 1 < chosen.replica_groups.num_groups < 16, "made so that neither end is best"


def test_provenance_says_what_each_would_have_cost():
    plan = make_plan("replica-groups", request_of())
    told = plan.provenance.models
    assert plan.provenance.planner == "replica-groups"
    assert told["group_planner"] == "cost-greedy"
    groups = plan.replica_groups
    mine = told[f"{groups.num_groups} groups {groups.layout}"]
    assert f"step {plan.predicted.step_ms.value:.4g} ms" in mine
    assert f"synchronisation {plan.predicted.group_sync_ms:.4g} ms" in mine
    labels = [f"{number} groups {layout}" for number in (2, 4, 8) for layout in GroupLayout]
    assert all(told[label] for label in ("1 group", *labels, "16 groups across_nodes"))
    assert "16 groups within_nodes" not in told, "groups of one rank are the same either way"
    assert all(len(text) <= 512 for text in told.values())


def test_groups_that_do_not_fit_are_dropped_with_the_bytes():
    total = sum(table.storage_bytes for table in tables().tables)
    plan = planned(topology=machine(hbm=total // 6), count_activations=False)
    told = plan.provenance.models
    assert plan.replica_groups.num_groups == 2
    for num_groups in (4, 8):
        room = (total // 6) * 16 // num_groups
        expected = (
            f"dropped, out of memory: all tables need {write_bytes(total)}, {write_bytes(total - room)} more than"
        )
        assert told[f"{num_groups} groups {ACROSS}"].startswith(expected)


def test_inputs_and_outputs_of_a_batch_have_to_fit():
    free = planned(num_groups=2)
    needed = max(rank.used_bytes for rank in evaluate(free, COSTS).ranks)
    for share, fits in ((1.0, True), (0.6, False)):
        tight = machine(hbm=int(needed * share))
        if fits:
            assert step_ms(planned(topology=tight, num_groups=2)) > 0
            continue
        with pytest.raises(
            InfeasiblePlanError,
            match=r"would hold [\d.]+ [MG]iB of tables and [\d.]+ [MG]iB for training",
        ):
            planned(topology=tight, num_groups=2)
        assert planned(topology=tight, num_groups=2, count_activations=False)


def test_tables_make_room_for_inputs_and_outputs():
    # Tables of all sizes, heaped by lookups: the fullest rank holds 1.9 times the mean.
    some = tables(num_tables=200, batch_size=1 << 14)
    rows = np.random.default_rng(1).lognormal(12, 1, 200).astype(int).tolist()
    sized = zip(some.tables, rows, strict=True)
    uneven = [replace(one, num_embeddings=size, access=AccessProfile.zipf(size, 1.05)) for one, size in sized]
    of_all_sizes = replace(some, tables=tuple(uneven))

    def fullest(plan):
        return max(rank.used_bytes for rank in evaluate(plan, COSTS).ranks)

    room = int(0.6 * fullest(planned(of_all_sizes, num_groups=1)))
    assert fullest(planned(of_all_sizes, machine(hbm=room), num_groups=1)) <= room


def test_ranks_are_levelled_by_memory_where_synchronisation_decides():
    # Idle tables are as large as busy ones, and a planner by lookups heaps them on a few ranks.
    few, slow = tables(num_tables=64, num_embeddings=2_000_000, batch_size=1 << 10), machine(bytes_per_s=(1e9, 100e9))
    plan = planned(few, slow, num_groups=4, layout="across_nodes", base="lookup-greedy")
    held = [rank.hbm_bytes for rank in evaluate(plan, COSTS).ranks]
    assert max(held) <= 1.1 * sum(held) / len(held) * (1 + 1e-9)


def test_seldom_synchronisation_allows_more_groups():
    often, seldom = planned(), planned(sync_every=1000)
    assert seldom.replica_groups.num_groups > often.replica_groups.num_groups
    assert seldom.replica_groups.sync_every == 1000


def test_the_cheaper_rows_are_synchronised():
    def chosen(batch_size, **options):
        return planned(
            tables(num_embeddings=1_000_000, batch_size=batch_size), num_groups=4, **options
        ).replica_groups.sync_rows

    assert chosen(1 << 10) is SyncRows.TOUCHED
    assert chosen(1 << 10, sync_rows="all") is SyncRows.ALL
    assert chosen(1 << 20, sync_every=1000) is SyncRows.ALL
    assert chosen(1 << 20, sync_every=1000, sync_rows="touched") is SyncRows.TOUCHED
    assert planned(num_groups=1, sync_rows="touched").replica_groups.sync_rows is SyncRows.ALL, "nothing to average"


def test_the_moment_is_scaled_by_the_number_of_groups():
    # 2D Sec. 4.1: "use the group number as the moment scaling factor".
    assert planned(num_groups=4).replica_groups.moment_scale == 4.0
    assert planned(num_groups=1).replica_groups.moment_scale == 1.0
    assert planned(num_groups=4, moment_scale=2.5).replica_groups.moment_scale == 2.5
    # Fewer groups than that are not tried (Scaling rule 1).
    chosen = planned(moment_scale=3.0)
    assert chosen.replica_groups.num_groups >= 3
    assert "fewer groups" in chosen.provenance.models["groups 2"]


def test_moments_that_are_means_are_not_scaled():
    given = tables()
    with_adam = replace(given, tables=tuple(replace(one, optimizer=Optimizer.ADAM) for one in given.tables))
    plan = planned(with_adam, num_groups=4)
    assert plan.replica_groups.moment_scale == 1.0
    assert not plan_note(plan)
    with pytest.raises(
        InvalidOptionError, match=r"^options\.moment_scale: must be 1 with tables of adam, whose moments"
    ):
        planned(with_adam, num_groups=4, moment_scale=2.0)


@pytest.mark.parametrize(
    ("base", "base_options", "tier"),
    [("flexshard", "tiers=2,count_activations=false", Tier.ROW_WISE), ("karmarkar-karp", "", Tier.TABLE_WISE)],
)
def test_any_planner_plans_a_group(base, base_options, tier):
    plan = planned(num_groups=4, base=base, base_options=base_options)
    assert tier in {placed.tier for placed in plan.shards}
    assert max(rank for placed in plan.shards for replica in placed.replicas for rank in replica) < 4
    assert plan.provenance.models["group_planner"] == base


def test_the_other_layout_is_taken_where_exchanges_are_dear():
    near = planned(topology=machine(bytes_per_s=(100e9, 1e8)), sync_every=1000, num_groups=4)
    assert near.replica_groups.layout is WITHIN
    heavy = planned(tables(num_embeddings=1_000_000, batch_size=64), machine(bytes_per_s=(100e9, 1e9)), num_groups=4)
    assert heavy.replica_groups.layout is ACROSS


def test_pinned_tables_keep_to_ranks_of_the_world():
    some = tables()
    pinned = replace(some.tables[0], constraints=Constraints(pinned_ranks=(13,)))
    plan = planned(replace(some, tables=(pinned, *some.tables[1:])))
    assert plan.replica_groups.num_groups == 1
    assert "pinned" in plan.provenance.models["other numbers of groups"]


def test_plans_are_written_and_read_back(tmp_path):
    plan = make_plan("replica-groups", request_of(num_groups=4))
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"num_groups": 3}, "num_groups", "must divide the 16 ranks, got 3"),
        ({"num_groups": -1}, "num_groups", "must be at least 0, got -1"),
        ({"layout": "sideways"}, "layout", 'must be one of auto, across_nodes, within_nodes, got "sideways"'),
        ({"sync_rows": "hot"}, "sync_rows", 'must be one of auto, all, touched, got "hot"'),
        ({"sync_every": 0}, "sync_every", "must be at least 1, got 0"),
        ({"moment_scale": -0.5}, "moment_scale", "must be at least 0, got -0.5"),
        ({"moment_scale": 2.5, "num_groups": 2}, "moment_scale", "must be at most the number of groups, 2, got 2.5"),
        ({"moment_scale": 17.0}, "moment_scale", "must be at most the number of groups, 16, got 17"),
        ({"base": "replica-groups"}, "base", "must be another planner"),
        ({"base_options": "tiers"}, "base_options", 'must be KEY=VALUE, got "tiers"'),
    ],
)
def test_bad_options_are_named(options, field, text):
    with pytest.raises(InvalidOptionError) as caught:
        ReplicaGroupsPlanner().plan(request_of(**options))
    assert caught.value.field == f"options.{field}"
    assert text in caught.value.message


def test_groups_without_an_equal_share_of_the_nodes():
    with pytest.raises(InvalidOptionError, match=r"3 groups of 8 ranks laid across_nodes .* each node's 4 ranks"):
        planned(topology=machine(24, 4), num_groups=3, layout="across_nodes")
    assert planned(topology=machine(24, 4), num_groups=3).replica_groups.layout is WITHIN


def test_an_unknown_planner_for_the_groups():
    with pytest.raises(UnknownNameError, match='no planner is named "nobody"'):
        planned(base="nobody")


def test_values_of_the_base_s_options_may_have_commas():
    options = ReplicaGroupsOptions(base="neo", base_options="sharding_types=table_wise, row_wise,placement=greedy,")
    assert options.of_base() == {"sharding_types": "table_wise, row_wise", "placement": "greedy"}


@pytest.mark.parametrize(
    ("given", "types"),
    [
        ("", ",".join(ShardingType)),
        ("sharding_types=table_wise,replica_groups,row_wise", "table_wise,row_wise"),
        ("sharding_types=replica_groups", ",".join(ShardingType)),
        ("objective=kernel", "all"),
    ],
)
def test_auto_as_the_base_has_no_groups_of_its_own(given, types):
    options = ReplicaGroupsOptions(base="auto", base_options=given).of_base()
    assert options["sharding_types"] == types
    assert not AutoOptions(**options).with_groups


def test_auto_holds_tables_on_all_ranks_of_a_group():
    # So slow between nodes, and so many samples, that it would take several groups.
    of_tables, _ = make.draw_task(12, 8, seed=6, batch_size=16_384)
    topology = make.two_nodes()
    slow = replace(topology.levels[1], all_to_all=Link(bytes_per_s=1e6), all_reduce=Link(bytes_per_s=4e8))
    options = {"base": "auto", "base_options": "steps=1,policy=false", "num_groups": 1}
    topology = replace(topology, levels=(topology.levels[0], slow))
    plan = ReplicaGroupsPlanner().plan(make.request(of_tables, topology, time_limit_s=60.0, options=options))
    validate_plan(plan)
    assert {rank for placed in plan.shards for ranks in placed.replicas for rank in ranks} == set(range(8))


def test_a_base_that_makes_groups_of_its_own_is_refused(monkeypatch):
    class Grouping(ReplicaGroupsPlanner):
        name = "grouping"

        def plan(self, request):
            return super().plan(replace(request, options={"num_groups": 2}))

    monkeypatch.setattr(
        "autoshard.planners.replica_groups.get_planner",
        lambda name: Grouping() if name == "grouping" else get_planner(name),
    )
    with pytest.raises(InvalidOptionError, match="must shard the tables over one group, grouping made 2") as caught:
        planned(base="grouping", num_groups=2)
    assert caught.value.field == "options.base"


def test_a_budget_that_nothing_fits():
    with pytest.raises(InfeasiblePlanError, match=r"no number of groups fits; with the fewest, .*iB more"):
        planned(topology=machine(hbm=1000))
