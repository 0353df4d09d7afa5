"""Rows behind caches, brought there before their lookup: in the order that FBGEMM asks for.

No GPU runs here. A stand-in keeps FBGEMM's books around its kernel of a CPU: the first batch that was prefetched is the
next one that is looked up, and lines of a batch are locked until its backward pass.
"""

import inspect

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from autoshard.core import DType, MemoryLevel, MemoryPlacement, Optimizer
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows import fused
from autoshard.runtime.engine.rows.fused import FusedKernel, FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make

SETTINGS = FusedSettings(learning_rate=0.05)
#: What the engine calls and sets beside the lookup, of the caches of FBGEMM's module.
BOOKS = ("timesteps_prefetched", "lxu_cache_locations_list", "prefetch_stream", "lock_cache_line")


class Cached(torch.nn.Module):
    """FBGEMM's kernel of a CPU as if its rows lay behind a cache that may be filled ahead."""

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, []
        self.timesteps_prefetched, self.lxu_cache_locations_list = [], []
        self.prefetch_stream, self.lock_cache_line = None, True
        self.lxu_cache_locking_counter = torch.zeros(1, dtype=torch.int32)

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)

    def prefetch(self, indices, offsets, forward_stream=None):
        del forward_stream  # there are none on a CPU
        self.calls.append("fill")
        self.timesteps_prefetched.append(len(self.calls))
        self.lxu_cache_locations_list.append((indices.clone(), offsets.clone()))
        self.lxu_cache_locking_counter += 1

    def forward(self, indices, offsets, *weights):
        if self.timesteps_prefetched:
            self.timesteps_prefetched.pop(0)
            filled_L, filled_offsets = self.lxu_cache_locations_list.pop(0)
            assert torch.equal(filled_L, indices), "FBGEMM would read the places of another batch's rows"
            assert torch.equal(filled_offsets, offsets)
            self.calls.append("hit")
        else:
            self.calls.append("miss")
            self.lxu_cache_locking_counter += int(self.lock_cache_line)
        output = self.module(indices, offsets, *weights)
        if output.requires_grad:
            output.register_hook(self._trained)
        return output

    def _trained(self, _):
        self.calls.append("train")
        self.lxu_cache_locking_counter -= 1


@pytest.fixture(params=[False, True], ids=["plain", "weighted"])
def cached(monkeypatch, request):
    """Embeddings whose one kernel is such a module, the module, and batches."""
    made, fuse = [], fused.fused_embedding
    monkeypatch.setattr(
        fused, "fused_embedding", lambda *args, **options: made.append(Cached(fuse(*args, **options))) or made[-1]
    )
    monkeypatch.setattr(FusedKernel, "fills_ahead", property(lambda _: True, lambda *_: None), raising=False)

    def decrement(counter, _):
        counter -= 1

    monkeypatch.setattr(torch.ops.fbgemm, "lxu_cache_locking_counter_decrement", decrement)
    tables = [make.table("t", 40, 8, weighted=request.param), make.table("u", 30, 12)]
    plan = make.table_wise_plan(tables, [0, 0], world_size=1, batch_size=6)
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    [module] = made
    batches = [draw_samples(plan.tables, 1, 6, (number,)).ids for number in range(4)]
    return embeddings, module, batches


def ahead(embeddings, batches):
    """Batches on their way, the ids of all of which have come."""
    under_way = [embeddings.prefetch(batch) for batch in batches]
    for one in under_way:
        while one.arrived() is None:
            pass
    return under_way


@pytest.mark.usefixtures("one_process")
class TestFilling:
    def test_the_next_batch_comes_to_the_cache_between_lookup_and_backward_pass(self, cached):
        embeddings, module, batches = cached
        assert embeddings.batches_ahead == 2
        for one in ahead(embeddings, batches[:3]):
            embeddings(one).pooled_BC.sum().backward()
        assert module.calls == ["miss", "fill", "train", "hit", "fill", "train", "hit", "train"]
        assert int(module.lxu_cache_locking_counter) == 0

    def test_what_was_filled_is_forgotten_where_another_batch_comes_between(self, cached):
        embeddings, module, batches = cached
        first, second = ahead(embeddings, batches[:2])
        embeddings(first).pooled_BC.sum().backward()
        with torch.no_grad():
            embeddings(batches[2])  # as an evaluation does
        embeddings(second).pooled_BC.sum().backward()
        assert module.calls == ["miss", "fill", "train", "miss", "miss", "train"]
        assert int(module.lxu_cache_locking_counter) == 0

    def test_lookups_without_a_backward_pass_lock_nothing(self, cached):
        embeddings, module, batches = cached
        first, second, third = ahead(embeddings, batches[:3])
        embeddings(first).pooled_BC.sum().backward()
        with torch.no_grad():
            embeddings(second)
            embeddings(third)
        assert module.calls == ["miss", "fill", "train", "miss", "miss"]
        assert int(module.lxu_cache_locking_counter) == 0

    def test_written_weights_forget_what_was_filled(self, cached):
        embeddings, module, batches = cached
        first, second = ahead(embeddings, batches[:2])
        embeddings(first).pooled_BC.sum().backward()
        weights_ND = torch.ones(40, 8)
        embeddings.load_weights("t", weights_ND)
        embeddings(second)
        assert module.calls == ["miss", "fill", "train", "miss"]

    def test_ids_under_way_are_not_waited_for(self, cached, monkeypatch):
        embeddings, module, batches = cached
        first, _ = ahead(embeddings, batches[:2])
        monkeypatch.setattr("autoshard.runtime.engine.ids.prefetch.Prefetched.arrived", lambda _: None)
        embeddings(first).pooled_BC.sum().backward()
        assert module.calls == ["miss", "train"]


@pytest.mark.parametrize(("policy", "is_filled"), [("lru", True), ("lfu", False)])
def test_kernels_are_told_that_their_cache_is_filled_ahead(monkeypatch, policy, is_filled):
    told = {}
    monkeypatch.setattr(fused, "fused_embedding", lambda *_, **options: told.update(options))
    memory = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=6400, policy=policy)
    kernel = FusedKernel(
        [(100, 8)], DType.FP32, Optimizer.SGD, SETTINGS, torch.device("cuda"), table_of_feature=[0], memory=memory
    )
    assert (kernel.fills_ahead, told["prefetch_pipeline"]) == (is_filled, is_filled)


def test_fbgemm_takes_what_it_is_given():
    signature = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.prefetch)
    signature.bind(None, torch.zeros(1), torch.zeros(2), forward_stream=None)
    options = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
    assert "prefetch_pipeline" in options
    source = inspect.getsource(SplitTableBatchedEmbeddingBagsCodegen)
    assert all(f"self.{name}" in source for name in (*BOOKS, "lxu_cache_locking_counter"))
    schema = torch.ops.fbgemm.lxu_cache_locking_counter_decrement.default._schema
    assert [one.name for one in schema.arguments] == ["lxu_cache_locking_counter", "lxu_cache_locations"]
