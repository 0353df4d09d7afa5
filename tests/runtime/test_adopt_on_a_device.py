"""What a checkpoint and an adopted plan hold, and what comes of them, on one process of a CPU or a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from autoshard.core import Optimizer, RowsBy
from autoshard.runtime.checkpoints import Checkpoints, RandomState
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from studies.engines.host_waits import plans

KINDS = [("table-wise", "row-wise", "tiers"), ("sequences", "tiers of sequences")]
PAIRS = [(one, other) for kinds in KINDS for one in kinds for other in kinds if one != other]
SETTINGS = FusedSettings(learning_rate=0.05)


@pytest.fixture
def device(any_device):
    own = torch.device("cuda", 0) if any_device == "cuda" else None
    backend = "nccl" if own else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=own)
    yield own or torch.device("cpu")
    dist.destroy_process_group()


def engine_of(plan, device):
    return ShardedEmbeddings(plan, SETTINGS, device=device, row_orders=orders_of(plan))


def orders_of(plan):
    cut = {one.shard.table for one in plan.shards if one.shard.rows.by is RowsBy.ACCESS_RANK}
    return {of.name: torch.arange(of.num_embeddings).flip(0)[: of.num_embeddings // 2] for of in cut}


def trained_with(plan, optimizer):
    """The plan with another optimizer of all tables."""
    tables = {one.name: replace(one, optimizer=optimizer) for one in plan.tables.tables}
    shards = (replace(one, shard=replace(one.shard, table=tables[one.shard.table.name])) for one in plan.shards)
    return replace(plan, tables=replace(plan.tables, tables=tuple(tables.values())), shards=tuple(shards))


def step(embeddings, number, device):
    ids = draw_samples(embeddings.owners.tables, 0, embeddings.local_batch_size, (7, number)).ids.to(device)
    embedded = embeddings(ids)
    outputs = [one for one in (embedded.pooled_BC, *embedded.sequences.values()) if one.numel()]
    torch.autograd.backward(outputs, [torch.full_like(one, 1.0 + number) for one in outputs])
    embeddings.end_step()


def assert_equal(one, other):
    for table in one.owners.tables.tables:
        of_one, of_other = (engine.table_state(table.name) for engine in (one, other))
        assert torch.equal(of_one.weights_ND, of_other.weights_ND)
        assert of_one.moments.keys() == of_other.moments.keys()
        assert all(torch.equal(kept, of_other.moments[name]) for name, kept in of_one.moments.items())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [one for one in Optimizer if one is not Optimizer.NONE])
def test_a_loaded_checkpoint_and_an_adopted_plan_are_the_same_and_go_on_alike(tmp_path, device, optimizer):
    made = {name: trained_with(plan, optimizer) for name, plan in plans(6, 2).items()}
    for number, (one, other) in enumerate(PAIRS):
        adopting = engine_of(made[one], device)
        for at in range(2):
            step(adopting, at, device)
        with Checkpoints(tmp_path / str(number)) as checkpoints:
            state = {"embeddings": adopting, "random": RandomState()}
            checkpoints.save(2, state, plan=made[one])
            checkpoints.wait()
            loaded = engine_of(made[other], device)
            checkpoints.latest().load({"embeddings": loaded, "random": RandomState()})
        assert_equal(adopting, loaded)
        adopting.adopt(made[other], orders_of(made[other]))
        assert_equal(adopting, loaded)
        for at in range(2, 4):
            step(adopting, at, device)
            step(loaded, at, device)
        assert_equal(adopting, loaded)
        adopting.close()
        loaded.close()
