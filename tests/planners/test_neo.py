"""The planner `neo`: schemes, placement, constraints, memory levels, and the paper's arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import (
    Constraints,
    DType,
    Exchange,
    MemoryBytes,
    MemoryLevel,
    Optimizer,
    Payload,
    Pooling,
    Shard,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.evaluation import evaluate
from autoshard.evaluation.cached_rows import cache_traffic
from autoshard.planners.neo import NEO_TYPES, CostFunction, NeoOptions, NeoPlanner
from autoshard.planners.registry import get_planner
from autoshard.planners.space.options import ShardingType, enumerate_options, option_of_placed
from autoshard.planners.space.planner_space import task_prices
from autoshard.validator import validate_plan
from tests import builders as make

COSTS = make.costs("a100")
TERA = 10**12


def machine(num_nodes=2, node=4, **fields):
    """Nodes of a kind; 240 GB/s within and 7 GB/s between them, as Neo's Appendix A measured."""
    links = {
        "bytes_per_s": (2.4e11, 7e9),
        "reduce_bytes_per_s": (2.4e11, 6e10),
        "latency_s": (1e-5, 2e-5),
        "reduce_latency_s": (1e-5, 3e-5),
    }
    return make.topology(node, num_nodes * node, **{"device": "a100", "hbm": TERA, **links, **fields})


def table(name, num_embeddings=100_000, embedding_dim=64, pooling_factor=20.0, **fields):
    return make.table(name, num_embeddings, embedding_dim, pooling_factor, **{"alpha": 1.05, **fields})


def plan_of(tables, topology, batch_size=4096, **options):
    request = make.request(make.tables(*tables, batch_size=batch_size), topology, costs=COSTS, options=options)
    plan = NeoPlanner().plan(request)
    validate_plan(plan)
    return plan


def scheme_in(plan, name):
    found = option_of_placed([one for one in plan.shards if one.shard.table.name == name], plan.topology)
    assert found is not None
    return found[0]


def names_in(plan):
    return [scheme_in(plan, one.name).name for one in plan.tables.tables]


def cost_function(tables, topology, **weights):
    return CostFunction(task_prices(tables, topology, COSTS, Payload()), **weights)


def rank_costs(plan):
    """What each rank costs by the cost function, in seconds."""
    sums_R = np.zeros(plan.topology.world_size)
    costs = cost_function(plan.tables, plan.topology).of(plan.shards)
    for placed, cost_s in zip(plan.shards, costs, strict=True):
        sums_R[[rank for replica in placed.replicas for rank in replica]] += cost_s
    return sums_R


class TestCost:
    BATCH = 80

    TABLE = table("t", 1000, 16, 5.0)

    def costs(self, *parts, **weights):
        topology = machine()
        found = cost_function(make.tables(self.TABLE, batch_size=self.BATCH), topology, **weights)
        return found.of([part.placed(0, topology) for part in parts])

    def moving_s(self, *parts):
        return self.costs(*parts, access_weight=0.0)

    def accessed_s(self, *parts):
        return self.costs(*parts, communication_weight=0.0)

    def part(self, name):
        return enumerate_options(self.TABLE, machine(), (name,))[0].parts[0]

    def test_counts_what_a_whole_table_sends_and_reads(self):
        part = self.part(ShardingType.TABLE_WISE)
        # Of each reader: 10 samples: 10 lengths of 4, 50 ids of 4, 10 vectors of 64 bytes there and 10 back.
        pair = 10 * 4 + 50 * 4 + 2 * 10 * 64
        (moving_s,), (accessed_s,) = self.moving_s(part), self.accessed_s(part)
        assert moving_s == pytest.approx(3 * pair / 2.4e11 + 4 * pair / 7e9)
        # 400 lookups of 64 bytes, read once and then read and written.
        assert accessed_s == pytest.approx(3 * 400 * 64 / 1300e9)
        assert self.costs(part) == pytest.approx([moving_s + accessed_s])

    def test_rows_over_all_ranks_cost_each_as_many_vectors_as_a_whole_table(self):
        # Sec. 4: "the communication cost scales linearly with the number of trainers".
        parts = self.part(ShardingType.TABLE_WISE), self.part(ShardingType.ROW_WISE)
        (whole, split), (whole_accessed, split_accessed) = self.moving_s(*parts), self.accessed_s(*parts)
        assert split_accessed == pytest.approx(whole_accessed / 8)
        # A lookup in eight: rows are sent, not vectors, and their number in place of lengths.
        vectors = (4 + 50 / 8 * 4 + 2 * 50 / 8 * 64) / (10 * 4 + 50 * 4 + 2 * 10 * 64)
        assert split == pytest.approx(vectors * whole)

    def test_sums_of_all_ranks_may_be_added_up_on_the_way(self):
        # Fig. 5b: row-wise parallelism scatters what it has reduced.
        _, summed = enumerate_options(self.TABLE, machine(), (ShardingType.ROW_WISE,))
        # Lengths and ids as ever; 80 vectors of 64 bytes are half of what an all-reduce of them takes, there and back.
        requests = (10 * 4 + 50 / 8 * 4) * (3 / 2.4e11 + 4 / 7e9)
        assert self.moving_s(*summed.parts) == pytest.approx([requests + 2 * 80 * 64 / 2 / 6e10])

    def test_columns_repeat_the_ids(self):
        # Sec. 4: column-wise parallelism "increases the payload for the input indices".
        schemes = enumerate_options(self.TABLE, machine(), (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE))
        (whole,), halves = (self.accessed_s(*scheme.parts) for scheme in schemes)
        assert halves == pytest.approx([whole / 2] * 2)
        (whole,), halves = (self.moving_s(*scheme.parts) for scheme in schemes)
        inputs_s = (10 * 4 + 50 * 4) * (3 / 2.4e11 + 4 / 7e9)
        assert sum(halves) == pytest.approx(whole + inputs_s)

    def test_replicas_send_nothing_and_reduce_the_rows_that_were_hit(self):
        part = self.part(ShardingType.DATA_PARALLEL)
        own, hit = map(table("t", 1000).access.expected_distinct, (50, 400))
        # Ids of 4 bytes from each of 8 ranks are gathered, which is half of an all-reduce.
        assert self.moving_s(part) == pytest.approx([(hit * 64 + 8 * own * 4 / 2) / 6e10])
        assert self.accessed_s(part) == pytest.approx([(3 * 50 * 64 + 2 * (own + 7 * hit) * 64) / 1300e9])

    def test_weights_are_those_of_communication_and_access(self):
        part = self.part(ShardingType.TABLE_WISE)
        (moving_s,), (accessed_s,) = self.moving_s(part), self.accessed_s(part)
        weighted = self.costs(part, communication_weight=2.0, access_weight=3.0)
        assert weighted == pytest.approx([2 * moving_s + 3 * accessed_s])


class TestSchemes:
    @pytest.mark.parametrize("name", NEO_TYPES)
    def test_each_scheme_can_be_the_only_one(self, name):
        plan = plan_of([table(f"t{index}") for index in range(3)], machine(), sharding_types=name.value)
        found = {scheme_in(plan, one.name).name for one in plan.tables.tables}
        # Columns on one node are column shards that happen to be there.
        assert found == {ShardingType.COLUMN_WISE if name is ShardingType.TABLE_COLUMN_WISE else name}
        if name is ShardingType.TABLE_COLUMN_WISE:
            for one in plan.tables.tables:
                ranks = [placed.replicas[0][0] for placed in plan.shards if placed.shard.table is one]
                assert len({rank // 4 for rank in ranks}) == 1

    def test_a_costly_table_is_split_and_small_ones_are_replicated(self):
        tables = [table("large", 10**7, 128, 100.0), *(table(f"s{i}", 300, 128, 2.0) for i in range(8))]
        plan = plan_of(tables, machine(), batch_size=65536)
        assert scheme_in(plan, "large").name not in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
        assert names_in(plan)[1:] == [ShardingType.DATA_PARALLEL] * 8

    def test_columns_are_multiples_of_four(self):
        plan = plan_of([table("t", embedding_dim=50)], machine(), sharding_types="column_wise")
        starts = sorted(placed.shard.columns[0] for placed in plan.shards)
        assert len(starts) > 1
        assert all(start % 4 == 0 for start in starts)

    def test_a_table_too_large_for_a_rank_is_cut(self):
        large = table("large", 10**6)
        plan = plan_of([large], machine(hbm=large.storage_bytes // 7), sharding_types="table_wise,row_wise")
        assert names_in(plan) == [ShardingType.ROW_WISE]
        with pytest.raises(InfeasiblePlanError, match=r"large needs 248 MiB of a rank as table_wise"):
            plan_of([large], machine(hbm=large.storage_bytes // 7), sharding_types="table_wise")

    def test_sequence_tables_exchange_rows(self):
        sequence = table("t", pooling=Pooling.SEQUENCE)
        plan = plan_of([sequence, table("u")], machine(), sharding_types="row_wise,table_wise")
        assert [placed.exchange for placed in plan.shards if placed.shard.table is sequence] == [Exchange.ROWS]

    def test_constraints_hold(self):
        tables = [
            table("pinned", constraints=Constraints(pinned_ranks=(6,))),
            table("node", constraints=Constraints(pinned_ranks=(4, 5, 6, 7), forbidden_tiers=(Tier.TABLE_WISE,))),
            table("one", constraints=Constraints(colocate_with=("other",))),
            table("other", 10**6, pooling_factor=90.0),
            table("whole", 10**6, pooling_factor=90.0, constraints=Constraints(forbidden_tiers=tuple(Tier)[1:])),
            *(table(f"t{index}") for index in range(4)),
        ]
        plan = plan_of(tables, machine())  # which the validator finds no fault with
        assert scheme_in(plan, "node").name in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID)
        assert scheme_in(plan, "whole").tiers == (Tier.TABLE_WISE,)

    @pytest.mark.parametrize("planner", ["neo", "auto"])
    def test_neighbours_that_may_not_be_held_alike_are_on_all_ranks(self, planner):
        tables = [
            table("a", constraints=Constraints(colocate_with=("b",), forbidden_tiers=(Tier.TABLE_WISE, Tier.ROW_WISE))),
            table("b", 10**6, constraints=Constraints(forbidden_tiers=(Tier.TABLE_WISE, Tier.DATA_PARALLEL))),
        ]
        request = make.request(make.tables(*tables, batch_size=4096), machine(1), costs=COSTS)
        plan = get_planner(planner).plan(request)
        validate_plan(plan)
        assert names_in(plan) == [ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE]


def test_arrangements_are_compared_by_predicted_steps_or_by_the_cost_function():
    tables = [table(f"t{i}", 30_000 * (i + 1), 64, 3.0 * (i + 1)) for i in range(12)]
    by_step, by_cost = (plan_of(tables, machine(), batch_size=512, compare=how) for how in ("step", "cost"))
    assert by_step.predicted == evaluate(by_step, COSTS)
    assert by_step.predicted.step_ms.value < by_cost.predicted.step_ms.value
    assert rank_costs(by_cost).max() < rank_costs(by_step).max()


class TestPlacement:
    TABLES = tuple(
        table(f"t{index}", pooling_factor=float(factor))
        for index, factor in enumerate(np.random.default_rng(3).integers(5, 100, 60))
    )

    def test_greedy_puts_the_costliest_on_the_cheapest_rank(self):
        plan = plan_of(self.TABLES, machine(1), sharding_types="table_wise", placement="greedy")
        # Costs are linear in lookups: lengths and vectors are the same of all tables.
        costs = sorted(rank_costs(plan_of([one], machine(1), sharding_types="table_wise")).max() for one in self.TABLES)
        sums = [0.0] * 4
        for cost in reversed(costs):
            sums[sums.index(min(sums))] += cost
        assert sorted(rank_costs(plan)) == pytest.approx(sorted(sums))

    def test_largest_differencing_is_no_worse(self):
        # Sec. 4.1: it "generally outperforms the greedy heuristic".
        spread = {}
        for placement in ("greedy", "karmarkar_karp"):
            sums_R = rank_costs(plan_of(self.TABLES, machine(1), sharding_types="table_wise", placement=placement))
            spread[placement] = sums_R.max() - sums_R.min()
        assert spread["karmarkar_karp"] < spread["greedy"]

    def test_nodes_are_balanced_as_ranks_are(self):
        spread = {}
        for placement in ("greedy", "karmarkar_karp"):
            plan = plan_of(self.TABLES, machine(5, 2), sharding_types="table_row_wise", placement=placement)
            costs_R = rank_costs(plan)
            assert costs_R.min() > 0.95 * costs_R.max()
            spread[placement] = costs_R.max() - costs_R.min()
        assert spread["karmarkar_karp"] < spread["greedy"]


class TestMemoryLevels:
    def test_nothing_leaves_the_device_memory_unless_it_has_to(self):
        tables = [table(f"t{index}") for index in range(6)]
        plan = plan_of(tables, machine(1, hbm=2 * tables[0].storage_bytes, ddr=TERA, ssd=TERA))
        assert {placed.memory.level for placed in plan.shards} == {MemoryLevel.HBM}

    @pytest.mark.parametrize("policy", ["lru", "lfu"])
    def test_the_coldest_tables_go_behind_caches_that_fill_what_is_left(self, policy):
        hot, cold = table("hot", 50_000, pooling_factor=50.0), table("cold", 400_000, pooling_factor=1.0)
        # Of each row a moment, beside its place in the cache.
        index_bytes, slot_bytes = 400_000 * (4 + {"lru": 4, "lfu": 12}[policy]), {"lru": 20, "lfu": 8}[policy]
        hbm = hot.storage_bytes + cold.storage_bytes // 20 + index_bytes
        plan = plan_of([cold, hot], machine(1, 1, hbm=hbm, ddr=TERA), cache_policy=policy)
        placed = {one.shard.table.name: one for one in plan.shards}
        assert placed["hot"].memory.level is MemoryLevel.HBM
        memory = placed["cold"].memory
        assert (memory.level, memory.policy) == (MemoryLevel.DDR, policy)
        row_bytes = 64 * 4
        room = hbm - hot.storage_bytes - index_bytes
        cached = memory.cache_bytes // row_bytes
        assert cached == room // (row_bytes + slot_bytes)
        local = plan.local_shards()[0][0]
        if policy == "lfu":
            assert cache_traffic(local).hit_rate == pytest.approx(float(cold.access.coverage(cached)))
        assert 0.5 < cache_traffic(local).hit_rate < 1

    def test_caches_share_a_rank_by_what_they_save(self):
        # Alike but for how often they are looked up: a row of the busier one is worth more bytes.
        tables = [table("slow", 10**6, pooling_factor=1.0), table("fast", 10**6, pooling_factor=30.0)]
        # Of each row 12 bytes of LFU's index and a moment, of each slot 8 bytes.
        plan = plan_of(tables, machine(1, 1, hbm=10**7 + 2 * (12 + 4) * 10**6, ddr=TERA), cache_policy="lfu")
        slow, fast = (one.memory.cache_bytes for one in plan.shards)
        assert slow + fast == pytest.approx(10**7 * 256 / (256 + 8), abs=2 * 256)
        assert fast > 2 * slow
        by_hand = evaluate(plan, COSTS).max_kernel_ms
        for moved in (-256 * 2000, 256 * 2000):
            caches = (slow - moved, fast + moved)
            shards = [
                replace(one, memory=replace(one.memory, cache_bytes=size))
                for one, size in zip(plan.shards, caches, strict=True)
            ]
            assert evaluate(replace(plan, shards=tuple(shards)), COSTS).max_kernel_ms > by_hand

    def test_caches_are_for_tables_that_no_ranks_have_room_for(self):
        # Together the ranks have room for three tables, but none of them for two.
        tables = [table(f"t{index}") for index in range(3)]
        topology = machine(1, 2, hbm=3 * tables[0].storage_bytes // 2, ddr=TERA)
        plan = plan_of(tables, topology, sharding_types="table_wise")
        assert {placed.memory.level for placed in plan.shards} == {MemoryLevel.HBM, MemoryLevel.DDR}
        # With its index and slots, a cache of all rows takes more than they do.
        cached = [local for held in plan.local_shards() for local in held if local.level is MemoryLevel.DDR]
        assert all(local.held_bytes[MemoryLevel.HBM] < local.memory_bytes for local in cached)

    def test_a_cache_on_several_ranks_is_as_large_as_the_tightest_has_room_for(self):
        one = table("t", 10**6)
        tight, index = 12_000_000, (4 + 4) * 10**6 // 2
        topology = machine(1, 2, hbm=2 * tight, ddr=TERA, overrides=((1, MemoryBytes(hbm=tight, ddr=TERA)),))
        (placed,) = plan_of([one], topology, sharding_types="row_wise").shards
        assert placed.memory.cache_bytes == (tight - index) // (64 * 4 + 20) * 64 * 4

    def test_disks_come_after_host_memory(self):
        tables = [table(f"t{index}", pooling_factor=float(index + 1)) for index in range(6)]
        size = tables[0].storage_bytes
        plan = plan_of(tables, machine(1, 1, hbm=3 * size, ddr=2 * size, ssd=9 * size))
        levels = [one.memory.level for one in plan.shards]
        # By heat; host memory is full before a disk is used.
        order = [MemoryLevel.SSD, MemoryLevel.DDR, MemoryLevel.HBM]
        assert levels == sorted(levels, key=order.index)
        assert levels.count(MemoryLevel.DDR) == 2
        assert MemoryLevel.SSD in levels
        small = machine(1, 1, hbm=3 * size, ddr=2 * size, ssd=9 * size)
        for options, memory in (
            ({"memory": "ddr"}, "device memory and host memory of the rank"),
            ({"memory": "hbm"}, "device memory of the rank"),
            ({"memory": "hbm", "memory_share": 0.5}, "device memory of the rank less memory_share"),
        ):
            with pytest.raises(InfeasiblePlanError, match=rf"B more than the {memory} \([\d.]+ MiB\)$"):
                plan_of(tables, small, **options)

    def test_a_share_of_the_device_memory_can_be_kept_free(self):
        tables = [table(f"t{index}") for index in range(6)]
        room = machine(1, 1, hbm=6 * tables[0].storage_bytes, ddr=TERA)
        assert {one.memory.level for one in plan_of(tables, room).shards} == {MemoryLevel.HBM}
        shared = plan_of(tables, room, memory_share=0.7)
        (held,) = (rank.hbm_bytes for rank in evaluate(shared, COSTS).ranks)
        assert held <= 109_200_000  # 70% of 156,000,000

    def test_more_tables_than_must_go_behind_caches_if_that_is_faster(self):
        # One cold table's worth of memory is missing; with a single table out there, no room is left for its cache.
        tables = [*(table(f"cold{i}", 10**6, pooling_factor=2.0) for i in range(4)), table("hot", pooling_factor=9.0)]
        hbm = sum(one.storage_bytes for one in tables) - tables[0].storage_bytes
        plan = plan_of(tables, machine(1, 1, hbm=hbm + 10**6, ddr=TERA))
        levels = {one.shard.table.name: one.memory.level for one in plan.shards}
        assert levels["hot"] is MemoryLevel.HBM
        assert list(levels.values()).count(MemoryLevel.DDR) > 1

    def test_a_cached_table_takes_longer_by_its_transfers(self):
        one = table("t", 10**6)
        near = plan_of([one], machine(1, 1, hbm=one.storage_bytes))
        cached = plan_of([one], machine(1, 1, hbm=one.storage_bytes // 20, ddr=TERA))
        assert evaluate(cached, COSTS).max_kernel_ms > 1.05 * evaluate(near, COSTS).max_kernel_ms


class TestModelF:
    """Neo Sec. 8.5: 12 trillion parameters, "a few massive embedding tables with ~10B rows and 256 columns".

    The paper does not list the tables: here four have 10 billion rows, and forty share the other 6.875 billion.
    """

    @staticmethod
    def tables(dtype, optimizer):
        massive = [table(f"m{index}", 10**10, 256, 20.0, dtype=dtype, optimizer=optimizer) for index in range(4)]
        rest = [table(f"s{index}", 171_875_000, 256, 10.0, dtype=dtype, optimizer=optimizer) for index in range(40)]
        return [*massive, *rest]

    def held(self, dtype, optimizer):
        return sum(Shard.whole(one).storage_bytes for one in self.tables(dtype, optimizer))

    def test_it_has_12_trillion_parameters(self):
        tables = self.tables(DType.FP16, Optimizer.ROWWISE_ADAGRAD)
        assert sum(one.num_embeddings * one.embedding_dim for one in tables) == 12 * TERA

    def test_memory_falls_from_96_to_24_terabytes(self):
        # Footnote: 12e12 x 4 x 2 = 96e12 with fp32 and a moment per element.
        assert self.held(DType.FP32, Optimizer.ADAGRAD) == 96 * TERA
        # fp16 and a moment per row: 24e12, and 4 bytes for each of 46.875e9 rows, which the paper rounds away.
        assert self.held(DType.FP16, Optimizer.ROWWISE_ADAGRAD) == 24 * TERA + 4 * 46_875_000_000
        # Either step alone.
        assert self.held(DType.FP16, Optimizer.ADAGRAD) == 72 * TERA
        assert self.held(DType.FP32, Optimizer.ROWWISE_ADAGRAD) == pytest.approx(48 * TERA, rel=0.004)

    def test_a_placed_shard_holds_its_share_of_it(self):
        massive = self.tables(DType.FP16, Optimizer.ROWWISE_ADAGRAD)[0]
        plan = plan_of([massive], machine(16, 8), batch_size=65536, sharding_types="row_wise")
        held = [rank.hbm_bytes for rank in evaluate(plan, COSTS).ranks]
        assert held == [10**10 * (256 * 2 + 4) // 128] * 128

    @pytest.mark.slow
    def test_it_fits_4_terabytes_of_hbm_and_24_of_dram_behind_caches(self):
        cluster = machine(16, 8, hbm=4 * TERA // 128, ddr=24 * TERA // 128)
        plan = plan_of(self.tables(DType.FP16, Optimizer.ROWWISE_ADAGRAD), cluster, batch_size=65536)
        massive = [one for one in plan.shards if one.shard.table.name.startswith("m")]
        assert {one.memory.level for one in massive} == {MemoryLevel.DDR}
        assert all(one.memory.cache_bytes > 0 for one in massive)
        # "On the massive embedding tables, we enable row-wise sharding": within nodes or over all of them.
        assert {one.tier for one in massive} <= {Tier.ROW_WISE, Tier.TABLE_ROW_WISE}
        assert sum(rank.ddr_bytes for rank in evaluate(plan, COSTS).ranks) <= 24 * TERA

    def test_the_naive_way_does_not_fit(self):
        cluster = machine(16, 8, hbm=4 * TERA // 128, ddr=24 * TERA // 128)
        with pytest.raises(InfeasiblePlanError, match=r"87\.3 TiB, 61\.8 TiB more"):
            plan_of(self.tables(DType.FP32, Optimizer.ADAGRAD), cluster, batch_size=65536)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"placement": "best"}, "options.placement"),
        ({"sharding_types": "table_wise,flex"}, "options.sharding_types"),
        ({"sharding_types": ""}, "options.sharding_types"),
        ({"memory": "tape"}, "options.memory"),
        ({"memory_share": 0.0}, "options.memory_share"),
        ({"memory_share": 1.1}, "options.memory_share"),
        ({"access_weight": -1.0}, "options.access_weight"),
        ({"cache_policy": "fifo"}, "options.cache_policy"),
        ({"compare": "size"}, "options.compare"),
    ],
)
def test_options_out_of_range_are_refused(options, field):
    with pytest.raises(InvalidOptionError) as caught:
        NeoOptions(**options)
    assert caught.value.field == field
