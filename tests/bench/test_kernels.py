import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from autoshard.core import DType, Exchange, MemoryLevel, Optimizer, Pooling, Update
from autoshard.runtime import releases
from autoshard.runtime.engine.rows.fused import UpdateStep
from bench.kernels.fused import EPSILON, LEARNING_RATE, ReplicaKernel, ShardSet, TimedFusedKernel, fusable
from bench.kernels.inputs import draw_batch
from bench.kernels.measurable import is_measurable
from bench.measuring.arena import Arenas
from tests import builders as make

CPU = torch.device("cpu")
GRADIENT = 1e-3


def small(name="t", num_embeddings=50, embedding_dim=8, **fields):
    """A shard that takes next to nothing."""
    return make.held(name, num_embeddings, embedding_dim, **{"num_bags": 16, "pooling_factor": 2.5, **fields})


def cases():
    mean, rows = {"pooling": Pooling.MEAN}, {"pooling": Pooling.SEQUENCE}
    return {
        "sum": [small("a"), small("b", 30, 16, pooling_factor=0.2)],
        "mean": [small("a", **mean), small("b", 30, 4, **mean)],
        "mixed": [small("a"), small("b", 30, 16, num_bags=4), small("c", **mean)],
        "empty batch": [small("a", pooling_factor=0.0), small("b")],
        "thin tier": [small("a", num_bags=1000, pooling_factor=0.001)],
        "sequence": [small("a", **rows), small("b", 30, 16, **rows), small("c", 20, **rows)],
        "empty sequence": [small("a", pooling_factor=0.0, **rows)],
        "rows of a pooled table": [small("a", output=Exchange.ROWS), small("b")],
        "fp16": [small("a", dtype=DType.FP16), small("b", 30, 16, dtype=DType.FP16), small("c")],
        "fp16 sequence": [small("a", dtype=DType.FP16, **rows)],
        "sgd": [small("a", optimizer=Optimizer.SGD), small("b", 30, 16, optimizer=Optimizer.SGD)],
        "optimizers": [small("a", optimizer=Optimizer.SGD), small("b", optimizer=Optimizer.ADAGRAD)],
    }


def bags_of(batch):
    return batch.ids_L, torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths_B.cumsum(0)])


def looked_up(weights, batch):
    """What torch's own embeddings give; of means the sums, which are divided where they are read."""
    ids, offsets = bags_of(batch)
    shard = batch.measured.shard
    if shard.pooling is Pooling.SEQUENCE or shard.output is Exchange.ROWS:
        return torch.nn.functional.embedding(ids, weights)
    return torch.nn.functional.embedding_bag(ids, weights, offsets, mode="sum", include_last_offset=True)


def stepped(table, optimizer):
    """The first step of an optimizer from zero state."""
    if optimizer is Optimizer.SGD:
        return table - LEARNING_RATE * table.grad
    squares = table.grad.square()
    moment = squares.mean(dim=1, keepdim=True) if optimizer is Optimizer.ROWWISE_ADAGRAD else squares
    return table - LEARNING_RATE * table.grad / (moment.sqrt() + EPSILON)


def in_kernel_order(shards):
    return sorted(([draw_batch(shard)] for shard in shards), key=lambda d: fusable(d[0].measured.shard))


def tables_of(running, batches):
    """The tables of all shards, as they are; a kernel of rows has those of several in one."""
    shards, found = iter([batch.measured.shard for batch in batches]), []
    for kernel in running.kernels:
        for table in kernel.kernel.module.split_embedding_weights():
            rest = table
            while len(rest):
                num_rows = next(shards).num_embeddings
                found.append(rest[:num_rows])
                rest = rest[num_rows:]
    return found


def check_outputs(outputs, expected):
    """Outputs are one per kernel: its pooled tables side by side, or its rows below each other."""
    start = 0
    for output in outputs:
        stop, parts = start, []
        while sum(part.numel() for part in parts) < output.numel() or stop == start:
            parts.append(expected[stop])
            stop += 1
        side_by_side = parts[0].shape[0] == output.shape[0]
        joined = (
            torch.cat(parts, dim=1 if side_by_side else 0)
            if output.dim() == 2
            else torch.cat([part.flatten() for part in parts])
        )
        torch.testing.assert_close(output, joined, rtol=1e-3, atol=1e-3)
        start = stop
    assert start == len(expected)


class OldEmbedding(SplitTableBatchedEmbeddingBagsCodegen):
    """Takes no memory from its caller, as FBGEMM 1.6."""

    def __init__(self, embedding_specs, **options):
        super().__init__(embedding_specs, **options)


@pytest.mark.parametrize("embedding", [SplitTableBatchedEmbeddingBagsCodegen, OldEmbedding])
@pytest.mark.parametrize("case", cases())
def test_a_set_does_what_plain_tables_do(case, embedding, monkeypatch):
    monkeypatch.setattr(releases, "SplitTableBatchedEmbeddingBagsCodegen", embedding)
    draws = in_kernel_order(cases()[case])
    batches = [batch for (batch,) in draws]
    running = ShardSet(draws, Arenas(100_000, CPU), CPU)
    for kernel in running.kernels:
        assert isinstance(kernel, TimedFusedKernel)
        module = kernel.kernel.module
        torch.nn.init.normal_(module.weights_host)
        if module.optimizer.name != "EXACT_SGD":
            module.momentum1_host.data.zero_()
    tables = [table.detach().float().clone().requires_grad_() for table in tables_of(running, batches)]
    plain = [looked_up(table, batch) for table, batch in zip(tables, batches, strict=True)]
    outputs = running.forward()
    check_outputs(outputs, plain)

    running.backward(outputs)
    for output in plain:
        output.backward(torch.full_like(output, GRADIENT))
    for table, batch, after in zip(tables, batches, tables_of(running, batches), strict=True):
        shard = batch.measured.shard
        tolerance = 5e-3 if shard.dtype is DType.FP16 else 1e-6
        expected = stepped(table, shard.optimizer).detach()
        torch.testing.assert_close(after.float(), expected, rtol=1e-3, atol=tolerance)
        if shard.dtype is DType.FP32:
            assert (table.grad.abs().sum() == 0) == torch.equal(after, table.detach())


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAGRAD])
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.SEQUENCE])
def test_replicas_are_looked_up_and_updated_as_plain_tables(pooling, optimizer, dtype):
    kinds = {"pooling": pooling, "update": Update.ALL_REDUCED, "optimizer": optimizer, "dtype": dtype}
    draws = in_kernel_order([small("a", **kinds), small("b", 30, 8, pooling_factor=0.2, **kinds)])
    running = ShardSet(draws, Arenas(100_000, CPU), CPU)
    (kernel,) = running.kernels
    torch.nn.init.normal_(kernel.rows.weights_ND)
    for moments in kernel.rows.moments.values():
        moments.zero_()
    tables = [table.float().clone().requires_grad_() for table in kernel.rows.weights_ND.split([50, 30])]
    plain = [looked_up(table, batch) for table, (batch,) in zip(tables, draws, strict=True)]
    outputs = running.forward()
    check_outputs(outputs, plain)
    running.backward(outputs)
    for output in plain:
        output.backward(torch.full_like(output, GRADIENT))
    expected = torch.cat([stepped(table, optimizer).detach() for table in tables])
    tolerance = 5e-3 if dtype is DType.FP16 else 1e-6
    torch.testing.assert_close(kernel.rows.weights_ND.float(), expected, rtol=1e-3, atol=tolerance)
    assert not torch.equal(expected, torch.cat(tables))


def test_replicas_update_rows_that_other_ranks_hit_as_well(monkeypatch):
    shards = [
        small(name, 200, pooling_factor=1.0, update=Update.ALL_REDUCED, written_rows=rows)
        for name, rows in (("a", 700.0), ("b", 14 * 8.0))
    ]
    draws = [[draw_batch(shard)] for shard in shards]
    running = ShardSet(draws, Arenas(100_000, CPU), CPU)
    (kernel,) = running.kernels
    updated = {}
    monkeypatch.setattr(
        kernel.rows, "update", lambda rows_U, gradients_UD, _: updated.update(all=(rows_U, gradients_UD))
    )
    running.backward(running.forward())
    rows_U, gradients_UD = updated["all"]
    own_U = torch.cat([batch.ids_L.unique() + 200 * place for place, (batch,) in enumerate(draws)])
    assert running.num_updated_S[0] == pytest.approx((700 - 15) / 7, rel=0.15)
    assert running.num_updated_S[0] > 5 * draws[0][0].measured.num_distinct
    assert len(rows_U) == len(gradients_UD) == sum(running.num_updated_S)
    assert torch.equal(rows_U[gradients_UD.any(dim=1)], own_U)


def test_replicas_and_fused_tables_of_one_arena_run_side_by_side():
    draws = in_kernel_order([small("a"), small("b", update=Update.ALL_REDUCED)])
    running = ShardSet(draws, Arenas(100_000, CPU), CPU)
    before = running.forward()
    running.backward(before)
    for one, other in zip(before, running.forward(), strict=True):
        assert not torch.equal(one, other), "both were updated"


def test_replicas_of_a_kind_are_one_kernel_for_each_dim_and_optimizer():
    def replica(name, dim, optimizer=Optimizer.ADAGRAD):
        return small(name, embedding_dim=dim, optimizer=optimizer, update=Update.ALL_REDUCED)

    draws = in_kernel_order([replica("a", 8), replica("b", 4), replica("c", 8), replica("d", 8, Optimizer.SGD)])
    running = ShardSet(draws, Arenas(100_000, CPU), CPU)
    assert [type(kernel) for kernel in running.kernels] == [ReplicaKernel] * 3
    running.backward(running.forward())


def test_a_set_runs_on_memory_of_the_arenas():
    arenas = Arenas(4_000, CPU)
    running = ShardSet([[draw_batch(small())]], arenas, CPU)
    arenas.clear()  # so that the same memory is dealt out again
    piece, moments = arenas.weights(50 * 8, DType.FP32), arenas.moments(50)
    before = piece.clone()
    running.backward(running.forward())
    assert not torch.equal(piece, before)
    assert (moments > before[:50]).any()


def test_runs_take_turns_among_batches():
    shard = small()
    draws = [draw_batch(shard, draw) for draw in range(3)]
    running = ShardSet([draws], Arenas(4_000, CPU), CPU)
    running.kernels[0].kernel.module.weights_host.data.copy_(torch.randn(50 * 8))
    running.kernels[0].kernel.set_step(UpdateStep(0.0, 1))
    outputs = []
    for _ in range(6):
        (output,) = found = running.forward()
        outputs.append(output.detach().clone())
        running.backward(found)
    for turn in range(3):
        torch.testing.assert_close(outputs[turn], outputs[turn + 3])
    assert not torch.equal(outputs[0], outputs[1])
    assert running.measured == (draws[0].measured,)


@pytest.mark.parametrize(
    "kinds",
    [
        {"optimizer": Optimizer.ADAM},
        {"optimizer": Optimizer.ADAGRAD, "dtype": DType.FP16},
        {"pooling": Pooling.SEQUENCE, "dtype": DType.FP16},
        {"update": Update.ALL_REDUCED},
        {"level": MemoryLevel.DDR, "cache_bytes": 2**16},
    ],
)
def test_a_device_runs_all_kinds_that_it_is_said_to(kinds, any_device):
    device, shard = torch.device(any_device), small(**kinds)
    if not is_measurable(shard, on_cuda=device.type == "cuda"):
        pytest.skip("these kernels are a GPU's")
    running = ShardSet(
        [[draw_batch(shard, device=device)]], Arenas(4_000 if device.type == "cpu" else 0, device), device
    )
    (output,) = outputs = running.forward()
    assert output.device.type == any_device
    running.backward(outputs)
    assert output.detach().isfinite().all()
