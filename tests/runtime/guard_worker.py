"""Trains tables of every optimizer on batches of which some have bad gradients, on each of some processes."""

from dataclasses import replace

import torch
import torch.distributed as dist

from autoshard.core import Collective, GradSync, Optimizer, Pooling, ReplicaGroups, Tier
from autoshard.core.errors import ExecutionError
from autoshard.core.step import Overlap
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.dense import DenseModel, default_layers
from autoshard.runtime.training.step import distributed_step
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make

BATCH = 8
SETTINGS = FusedSettings(learning_rate=0.1, eps=1e-3)
#: What the last process's third batch has in it.
BAD_STEP = 2


def plan_of(optimizer, num_processes, num_groups):
    """Rows on one process, dealt to all, and copies of rows whose gradients meet in all ways, in each replica group."""
    num_all, num_processes = num_processes, num_processes // num_groups
    tables = [
        make.table(name, 40, 8, optimizer=optimizer) for name in ("whole", "dealt", "summed", "all", "hit", "sent")
    ]
    sequence = make.table("sequence", 40, 8, optimizer=optimizer, pooling=Pooling.SEQUENCE)
    whole, dealt, summed, *copied = tables
    return make.plan(
        make.placed(whole, Tier.TABLE_WISE, ((0,),)),
        make.placed(dealt, Tier.ROW_WISE, make.everyone(num_processes)),
        make.placed(summed, Tier.ROW_WISE, make.everyone(num_processes), collective=Collective.REDUCE_SCATTER),
        *(
            make.placed(one, Tier.DATA_PARALLEL, make.each(num_processes), grad_sync=sync)
            for one, sync in zip(copied, (GradSync.DENSE, GradSync.SPARSE, GradSync.ALL_GATHER), strict=True)
        ),
        make.placed(sequence, Tier.TABLE_WISE, ((num_processes - 1,),)),
        batch_size=BATCH * num_all,
        topology=make.topology(num_all),
        replica_groups=ReplicaGroups(num_groups=num_groups, moment_scale=1.0),
    )


def states(embeddings, dense):
    """All tables and layers."""
    found = [one.detach().clone() for one in dense.parameters()]
    for table in embeddings.owners.tables.tables:
        state = embeddings.table_state(table.name)
        found += [state.weights_ND.clone(), *(one.clone() for one in state.moments.values())]
    return found


def trained(optimizer, policy, overlap, value, num_groups):
    """What is left of five steps, of which one has a bad value in the last process's batch.

    Returns:
        Whether the bad step changed anything, whether all is finite at the end, how many bad steps were counted, and
        the error.
    """
    rank, num_processes = dist.get_rank(), dist.get_world_size()
    plan = plan_of(optimizer, num_processes, num_groups)
    settings = replace(SETTINGS, on_bad_gradients=policy, max_gradient=1.0)
    embeddings = ShardedEmbeddings(plan, settings)
    layers = default_layers(embeddings.feature_dims)
    dense = DenseModel(layers, embeddings.feature_dims, 0, smooth=True)
    step = distributed_step(embeddings, plan.tables, dense, 0.1, overlap=overlap)
    batches = [draw_samples(plan.tables, layers.num_dense_features, BATCH, (3, number, rank)) for number in range(5)]
    if rank == num_processes - 1:
        batches[BAD_STEP].dense_BN[1, 0] = value
    changed, said = None, None
    for number, samples in enumerate(batches):
        before = states(embeddings, dense)
        try:
            step(samples, batches[number + 1 : number + 1 + step.batches_ahead])
        except ExecutionError as error:
            said = str(error)
        after = states(embeddings, dense)
        if number == BAD_STEP:
            changed = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
        if said:
            break
    found = any(changed), all(bool(one.isfinite().all()) for one in after), embeddings.guard.num_bad, said
    embeddings.close()
    return found


def clipped_by_infinite_gradients():
    """Gradients of layers and tables, of which all processes have infinite ones, NaN, and others above the limit."""
    plan = make.table_wise_plan([make.table("t", 4, 4, optimizer=Optimizer.SGD)], [0], batch_size=2)
    embeddings = ShardedEmbeddings(plan, FusedSettings(learning_rate=1.0, on_bad_gradients="clip", max_gradient=0.5))
    row = dist.get_rank()
    before = embeddings.table_state("t").weights_ND[row].clone()
    bad = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3.0]])
    embeddings(BatchOfIds(torch.ones(1, 1, dtype=torch.int64), torch.tensor([row]))).pooled_BC.backward(bad)
    layer = torch.nn.Linear(4, 1, bias=False)
    layer.weight.grad = bad.clone()
    embeddings.guard.keep_from_layers(embeddings.verdict, layer)
    moved = before - embeddings.table_state("t").weights_ND[row]
    embeddings.close()
    return layer.weight.grad[0].tolist(), moved.tolist()


def every_way(optimizers, value, num_groups):
    """What `trained` finds, by optimizer, policy and overlap."""
    return {
        (optimizer, policy, overlap): trained(optimizer, policy, overlap, value, num_groups)
        for optimizer in optimizers
        for policy in ("skip", "error", "clip")
        for overlap in (Overlap.NONE, Overlap.PIPELINED)
    }
