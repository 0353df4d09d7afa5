"""Two processes that train without what torch 2.13 and FBGEMM 1.8 have added.

It is taken away before anything of ours is imported. They hold replicas, split rows whose sums are scattered, and a
sequence table, and compare with plain torch.

Argument: file to meet at.
"""

# ruff: noqa: E402

import os
import sys

import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

for name in ("all_gather_single", "reduce_scatter_single"):
    if hasattr(dist, name):
        delattr(dist, name)


class OldEmbedding(SplitTableBatchedEmbeddingBagsCodegen):
    def __init__(self, embedding_specs, **options):
        assert "preallocated_host_buffers" not in options
        super().__init__(embedding_specs, **options)


from autoshard.core import (
    AccessProfile,
    Collective,
    EmbeddingTable,
    Feature,
    GradSync,
    Level,
    Link,
    MemoryBytes,
    PlacedShard,
    Pooling,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
    Topology,
)
from autoshard.runtime import releases
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.results import RunRequest
from autoshard.runtime.training.dense import DenseModel, default_layers
from autoshard.runtime.training.reference import Reference, compare
from autoshard.runtime.training.step import distributed_step

releases.SplitTableBatchedEmbeddingBagsCodegen = OldEmbedding

# Imports take most of the time: the other process has them, too.
other = os.fork()
rank, rendezvous = int(other != 0), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
tables = [
    EmbeddingTable(
        name=name,
        num_embeddings=40,
        embedding_dim=8,
        features=(Feature(name=f"{name}.ids", pooling_factor=2.0),),
        access=AccessProfile.zipf(40, 1.05),
        pooling=Pooling.SEQUENCE if name == "sequence" else Pooling.SUM,
    )
    for name in ("replicated", "scattered", "sequence")
]
whole = [Shard.whole(table) for table in tables]
link = Link(bytes_per_s=1e9)
plan = ShardingPlan(
    tables=TableSet(batch_size=8, tables=tuple(tables)),
    topology=Topology(
        world_size=2,
        device="cpu",
        memory_bytes=MemoryBytes(hbm=1 << 30),
        levels=(Level(name="node", size=2, all_to_all=link, all_reduce=link),),
    ),
    shards=(
        PlacedShard(shard=whole[0], tier=Tier.DATA_PARALLEL, replicas=((0,), (1,)), grad_sync=GradSync.SPARSE),
        PlacedShard(shard=whole[1], tier=Tier.ROW_WISE, replicas=((0, 1),), collective=Collective.REDUCE_SCATTER),
        PlacedShard.table_wise(whole[2], 1),
    ),
)
settings = FusedSettings(learning_rate=0.05)
request = RunRequest(plan_path="", verify_steps=2, learning_rate=0.05, eps=settings.eps)
engine = ShardedEmbeddings(plan, settings)
layers = default_layers(engine.feature_dims)
training_step = distributed_step(engine, plan.tables, DenseModel(layers, engine.feature_dims, 0, smooth=True), 0.05)
untrained = DenseModel(layers, engine.feature_dims, 0, smooth=True)
found = compare(
    engine,
    training_step,
    Reference(plan, untrained, request, 2) if rank == 0 else None,
    request,
    layers.num_dense_features,
)
assert rank or found.max_error < 5e-6, found
engine.close()
dist.destroy_process_group()
if other:
    _, status = os.waitpid(other, 0)
    assert status == 0
