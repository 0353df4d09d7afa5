"""The planner `flexshard`: valid plans, within memory, for any task and any option."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    Collective,
    Constraints,
    DType,
    Exchange,
    Feature,
    GradSync,
    Link,
    MemoryBytes,
    Optimizer,
    Pooling,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, InvalidPlanError
from autoshard.evaluation import evaluate, plan_traffic
from autoshard.evaluation.traffic import Stream
from autoshard.planners.flexshard.planner import FlexShardPlanner
from autoshard.planning import make_plan
from autoshard.validator import validate_plan
from tests import builders as make

COSTS = make.costs("a100")


def topology(nodes=4, per_node=8, **fields):
    speeds = {"bytes_per_s": (2.4e11, 7e9), "reduce_bytes_per_s": (2.4e11, 8 * 7e9)}
    return make.topology(per_node, nodes * per_node, **{"device": "a100", **speeds, **fields})


def table(name="history", num_embeddings=200_000, **fields):
    usual = {"embedding_dim": 64, "pooling_factor": 100.0, "alpha": 1.05, "pooling": Pooling.SEQUENCE}
    return make.table(name, num_embeddings, **{**usual, **fields})


def plan(*tables, on=None, batch_size=32 * 512, **options):
    request = make.request(make.tables(*tables, batch_size=batch_size), on or topology(), costs=COSTS, options=options)
    return make_plan("flexshard", request)


def tiers(plan_, name="history"):
    return {placed.tier: placed.shard for placed in plan_.shards if placed.shard.table.name == name}


def held_bytes(plan_):
    return [rank.used_bytes for rank in plan_.predicted.ranks]


class TestTiers:
    @pytest.mark.parametrize(
        ("num_tiers", "expected"),
        [
            (1, [Tier.ROW_WISE]),
            (2, [Tier.DATA_PARALLEL, Tier.ROW_WISE]),
            (3, [Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE]),
        ],
    )
    @pytest.mark.parametrize("rule", ["frontier", "paper"])
    def test_rows_fall_in_tiers_by_access_rank(self, num_tiers, expected, rule):
        found = tiers(plan(table(), tiers=num_tiers, rule=rule))
        assert list(found) == expected
        ends = [(shard.rows.start, shard.rows.stop) for shard in found.values()]
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
        assert {placed.exchange for placed in plan(table(), tiers=num_tiers).shards} == {Exchange.ROWS}

    def test_more_tiers_exchange_less_between_nodes(self):
        nodes = np.arange(32) // 8
        between = [
            plan_traffic(plan(table(), tiers=num_tiers)).pairs_RR(Stream.FORWARD)[nodes[:, None] != nodes].sum()
            for num_tiers in (1, 2, 3)
        ]
        assert between[0] > between[1] > 0
        assert between[0] > between[2] > 0

    def test_more_budget_makes_steps_no_longer(self):
        long = table(num_embeddings=2_000_000, pooling_factor=20.0)
        plans = [plan(long, memory_multiplier=6, memory_budget_bytes=budget) for budget in (0, 10**6, 10**7, 10**8)]
        steps_ms = [one.predicted.step_ms.value for one in plans]
        # Bounds are those that were offered, not every row.
        assert all(after < 1.002 * before for before, after in pairwise(steps_ms))
        assert steps_ms[0] > steps_ms[-1]

    @pytest.mark.parametrize("rule", ["frontier", "paper"])
    def test_on_one_node_there_is_no_flex_tier(self, rule):
        slow = topology(nodes=1, bytes_per_s=(7e9,), reduce_bytes_per_s=(5.6e10,))
        found = tiers(plan(table(), on=slow, batch_size=8 * 512, rule=rule))
        assert list(found) == [Tier.DATA_PARALLEL, Tier.ROW_WISE]

    @pytest.mark.parametrize("num_tiers", [2, 3])
    @pytest.mark.parametrize("multiplier", [0, 6])
    def test_the_price_is_never_above_that_of_the_papers_rule(self, num_tiers, multiplier):
        tables = table("often", pooling_factor=300.0), table("seldom", 2_000_000, pooling_factor=30.0)
        options = {"tiers": num_tiers, "memory_multiplier": multiplier}
        found, by_rule = (plan(*tables, rule=rule, **options).predicted.step_ms for rule in ("frontier", "paper"))
        # Bounds are those that were offered, not every row.
        assert found.value <= 1.01 * by_rule.value

    def test_memory_goes_where_it_saves_most(self):
        # Alike in size; rows of the first are looked up ten times as often.
        found = plan(table("often", pooling_factor=500.0), table("seldom", pooling_factor=50.0), tiers=2)
        often, seldom = (tiers(found, name).get(Tier.DATA_PARALLEL) for name in ("often", "seldom"))
        assert often.num_embeddings > (seldom.num_embeddings if seldom else 0)

    def test_on_one_rank_tables_are_whole(self):
        found = plan(table(), on=topology(nodes=1, per_node=1), batch_size=512)
        assert list(tiers(found)) == [Tier.TABLE_WISE]

    def test_the_papers_multiplier_replicates_less(self):
        rows = [tiers(plan(table(), memory_multiplier=m, tiers=2))[Tier.DATA_PARALLEL].num_embeddings for m in (0, 6)]
        assert rows[0] > rows[1]

    def test_gradients_of_rows_that_are_surely_hit_are_summed_whole(self):
        by_tier = {placed.tier: placed.grad_sync for placed in plan(table()).shards}
        assert by_tier[Tier.DATA_PARALLEL] is GradSync.DENSE
        assert by_tier[Tier.ROW_WISE] is GradSync.NONE

    def test_pooled_tables_may_be_told_what_to_exchange(self):
        pooled = table(pooling=Pooling.SUM, pooling_factor=5.0)
        rows = plan(pooled, exchange="rows")
        assert {one.exchange for one in rows.shards if one.tier is not Tier.DATA_PARALLEL} == {Exchange.ROWS}
        sums = plan(pooled, exchange="partial_sums")
        assert {placed.exchange for placed in sums.shards} == {Exchange.PARTIAL_SUMS}
        either = plan(pooled, exchange="auto")
        forward_ms = [max(rank.forward_exchange_ms for rank in one.predicted.ranks) for one in (rows, sums, either)]
        assert forward_ms[2] <= min(forward_ms[:2])

    @pytest.mark.parametrize(
        ("all_reduce", "collective"), [(5.6e10, Collective.REDUCE_SCATTER), (1e9, Collective.ALL_TO_ALL)]
    )
    def test_sums_of_row_wise_tables_travel_by_the_faster_collective(self, all_reduce, collective):
        machine = topology()
        node, cluster = machine.levels
        cluster = replace(cluster, all_reduce=Link(bytes_per_s=all_reduce))
        machine = replace(machine, levels=(node, cluster))
        pooled, history = table("pooled", pooling=Pooling.SUM, pooling_factor=400.0), table()
        found = plan(pooled, history, on=machine, tiers=1)
        assert [one.collective for one in found.shards] == [collective, Collective.ALL_TO_ALL]
        other = next(one for one in Collective if one is not collective)
        shards = (replace(found.shards[0], collective=other), found.shards[1])
        slower = evaluate(replace(found, shards=shards), COSTS)
        assert found.predicted.step_ms.value < slower.step_ms.value


class TestMemory:
    def test_neutral_plans_take_no_more_than_row_wise_ones(self):
        found, row_wise = plan(table(), tiers=3), plan(table(), tiers=1)
        ids = max(plan_traffic(one).pairs_RR(Stream.IDS).sum() / 32 for one in (found, row_wise))
        for held, before in zip(held_bytes(found), held_bytes(row_wise), strict=True):
            assert held <= before + ids

    @pytest.mark.parametrize("length", [100.0, 0.5])
    def test_what_is_counted_is_what_evaluation_counts(self, length):
        # As much memory as the evaluation of a plan says: the same plan again; a row less: another one.
        one = table(pooling_factor=length)
        found = plan(one, memory_budget_bytes=10**6)
        needed = max(held_bytes(found))
        assert plan(one, on=topology(hbm=needed + 2), memory_budget_bytes=10**6).shards == found.shards
        shrunk = plan(one, on=topology(hbm=needed - 10_000), memory_budget_bytes=10**6)
        assert shrunk.shards != found.shards
        assert max(held_bytes(shrunk)) <= needed - 10_000

    def test_sums_by_reduce_scatter_are_counted_as_evaluation_counts_them(self):
        pooled = table(pooling=Pooling.SUM, pooling_factor=400.0)
        found = plan(pooled, tiers=1)
        assert [one.collective for one in found.shards] == [Collective.REDUCE_SCATTER]
        needed = max(held_bytes(found))
        assert plan(pooled, on=topology(hbm=needed + 2), tiers=1).shards == found.shards
        with pytest.raises(InfeasiblePlanError):
            plan(pooled, on=topology(hbm=needed - 10_000), tiers=1, exchange="partial_sums")

    def test_replicas_shrink_to_what_fits(self):
        row_wise = max(held_bytes(plan(table(), tiers=1)))
        room = topology(hbm=row_wise + 2 * 10**6)
        found = plan(table(), on=room, memory_budget_bytes=10**9)
        unlimited = plan(table(), memory_budget_bytes=10**9)
        assert max(held_bytes(found)) <= row_wise + 2 * 10**6 < max(held_bytes(unlimited))
        assert {Tier.ROW_WISE} < set(tiers(found))
        assert found.predicted.step_ms.value < 1.01 * unlimited.predicted.step_ms.value

    def test_a_budget_below_row_wise_takes_less_than_it(self):
        # Rows of a long history are looked up often enough that copies of the hottest save memory (Fig. 5, A to B).
        def spare(found):
            return max(held_bytes(found))

        long = table(num_embeddings=2_000_000)
        row_wise, neutral = plan(long, tiers=1), plan(long, tiers=2, rule="paper")
        less = plan(long, tiers=2, rule="paper", memory_budget_bytes=-(10**6))
        assert spare(less) < spare(neutral)
        assert spare(less) <= spare(row_wise)
        replicated = [tiers(found)[Tier.DATA_PARALLEL].num_embeddings for found in (less, neutral)]
        assert 0 < replicated[0] < replicated[1]

    @pytest.mark.parametrize("rule", ["frontier", "paper"])
    def test_a_budget_that_nothing_takes_is_told_with_the_least(self, rule):
        message = r"options\.memory_budget_bytes: no cut takes as little: the least is -[\d,]+ bytes over .*"
        with pytest.raises(InfeasiblePlanError, match=message + r"got -1(,000){4}$"):
            plan(table(), rule=rule, memory_budget_bytes=-(10**12))

    @pytest.mark.parametrize("rule", ["frontier", "paper"])
    @pytest.mark.parametrize("num_tiers", [1, 2, 3])
    def test_tables_that_nobody_looks_up_take_what_row_wise_needs(self, rule, num_tiers):
        idle = table(pooling_factor=0.0)
        assert list(tiers(plan(idle, rule=rule, tiers=num_tiers))) == [Tier.ROW_WISE]
        with pytest.raises(InfeasiblePlanError, match=r"the least is 0 bytes over row-wise sharding, got -1$"):
            plan(idle, rule=rule, tiers=num_tiers, memory_budget_bytes=-1)
        with pytest.raises(
            InfeasiblePlanError, match=r"take [\d.]+ [KMGTP]?i?B of each, [\d.]+ [KMGTP]?i?B more than rank 0 has"
        ):
            plan(idle, rule=rule, tiers=num_tiers, on=topology(hbm=200_000 // 32 * 260 - 1))

    def test_says_what_is_missing(self):
        with pytest.raises(
            InfeasiblePlanError, match=r"take [\d.]+ [KMGTP]?i?B of each, [\d.]+ [KMGTP]?i?B more than rank 0 has"
        ):
            plan(table(), on=topology(hbm=10**6))

    def test_activations_may_be_left_out(self):
        static = 200_000 // 32 * 260
        room = topology(hbm=static + 260)
        with pytest.raises(InfeasiblePlanError):
            plan(table(), on=room, tiers=1)
        assert list(tiers(plan(table(), on=room, tiers=1, count_activations=False))) == [Tier.ROW_WISE]

    def test_sequences_count_at_their_99th_percentile(self):
        needed = max(held_bytes(plan(table(), tiers=1)))
        steady, varying = table(), table(pooling_variance=51_200.0)
        assert plan(steady, tiers=1, on=topology(hbm=needed + 1))
        with pytest.raises(InfeasiblePlanError):
            plan(varying, tiers=1, on=topology(hbm=needed + 1))


class TestWholeTables:
    def test_small_tables_may_stay_whole(self):
        found = plan(table(), table("small", 500, pooling_factor=3.0), table_wise_below_rows=1000)
        assert list(tiers(found, "small")) == [Tier.TABLE_WISE]
        assert Tier.ROW_WISE in tiers(found)

    def test_constraints_keep_tables_whole(self):
        found = plan(
            table("pinned", constraints=Constraints(pinned_ranks=(5,))),
            table("friend", constraints=Constraints(colocate_with=("pinned",))),
            table("whole", constraints=Constraints(forbidden_tiers=(Tier.ROW_WISE,))),
            table(),
        )
        assert [list(tiers(found, name)) for name in ("pinned", "friend", "whole")] == [[Tier.TABLE_WISE]] * 3
        ranks = {placed.shard.table.name: placed.replicas for placed in found.shards}
        assert ranks["pinned"] == ranks["friend"] == ((5,),)
        assert Tier.FLEX in tiers(found)

    def test_tables_that_go_nowhere_are_told(self):
        nowhere = table(constraints=Constraints(forbidden_tiers=tuple(Tier)))
        with pytest.raises(
            InfeasiblePlanError, match="history: no sharding type is left: the table forbids tier table_wise"
        ):
            plan(nowhere)
        with pytest.raises(InvalidPlanError, match=r"tables\[0\]\.constraints\.pinned_ranks: must be in \[0, 32\)"):
            plan(table(constraints=Constraints(pinned_ranks=(32,))))
        with pytest.raises(InvalidPlanError, match='names "nobody", which is no table'):
            plan(table(constraints=Constraints(colocate_with=("nobody",))))

    def test_what_comes_back_from_whole_tables_must_fit_everywhere(self):
        uneven = topology(overrides=((3, MemoryBytes(hbm=0)),))
        with pytest.raises(InfeasiblePlanError, match=r"take [\d.]+ [KMGTP]?i?B more than rank 3 has"):
            plan(table(constraints=Constraints(pinned_ranks=(5,))), on=uneven)

    def test_a_rank_without_memory_makes_all_tables_whole(self):
        uneven = topology(overrides=((3, MemoryBytes(hbm=0)),))
        found = plan(table(), table("other"), on=uneven, count_activations=False)
        assert {placed.tier for placed in found.shards} == {Tier.TABLE_WISE}
        assert ((3,),) not in {placed.replicas for placed in found.shards}


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tiers": 4}, r"options\.tiers: must be 1, 2 or 3, got 4"),
            ({"rule": "best"}, r'options\.rule: must be one of frontier, paper, got "best"'),
            ({"exchange": "all"}, r"options\.exchange: must be one of auto, rows, partial_sums"),
            ({"memory_multiplier": -1}, r"options\.memory_multiplier: must be at least 0"),
            ({"memory_multiplier": "nan"}, r"options\.memory_multiplier: must be a number"),
        ],
    )
    def test_bad_values_are_refused(self, options, message):
        with pytest.raises(InvalidOptionError, match=message):
            plan(table(), **options)


def drawn(rng, values):
    return list(values)[rng.integers(len(list(values)))]


def drawn_table(index, rng):
    num_embeddings = int(10 ** rng.uniform(0, 6.5))
    pooling = drawn(rng, Pooling)
    access = rng.choice(["zipf", "uniform", "counts"])
    profile = {
        "zipf": lambda: AccessProfile.zipf(num_embeddings, rng.uniform(0, 2)),
        "uniform": lambda: AccessProfile.uniform(num_embeddings, rng.uniform(0.01, 1)),
        "counts": lambda: make.profile_of(rng.pareto(1, min(num_embeddings, 1000))).thinned(num_embeddings),
    }[access]()
    features = tuple(
        Feature(name=f"f{index}_{number}", pooling_factor=float(rng.choice([0.0, 1.0, rng.lognormal(3, 2)])))
        for number in range(rng.integers(1, 4))
    )
    forbidden = tuple(tier for tier in Tier if rng.random() < 0.1)
    return make.table(
        f"t{index}",
        num_embeddings,
        int(rng.choice([1, 16, 256])),
        features=features,
        access=profile,
        dtype=drawn(rng, [DType.FP32, DType.FP16]),
        pooling=pooling,
        optimizer=drawn(rng, Optimizer),
        constraints=Constraints(forbidden_tiers=forbidden if rng.random() < 0.3 else ()),
    )


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 4),
    spare=st.sampled_from([0.5, 1.0, 1.3, 4.0, 1e6]),
    options=st.fixed_dictionaries(
        {
            "tiers": st.integers(1, 3),
            "rule": st.sampled_from(["frontier", "paper"]),
            "memory_multiplier": st.sampled_from([0.0, 1.0, 6.0]),
            "memory_budget_bytes": st.sampled_from([-(10**4), 0, 10**5, 10**8, 10**12]),
            "exchange": st.sampled_from(["auto", "rows", "partial_sums"]),
            "table_wise_below_rows": st.sampled_from([0, 100]),
            "count_activations": st.booleans(),
        }
    ),
)
def test_any_task_has_a_valid_plan_or_a_typed_error(seed, nodes, per_node, spare, options):
    rng = np.random.default_rng(seed)
    tables = tuple(drawn_table(index, rng) for index in range(rng.integers(1, 5)))
    batch_size = int(10 ** rng.uniform(0, 4))
    share = sum(one.storage_bytes for one in tables) / (nodes * per_node)
    active = sum(
        batch_size * (one.pooling_factor * 2 + 4 * len(one.features)) * one.embedding_dim * 8 for one in tables
    )
    machine = topology(
        nodes=nodes,
        per_node=per_node,
        hbm=int(spare * (share + active)),
        bytes_per_s=(10 ** rng.uniform(8, 12), 10 ** rng.uniform(8, 12)),
    )
    request = make.request(make.tables(*tables, batch_size=batch_size), machine, costs=COSTS, options=options)
    if spare < 4 or options["memory_budget_bytes"] < 0 or any(one.constraints.forbidden_tiers for one in tables):
        try:
            found = FlexShardPlanner().plan(request)
        except InfeasiblePlanError:
            return
    else:
        found = FlexShardPlanner().plan(request)
    validate_plan(found)
    if options["count_activations"]:
        predicted = evaluate(found, COSTS)
        assert all(rank.used_bytes <= machine.memory_bytes.hbm + 1 for rank in predicted.ranks)
