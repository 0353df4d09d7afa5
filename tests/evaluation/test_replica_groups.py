"""Plans over several replica groups: 2D's equations by hand, which links are used, and what a group's view is."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    DenseLayers,
    DType,
    GradSync,
    GroupLayout,
    Link,
    MemoryBytes,
    MemoryLevel,
    Optimizer,
    ReplicaGroups,
    Shard,
    Split,
    SyncRows,
    Tier,
)
from autoshard.core.errors import InvalidPlanError
from autoshard.core.step import Overlap, StepPart
from autoshard.evaluation import evaluate, group_sync, price_step
from autoshard.evaluation.device_memory import device_memory
from autoshard.evaluation.group_sync import group_sync_bytes, with_cheaper_sync
from autoshard.formats.documents.plan_json import plan_from_json, plan_to_json
from autoshard.validator import validate_plan
from tests.builders import costs, each, placed, plan, table, tables, topology

ROWS, DIM, BATCH = 1 << 20, 64, 1 << 14
NODE_BYTES_PER_S, BUILDING_BYTES_PER_S, REGION_BYTES_PER_S = 70e9, 60e9, 40e9
#: Nodes of 8 unless told otherwise, with an all-to-all slow enough for all-reduces to say what ports carry.
machine = partial(
    topology,
    device="a100",
    bytes_per_s=(1e9, 1e9 / 4, 1e9 / 16),
    reduce_bytes_per_s=(NODE_BYTES_PER_S, BUILDING_BYTES_PER_S, REGION_BYTES_PER_S),
)
COSTS = costs("a100")
ACROSS, WITHIN = GroupLayout.ACROSS_NODES, GroupLayout.WITHIN_NODES


def row_wise(topology, groups, **changes):
    """One table, its rows split over all ranks of the group."""
    group = tuple(range(groups.group_size(topology)))
    tier = Tier.ROW_WISE if len(group) > 1 else Tier.TABLE_WISE
    of = table("t0", ROWS, DIM, pooling_factor=10.0)
    return plan(
        placed(of, tier, (group,), split=Split.CYCLIC),
        tables=tables(of, batch_size=BATCH, **changes),
        topology=topology,
        replica_groups=groups,
    )


def group_sync_ms(topology, **groups):
    return evaluate(row_wise(topology, ReplicaGroups(**groups)), COSTS).group_sync_ms


def has_equal_shares(world, groups):
    """Whether groups, and copies of a row, are as many in each unit of a level that they reach, counted one by one."""
    if world.world_size % groups.num_groups:
        return False
    size = world.world_size // groups.num_groups
    ranks = np.array([list(groups.world_ranks(rank, world)) for rank in range(size)])
    for level in world.levels:
        for of_view in (*ranks.T, *ranks):
            _, counts = np.unique(of_view // level.size, return_counts=True)
            if len(set(counts)) > 1:
                return False
    return True


class TestEquation1:
    """2D Sec. 5: memory S (M - 1) / T and time 2 S (M - 1) / (T B), S with the moments."""

    #: Weights of 4 bytes and a moment of 4 bytes per row.
    SIZE = ROWS * (DIM * 4 + 4)
    #: What passes a port of a node's ring of 8 when its all-reduce takes bytes / NODE_BYTES_PER_S.
    PORT = NODE_BYTES_PER_S * 2 * 7 / 8

    @pytest.fixture(autouse=True)
    def _collectives_alone(self, monkeypatch):
        for name in ("_MOVES_OF_ALL", "_MOVES_OF_MARKS", "_MOVES_OF_TOUCHED"):
            monkeypatch.setattr(group_sync, name, 0)

    @pytest.mark.parametrize("num_groups", [2, 4, 8])
    def test_copies_in_a_node(self, num_groups):
        world = machine(8, 64)
        plan = row_wise(world, ReplicaGroups(num_groups=num_groups))
        costs, full = evaluate(plan, COSTS), evaluate(row_wise(world, ReplicaGroups()), COSTS)
        expected_s = 2 * self.SIZE * (num_groups - 1) / (64 * self.PORT)
        assert costs.group_sync_ms == pytest.approx(expected_s * 1e3)
        overhead = self.SIZE * (num_groups - 1) / 64
        assert costs.ranks[0].hbm_bytes - full.ranks[0].hbm_bytes == overhead
        assert (len(costs.ranks), full.group_sync_ms) == (64 // num_groups, None)

    def test_optimizer_states_count(self):
        plan = row_wise(machine(8), ReplicaGroups(num_groups=8))
        adam = replace(plan.tables.tables[0], optimizer=Optimizer.ADAM)
        shard = replace(plan.shards[0], shard=Shard.whole(adam))
        held = evaluate(replace(plan, tables=tables(adam, batch_size=BATCH), shards=(shard,)), COSTS)
        ratio = held.group_sync_ms / evaluate(plan, COSTS).group_sync_ms
        assert ratio == pytest.approx((3 * DIM * 4) / (DIM * 4 + 4))

    def test_touched_rows_are_what_all_groups_look_up_between_synchronisations(self):
        # Even in their access, so that d lookups hit n (1 - exp(-d / n)) of n rows; each rank has a mark of every row.
        # A row is 64 fp32 weights and one moment; both all-reduces are of the 4 ranks of a node that hold copies.
        groups = ReplicaGroups(num_groups=4, sync_every=3, sync_rows=SyncRows.TOUCHED)
        plan = row_wise(machine(8), groups)
        even = replace(plan.tables.tables[0], access=AccessProfile.uniform(ROWS))
        plan = replace(plan, tables=tables(even, batch_size=BATCH))
        plan = replace(plan, shards=(replace(plan.shards[0], shard=Shard.whole(even)),))
        rows, lookups = ROWS / 2, 3 * BATCH * 10 / 2
        expected = rows, rows * -np.expm1(-lookups / rows) * (4 * DIM + 4)
        marks_R, touched_R = group_sync_bytes(plan, plan.of_one_group().arrays)
        np.testing.assert_allclose([marks_R, touched_R], np.transpose([expected, expected]), rtol=1e-6)
        speed = 2 * NODE_BYTES_PER_S * 7 / 8 / (2 * 3 / 4)
        assert evaluate(plan, COSTS).group_sync_ms == pytest.approx(sum(expected) / speed * 1e3 / 3)
        # Half as many bytes of a weight in fp16; the moment stays fp32.
        half = replace(even, dtype=DType.FP16)
        shards = (replace(plan.shards[0], shard=Shard.whole(half)),)
        plan = replace(plan, tables=tables(half, batch_size=BATCH), shards=shards)
        _, half_R = group_sync_bytes(plan, plan.of_one_group().arrays)
        np.testing.assert_allclose(half_R, touched_R * (2 * DIM + 4) / (4 * DIM + 4))

    def test_copies_within_a_group_are_touched_by_all_its_lookups(self):
        groups = ReplicaGroups(num_groups=2, sync_rows=SyncRows.TOUCHED)
        plan = row_wise(machine(8), groups)
        copies = replace(plan.shards[0], tier=Tier.DATA_PARALLEL, replicas=each(4), grad_sync=GradSync.SPARSE)
        whole = replace(plan.shards[0], tier=Tier.TABLE_WISE, replicas=((0,),))
        of_copies, of_whole = (
            group_sync_bytes(one, one.of_one_group().arrays)
            for one in (replace(plan, shards=(copies,)), replace(plan, shards=(whole,)))
        )
        for of_copies_R, of_whole_R in zip(of_copies, of_whole, strict=True):
            assert of_copies_R.tolist() == [of_whole_R[0]] * 4

    @pytest.mark.parametrize(("num_lookups", "rows"), [(1, SyncRows.TOUCHED), (1000, SyncRows.ALL)])
    def test_the_cheaper_rows_are_averaged(self, num_lookups, rows):
        plan = row_wise(machine(8), ReplicaGroups(num_groups=4, sync_every=4))
        of = table("t0", ROWS, DIM, pooling_factor=float(num_lookups), access=AccessProfile.uniform(ROWS))
        shards = (replace(plan.shards[0], shard=Shard.whole(of)),)
        plan = replace(plan, tables=tables(of, batch_size=BATCH), shards=shards)
        chosen = with_cheaper_sync(plan, COSTS.comm)
        ways = [replace(plan, replica_groups=replace(plan.replica_groups, sync_rows=one)) for one in SyncRows]
        assert chosen.replica_groups.sync_rows is rows
        assert evaluate(chosen, COSTS).group_sync_ms == min(evaluate(one, COSTS).group_sync_ms for one in ways)

    def test_one_group_averages_nothing(self):
        plan = row_wise(machine(8), ReplicaGroups())
        assert with_cheaper_sync(plan, COSTS.comm) == plan

    def test_fewer_synchronisations_cost_less(self):
        every, fourth = (group_sync_ms(machine(8, 64), num_groups=4, sync_every=steps) for steps in (1, 4))
        assert fourth == pytest.approx(every / 4)

    @pytest.mark.parametrize(("num_groups", "bound"), [(16, "node"), (64, "building")])
    def test_copies_of_one_node_meet_there_first(self, num_groups, bound):
        # Rings of 8 inside nodes, then rings of nodes with an eighth of the bytes per port; the slower of both counts.
        nodes = num_groups / 8
        held, port = self.SIZE * num_groups / 64, BUILDING_BYTES_PER_S * 2 * (7 / 8) / 8
        inside_s = held * 2 * (7 / 8) / self.PORT
        between_s = held / 8 * 2 * (nodes - 1) / nodes / port
        assert (between_s > inside_s) == (bound == "building")
        assert group_sync_ms(machine(8, 64), num_groups=num_groups) == pytest.approx(max(inside_s, between_s) * 1e3)

    def test_copies_in_different_nodes_use_a_port_each(self):
        # FlexShard, Table 6: all-reduces over all ranks reach 86 GB/s, over one rank of each node 11 GB/s.
        world = machine(8, 128)
        levels = (world.levels[0], replace(world.levels[1], all_reduce=Link(bytes_per_s=86e9)))
        across_nodes = ReplicaGroups(num_groups=16, layout=WITHIN).replica_topology(replace(world, levels=levels))
        assert across_nodes.levels[-1].all_reduce.bytes_per_s == pytest.approx(11e9, rel=0.03)

    def test_ports_carry_at_least_an_all_to_all(self):
        # One rank of each building, where the published all-reduce says little of what a rank's port carries: the
        # buffer of the whole building's ranks passes all of their ports, 40 GB/s * 2 / 2 / 64 each.
        world = machine(8, 64, 128)
        region = replace(world.levels[2], all_to_all=Link(bytes_per_s=3e9))
        fast = replace(world, levels=(*world.levels[:2], region))
        for each_world, bytes_per_s in ((world, REGION_BYTES_PER_S / 64), (fast, 3e9)):
            expected_s = self.SIZE / 64 / bytes_per_s
            assert group_sync_ms(each_world, num_groups=2, layout=WITHIN) == pytest.approx(expected_s * 1e3)


def test_what_a_rank_moves_itself_is_priced_beside_the_collectives(monkeypatch):
    memory = device_memory(machine(8).device).gather_bytes_per_s
    for rows, moves in ((SyncRows.ALL, (1,)), (SyncRows.TOUCHED, (1, 3))):
        plan = row_wise(machine(8), ReplicaGroups(num_groups=4, sync_every=2, sync_rows=rows))
        put_in = [bytes_R.max() for bytes_R in group_sync_bytes(plan, plan.of_one_group().arrays)]
        whole_ms = evaluate(plan, COSTS).group_sync_ms
        with monkeypatch.context() as patch:
            for name in ("_MOVES_OF_ALL", "_MOVES_OF_MARKS", "_MOVES_OF_TOUCHED"):
                patch.setattr(group_sync, name, 0)
            collectives_ms = evaluate(plan, COSTS).group_sync_ms
        assert whole_ms - collectives_ms == pytest.approx(1e3 * np.dot(moves, put_in) / memory / 2)


class TestGroups:
    @pytest.mark.parametrize(
        ("num_groups", "layout", "sizes"),
        [
            (2, ACROSS, [4, 32, 64]),
            (8, ACROSS, [1, 8, 16]),
            (16, ACROSS, [1, 4, 8]),
            (128, ACROSS, [1, 1, 1]),
            (2, WITHIN, [8, 64]),
            (4, WITHIN, [8, 32]),
            (32, WITHIN, [4]),
            (128, WITHIN, [1]),
        ],
    )
    def test_levels_are_those_that_a_group_reaches(self, num_groups, layout, sizes):
        world, groups = machine(8, 64, 128), ReplicaGroups(num_groups=num_groups, layout=layout)
        view = groups.group_topology(world)
        assert [level.size for level in view.levels] == sizes or (sizes == [1, 1, 1] and view.world_size == 1)
        assert view.world_size == 128 // num_groups

    @given(
        node=st.sampled_from([1, 2, 4, 8]),
        nodes=st.sampled_from([1, 2, 3, 4]),
        buildings=st.sampled_from([1, 2, 3]),
        num_groups=st.integers(1, 96),
        layout=st.sampled_from(GroupLayout),
    )
    def test_views_have_the_world_s_levels_or_are_refused(self, node, nodes, buildings, num_groups, layout):
        world = machine(node, node * nodes, node * nodes * buildings)
        groups = ReplicaGroups(num_groups=num_groups, layout=layout)
        if not has_equal_shares(world, groups):
            with pytest.raises(InvalidPlanError, match=r"must divide|no equal share"):
                groups.group_topology(world)
            return
        group, copies = groups.group_topology(world), groups.replica_topology(world)
        ranks = [groups.world_ranks(rank, world) for rank in range(group.world_size)]
        for view, world_ranks in ((group, [of[-1] for of in ranks]), (copies, list(ranks[-1]))):
            assert view.world_size == len(world_ranks)
            for mine, one in enumerate(world_ranks):
                for yours, other in enumerate(world_ranks):
                    index = next(i for i, level in enumerate(world.levels) if one // level.size == other // level.size)
                    seen = next(i for i, level in enumerate(view.levels) if mine // level.size == yours // level.size)
                    assert seen == index or one == other

    @pytest.mark.parametrize(
        ("num_groups", "layout", "text"),
        [
            (3, ACROSS, "must divide the 64 ranks, got 3"),
            (5, WITHIN, "must divide the 64 ranks, got 5"),
        ],
    )
    def test_ranks_that_are_not_divisible(self, num_groups, layout, text):
        plan = row_wise(machine(8, 64), ReplicaGroups())
        plan = replace(plan, replica_groups=ReplicaGroups(num_groups=num_groups, layout=layout))
        for check in (validate_plan, lambda plan: evaluate(plan, COSTS)):
            with pytest.raises(InvalidPlanError, match=text) as caught:
                check(plan)
            assert caught.value.field == "replica_groups.num_groups"

    @pytest.mark.parametrize(("layout", "level"), [(ACROSS, "node's 8"), (WITHIN, "node's 8")])
    def test_groups_without_an_equal_share_of_nodes(self, layout, level):
        world = machine(8, 24)
        groups = ReplicaGroups(num_groups=2 if layout is WITHIN else 3, layout=layout)
        with pytest.raises(InvalidPlanError, match=f"have no equal share of each {level} ranks"):
            validate_plan(row_wise(world, groups))

    @pytest.mark.parametrize("field", ["num_groups", "sync_every", "moment_scale"])
    def test_impossible_numbers_are_refused(self, field):
        with pytest.raises(InvalidPlanError) as caught:
            ReplicaGroups(**{field: 0})
        assert caught.value.field == field

    @pytest.mark.parametrize(("num_groups", "moment_scale"), [(1, 2.0), (2, 2.5), (4, 1e6)])
    def test_a_moment_scale_above_the_number_of_groups_is_refused(self, num_groups, moment_scale):
        # 2D Scaling rule 1: c in (0, M].
        with pytest.raises(InvalidPlanError, match=rf"at most the number of groups, {num_groups}, got") as caught:
            ReplicaGroups(num_groups=num_groups, moment_scale=moment_scale)
        assert caught.value.field == "moment_scale"
        document = plan_to_json(row_wise(machine(8, 64), ReplicaGroups(num_groups=num_groups)))
        document["replica_groups"]["moment_scale"] = moment_scale
        with pytest.raises(InvalidPlanError, match=r"^replica_groups.moment_scale: must be at most"):
            plan_from_json(document)

    def test_the_moment_scale_is_the_number_of_groups_unless_it_is_given(self):
        assert [ReplicaGroups(num_groups=number).moment_scale for number in (1, 4)] == [1.0, 4.0]
        assert ReplicaGroups(num_groups=4, moment_scale=2.0).moment_scale == 2.0
        document = plan_to_json(row_wise(machine(8, 64), ReplicaGroups(num_groups=4)))
        assert document["replica_groups"].pop("moment_scale") == 4.0
        assert plan_from_json(document).replica_groups.moment_scale == 4.0

    def test_the_smallest_memory_and_the_slowest_fetch_count(self):
        fetch_ms = tuple(tuple(float(10 * i + j) for j in range(4)) for i in range(4))
        world = replace(machine(2, 4), overrides=((3, MemoryBytes(hbm=5)),), fetch_ms=fetch_ms)
        view = ReplicaGroups(num_groups=2).group_topology(world)
        assert [view.memory_of(rank)[MemoryLevel.HBM] for rank in (0, 1)] == [1 << 40, 5]
        # Group 0 has the world's ranks 0 and 2, group 1 ranks 1 and 3.
        assert view.fetch_ms == ((11.0, 13.0), (31.0, 33.0))


class TestStep:
    def test_a_group_exchanges_as_a_cluster_of_its_own(self):
        world, groups = machine(8, 64, latency_s=1e-4), ReplicaGroups(num_groups=8)
        plan = row_wise(world, groups)
        # One rank of each of 8 nodes, an eighth of the batch: everything travels between nodes.
        alone = replace(
            plan,
            tables=replace(plan.tables, batch_size=BATCH // 8),
            topology=machine(1, 8, latency_s=1e-4),
            replica_groups=ReplicaGroups(),
        )
        mine, theirs = evaluate(plan, COSTS), evaluate(alone, COSTS)
        for part in ("input_ms", "forward_exchange_ms", "backward_exchange_ms", "kernel_ms", "activation_bytes"):
            assert getattr(mine.ranks[3], part) == pytest.approx(getattr(theirs.ranks[3], part)), part
        assert mine.step_ms.value == pytest.approx(theirs.step_ms.value + mine.group_sync_ms)
        seven_of_eight = BATCH / 64 * DIM * 4 * 7
        slow = world.levels[1].all_to_all
        expected_s = slow.latency_s + seven_of_eight / slow.bytes_per_s
        assert mine.ranks[0].forward_exchange_ms == pytest.approx(expected_s * 1e3)

    def test_groups_within_nodes_exchange_over_the_nodes_links(self):
        world = machine(8, 64)
        across, within = (
            evaluate(row_wise(world, ReplicaGroups(num_groups=8, layout=layout)), COSTS) for layout in (ACROSS, WITHIN)
        )
        assert within.ranks[0].forward_exchange_ms < across.ranks[0].forward_exchange_ms / 3
        assert within.group_sync_ms > across.group_sync_ms

    def test_the_groups_part_the_batch_and_what_it_takes(self):
        world = machine(8, 64)
        full, halves = (evaluate(row_wise(world, ReplicaGroups(num_groups=num)), COSTS) for num in (1, 2))
        # Each rank serves half as many samples with twice the rows of a bag: ids as before, but half of the vectors.
        ids, lengths, vectors = BATCH / 64 * 10 * 8, BATCH * 4, BATCH * DIM * 4
        assert full.ranks[0].activation_bytes == pytest.approx(ids + lengths + 2 * vectors, rel=1e-6)
        assert halves.ranks[0].activation_bytes == pytest.approx(ids + lengths / 2 + vectors, rel=1e-6)

    def test_dense_gradients_meet_over_the_whole_world(self):
        world = machine(8, 64)
        dense = DenseLayers(num_dense_features=13, bottom_mlp=(512, 64), top_mlp=(512, 1))
        one, many = (price_step(row_wise(world, ReplicaGroups(num_groups=num), dense=dense), COSTS) for num in (1, 64))
        assert many.times.all_reduce == one.times.all_reduce > 0
        assert many.times.dense_layers == pytest.approx(one.times.dense_layers)

    def test_synchronisation_hides_behind_nothing(self):
        plan = row_wise(machine(8, 64), ReplicaGroups(num_groups=4))
        for overlap in Overlap:
            price = price_step(plan, COSTS, overlap=overlap)
            free = replace(price.times, group_sync=0.0)
            assert price.step_ms.value == pytest.approx(free.step_ms(overlap) + price.times.group_sync)
            assert price.parts[StepPart.DENSE].value >= price.times.group_sync > 0
        assert price.step_ms.high > price.step_ms.value + 2 * price.times.group_sync

    def test_predictions_are_written_and_read_back(self):
        plan = row_wise(machine(8, 64), ReplicaGroups(num_groups=4, sync_every=2, moment_scale=4.0))
        plan = plan.with_predicted(evaluate(plan, COSTS))
        document = plan_to_json(plan)
        assert document["predicted"]["group_sync_ms"] == plan.predicted.group_sync_ms > 0
        assert plan.predicted.sync_ms == plan.predicted.group_sync_ms
        assert max(rank.sync_ms for rank in plan.predicted.ranks) == pytest.approx(plan.predicted.group_sync_ms)
        assert plan_from_json(document) == plan

    def test_thousands_of_ranks(self):
        world = machine(8, 2048, 4096)
        for num_groups, layout in ((1, ACROSS), (16, ACROSS), (16, WITHIN)):
            costs = evaluate(row_wise(world, ReplicaGroups(num_groups=num_groups, layout=layout)), COSTS)
            assert len(costs.ranks) == 4096 // num_groups
            assert np.isfinite(costs.step_ms.high)
