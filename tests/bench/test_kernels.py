import numpy as np
import pytest
import torch

import bench.kernels
from autoshard.core import DType, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.errors import InvalidTableError
from bench.arena import Arena
from bench.inputs import draw_batch
from bench.kernels import EPSILON, LEARNING_RATE, ShardSet, check_measurable

CPU = torch.device("cpu")


def cases(make_shard):
    return {
        "sum": [make_shard("a"), make_shard("b", 30, 16, pooling_factor=0.2)],
        "mean": [make_shard("a", pooling=Pooling.MEAN), make_shard("b", 30, 4, pooling=Pooling.MEAN)],
        "mixed": [make_shard("a"), make_shard("b", 30, 16, num_bags=4), make_shard("c", pooling=Pooling.MEAN)],
        "empty batch": [make_shard("a", pooling_factor=0.0), make_shard("b")],
    }


def bags_of(batch):
    ids, lengths = batch.bags.ids_L, batch.bags.lengths_B
    return torch.from_numpy(ids), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))


def pooled(weights, batch):
    ids, offsets = bags_of(batch)
    mode = str(batch.measured.shard.pooling)
    return torch.nn.functional.embedding_bag(ids, weights, offsets, mode=mode, include_last_offset=True)


@pytest.mark.parametrize("takes_memory", [bench.kernels._TAKES_MEMORY, False])
@pytest.mark.parametrize("case", ["sum", "mean", "mixed", "empty batch"])
def test_a_set_does_what_dense_tables_do(case, takes_memory, make_shard, monkeypatch):
    monkeypatch.setattr(bench.kernels, "_TAKES_MEMORY", takes_memory)
    shards = cases(make_shard)[case]
    batches = sorted(map(draw_batch, shards), key=bench.kernels._fusable)
    weights, moments = Arena(10_000, CPU), Arena(1_000, CPU)
    running = ShardSet(batches, weights, moments, CPU)

    tables = []
    for kernel in running._kernels:
        torch.nn.init.normal_(kernel.module.weights_host)
        kernel.module.momentum1_host.data.zero_()
        tables += [table.detach().clone().requires_grad_() for table in kernel.module.split_embedding_weights()]
    dense = [pooled(table, batch) for table, batch in zip(tables, batches, strict=True)]
    outputs = running.forward()
    start = 0
    for output in outputs:  # one per kernel, its tables side by side
        stop = start + 1
        while sum(part.shape[1] for part in dense[start:stop]) < output.shape[1]:
            stop += 1
        torch.testing.assert_close(output, torch.cat(dense[start:stop], dim=1))
        start = stop
    assert start == len(shards)

    running.backward(outputs)
    for output in dense:
        output.backward(torch.full_like(output, 1e-3))
    updated = [table for kernel in running._kernels for table in kernel.module.split_embedding_weights()]
    for table, after in zip(tables, updated, strict=True):
        moment = table.grad.square().mean(dim=1, keepdim=True)  # row-wise AdaGrad from zero
        after_reference = table - LEARNING_RATE * table.grad / (moment.sqrt() + EPSILON)
        torch.testing.assert_close(after, after_reference.detach(), rtol=1e-4, atol=1e-6)
        assert (table.grad.abs().sum() == 0) == torch.equal(after, table.detach())


def test_a_set_runs_on_memory_of_the_arena(make_shard):
    weights, moments = Arena(1_000, CPU), Arena(1_000, CPU)
    running = ShardSet([draw_batch(make_shard())], weights, moments, CPU)
    piece = weights._memory[: 50 * 8]
    before = piece.clone()
    running.backward(running.forward())
    assert not torch.equal(piece, before)
    assert (moments._memory[:50] > before[:50]).any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", DType.FP16),
        ("pooling", Pooling.SEQUENCE),
        ("optimizer", Optimizer.SGD),
        ("update", Update.ALL_REDUCED),
        ("level", MemoryLevel.SSD),
        ("embedding_dim", 6),
    ],
)
def test_other_kinds_are_refused_by_name(field, value, make_shard):
    with pytest.raises(InvalidTableError, match=rf"wide\.{field}: .*{value}"):
        check_measurable(make_shard("wide", **{field: value}))
