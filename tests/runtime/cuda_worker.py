"""One of two processes that train drawn plans on the CPU and on a pretended GPU, which have to agree to the last bit.

Arguments: rank, file to meet at, seeds of plans. Prints one JSON object: how many tensors were compared, what differs,
and what the host waited for in one step on tables that are held whole.
"""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from autoshard.core import DType, PlacedShard, Pooling, Shard
from autoshard.runtime import participation
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows import averaging, fused, replicated
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.engine.vectors import payload
from autoshard.runtime.releases import fused_embedding
from autoshard.runtime.training.synthetic import draw_samples
from tests.contracts.drawn_layouts import drawn_plan
from tests.runtime.pretended_gpu import CUDA, OnGpu, held, pretended, waits

SETTINGS = FusedSettings(learning_rate=0.1, eps=1e-3)
STEPS = 2
MODULES = (averaging, participation, payload, replicated)


def trained(plan, orders, device):
    """Embeddings of all steps, and all tables afterwards; on the CPU."""
    found = []
    embeddings = ShardedEmbeddings(plan, SETTINGS, device=device, row_orders=orders)
    for step in range(STEPS):
        batch = draw_samples(plan.tables, 1, embeddings.local_batch_size, (7, step, dist.get_rank())).ids
        embedded = embeddings(batch.to(device))
        outputs = [embedded.pooled_BC, *embedded.sequences.values()]
        sum(one.square().sum() for one in outputs).backward()
        embeddings.end_step()
        found += [one.detach() for one in outputs]
    for table in plan.tables.tables:
        state = embeddings.table_state(table.name)
        embeddings.load_table_state(table.name, state)
        found += [one for one in (state.weights_ND, state.moments_ND) if one is not None]
    assert all(one.device == device for one in found)
    embeddings.close()
    return held(found)


class FusedOnGpu:
    """FBGEMM's kernel on the pretended device: takes and gives tensors that are there."""

    def __init__(self, specs, host_memory=None, *, device, **options):
        assert device == CUDA
        assert host_memory is None
        assert {compute for *_, compute in specs} == {fused.ComputeDevice.CUDA}
        sizes = [(rows, dim, fused.EmbeddingLocation.HOST, fused.ComputeDevice.CPU) for rows, dim, *_ in specs]
        self.kernel = fused_embedding(sizes, **options, device=torch.device("cpu"))

    def __call__(self, ids_L, offsets):
        assert isinstance(ids_L, OnGpu)
        assert isinstance(offsets, OnGpu)
        return OnGpu(self.kernel(*held((ids_L, offsets))))

    def split_embedding_weights(self):
        return [OnGpu(one) for one in self.kernel.split_embedding_weights()]

    def split_optimizer_states(self):
        return [tuple(OnGpu(one) for one in of) for of in self.kernel.split_optimizer_states()]

    def __getattr__(self, name):
        return getattr(self.kernel, name)


@contextmanager
def on_gpu():
    with pretended(MODULES):
        fused.fused_embedding = FusedOnGpu
        yield
        fused.fused_embedding = fused_embedding


def compared(plan, orders):
    """How many tensors an engine on each device gave, and the largest differences of those that differ."""
    orders = {name: torch.from_numpy(ids_N) for name, ids_N in orders.items()}
    expected = trained(plan, orders, torch.device("cpu"))
    with on_gpu():
        actual = trained(plan, orders, CUDA)
    pairs = list(zip(actual, expected, strict=True))
    return len(pairs), [float((one - other).abs().max()) for one, other in pairs if not torch.equal(one, other)]


def waited(plan):
    """What the host waits for in a step, once the rooms of messages are known."""
    with on_gpu():
        embeddings = ShardedEmbeddings(plan, SETTINGS, device=CUDA)
        for step in range(3):
            waits.clear()
            batch = draw_samples(plan.tables, 1, embeddings.local_batch_size, (7, step, dist.get_rank())).ids.to(CUDA)
            embeddings(batch).pooled_BC.square().sum().backward()
        embeddings.close()
    return dict(waits)


def whole_tables(plan):
    """A plan of the same pooled tables, each whole on a rank."""
    tables = tuple(replace(one, pooling=Pooling.SUM) for one in plan.tables.tables)
    shards = tuple(PlacedShard.table_wise(Shard.whole(one), index % 2) for index, one in enumerate(tables))
    return replace(plan, tables=replace(plan.tables, tables=tables), shards=shards)


def main():
    rank, rendezvous, *seeds = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=2)
    # Some with numbers of eight bits, which no reduce-scatter takes.
    drawn = [drawn_plan(int(seed), 2, 2, DType.INT8 if int(seed) % 4 == 3 else DType.FP32) for seed in seeds]
    counts, differences = zip(*(compared(*one) for one in drawn), strict=True)
    print(json.dumps([counts, differences, waited(whole_tables(drawn[0][0]))]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
