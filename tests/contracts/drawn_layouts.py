"""Plans of every layout that the validator accepts, drawn at random for the runtime's contract."""

import itertools
from dataclasses import replace

import numpy as np

from autoshard.core import (
    Collective,
    DType,
    Exchange,
    Feature,
    GradSync,
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
from tests import builders as make

OPTIMIZERS = (Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAGRAD)


def drawn_plan(seed, world_size, node_size, payload=DType.FP32, replica_groups=None):
    """A plan, and for tables that are cut by access rank and have an order, row ids in falling access frequency."""
    rng = np.random.default_rng(seed)
    groups = replica_groups or ReplicaGroups()
    tables = tuple(drawn_table(rng, f"t{index}") for index in range(rng.integers(1, 7)))
    shards, orders = [], {}
    for table in tables:
        held, ids = drawn_shards(rng, table, world_size, node_size, can_reduce=payload is not DType.INT8)
        shards += held
        if ids is not None:
            orders[table.name] = ids
    world_size, node_size = world_size * groups.num_groups, node_size * groups.num_groups
    plan = make.plan(
        *shards,
        tables=make.tables(*tables, batch_size=6 * world_size),
        topology=make.topology(node_size, world_size),
        payload=Payload(forward=payload, backward=payload),
        replica_groups=groups,
    )
    return plan, orders


def with_optimizers(plan, optimizers, dtype=DType.FP32):
    """The plan, its tables of a dtype and trained with each of some optimizers in turn."""
    tables = [
        replace(table, optimizer=optimizer, dtype=dtype)
        for table, optimizer in zip(plan.tables.tables, itertools.cycle(optimizers), strict=False)
    ]
    return with_tables(plan, tables)


def with_tables(plan, tables):
    """The plan, with other tables of the same names and sizes."""
    by_name = {table.name: table for table in tables}
    shards = [replace(one, shard=replace(one.shard, table=by_name[one.shard.table.name])) for one in plan.shards]
    return replace(plan, tables=replace(plan.tables, tables=tuple(tables)), shards=tuple(shards))


def weighted_sums(plan):
    """The plan with weighted lookups, and sums in place of means, which have no weights."""
    summed = {Pooling.MEAN: Pooling.SUM}
    return with_tables(
        plan,
        [replace(one, weighted=True, pooling=summed.get(one.pooling, one.pooling)) for one in plan.tables.tables],
    )


def other_layout(seed, plan):
    """Another way to hold the tables of a plan, and their row orders."""
    rng = np.random.default_rng(1000 + seed)
    shards, orders = [], {}
    for table in plan.tables.tables:
        can_reduce = plan.payload.forward is not DType.INT8
        held, ids = drawn_shards(rng, table, plan.topology.world_size, 1, can_reduce=can_reduce)
        shards += held
        if ids is not None:
            orders[table.name] = ids
    return replace(plan, shards=tuple(shards)), orders


def drawn_table(rng, name):
    num_rows, dim = int(rng.choice([1, 3, 8, 50, 200, 1000])), 4 * int(rng.choice([1, 2, 4, 8]))
    features = tuple(
        Feature(name=f"{name}.{index}", pooling_factor=float(rng.choice([0.3, 1.0, 3.0])))
        for index in range(rng.integers(1, 3))
    )
    return make.table(
        name,
        num_rows,
        dim,
        alpha=1.05,
        row_order=None,
        features=features,
        pooling=list(Pooling)[rng.integers(len(Pooling))],
        optimizer=OPTIMIZERS[rng.integers(len(OPTIMIZERS))],
    )


def drawn_shards(rng, table, world_size, node_size, can_reduce=True):
    bounds = drawn_bounds(rng, table.num_embeddings, 2)
    by = RowsBy.ACCESS_RANK if len(bounds) > 2 and rng.random() < 0.5 else RowsBy.INDEX
    shards = []
    for start, stop in itertools.pairwise(bounds):
        columns = [4 * bound for bound in drawn_bounds(rng, table.embedding_dim // 4, 1)]
        rows = RowRange(start=start, stop=stop, by=by)
        for first, last in itertools.pairwise(columns):
            shard = Shard(table=table, rows=rows, columns=(first, last))
            shards.append(drawn_placed(rng, shard, world_size, node_size, can_reduce))
    if by is RowsBy.INDEX or rng.random() < 0.3:
        return shards, None
    return shards, rng.permutation(table.num_embeddings)[: rng.integers(1, table.num_embeddings + 1)]


def drawn_bounds(rng, size, most):
    cuts = rng.choice(size, min(int(rng.integers(0, most + 1)), size - 1), replace=False) if size > 1 else []
    return sorted({0, *(int(cut) for cut in cuts), size})


def drawn_placed(rng, shard, world_size, node_size, can_reduce=True):
    tier, replicas, fetch = drawn_replicas(rng, world_size, node_size)
    is_sequence = shard.table.pooling is Pooling.SEQUENCE
    exchange = Exchange.ROWS if is_sequence or rng.random() < 0.5 else Exchange.PARTIAL_SUMS
    is_reduced = can_reduce and tier is Tier.ROW_WISE and exchange is Exchange.PARTIAL_SUMS and rng.random() < 0.6
    by_rank = shard.rows.by is RowsBy.ACCESS_RANK
    splits = (Split.CYCLIC, Split.HASH) if by_rank else tuple(Split)
    return PlacedShard(
        shard=shard,
        tier=tier,
        replicas=replicas,
        split=splits[rng.integers(len(splits))],
        exchange=exchange,
        collective=Collective.REDUCE_SCATTER if is_reduced else Collective.ALL_TO_ALL,
        deduplicate=exchange is Exchange.ROWS and bool(rng.random() < 0.4),
        grad_sync=list(GradSync)[rng.integers(1, 4)] if len(replicas) > 1 else GradSync.NONE,
        fetch=fetch,
    )


def drawn_replicas(rng, world_size, node_size):
    """A tier, its replicas, whose ranks do not rise where that is accepted, and what each rank reads."""
    ranks, order = range(world_size), rng.spawn(1)[0]
    nodes = [tuple(ranks[start : start + node_size]) for start in range(0, world_size, node_size)]
    kind = rng.integers(6)
    if kind == 0 or world_size == 1:
        return Tier.TABLE_WISE, ((int(rng.integers(world_size)),),), None
    if kind == 1:
        return Tier.ROW_WISE, (tuple(ranks),), None
    if kind == 2 and len(nodes) > 1 and node_size > 1:
        return Tier.TABLE_ROW_WISE, (nodes[rng.integers(len(nodes))],), None
    if kind == 3 and len(nodes) > 1 and node_size > 1:
        return Tier.FLEX, permuted(order, [permuted(order, node) for node in nodes]), None
    if kind == 4:
        holders = [int(rank) for rank in rng.choice(world_size, rng.integers(1, world_size + 1), replace=False)]
        if len(holders) > 1:
            fetch = tuple(holders.index(rank) if rank in holders else int(rng.integers(len(holders))) for rank in ranks)
            return Tier.REPLICATED, tuple((rank,) for rank in holders), fetch
    return Tier.DATA_PARALLEL, tuple((rank,) for rank in ranks), None


def permuted(rng, of):
    return tuple(of[place] for place in rng.permutation(len(of)))
