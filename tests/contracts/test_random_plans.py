"""Plans as nobody would make them are valid, priced, written and read: any tier, cut, split, exchange and memory.

Shape suffixes: R ranks of a replica group.
"""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    Collective,
    DType,
    Exchange,
    Feature,
    GradSync,
    GroupLayout,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    Payload,
    PlacedShard,
    Pooling,
    ReplicaGroups,
    RowRange,
    RowsBy,
    Shard,
    Split,
    Tier,
)
from autoshard.core.errors import InvalidPlanError
from autoshard.evaluation import evaluate
from autoshard.formats import plan_from_json, plan_to_json
from autoshard.validator import validate_plan
from tests import builders as make

#: Sizes of levels.
WORLDS = [(1,), (4,), (1, 4), (2, 4), (4, 8), (2, 4, 8)]


def drawn_topology(rng):
    sizes = WORLDS[rng.integers(len(WORLDS))]
    speeds = 10.0 ** rng.uniform(8, 11, (len(sizes), 2))
    links = {"bytes_per_s": tuple(speeds[:, 0]), "reduce_bytes_per_s": tuple(speeds[:, 1]), "latency_s": 1e-5}
    plenty = dict.fromkeys(("hbm", "ddr", "ssd"), 10**12)
    return make.topology(*sizes, device=str(rng.choice(["cpu", "h100"])), **links, **plenty)


def drawn_groups(rng, topology):
    """Any number of groups and layout with an equal share of every node."""
    found = []
    for layout in GroupLayout:
        for num_groups in range(1, topology.world_size + 1):
            groups = ReplicaGroups(num_groups=num_groups, layout=layout, sync_every=int(rng.integers(1, 4)))
            try:
                groups.ranks_per_node(topology)
            except InvalidPlanError:
                continue
            found.append(groups)
    return found[rng.integers(len(found))] if rng.random() < 0.5 else ReplicaGroups()


def drawn_table(rng, index):
    num_rows = int(10 ** rng.uniform(0, 5))
    return make.table(
        f"t{index}",
        num_rows,
        int(rng.integers(1, 40)),
        alpha=float(rng.choice([0.0, 1.05, 3.0])),
        features=tuple(
            Feature(name=f"t{index}_f{number}", pooling_factor=float(rng.choice([0.0, 0.01, 1.0, 20.0])))
            for number in range(rng.integers(1, 3))
        ),
        dtype=list(DType)[rng.integers(4)],
        pooling=list(Pooling)[rng.integers(3)],
        optimizer=list(Optimizer)[rng.integers(4)],
    )


def drawn_cuts(rng, size):
    """Bounds of one to four parts of [0, size)."""
    inner = rng.integers(1, size, rng.integers(0, 4)).tolist() if size > 1 else []
    bounds = sorted({0, size, *inner})
    return list(pairwise(bounds))


def drawn_replicas(rng, size, nodes):
    """A tier, and replicas that it stands for."""
    every = tuple(range(size))
    few = tuple(int(rank) for rank in rng.permutation(size)[: rng.integers(2, size + 1)]) if size > 1 else ()
    choices = {
        Tier.TABLE_WISE: ((int(rng.integers(size)),),),
        Tier.ROW_WISE: (every,),
        Tier.TABLE_ROW_WISE: (nodes[rng.integers(len(nodes))],),
        Tier.DATA_PARALLEL: tuple((rank,) for rank in every),
        Tier.FLEX: tuple(nodes),
        Tier.REPLICATED: tuple((rank,) for rank in few),
    }
    tiers = [tier for tier, replicas in choices.items() if replicas]
    tier = tiers[rng.integers(len(tiers))]
    return tier, choices[tier]


def drawn_placed(rng, shard, size, nodes, can_reduce):
    tier, replicas = drawn_replicas(rng, size, nodes)
    splits = [Split.CYCLIC, Split.HASH]
    if shard.rows.by is RowsBy.INDEX or len(replicas[0]) == 1:
        splits.append(Split.BLOCK)
    exchange = Exchange.ROWS if shard.table.pooling is Pooling.SEQUENCE else list(Exchange)[rng.integers(2)]
    are_sums = tier is Tier.ROW_WISE and exchange is Exchange.PARTIAL_SUMS
    is_reduced = can_reduce and are_sums and bool(rng.random() < 0.5)
    level = list(MemoryLevel)[rng.integers(3)] if rng.random() < 0.3 else MemoryLevel.HBM
    cache_bytes = 0 if level is MemoryLevel.HBM else int(rng.choice([0, 1000, shard.storage_bytes]))
    fetch = None
    if tier is Tier.REPLICATED:
        fetch = tuple(int(index) for index in rng.integers(len(replicas), size=size))
    return PlacedShard(
        shard=shard,
        tier=tier,
        replicas=replicas,
        split=splits[rng.integers(len(splits))],
        exchange=exchange,
        collective=Collective.REDUCE_SCATTER if is_reduced else Collective.ALL_TO_ALL,
        deduplicate=exchange is Exchange.ROWS and bool(rng.random() < 0.5),
        grad_sync=GradSync.NONE if len(replicas) == 1 else list(GradSync)[rng.integers(1, 4)],
        memory=MemoryPlacement(level=level, cache_bytes=cache_bytes, policy=str(rng.choice(["lru", "lfu"]))),
        fetch=fetch,
    )


def drawn_plan(seed):
    rng = np.random.default_rng(seed)
    topology = drawn_topology(rng)
    groups = drawn_groups(rng, topology)
    size = groups.group_size(topology)
    by_node = {}
    for rank in range(size):
        key = tuple(topology.node_of(member) for member in groups.world_ranks(rank, topology))
        by_node.setdefault(key, []).append(rank)
    nodes = [tuple(ranks) for ranks in by_node.values()]
    tables = tuple(drawn_table(rng, index) for index in range(rng.integers(1, 6)))
    payload = Payload(forward=list(DType)[rng.integers(4)], backward=list(DType)[rng.integers(4)])
    can_reduce = DType.INT8 not in (payload.forward, payload.backward)
    shards = []
    for table in tables:
        by = list(RowsBy)[rng.integers(2)]
        for start, stop in drawn_cuts(rng, table.num_embeddings):
            for columns in drawn_cuts(rng, table.embedding_dim):
                shard = Shard(table=table, rows=RowRange(start=start, stop=stop, by=by), columns=columns)
                shards.append(drawn_placed(rng, shard, size, nodes, can_reduce))
    batch_size = topology.world_size * int(rng.choice([1, 16, 1024]))
    return make.plan(
        *shards,
        tables=make.tables(*tables, batch_size=batch_size),
        topology=topology,
        replica_groups=groups,
        payload=payload,
    )


def check(seed, check_prediction):
    plan = drawn_plan(seed)
    validate_plan(plan)
    predicted = evaluate(plan, make.costs(plan.topology.device))
    check_prediction(plan, predicted)
    # As a file would have it, price and all.
    priced = plan.with_predicted(predicted)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(priced)))) == priced
    # The order in which shards are listed means nothing.
    turned = evaluate(replace(plan, shards=plan.shards[::-1]), make.costs(plan.topology.device))
    assert turned.step_ms.value == pytest.approx(predicted.step_ms.value, rel=1e-4)
    assert [cost.hbm_bytes for cost in turned.ranks] == [cost.hbm_bytes for cost in predicted.ranks]


@given(seed=st.integers(0, 2**32))
def test_a_plan_of_anything_is_valid_and_priced(check_prediction, seed):
    check(seed, check_prediction)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_very_many_plans_of_anything_are_valid_and_priced(check_prediction, block):
    for seed in range(500 * block, 500 * (block + 1)):
        try:
            check(seed, check_prediction)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
