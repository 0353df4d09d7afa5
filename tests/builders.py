"""Small valid tables, topologies, shards, plans and requests.

Every field of what is built is an option by its name: fields without a default here go to the class as they are.
"""

import dataclasses

from autoshard.core import (
    AccessProfile,
    CostModels,
    EmbeddingTable,
    Exchange,
    Feature,
    GradSync,
    ImpliedOrder,
    Level,
    Link,
    LocalShard,
    MemoryBytes,
    PlacedShard,
    Pooling,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
    Topology,
)
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel
from autoshard.planners.planner import PlanRequest


def table(name="t0", num_embeddings=1000, embedding_dim=16, *, alpha=1.0, **fields):
    """A pooled table whose rows are in the order of access, which is Zipf's, and its feature with the fields of one."""
    of_feature = {one.name: fields.pop(one.name) for one in dataclasses.fields(Feature) if one.name in fields}
    if "features" not in fields:
        fields["features"] = (Feature(**{"name": f"{name}_f", "pooling_factor": 2.0, **of_feature}),)
    if "access" not in fields:
        fields["access"] = AccessProfile.zipf(num_embeddings, alpha)
    values = {"row_order": ImpliedOrder.BY_ID, **fields}
    return EmbeddingTable(name=name, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **values)


def tables(*of, batch_size=64, dense=None, **fields):
    """A set of these tables, or of so many with these fields; of two if none are given."""
    (first, *_) = of or (2,)
    if isinstance(first, int):
        of = tuple(table(f"t{index}", **fields) for index in range(first))
    return TableSet(batch_size=batch_size, tables=tuple(of), dense=dense)


def levels(*sizes, bytes_per_s=1e9, reduce_bytes_per_s=None, latency_s=0.0, **fields):
    """Levels of so many ranks, from the node outwards; speeds and latencies are one number, or one for each level."""

    def at(value, index):
        return value[index] if isinstance(value, tuple) else value

    reduce_bytes_per_s = bytes_per_s if reduce_bytes_per_s is None else reduce_bytes_per_s
    return tuple(
        Level(
            name=("node", "cluster", "region")[index],
            size=size,
            all_to_all=Link(bytes_per_s=at(bytes_per_s, index), latency_s=at(latency_s, index)),
            all_reduce=Link(bytes_per_s=at(reduce_bytes_per_s, index), latency_s=at(latency_s, index)),
            **fields,
        )
        for index, size in enumerate(sizes)
    )


def topology(
    *sizes,
    hbm=1 << 40,
    ddr=0,
    ssd=0,
    bytes_per_s=1e9,
    reduce_bytes_per_s=None,
    latency_s=0.0,
    **fields,
):
    """Ranks in levels of these sizes, the last of which is all ranks; two nodes of two ranks if none are given."""
    sizes = sizes or (2, 4)
    values = {
        "world_size": sizes[-1],
        "device": "cpu",
        "memory_bytes": MemoryBytes(hbm=hbm, ddr=ddr, ssd=ssd),
        "levels": levels(*sizes, bytes_per_s=bytes_per_s, reduce_bytes_per_s=reduce_bytes_per_s, latency_s=latency_s),
    }
    return Topology(**{**values, **fields})


def uneven(*hbm_bytes, **fields):
    """Ranks of one node that have so many bytes each."""
    overrides = tuple((rank, MemoryBytes(hbm=int(size))) for rank, size in enumerate(hbm_bytes))
    return topology(len(hbm_bytes), overrides=overrides, **fields)


def placed(of=None, tier=Tier.TABLE_WISE, replicas=((0,),), **fields):
    """A table or a shard of one, held by these ranks; copies sum their gradients whole."""
    shard = of if isinstance(of, Shard) else Shard.whole(of or table())
    is_sequence = shard.table.pooling is Pooling.SEQUENCE
    values = {
        "exchange": Exchange.ROWS if is_sequence else Exchange.PARTIAL_SUMS,
        "grad_sync": GradSync.NONE if len(replicas) == 1 else GradSync.DENSE,
    }
    return PlacedShard(shard=shard, tier=tier, replicas=replicas, **{**values, **fields})


def on(rank, *args, **fields):
    """A whole table of these fields on one rank."""
    return PlacedShard.table_wise(Shard.whole(table(*args, **fields)), rank)


def each(num_ranks):
    """Replicas: each rank a copy of its own."""
    return tuple((rank,) for rank in range(num_ranks))


def everyone(num_ranks):
    """Replicas: one, split over all ranks."""
    return (tuple(range(num_ranks)),)


def table_wise(tables, ranks):
    """Whole tables, each on its rank."""
    return tuple(PlacedShard.table_wise(Shard.whole(one), rank) for one, rank in zip(tables, ranks, strict=True))


def plan(*shards, batch_size=64, **fields):
    """A plan of these placed shards, and of the tables that they are parts of, on the default topology."""
    if "tables" not in fields:
        held = {one.shard.table.name: one.shard.table for one in shards}
        fields["tables"] = tables(*held.values(), batch_size=batch_size)
    if "topology" not in fields:
        fields["topology"] = topology()
    return ShardingPlan(shards=shards, **fields)


def held(table="t", num_embeddings=1000, embedding_dim=16, *, alpha=1.0, **fields):
    """What one rank holds of a table: by default 64 bags of two lookups."""
    if "access" not in fields:
        fields["access"] = AccessProfile.zipf(num_embeddings, alpha)
    return LocalShard(
        table=table,
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        **{"num_bags": 64, "pooling_factor": 2.0, **fields},
    )


def costs(device="cpu", **fields):
    """The published figures of a device, and links of latency and bandwidth."""
    return CostModels(**{"kernel": AnalyticCostModel.for_device(device), "comm": AlphaBetaComm(), **fields})


def request(tables, topology, **fields):
    """A planning task, priced by the figures of its device."""
    return PlanRequest(**{"tables": tables, "topology": topology, "costs": costs(topology.device), **fields})
