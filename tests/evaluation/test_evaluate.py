"""What a plan costs: bytes worked out by hand, and how the parts make up a step."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    Collective,
    DenseLayers,
    DType,
    Exchange,
    Feature,
    GradSync,
    MemoryBytes,
    Payload,
    Pooling,
    RowRange,
    RowsBy,
    Shard,
    Split,
    Tier,
)
from autoshard.core.step import ENGINE_WORK, EXCHANGE_PARTS, Overlap, StepPart
from autoshard.evaluation import (
    activation_bytes,
    evaluate,
    plan_traffic,
    price_step,
    training_bytes,
)
from autoshard.evaluation.batch_memory import has_room
from autoshard.evaluation.communication import link_bytes
from autoshard.evaluation.stages import cheapest_syncs
from autoshard.evaluation.traffic import Stream, whole_share
from tests.builders import costs, each, on, placed, plan, table, topology

BATCH, WORLD = 64, 4
ROWS, DIM, POOLING = 1000, 16, 2.0
#: Of one rank, which has a quarter of the batch.
BAGS, LOOKUPS = 16, 32.0
TOPOLOGY, COSTS = topology(latency_s=1e-4), costs()
plan_of = partial(plan, topology=TOPOLOGY)


SHARED = table("shared", num_embeddings=10**6, access=AccessProfile.uniform(10**6))
ALL, EACH, EACH_NODE = ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,)), ((0, 1), (2, 3))


class TestTraffic:
    def test_whole_tables(self):
        plan = plan_of(on(1), payload=Payload(forward=DType.FP16, backward=DType.FP32))
        traffic = plan_traffic(plan)
        # Every rank sends 16 lengths of 4 bytes and 32 ids of 8 to rank 1, gets 16 vectors of 16 fp16 back, and sends
        # their gradients in fp32.
        to_owner = np.zeros((WORLD, WORLD))
        to_owner[:, 1] = 1
        np.testing.assert_allclose(traffic.pairs_RR(Stream.LENGTHS), to_owner * BAGS * 4)
        np.testing.assert_allclose(traffic.pairs_RR(Stream.IDS), to_owner * LOOKUPS * 4)
        np.testing.assert_allclose(traffic.pairs_RR(Stream.FORWARD), to_owner.T * BAGS * DIM * 2)
        np.testing.assert_allclose(traffic.pairs_RR(Stream.BACKWARD), to_owner * BAGS * DIM * 4)
        assert not traffic.reduced_R.any()
        assert not traffic.gathered_R.any()
        # Rank 1 holds all inputs, their ids as int64, and outputs; every rank holds the 16 vectors that it got.
        owner_bytes = WORLD * (BAGS * 4 + LOOKUPS * 8 + BAGS * DIM * 2)
        got_bytes = BAGS * DIM * 2
        expected = [got_bytes, owner_bytes + got_bytes, got_bytes, got_bytes]
        np.testing.assert_allclose(activation_bytes(plan), expected)

    def test_ids_of_tables_that_int32_cannot_number_travel_as_int64(self):
        most = 1 << 31
        sent, with_long = (
            plan_traffic(plan_of(on(1), on(2, "long", num_embeddings=rows))) for rows in (most, most + 1)
        )
        np.testing.assert_allclose(with_long.pairs_RR(Stream.IDS), 2 * sent.pairs_RR(Stream.IDS))

    def test_outputs_of_copies_on_every_rank_are_held_once(self):
        # FlexShard, Table 2: data-parallel rows take B x L x D, all others twice that. Each holder collects gradients
        # of its rows.
        sequences = table(pooling=Pooling.SEQUENCE)
        rows = {"of": sequences, "exchange": Exchange.ROWS, "grad_sync": GradSync.DENSE}
        each = activation_bytes(plan_of(placed(tier=Tier.DATA_PARALLEL, replicas=EACH, **rows)))
        each_node = activation_bytes(plan_of(placed(tier=Tier.FLEX, replicas=EACH_NODE, **rows)))
        looked_up, gradients = LOOKUPS * DIM * 4, ROWS * DIM * 4
        # Rows are asked for by their number and their ids.
        np.testing.assert_allclose(each, 4 + LOOKUPS * 8 + looked_up + gradients)
        np.testing.assert_allclose(each_node, 2 * 4 + LOOKUPS * 8 + 2 * looked_up + gradients / 2)
        # Rank 1 looks up for ranks 0 and 1 what it has a copy of: there is an exchange, and what stays goes with it.
        some = placed(tier=Tier.REPLICATED, replicas=EACH, fetch=(1, 1, 2, 3), **rows)
        np.testing.assert_allclose(
            activation_bytes(plan_of(some)),
            np.array([0, 2, 1, 1]) * (4 + LOOKUPS * 8 + looked_up) + looked_up + gradients,
        )

    def test_training_holds_gradients_of_all_that_was_sent_and_received(self):
        for forward, backward in ((DType.FP32, DType.FP32), (DType.FP16, DType.FP32), (DType.FP32, DType.FP16)):
            plan = plan_of(on(1), payload=Payload(forward=forward, backward=backward))
            got, sent = BAGS * DIM * forward.num_bytes, WORLD * BAGS * DIM * forward.num_bytes
            gradients = backward.num_bytes / forward.num_bytes * (got + np.array([0, sent, 0, 0]))
            inputs = np.array([0, WORLD * (BAGS * 4 + LOOKUPS * 8), 0, 0])
            expected = inputs + got + np.maximum(gradients, np.array([0, sent, 0, 0]))
            np.testing.assert_allclose(training_bytes(plan), expected)
            assert (training_bytes(plan) >= activation_bytes(plan)).all()

    @pytest.mark.parametrize("fetch", [None, (0, 1, 2, 3)])
    def test_rows_of_own_copies_are_pooled_where_they_are(self, fetch):
        tier = Tier.REPLICATED if fetch else Tier.DATA_PARALLEL
        copies = placed(table(), tier, EACH, fetch=fetch, grad_sync=GradSync.DENSE)
        sums, rows = (plan_of(replace(copies, exchange=exchange)) for exchange in Exchange)
        assert evaluate(rows, COSTS) == evaluate(sums, COSTS)
        swapped = plan_of(replace(copies, tier=Tier.REPLICATED, fetch=(1, 0, 2, 3), exchange=Exchange.ROWS))
        assert evaluate(swapped, COSTS) != evaluate(sums, COSTS)

    def test_gradients_of_own_copies_are_held_once(self):
        sequences = table(pooling=Pooling.SEQUENCE)
        each = plan_of(placed(sequences, Tier.DATA_PARALLEL, EACH, exchange=Exchange.ROWS, grad_sync=GradSync.DENSE))
        np.testing.assert_allclose(training_bytes(each) - activation_bytes(each), LOOKUPS * DIM * 4)

    def test_dense_layers_take_parameters_gradients_and_outputs(self):
        layers = DenseLayers(num_dense_features=3, bottom_mlp=(8, 4), top_mlp=(5, 1), interaction="concat")
        bare = plan_of(on(1))
        plan = replace(bare, tables=replace(bare.tables, dense=layers))
        # 3 -> 8 -> 4; the 4 columns beside those of the table's feature; -> 5 -> 1.
        wide = 4 + DIM
        parameters = (3 + 1) * 8 + (8 + 1) * 4 + (wide + 1) * 5 + (5 + 1) * 1
        outputs = (8 + 4) + wide + (5 + 1)
        dense = 4 * (2 * parameters + BATCH // WORLD * (3 + 2 * outputs))
        np.testing.assert_allclose(training_bytes(plan) - training_bytes(bare), dense)
        assert evaluate(plan, COSTS).ranks[0].training_bytes == round(training_bytes(plan)[0])

    def test_a_device_has_room_for_training_or_has_not(self):
        plan = plan_of(on(1))
        held, needed = plan.tables.tables[0].storage_bytes, int(training_bytes(plan)[1])

        def with_memory(hbm):
            return replace(plan, topology=replace(plan.topology, memory_bytes=MemoryBytes(hbm=hbm), overrides=()))

        assert has_room(with_memory(held + needed))
        assert not has_room(with_memory(held + needed - 1))
        assert not has_room(with_memory(held + needed), 1)
        assert has_room(with_memory(held), count_activations=False)

    def test_sparse_gradients_are_those_of_rows_that_are_hit_with_their_ids(self):
        dense, sparse, gathered = (
            activation_bytes(plan_of(placed(table(), Tier.DATA_PARALLEL, EACH, grad_sync=sync)))
            for sync in (GradSync.DENSE, GradSync.SPARSE, GradSync.ALL_GATHER)
        )
        # Each of the four ranks' lookups hit some of the 1,000 rows, and all of them together.
        own, num_hit = (table().access.expected_distinct(share * LOOKUPS) for share in (1, WORLD))
        np.testing.assert_allclose(dense - sparse, ROWS * DIM * 4 - num_hit * DIM * 4 - WORLD * own * 4)
        np.testing.assert_allclose(dense - gathered, ROWS * DIM * 4 - WORLD * own * (DIM * 4 + 4))

    def test_long_batches_of_sequences_take_memory_but_no_time(self):
        # 16 samples of variance 9: their sum of 32 deviates by 12, and by 2.3263 times as much at the 99th percentile.
        steady = Feature(name="f", pooling_factor=POOLING)
        varying = replace(steady, pooling_variance=9.0)
        factor = 1 + 2.3263 * 12 / 32
        owned = {}
        for pooling in Pooling:
            plans = [plan_of(on(1, pooling=pooling, features=(feature,))) for feature in (steady, varying)]
            before, after = (evaluate(plan, COSTS) for plan in plans)
            assert before.step_ms == after.step_ms
            owned[pooling] = [cost.ranks[1].activation_bytes for cost in (before, after)]
            np.testing.assert_allclose(owned[pooling], [activation_bytes(plan)[1] for plan in plans], atol=0.5)
        assert owned[Pooling.SUM][0] == owned[Pooling.SUM][1]
        ids, number, rows = LOOKUPS * 8, 4, LOOKUPS * DIM * 4
        expected = [WORLD * (number + ratio * (ids + rows)) + ratio * rows for ratio in (1.0, factor)]
        np.testing.assert_allclose(owned[Pooling.SEQUENCE], expected, atol=0.5)

    def test_sequences_send_one_row_per_lookup(self):
        traffic = plan_traffic(plan_of(on(0, pooling=Pooling.SEQUENCE)))
        np.testing.assert_allclose(traffic.pairs_RR(Stream.FORWARD)[0], LOOKUPS * DIM * 4)

    def test_several_features_are_several_bags(self):
        traffic = plan_traffic(
            plan_of(on(0, features=(Feature(name="a", pooling_factor=1.0), Feature(name="b", pooling_factor=2.0))))
        )
        np.testing.assert_allclose(traffic.pairs_RR(Stream.FORWARD)[0], 2 * BAGS * DIM * 4)
        np.testing.assert_allclose(traffic.pairs_RR(Stream.IDS)[:, 0], BAGS * 3 * 4)

    def test_row_wise_owners_each_send_a_partial_sum(self):
        traffic = plan_traffic(plan_of(placed(table(), Tier.ROW_WISE, ALL)))
        np.testing.assert_allclose(traffic.pairs_RR(Stream.IDS), LOOKUPS)
        np.testing.assert_allclose(traffic.pairs_RR(Stream.FORWARD), BAGS * DIM * 4)

    def test_sums_that_are_added_up_on_the_way(self):
        summed = placed(table(), Tier.ROW_WISE, ALL, collective=Collective.REDUCE_SCATTER)
        payload = Payload(forward=DType.FP16, backward=DType.FP32)
        plan = plan_of(summed, on(1, "t1"), payload=payload)
        traffic, other = plan_traffic(plan), plan_traffic(plan_of(on(1, "t1"), payload=payload))
        alone = plan_traffic(plan_of(placed(table(), Tier.ROW_WISE, ALL), on(1, "t1"), payload=payload))
        for stream in (Stream.LENGTHS, Stream.IDS):
            np.testing.assert_array_equal(traffic.pairs_RR(stream), alone.pairs_RR(stream))
            assert traffic.scattered_bytes(stream) == 0
        for stream, wire in ((Stream.FORWARD, 2), (Stream.BACKWARD, 4)):
            np.testing.assert_array_equal(traffic.pairs_RR(stream), other.pairs_RR(stream))
            assert traffic.scattered_bytes(stream) == WORLD * BAGS * DIM * wire
        # A rank puts in sums of all bags and takes out its own; their gradients go the other way.
        every, own = WORLD * BAGS * DIM, BAGS * DIM
        for stream, sent, received in ((Stream.FORWARD, every * 2, own * 2), (Stream.BACKWARD, own * 4, every * 4)):
            np.testing.assert_allclose(traffic.sent_R(stream) - other.sent_R(stream), sent)
            np.testing.assert_allclose(traffic.received_R(stream) - other.received_R(stream), received)
        # Every rank holds its inputs, sums of all bags, and those of its own that came.
        inputs = WORLD * (BAGS * 4 + LOOKUPS / WORLD * 8)
        more = activation_bytes(plan) - activation_bytes(plan_of(on(1, "t1"), payload=payload))
        np.testing.assert_allclose(more, inputs + (every + own) * 2)

    def test_deduplicated_rows_travel_once(self):
        rows = placed(table(), Tier.ROW_WISE, ALL, exchange=Exchange.ROWS, split=Split.HASH)
        plain, once = plan_traffic(plan_of(rows)), plan_traffic(plan_of(replace(rows, deduplicate=True)))
        np.testing.assert_allclose(plain.pairs_RR(Stream.FORWARD), LOOKUPS / 4 * DIM * 4)
        distinct = table().access.expected_distinct(LOOKUPS)
        assert distinct < LOOKUPS
        np.testing.assert_allclose(once.pairs_RR(Stream.FORWARD), distinct / 4 * DIM * 4)

    def test_data_parallel_tables_meet_in_an_all_reduce_only(self):
        traffic = plan_traffic(plan_of(placed(table(), Tier.DATA_PARALLEL, EACH, grad_sync=GradSync.DENSE)))
        for matrix in map(traffic.pairs_RR, (Stream.IDS, Stream.FORWARD, Stream.BACKWARD)):
            assert not (matrix - np.diag(np.diag(matrix))).any()
        np.testing.assert_allclose(traffic.reduced_R, ROWS * DIM * 4)

    def test_sparse_synchronisation_sends_touched_rows(self):
        traffic = plan_traffic(plan_of(placed(table(), Tier.DATA_PARALLEL, EACH, grad_sync=GradSync.SPARSE)))
        touched = table().access.expected_distinct(BATCH * POOLING)
        np.testing.assert_allclose(traffic.reduced_R, touched * DIM * 4)
        # Every rank gathers the ids of the rows that each rank's batch hits.
        own = table().access.expected_distinct(LOOKUPS)
        np.testing.assert_allclose(traffic.gathered_R, WORLD * own * 4)

    def test_gathered_gradients_travel_with_their_ids(self):
        traffic = plan_traffic(plan_of(placed(table(), Tier.DATA_PARALLEL, EACH, grad_sync=GradSync.ALL_GATHER)))
        assert not traffic.reduced_R.any()
        own = table().access.expected_distinct(LOOKUPS)
        np.testing.assert_allclose(traffic.gathered_R, WORLD * own * (4 + DIM * 4))

    def test_gathered_ids_are_as_many_as_the_replica_has_that_most_ranks_read(self):
        shard = placed(table(), Tier.REPLICATED, ((2,), (1,)), fetch=(1, 1, 0, 1), grad_sync=GradSync.SPARSE)
        most = table().access.expected_distinct(3 * LOOKUPS)
        np.testing.assert_allclose(plan_traffic(plan_of(shard)).gathered_R, [0, 2 * most * 4, 2 * most * 4, 0])

    def test_flex_stays_within_nodes(self):
        traffic = plan_traffic(plan_of(placed(table(), Tier.FLEX, EACH_NODE, grad_sync=GradSync.DENSE)))
        assert not traffic.pairs_RR(Stream.FORWARD)[:2, 2:].any()
        np.testing.assert_allclose(traffic.pairs_RR(Stream.FORWARD)[:2, :2], BAGS * DIM * 4)
        # Each rank puts in half of the rows, over a port that is as quick as an all-reduce of all ranks.
        np.testing.assert_allclose(traffic.reduced_R, ROWS * DIM * 4 / 2)

    def test_ports_of_a_node_carry_all_rows_together(self):
        # FlexShard's Table 6: 86 GB/s over all ranks, 11 GB/s across nodes, with 8 ranks a node.
        nodes = tuple(tuple(range(first, first + 8)) for first in range(0, 128, 8))
        cluster = partial(topology, 8, 128, reduce_bytes_per_s=8.6e10)
        assert whole_share(nodes, cluster(bytes_per_s=(1e11, 1.1e10))) == pytest.approx(1)
        assert whole_share(tuple((rank,) for rank in range(128)), cluster(bytes_per_s=(1e11, 1.1e10))) == 1
        # Ports of twice what such an all-reduce leaves to each: 2 x 15 / 16 of the buffer, by 8.
        assert whole_share(nodes, cluster(bytes_per_s=(1e11, 2 * 8.6e10 * 15 / 16 / 4))) == pytest.approx(1 / 2)

    def test_replicas_are_fetched_as_the_plan_says(self):
        shard = placed(table(), Tier.REPLICATED, ((2,), (1,)), fetch=(1, 1, 0, 1), grad_sync=GradSync.SPARSE)
        requests = plan_traffic(plan_of(shard)).pairs_RR(Stream.IDS) > 0
        assert [np.flatnonzero(row).tolist() for row in requests] == [[1], [1], [2], [1]]

    def test_replicas_are_fetched_from_the_own_node_by_default(self):
        requests = (
            plan_traffic(plan_of(placed(table(), Tier.REPLICATED, ((3,), (0,)), grad_sync=GradSync.SPARSE))).pairs_RR(
                Stream.IDS
            )
            > 0
        )
        assert [np.flatnonzero(row).tolist() for row in requests] == [[0], [0], [3], [3]]

    @given(cut=st.integers(1, ROWS - 1), by=st.sampled_from(RowsBy), seed=st.integers(0, 99))
    def test_cutting_a_table_keeps_its_lookups(self, cut, by, seed):
        tiers = [(Tier.TABLE_WISE, ((1,),)), (Tier.ROW_WISE, ALL), (Tier.DATA_PARALLEL, EACH), (Tier.FLEX, EACH_NODE)]
        parts = []
        for start, stop in ((0, cut), (cut, ROWS)):
            tier, replicas = tiers[np.random.default_rng([seed, start]).integers(4)]
            rows = RowRange(start=start, stop=stop, by=by)
            parts.append(placed(Shard(table=table(), rows=rows, columns=(0, DIM)), tier, replicas, split=Split.CYCLIC))
        traffic = plan_traffic(plan_of(*parts))
        np.testing.assert_allclose(traffic.pairs_RR(Stream.IDS).sum(axis=1), LOOKUPS * 4, rtol=1e-6)


class TestCheapestSync:
    """The topology reduces 1 GB/s after 0.1 ms; an all-gather takes half of an all-reduce, and another for counts."""

    def cheapest(self, batch_size=BATCH, num_ranks=WORLD, **fields):
        shard = placed(table(**fields), Tier.DATA_PARALLEL, each(num_ranks))
        return cheapest_syncs([shard], batch_size, COSTS.comm, topology(num_ranks, latency_s=1e-4))[0]

    def test_few_bytes_are_summed_whole(self):
        # 64 kB in 0.16 ms: what names its rows takes 0.2 ms and more.
        assert self.cheapest() is GradSync.DENSE

    def test_few_of_many_rows_are_gathered_by_few_ranks(self):
        # Each of two ranks hits about as many rows as there are lookups: no row of one is hit by the other.
        uniform = AccessProfile.uniform(10**7)
        assert self.cheapest(num_ranks=2, num_embeddings=10**7, access=uniform) is GradSync.ALL_GATHER

    def test_rows_that_many_ranks_hit_are_reduced_once(self):
        assert self.cheapest(2**20, 16, num_embeddings=10**7, alpha=1.5) is GradSync.SPARSE

    def test_one_replica_needs_none(self):
        assert cheapest_syncs([on(0)], BATCH, COSTS.comm, TOPOLOGY) == [GradSync.NONE]


class TestEvaluate:
    def test_reduce_scatter_and_all_gather_are_priced_as_such(self):
        summed = placed(table(), Tier.ROW_WISE, ALL, collective=Collective.REDUCE_SCATTER)
        second = placed(SHARED, Tier.ROW_WISE, ALL, collective=Collective.REDUCE_SCATTER)
        table_wise = evaluate(plan_of(on(1, "t1")), COSTS)
        both = evaluate(plan_of(summed, second, on(1, "t1")), COSTS)
        # One collective for both tables, behind the all-to-all.
        num_bytes = 2.0 * WORLD * BAGS * DIM * 4
        for part, collective_ms in (
            ("forward_exchange_ms", COSTS.comm.collective_ms("reduce_scatter", num_bytes, TOPOLOGY)),
            ("backward_exchange_ms", COSTS.comm.collective_ms("all_gather", num_bytes, TOPOLOGY)),
        ):
            assert collective_ms > 0
            # What a rank packs and unpacks: its own samples for each rank, and what all add up to.
            work = ENGINE_WORK["cpu"][StepPart(part.removesuffix("_ms"))]
            work_ms = work.get("row_cuts", 0.0) + work["megabytes"] * (WORLD + 1) / WORLD * num_bytes / 1e6
            for rank, alone in zip(both.ranks, table_wise.ranks, strict=True):
                assert getattr(rank, part) == pytest.approx(getattr(alone, part) + collective_ms + work_ms)

    def test_the_interval_of_an_exchange_spans_that_of_its_collectives(self):
        plan = plan_of(placed(table(), Tier.ROW_WISE, ALL, collective=Collective.REDUCE_SCATTER), on(1, "t1"))
        price = price_step(plan, COSTS)
        part, wire_ms = price.parts[StepPart.FORWARD_EXCHANGE], price.stages.exchange_ms_XBR[1].max()
        low, high = COSTS.comm.bounds_ms("all_to_all", np.array([wire_ms]), TOPOLOGY)
        # Both collectives have the same factors in this model, and what ranks work is known.
        assert part.high - part.value == pytest.approx(high[0] - wire_ms)
        assert part.value - part.low == pytest.approx(wire_ms - low[0])

    def test_parts_make_up_the_step_as_in_neo(self):
        # Neo Appendix B, Eq. 1 without dense layers: every stage at its slowest rank, and the input distribution.
        shared = placed(SHARED, Tier.DATA_PARALLEL, EACH, grad_sync=GradSync.DENSE)
        plan = plan_of(on(0), on(1, "t1", pooling_factor=30.0), shared)
        costs = evaluate(plan, COSTS, overlap=Overlap.NEO)

        def slowest(part):
            return max(getattr(rank, part) for rank in costs.ranks)

        forward = slowest("forward_kernel_ms") + slowest("forward_exchange_ms")
        backward = slowest("backward_exchange_ms") + slowest("backward_kernel_ms")
        assert costs.sync_ms > backward, "the all-reduce of the shared table is made to decide"
        assert costs.step_ms.value == pytest.approx(slowest("input_ms") + forward + costs.sync_ms)
        one_by_one = slowest("input_ms") + forward + backward + costs.sync_ms
        assert evaluate(plan, COSTS).step_ms.value == pytest.approx(one_by_one)

    def test_exchange_and_update_decide_without_replicas(self):
        costs = evaluate(plan_of(on(0), on(1, "t1", pooling_factor=30.0)), COSTS)
        parts = ("input", "forward_kernel", "forward_exchange", "backward_exchange", "backward_kernel")
        expected = sum(max(getattr(rank, f"{part}_ms") for rank in costs.ranks) for part in parts)
        assert costs.step_ms.value == pytest.approx(expected)
        assert costs.step_ms.low < expected < costs.step_ms.high

    def test_kernels_are_priced_per_rank(self):
        plan = plan_of(on(0), on(0, "t1"), on(1, "t2", pooling_factor=200.0), on(2, "t3"), on(3, "t4"))
        costs = evaluate(plan, COSTS)
        kernel = COSTS.kernel
        codes = [kernel.encode(shards).sum(axis=0) for shards in plan.local_shards()]
        expected = kernel.predict_ms(np.stack(codes))
        assert [rank.kernel_ms for rank in costs.ranks] == pytest.approx(expected.tolist())
        assert (costs.binding_rank, costs.binding_shard) == (1, "t2")
        assert costs.floor_kernel_ms == pytest.approx(expected[1])
        assert costs.balance == pytest.approx(expected.min() / expected.max())
        assert costs.imbalance == pytest.approx(expected.max() / expected.mean())
        assert costs.cost_model == "analytic:cpu"

    def test_memory_is_weights_and_optimizer_state(self):
        costs = evaluate(plan_of(on(0), placed(table("t1"), Tier.ROW_WISE, ALL)), COSTS)
        # 1,000 rows of 64 bytes and a moment of 4; a quarter of them on every rank.
        assert [rank.hbm_bytes for rank in costs.ranks] == [85_000, 17_000, 17_000, 17_000]
        assert {(rank.ddr_bytes, rank.ssd_bytes) for rank in costs.ranks} == {(0, 0)}

    def test_a_rank_that_holds_nothing_makes_the_balance_zero(self):
        costs = evaluate(plan_of(on(0), on(2, "t1")), COSTS)
        assert costs.balance == 0.0
        assert [rank.kernel_ms > 0 for rank in costs.ranks] == [True, False, True, False]

    def test_one_rank_exchanges_nothing(self):
        costs = evaluate(plan_of(on(0), topology=topology(1, latency_s=1e-4)), COSTS)
        assert (costs.balance, costs.imbalance, costs.exchange_balance) == (1.0, 1.0, 1.0)
        exchanges_ms = sum(costs.parts[part].value for part in EXCHANGE_PARTS)
        assert costs.step_ms.value == pytest.approx(costs.max_kernel_ms + exchanges_ms)

    def test_exchange_balance_is_min_over_max(self):
        # All vectors are as wide, and rank 1 sends twice as many as ranks 0, 2 and 3.
        plan = plan_of(on(0), on(1, "t1"), on(1, "t2"), on(2, "t3"), on(3, "t4"))
        costs, (_, forward_R, backward_R) = evaluate(plan, COSTS), price_step(plan, COSTS).stages.exchange_ms_XBR
        exchange_ms = forward_R + backward_R
        assert costs.exchange_balance == pytest.approx(min(exchange_ms) / max(exchange_ms))
        assert costs.exchange_balance < 1

    @given(seed=st.integers(0, 500))
    def test_relabelling_ranks_of_a_node_leaves_the_cost(self, seed):
        rng = np.random.default_rng(seed)
        order = np.concatenate([rng.permutation(2), 2 + rng.permutation(2)])
        ranks = rng.integers(0, WORLD, 6)
        names = [f"t{index}" for index in range(6)]
        pooling = rng.uniform(0, 50, 6)

        def cost(of_rank):
            items = zip(ranks, names, pooling, strict=True)
            return evaluate(plan_of(*(on(int(of_rank[r]), n, pooling_factor=p) for r, n, p in items)), COSTS)

        first, other = cost(np.arange(WORLD)), cost(order)
        assert other.step_ms.value == pytest.approx(first.step_ms.value)
        assert other.balance == pytest.approx(first.balance)


@pytest.mark.parametrize(("tier", "replicas"), [(Tier.ROW_WISE, ((0, 1, 2, 3),)), (Tier.TABLE_WISE, ((2,),))])
def test_lengths_and_ids_travel_in_one_message(tier, replicas):
    plan = plan_of(placed(table(), tier, replicas))
    plan = replace(plan, topology=replace(plan.topology, device="a100"))  # where splitting ids is not priced
    sent_RR = plan_traffic(plan).pairs_RR(Stream.LENGTHS) + plan_traffic(plan).pairs_RR(Stream.IDS)
    wanted_R = COSTS.comm.links_ms(link_bytes(sent_RR, plan.topology), plan.topology)
    np.testing.assert_allclose([rank.input_ms for rank in evaluate(plan, COSTS).ranks], wanted_R, rtol=1e-9)
