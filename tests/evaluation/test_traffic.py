"""Bytes by level, added up layout by layout, against those added up pair by pair of ranks."""

import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import (
    Collective,
    CostModels,
    DType,
    Exchange,
    GradSync,
    Payload,
    Tier,
)
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel, activation_bytes, evaluate, plan_traffic
from autoshard.evaluation.communication import link_bytes
from autoshard.evaluation.traffic import Stream, pair_bytes, replicas_read
from tests.builders import each, everyone, on, placed, table, topology
from tests.builders import plan as plan_of
from tests.contracts.price_oracle import read_by

COMM = AlphaBetaComm()
machine = partial(
    topology,
    device="a100",
    hbm=1 << 60,
    bytes_per_s=(1e11, 1e10, 1e9),
    reduce_bytes_per_s=1e10,
    latency_s=(1e-5, 2e-5, 3e-5),
)


def nodes_of(topology):
    size = topology.local_world_size
    return tuple(tuple(range(start, start + size)) for start in range(0, topology.world_size, size))


ALL_TO_ALL, collectives = Collective.ALL_TO_ALL, st.sampled_from(list(Collective))


@st.composite
def plans(draw):
    """Plans with shards held in all ways: alone, split, in every rank, in every node, and on a few ranks."""
    topology = machine(*draw(st.sampled_from([(4,), (2, 8), (2, 4, 12), (1, 6), (8, 16)])))
    world = topology.world_size
    shards = []
    for index in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["one", "all", "node", "each", "each_node", "some", "fetch"]))
        rank = draw(st.integers(0, world - 1))
        some = tuple((one,) for one in draw(st.permutations(range(world)))[: max(2, world // 3)])
        tier, replicas = {
            "one": (Tier.TABLE_WISE, ((rank,),)),
            "all": (Tier.ROW_WISE, everyone(world)),
            "node": (Tier.TABLE_ROW_WISE, (nodes_of(topology)[rank % topology.num_nodes],)),
            "each": (Tier.DATA_PARALLEL, each(world)),
            "each_node": (Tier.FLEX, nodes_of(topology)),
        }.get(kind, (Tier.REPLICATED, some))
        fetch = None
        if kind == "fetch":
            fetch = tuple(draw(st.lists(st.integers(0, len(some) - 1), min_size=world, max_size=world)))
        exchange = draw(st.sampled_from(list(Exchange)))
        shards.append(
            placed(
                table(f"t{index}", pooling_factor=1.0 + index % 7),
                tier,
                replicas,
                fetch=fetch,
                exchange=exchange,
                collective=draw(collectives) if kind == "all" and exchange is Exchange.PARTIAL_SUMS else ALL_TO_ALL,
                grad_sync=GradSync.DENSE if len(replicas) > 1 else GradSync.NONE,
            )
        )
    return plan_of(*shards, batch_size=64 * world, topology=topology)


def pair_by_pair(plan, stream):
    """The slow way: every reader and every owner of every shard."""
    sent_RR = np.zeros((plan.group_size, plan.group_size))
    for one in plan.shards:
        if one.collective is not ALL_TO_ALL and stream in (Stream.FORWARD, Stream.BACKWARD):
            continue
        readers = range(plan.group_size)
        is_own = all(one.replicas[read_by(plan, one, reader)] == (reader,) for reader in readers)
        run = replace(one, exchange=Exchange.PARTIAL_SUMS) if is_own else one
        local_batch = plan.group_batch_size / plan.group_size
        by_stream = pair_bytes([run], local_batch, plan.payload, id_bytes=4, lookups_factor_N=[1.0])[0]
        of_pair = by_stream[list(Stream).index(stream)]
        for reader in readers:
            for owner in one.replicas[read_by(plan, one, reader)]:
                place = (reader, owner) if stream.asks else (owner, reader)
                sent_RR[place] += of_pair
    return sent_RR


def scattered_bytes(plan, stream):
    """Sums of all bags of the group, and their gradients."""
    return sum(
        plan.group_batch_size * len(placed.shard.table.features) * placed.shard.embedding_dim * 4
        for placed in plan.shards
        if placed.collective is not ALL_TO_ALL and stream in (Stream.FORWARD, Stream.BACKWARD)
    )


@settings(max_examples=40)
@given(plan=plans())
def test_bytes_by_level_are_those_of_the_pairs_of_ranks(plan):
    traffic = plan_traffic(plan)
    links = traffic.links(plan.topology)
    for stream in Stream:
        expected_RR = pair_by_pair(plan, stream)
        np.testing.assert_allclose(traffic.pairs_RR(stream), expected_RR, rtol=1e-12)
        larger = scattered_bytes(plan, stream)
        assert traffic.scattered_bytes(stream) == pytest.approx(larger)
        smaller = larger / plan.group_size
        sent, received = (larger, smaller) if stream is Stream.FORWARD else (smaller, larger)
        np.testing.assert_allclose(traffic.sent_R(stream), expected_RR.sum(axis=1) + sent, rtol=1e-12)
        np.testing.assert_allclose(traffic.received_R(stream), expected_RR.sum(axis=0) + received, rtol=1e-12)
        expected = link_bytes(expected_RR, plan.topology)
        np.testing.assert_allclose(links[stream].leaving_LR, expected.leaving_LR, rtol=1e-9)
        np.testing.assert_allclose(links[stream].arriving_LR, expected.arriving_LR, rtol=1e-9)
        np.testing.assert_allclose(
            COMM.links_ms(links[stream], plan.topology),
            COMM.links_ms(expected, plan.topology),
            rtol=1e-9,
        )


@settings(max_examples=40)
@given(plan=plans())
def test_each_rank_reads_its_own_replica_else_one_of_its_node(plan):
    for one in plan.shards:
        expected = [read_by(plan, one, reader) for reader in range(plan.group_size)]
        assert replicas_read(plan, one).tolist() == expected


def large_plan(num_tables, topology):
    """Tables of all tiers in turn."""
    world = topology.world_size
    nodes, shards = nodes_of(topology), []
    for index in range(num_tables):
        tier, replicas = (
            (Tier.TABLE_WISE, ((index * 7 % world,),)),
            (Tier.ROW_WISE, everyone(world)),
            (Tier.TABLE_ROW_WISE, (nodes[index % len(nodes)],)),
            (Tier.DATA_PARALLEL, each(world)),
            (Tier.FLEX, nodes),
        )[index % 5]
        sync = GradSync.SPARSE if len(replicas) > 1 else GradSync.NONE
        shards.append(
            placed(table(f"t{index}", 10**6, 64, pooling_factor=1.0 + index % 7), tier, replicas, grad_sync=sync)
        )
    return plan_of(*shards, batch_size=64 * world, topology=topology)


def test_traffic_of_thousands_of_ranks_needs_no_matrix_of_ranks():
    # One matrix of 4,096 x 4,096 numbers would be 128 MiB.
    plan = large_plan(1000, machine(8, 256, 4096))
    tracemalloc.start()
    traffic = plan_traffic(plan)
    links = traffic.links(plan.topology)
    activation_bytes(plan, traffic)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert links[Stream.FORWARD].leaving_LR.shape == (3, 4096)


@pytest.mark.slow
def test_a_thousand_tables_on_thousands_of_ranks_are_priced():
    plan = large_plan(1000, machine(8, 256, 4096))
    costs = CostModels(kernel=AnalyticCostModel.for_device("a100"), comm=COMM)
    tracemalloc.start()
    priced = evaluate(plan, costs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 30
    assert len(priced.ranks) == 4096
    assert priced.step_ms.value > 0


def test_messages_of_int8_have_whole_blocks():
    # 2 ranks of 3 samples: 3 x (16 + 16) numbers for each of both, so 96, in 2 blocks of 64 with 8 bytes of scales.
    payload = Payload(forward=DType.INT8, backward=DType.FP16)
    plan = plan_of(on(1, "t0"), on(1, "t1"), batch_size=6, topology=machine(2), payload=payload)
    traffic = plan_traffic(plan)
    assert traffic.pairs_RR(Stream.FORWARD).tolist() == [[0, 0], [2 * 72, 2 * 72]]
    assert traffic.pairs_RR(Stream.BACKWARD).tolist() == [[0, 96 * 2], [0, 96 * 2]]


def test_numbers_of_rows_with_copies_travel_as_wide_as_those_of_the_plan():
    copied = placed(table("a"), Tier.DATA_PARALLEL, each(4), grad_sync=GradSync.SPARSE)
    plain, weighted = (
        plan_traffic(plan_of(copied, placed(table("b", weighted=of)), topology=topology(4))) for of in (False, True)
    )
    assert weighted.gathered_R.tolist() == (2 * plain.gathered_R).tolist()
    assert plain.gathered_R.min() > 0
