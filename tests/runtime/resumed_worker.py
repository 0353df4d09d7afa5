"""Trains tables of an optimizer under one layout, goes on under another, and compares with training in one go."""

import torch.distributed as dist

from autoshard.core import GradSync, Tier
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make

SETTINGS = FusedSettings(learning_rate=0.1, eps=1e-3, beta1=0.7, beta2=0.9)
BATCH, STEPS = 6, 4


def plan_of(optimizer, layout, num_processes):
    table = make.table("t", 30, 8, optimizer=optimizer)
    placed = {
        "whole": (Tier.TABLE_WISE, ((0,),), {}),
        "dealt": (Tier.ROW_WISE, make.everyone(num_processes), {}),
        "dense": (Tier.DATA_PARALLEL, make.each(num_processes), {"grad_sync": GradSync.DENSE}),
        "sparse": (Tier.DATA_PARALLEL, make.each(num_processes), {"grad_sync": GradSync.SPARSE}),
    }
    tier, replicas, options = placed[layout]
    shard = make.placed(table, tier, replicas, **options)
    return make.plan(shard, batch_size=BATCH * num_processes, topology=make.topology(num_processes))


def train(embeddings, steps):
    for step in steps:
        batch = draw_samples(embeddings.owners.tables, 1, BATCH, (1, step, dist.get_rank())).ids
        embeddings(batch).pooled_BC.square().mean().backward()
        embeddings.end_step()


def tensors(embeddings):
    state = embeddings.table_state("t")
    return [state.weights_ND.clone(), *(state.expanded(name).clone() for name in state.moments)]


def differences(optimizers, layouts):
    """Largest difference of weights and moments, by optimizer and pair of layouts; and the keys of its state."""
    found, keys = {}, {}
    for optimizer in optimizers:
        for before in layouts:
            one = ShardedEmbeddings(plan_of(optimizer, before, dist.get_world_size()), SETTINGS)
            train(one, range(STEPS - 1))
            saved = {name: tensor.clone() for name, tensor in one.state_dict().items()}
            keys[optimizer] = sorted(saved)
            train(one, [STEPS - 1])
            for after in layouts:
                other = ShardedEmbeddings(plan_of(optimizer, after, dist.get_world_size()), SETTINGS)
                other.load_state_dict(saved)
                train(other, [STEPS - 1])
                pairs = zip(tensors(other), tensors(one), strict=True)
                found[optimizer, before, after] = max(float((a - b).abs().max()) for a, b in pairs)
                other.close()
            one.close()
    return found, keys


def synced_bytes(optimizer):
    """What a process put into collectives of gradients a step, of a table whose copies reduce those of all rows."""
    embeddings = ShardedEmbeddings(plan_of(optimizer, "dense", dist.get_world_size()), SETTINGS)
    train(embeddings, range(2))
    sent = embeddings.sent_bytes()["sync"] / 2
    embeddings.close()
    return sent


def all_of(optimizers, layouts):
    return differences(optimizers, layouts), {one: synced_bytes(one) for one in optimizers}
