"""Small valid tables, topologies, shards, plans, requests and samples.

Every field of what is built is an option by its name: fields without a default here go to the class as they are.
"""

import dataclasses
import math
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np

from autoshard.core import (
    AccessProfile,
    Constraints,
    CostModels,
    DenseLayers,
    DType,
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
from autoshard.core.dense import DenseKind, DenseShape
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel
from autoshard.formats.stores.collective_samples import CollectiveSample, GroupLevel, MeasuredCollective, Operator
from autoshard.formats.stores.dense_samples import DenseSample
from autoshard.formats.stores.samples import MeasuredShard, Sample
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.placement import PlacementProblem

#: Where and how samples were measured.
_MEASURED = {
    "collected_at": datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=UTC),
    "device": "cpu",
    "device_name": "A processor",
    "torch_version": "2.13.0+cpu",
    "autoshard_version": "0.1.0",
    "git_commit": "",
    "num_rounds": 9,
}
#: Those of kernels and of dense layers.
_TIMED = {
    "num_threads": 1,
    "fbgemm_version": "1.8.0",
    "source": "random",
    "forward_ms": 2.0,
    "backward_ms": 4.0,
    "forward_spread": 0.01,
    "backward_spread": 0.0,
    "reference_forward_ms": 1.0,
    "reference_backward_ms": 2.0,
}

#: An amount of memory, as people are told it.
AMOUNT = r"\d[\d,.]* (?:bytes|[KMGTPE]iB)"


def table(name="t0", num_embeddings=1000, embedding_dim=16, pooling_factor=2.0, *, alpha=1.0, **fields):
    """A pooled table whose rows are in the order of access, which is Zipf's, and its feature with the fields of one."""
    of_feature = {one.name: fields.pop(one.name) for one in dataclasses.fields(Feature) if one.name in fields}
    if "features" not in fields:
        fields["features"] = (Feature(**{"name": f"{name[:510]}_f", "pooling_factor": pooling_factor, **of_feature}),)
    if "access" not in fields:
        fields["access"] = AccessProfile.zipf(num_embeddings, alpha)
    values = {"row_order": ImpliedOrder.BY_ID, **fields}
    return EmbeddingTable(name=name, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **values)


def tables(*of, batch_size=64, dense=None, **fields):
    """A set of these tables, or of so many tables with these fields; of two if none are given."""
    (first, *_) = of or (2,)
    if isinstance(first, int):
        of, fields = tuple(table(f"t{index}", **fields) for index in range(first)), {}
    return TableSet(batch_size=batch_size, tables=tuple(of), dense=dense, **fields)


def levels(*sizes, bytes_per_s=1e9, latency_s=0.0, reduce_bytes_per_s=None, reduce_latency_s=None, **fields):
    """Levels of so many ranks, from the node outwards; an option is one value for all, or a tuple of one for each.

    All-reduces have links of their own if told, else those of the all-to-all.
    """
    options = {
        "bytes_per_s": bytes_per_s,
        "latency_s": latency_s,
        "reduce_bytes_per_s": bytes_per_s if reduce_bytes_per_s is None else reduce_bytes_per_s,
        "reduce_latency_s": latency_s if reduce_latency_s is None else reduce_latency_s,
        **fields,
    }
    made = []
    for index, size in enumerate(sizes):
        given = {name: value[index] if isinstance(value, tuple) else value for name, value in options.items()}
        links = [
            Link(bytes_per_s=given.pop(f"{kind}bytes_per_s"), latency_s=given.pop(f"{kind}latency_s"))
            for kind in ("", "reduce_")
        ]
        name = ("node", "cluster", "region")[index]
        made.append(Level(name=name, size=size, all_to_all=links[0], all_reduce=links[1], **given))
    return tuple(made)


def topology(*sizes, hbm=1 << 40, ddr=0, ssd=0, **fields):
    """Ranks in levels of these sizes, the last of which is all ranks: two nodes of two ranks if none are given.

    A size as large as the one before it is no level of its own. Links are said as those of `levels`.
    """
    sizes = tuple(dict.fromkeys(sizes or (2, 4)))
    of_topology = {one.name for one in dataclasses.fields(Topology)}
    links = {name: fields.pop(name) for name in list(fields) if name not in of_topology}
    values = {
        "world_size": sizes[-1],
        "device": "cpu",
        "memory_bytes": MemoryBytes(hbm=hbm, ddr=ddr, ssd=ssd),
        "levels": levels(*sizes, **links),
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


def table_wise_plan(tables, ranks, world_size=2, batch_size=8, **fields):
    """Whole tables on these ranks, of so many in one node."""
    return plan(*table_wise(tables, ranks), batch_size=batch_size, topology=topology(world_size), **fields)


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


def profile_of(counts):
    """The access profile of a table whose rows were looked up so often, in any order."""
    values_V, rows_V = np.unique(np.asarray(counts, dtype=np.float64), return_counts=True)
    return AccessProfile.from_groups(rows_V[::-1], (rows_V * values_V)[::-1])


def costs(device="cpu", **fields):
    """The published figures of a device, and links of latency and bandwidth."""
    return CostModels(**{"kernel": AnalyticCostModel.for_device(device), "comm": AlphaBetaComm(), **fields})


def request(tables, topology, **fields):
    """A planning task, priced by the figures of its device."""
    return PlanRequest(**{"tables": tables, "topology": topology, "costs": costs(topology.device), **fields})


def problem(tables, topology):
    """Whole tables to place, priced by the figures of a CPU."""
    return PlacementProblem.table_wise(tables, topology, costs().kernel)


def pool(pooling_factors, rows=1000):
    """Tables with these pooling factors and rows, of two widths in turn."""
    rows = [rows] * len(pooling_factors) if isinstance(rows, int) else rows
    made = [
        table(f"t{index}", num_rows, 16 * (1 + index % 2), float(factor))
        for index, (factor, num_rows) in enumerate(zip(pooling_factors, rows, strict=True))
    ]
    return tables(*made)


def draw_task(num_tables, world_size, seed=0, spare=None, batch_size=256):
    """Tables drawn with a seed, and ranks; `spare` is the share of memory beyond what an even spread needs."""
    rng = np.random.default_rng(seed)
    drawn = tables(
        *(
            table(
                f"t{index}",
                num_embeddings=int(rng.lognormal(9, 1.2)) + 1,
                embedding_dim=int(rng.choice([16, 32, 64])),
                pooling_factor=round(float(rng.lognormal(2, 0.8)), 3),
                alpha=0.9,
            )
            for index in range(num_tables)
        ),
        batch_size=batch_size,
    )
    total = drawn.storage_bytes
    return drawn, topology(world_size, hbm=total if spare is None else int(total / world_size * (1 + spare)))


def two_nodes(world_size=8, **fields):
    """Ranks of two nodes, an eighth as fast between as within them."""
    return topology(world_size // 2, world_size, **{"bytes_per_s": (4e9, 5e8), "latency_s": 1e-5, **fields})


def mixed_task():
    """Pooled tables, a sequence table, pinned ones and two that share their ranks, on two nodes."""
    drawn, _ = draw_task(9, 8, seed=5)
    first, second, third, fourth, fifth, *others = (replace(one, embedding_dim=16) for one in drawn.tables)
    # Batches of sequences differ in length, which counts in memory alone.
    long = tuple(replace(feature, pooling_variance=9.0 * feature.pooling_factor**2) for feature in first.features)
    of = (
        replace(first, pooling=Pooling.SEQUENCE, features=long),
        replace(second, constraints=Constraints(pinned_ranks=(2, 5))),
        replace(third, constraints=Constraints(colocate_with=(fourth.name,))),
        fourth,
        replace(fifth, constraints=Constraints(forbidden_tiers=(Tier.TABLE_WISE, Tier.DATA_PARALLEL))),
        *others,
    )
    dense = DenseLayers(num_dense_features=13, bottom_mlp=(64, 16), top_mlp=(64, 1), interaction="dot")
    return tables(*of, batch_size=drawn.batch_size, dense=dense), two_nodes()


def kernel_sample(*shards, **fields):
    """A measured set of shards, or of one."""
    measured = tuple(
        MeasuredShard(shard=shard, num_lookups=5, num_distinct=3, reuse_bins=(0.25, 0.75, *[0.0] * 15))
        for shard in shards or (held(),)
    )
    return Sample(**{**_MEASURED, **_TIMED, "shards": measured, **fields})


def dense_sample(shape=None, **fields):
    """A measured part of the dense layers; by default the top MLP of a DLRM."""
    shape = shape or DenseShape(kind=DenseKind.TOP_MLP, batch_size=512, widths=(479, 1024, 1))
    return DenseSample(**{**_MEASURED, **_TIMED, "shape": shape, **fields})


def collective(operator=Operator.ALL_TO_ALL, level=GroupLevel.NODE, bytes_per_rank=4096, **fields):
    """What is measured of a collective, in fp32."""
    return MeasuredCollective(
        operator=operator, level=level, bytes_per_rank=bytes_per_rank, **{"dtype": DType.FP32, **fields}
    )


def collective_sample(of=None, *, nproc=4, node_size=2, **fields):
    """A measured collective of processes on nodes of so many, which sends what equal splits do."""
    of, nodes = of or collective(), nproc // node_size
    group_size, num_nodes = {"node": (node_size, 1), "across_nodes": (nodes, nodes), "world": (nproc, nodes)}[of.level]
    sent = of.bytes_per_rank * (1 - 1 / group_size) * (2 if of.operator is Operator.ALL_REDUCE else 1)
    values = {
        "backend": "gloo",
        "num_hosts": 1,
        "group_size": group_size,
        "num_nodes": num_nodes,
        "mean_sent_bytes": sent,
        "max_sent_bytes": math.ceil(sent),
        "max_received_bytes": math.ceil(sent),
        "latency_ms": 0.5,
        "spread": 0.01,
        "reference_ms": 1.0,
    }
    return CollectiveSample(collective=of, nproc=nproc, node_size=node_size, **{**_MEASURED, **values, **fields})
