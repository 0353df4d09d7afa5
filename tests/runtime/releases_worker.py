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
    Collective,
    GradSync,
    Pooling,
    Tier,
)
from autoshard.runtime import releases
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.results import RunRequest
from autoshard.runtime.training.dense import DenseModel, default_layers
from autoshard.runtime.training.reference import Reference, compare
from autoshard.runtime.training.step import distributed_step
from tests import builders as make

releases.SplitTableBatchedEmbeddingBagsCodegen = OldEmbedding

# Imports take most of the time: the other process has them, too.
other = os.fork()
rank, rendezvous = int(other != 0), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
replicated, scattered = (make.table(name, 40, 8) for name in ("replicated", "scattered"))
plan = make.plan(
    make.placed(replicated, Tier.DATA_PARALLEL, make.each(2), grad_sync=GradSync.SPARSE),
    make.placed(scattered, Tier.ROW_WISE, make.everyone(2), collective=Collective.REDUCE_SCATTER),
    make.on(1, "sequence", 40, 8, pooling=Pooling.SEQUENCE),
    batch_size=8,
    topology=make.topology(2),
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
