"""Trains drawn plans on batches of several sizes, on each of some processes, beside the unsharded reference."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor, KeyedTensor

from autoshard.core import ReplicaGroups
from autoshard.runtime.batch import BatchOfIds, Embedded
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.holdings import GroupOrder
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.reference import ReferenceEmbeddings, moment_blocks
from studies.engines.host_waits import as_on_a_gpu
from tests.contracts.drawn_layouts import drawn_plan, weighted_sums, with_optimizers

LEARNING_RATE, EPS, STEPS = 0.1, 1e-3, 4


def drawn_size(most, seed, step, process):
    """Whole, larger and empty batches among others; one step has none but empty ones."""
    if step == 3:
        return 0
    if process == step:
        return 0 if step else most
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + process)
    return int(torch.randint(2 * most + 1, (), generator=generator))


def drawn_batch(tables, most, seed, step, process, *, is_weighted):
    size = drawn_size(most, seed, step, process)
    generator = torch.Generator().manual_seed(77 + 1000 * seed + 10 * step + process)
    rows = [table.num_embeddings for table in tables.tables for _ in table.features]
    lengths_FB = torch.randint(4, (len(rows), size), generator=generator)
    ids = [torch.randint(n, (int(of.sum()),), generator=generator) for n, of in zip(rows, lengths_FB, strict=True)]
    weights_L = torch.randn(int(lengths_FB.sum()), generator=generator) if is_weighted else None
    return BatchOfIds(lengths_FB, torch.cat(ids), weights_L=weights_L)


def keyed(batch, names):
    """The batch as a keyed tensor in another order, with a feature that no table looks up."""
    pieces, size = batch.per_feature(batch.ids_L)[::-1], batch.batch_size
    lengths = torch.cat([torch.ones(1, size, dtype=torch.int64), batch.lengths_FB.flip(0)])
    weights = None
    if batch.weights_L is not None:
        weights = torch.cat([torch.zeros(size), *batch.per_feature(batch.weights_L)[::-1]])
    return KeyedJaggedTensor(
        keys=["other", *reversed(names)],
        values=torch.cat([torch.full((size,), 10**6), *pieces]),
        lengths=lengths.view(-1),
        weights=weights,
    )


def parts_of(output, names):
    """Pooled embeddings and rows of sequences of what the engine returned, checked to be of the right type."""
    if isinstance(output, Embedded):
        return output.pooled_BC, output.sequences
    pooled, sequences = output if isinstance(output, tuple) else (output, {})
    if isinstance(pooled, dict):
        pooled, sequences = None, pooled
    assert pooled is None or (isinstance(pooled, KeyedTensor) and set(pooled.keys()) <= set(names))
    values_BC = torch.empty(0, 0) if pooled is None else pooled.values()
    return values_BC, {name: one.values() for name, one in sequences.items()}


def loss_of(pooled_BC, sequences):
    return pooled_BC.square().sum() + sum(one.square().sum() for one in sequences.values())


def largest(one, other):
    """The largest difference, over the largest number where that is above 1."""
    assert one.shape == other.shape, (one.shape, other.shape)
    if not one.numel():
        return 0.0
    return float((one - other).detach().abs().max() / other.detach().abs().max().clamp(min=1))


def error_of(seed, world_size, node_size, groups, optimizers, *, is_weighted):
    """How far outputs, weights and moments are off the reference."""
    plan, orders = drawn_plan(seed, world_size, node_size, replica_groups=groups)
    if optimizers:
        plan = with_optimizers(plan, optimizers)
    if is_weighted:
        plan = weighted_sums(plan)
    orders = {name: torch.from_numpy(ids) for name, ids in orders.items()}
    settings = FusedSettings(learning_rate=LEARNING_RATE, eps=EPS, seed=seed)
    engine = ShardedEmbeddings(plan, settings, row_orders=orders)
    reference = ReferenceEmbeddings(
        plan.tables, replace(settings, moment_scale=groups.moment_scale), blocks=moment_blocks(plan, orders)
    )
    rank, order = dist.get_rank(), GroupOrder.of(groups, dist.get_world_size())
    members = order.groups[order.group_of(rank)]
    drawn, error = partial(drawn_batch, plan.tables, engine.local_batch_size, seed, is_weighted=is_weighted), 0.0
    for step in range(STEPS):
        batch = given = drawn(step, rank)
        if (seed + step + rank) % 2:
            given = keyed(batch, engine.feature_names)
        output = engine(engine.prefetch(given) if step % 2 else given)
        pooled_BC, sequences = parts_of(output, engine.feature_names)
        losses = []
        for process in members:
            expected = reference(drawn(step, process)) if drawn(step, process).batch_size else None
            if expected is not None:
                losses.append(loss_of(expected.pooled_BC, expected.sequences))
            if process == rank:
                assert expected is not None or not len(pooled_BC)
                if expected is not None and expected.pooled_BC.shape[1]:
                    error = max(error, largest(pooled_BC, expected.pooled_BC))
                for name, rows_LD in sequences.items():
                    error = max(error, largest(rows_LD, expected.sequences[name]) if expected else float(len(rows_LD)))
        loss_of(pooled_BC, sequences).backward()
        engine.end_step()
        if losses:
            # Gradients are divided by the number of processes, those with empty batches included.
            (sum(losses) / len(members)).backward()
        reference.end_step()
    for table in plan.tables.tables:
        state = engine.table_state(table.name)
        error = max(error, largest(state.weights_ND, reference.weights[table.name]))
        for name, moments_ND in reference.moments[table.name].items():
            error = max(error, largest(state.expanded(name), moments_ND) / max(1.0, float(moments_ND.abs().max())))
    engine.close()
    return error


def errors_of(world_size, node_size, num_groups, num_plans, optimizers):
    """Largest errors of drawn plans, by their optimizers, whether lookups are weighted, and plan: shape (O, 2, P).

    Args:
        world_size: Ranks of the plans.
        node_size: Ranks of a node.
        num_groups: Replica groups.
        num_plans: Plans.
        optimizers: Sets of optimizers, each of the tables in turn; those that are drawn where a set is empty.
    """
    # Averages would make the groups alike: they are another contract's.
    groups = ReplicaGroups(num_groups=num_groups, sync_every=STEPS + 1, moment_scale=float(num_groups))
    errors_OWP = torch.zeros(len(optimizers), 2, num_plans)
    for number, of_tables in enumerate(optimizers):
        for is_weighted, seed in product((False, True), range(num_plans)):
            # Half of them make room for what may come, as on a GPU, whose host does not know what does.
            with as_on_a_gpu() if seed % 2 else nullcontext():
                errors_OWP[number, int(is_weighted), seed] = error_of(
                    seed, world_size, node_size, groups, of_tables, is_weighted=is_weighted
                )
    dist.all_reduce(errors_OWP, op=dist.ReduceOp.MAX)
    return errors_OWP
