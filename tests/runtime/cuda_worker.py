"""Trains drawn plans on the CPU and on a pretended GPU, which have to agree to the last bit."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType

from autoshard.runtime import memory, participation
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows import averaging, fused, replicated
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.engine.vectors import payload
from autoshard.runtime.memory import free_device_bytes
from autoshard.runtime.releases import fused_embedding
from autoshard.runtime.training.synthetic import draw_samples
from tests.contracts.drawn_layouts import drawn_plan, other_layout, weighted_sums
from tests.runtime.pretended_gpu import CUDA, OnGpu, held, pretended

SETTINGS = FusedSettings(learning_rate=0.1, eps=1e-3)
STEPS = 2
MODULES = (averaging, participation, payload, replicated)


def trained(plan, orders, device):
    """Embeddings of all steps, and all tables afterwards; on the CPU."""
    found = []
    embeddings = ShardedEmbeddings(plan, SETTINGS, device=device, row_orders=orders)
    for step in range(2 * STEPS):
        if step == STEPS:
            other, row_orders = other_layout(7, plan)
            embeddings.adopt(other, {name: torch.from_numpy(ids_N) for name, ids_N in row_orders.items()})
        batch = draw_samples(plan.tables, 1, embeddings.local_batch_size, (7, step, dist.get_rank())).ids
        embedded = embeddings(batch.to(device))
        outputs = [embedded.pooled_BC, *embedded.sequences.values()]
        sum(one.square().sum() for one in outputs).backward()
        embeddings.end_step()
        found += [one.detach() for one in outputs]
    for table in plan.tables.tables:
        state = embeddings.table_state(table.name)
        embeddings.load_table_state(table.name, state)
        found += [state.weights_ND, *state.moments.values()]
    assert all(one.device == device for one in found)
    embeddings.close()
    return held(found)


class FusedOnGpu:
    """FBGEMM's kernel on the pretended device: takes and gives tensors that are there.

    A GPU's kernel adds up in fp32, whatever it gives out and takes gradients as; a CPU's does not.
    """

    def __init__(self, specs, host_memory=None, *, device, output_dtype, **options):
        assert device == CUDA
        assert host_memory is None
        assert {compute for *_, compute in specs} == {fused.ComputeDevice.CUDA}
        sizes = [(rows, dim, fused.EmbeddingLocation.HOST, fused.ComputeDevice.CPU) for rows, dim, *_ in specs]
        self.kernel = fused_embedding(sizes, **options, output_dtype=SparseType.FP32, device=torch.device("cpu"))
        self.dtype = output_dtype.as_dtype()

    def __call__(self, ids_L, offsets, weights_L=None, without_gradients_F=None):
        assert isinstance(ids_L, OnGpu)
        assert isinstance(offsets, OnGpu)
        assert weights_L is None or isinstance(weights_L, OnGpu)
        return OnGpu(self.kernel(*held((ids_L, offsets, weights_L, without_gradients_F))).to(self.dtype))

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
        memory.free_device_bytes = lambda _: 1 << 40
        yield
        fused.fused_embedding, memory.free_device_bytes = fused_embedding, free_device_bytes


def compared(plan, orders, *, is_weighted):
    """How many tensors an engine on each device gave, and the largest differences of those that differ."""
    orders = {name: torch.from_numpy(ids_N) for name, ids_N in orders.items()}
    plan = weighted_sums(plan) if is_weighted else plan
    expected = trained(plan, orders, torch.device("cpu"))
    with on_gpu():
        actual = trained(plan, orders, CUDA)
    pairs = list(zip(actual, expected, strict=True))
    return len(pairs), [float((one - other).abs().max()) for one, other in pairs if not torch.equal(one, other)]


def compare_all(drawn_plans):
    """What `compared` gives for plans: each a seed, the number format on the wire, and whether lookups are weighted."""
    return [compared(*drawn_plan(seed, 2, 2, dtype), is_weighted=weighted) for seed, dtype, weighted in drawn_plans]
