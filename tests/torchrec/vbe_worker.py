"""Trains TorchRec's modules on batches whose features have samples of their own (VBE), on each of some processes."""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from autoshard.core import GradSync, Tier
from autoshard.core.errors import InputError
from autoshard.torchrec import shard, tables_of
from tests import builders as make

ROWS, STEPS, LEARNING_RATE = 20, 3, 0.1
POOLED, SEQUENCE = ("user", "item"), "history"
SAMPLES = {"user": (3, 1, 0), "item": (6, 5, 2), "history": (2, 4, 1)}
#: Whether batches have inverse indices, and weights.
KINDS = ((True, False), (True, True), (False, False), (False, True))


class Model(torch.nn.Module):
    def __init__(self, is_weighted):
        super().__init__()
        torch.manual_seed(0)
        poolings = {"user": PoolingType.SUM, "item": PoolingType.SUM if is_weighted else PoolingType.MEAN}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{name}", num_embeddings=ROWS, embedding_dim=8, feature_names=[name], pooling=poolings[name]
                )
                for name in POOLED
            ],
            is_weighted=is_weighted,
        )
        self.rows = EmbeddingCollection(
            tables=[EmbeddingConfig(name="t_history", num_embeddings=ROWS, embedding_dim=4, feature_names=[SEQUENCE])]
        )


def draw(step, rank, *, has_inverse, is_weighted=False):
    """A batch in another order than the tables'; of 7 samples in the result, if it has inverse indices."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    keys = ["history", "item", "user"]
    sizes = [SAMPLES[name][(step + rank) % 3] + has_inverse for name in keys]
    lengths = torch.randint(0, 4, (sum(sizes),), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    inverse = None
    if has_inverse:
        inverse = (keys, torch.stack([torch.randint(0, size, (7,), generator=generator) for size in sizes]))
    return KeyedJaggedTensor(
        keys=keys,
        values=ids,
        lengths=lengths,
        weights=torch.randn(len(ids), generator=generator) if is_weighted else None,
        stride_per_key_per_rank=[[one] for one in sizes],
        inverse_indices=inverse,
    )


def features_of(model, batch, *, is_sharded):
    """Pooled features by name, and bag lengths and rows of the sequence."""
    jagged = batch.to_dict()
    rows = model.rows(batch)[SEQUENCE]
    lengths, values = rows.lengths(), rows.values()
    inverse = batch.inverse_indices_or_none()
    if is_sharded:
        pooled = model.bags(batch)
        return {name: pooled[name] for name in POOLED}, lengths, values
    if inverse is not None:  # which TorchRec's own module of sequences heeds only where it is sharded
        pieces = torch.split(values, lengths.tolist())
        wanted = inverse[1][inverse[0].index(SEQUENCE)].tolist()
        lengths, values = lengths[wanted], torch.cat([pieces[one] for one in wanted])
        pooled = model.bags(batch)
        return {name: pooled[name] for name in POOLED}, lengths, values
    # Of several sizes, they make no keyed tensor: each feature by itself.
    tables = {name: model.bags.embedding_bags[f"t_{name}"] for name in POOLED}
    found = {
        name: tables[name](
            jagged[name].values(), jagged[name].offsets(), per_sample_weights=jagged[name].weights_or_none()
        )
        for name in POOLED
    }
    return found, lengths, values


def loss_of(found):
    pooled, lengths, rows = found
    weights = torch.arange(1, len(rows) + 1)[:, None] / (1 + lengths.sum())
    return sum(one.square().sum() for one in pooled.values()) + (rows.square() * weights).sum()


def differences():
    """By kind of batches, what `difference_of` finds on this process."""
    return {kind: difference_of(*kind) for kind in KINDS}


def difference_of(has_inverse, is_weighted):
    """How far features of every step and weights at the end are off the unsharded modules', and what was refused."""
    warnings.simplefilter("ignore")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    trained = Model(is_weighted)
    _apply_optimizer_in_backward(torch.optim.SGD, trained.parameters(), {"lr": LEARNING_RATE})
    tables, machine = tables_of(trained, batch_size=4 * world_size), make.topology(world_size)
    kinds = [
        {"tier": Tier.ROW_WISE, "replicas": make.everyone(world_size)},
        {},
        {"tier": Tier.DATA_PARALLEL, "replicas": make.each(world_size), "grad_sync": GradSync.SPARSE},
    ]
    plan = make.plan(
        *(make.placed(table, **kind) for table, kind in zip(tables.tables, kinds, strict=True)),
        tables=tables,
        topology=machine,
    )
    model, reference, found = shard(trained, plan), Model(is_weighted), []
    optimizer = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        batches = [draw(step, one, has_inverse=has_inverse, is_weighted=is_weighted) for one in range(world_size)]
        ours = features_of(model.module, batches[rank], is_sharded=True)
        expected = [features_of(reference, batch, is_sharded=False) for batch in batches]
        pairs = [(ours[0][name], expected[rank][0][name]) for name in POOLED]
        pairs += [(ours[1].float(), expected[rank][1].float()), (ours[2], expected[rank][2])]
        assert all(one.shape == other.shape for one, other in pairs)
        found += [float((one - other).detach().abs().max()) for one, other in pairs if one.numel()]
        loss_of(ours).backward()
        model.end_step()
        optimizer.zero_grad()
        (sum(map(loss_of, expected)) / world_size).backward()
        optimizer.step()
    weights = [*reference.bags.parameters(), *reference.rows.parameters()]
    for table, own in zip(tables.tables, weights, strict=True):
        found.append(float((model.table_state(table.name).weights_ND - own).detach().abs().max()))
    told = refusal(model, rank, is_weighted) if has_inverse else ""
    model.close()
    return max(found), told


def refusal(model, rank, is_weighted):
    batch = draw(0, rank, has_inverse=True, is_weighted=is_weighted)
    if rank == 1:
        batch.inverse_indices()[1][2, 3] = 9
    try:
        model.module.bags(batch)
    except InputError as error:
        return str(error)
    return ""
