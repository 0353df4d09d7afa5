"""What `shard` makes of models whose processes differ: in weights, and in the layers that a step uses."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from autoshard.core import GradSync, Optimizer, ReplicaGroups, Tier
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.checkpoints import Checkpoint, Checkpoints
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.torchrec import shard, tables_of
from tests import builders as make
from tests.ranks import on_ranks

#: By name: tier, replicas, what is read, replica groups, and of which process each of the table's rows is.
LAYOUTS = {
    "table_wise": (Tier.TABLE_WISE, ((1,),), None, 1, [1] * 6),
    "row_wise": (Tier.ROW_WISE, ((0, 1),), None, 1, [0] * 3 + [1] * 3),
    "data_parallel": (Tier.DATA_PARALLEL, ((0,), (1,)), None, 1, [0] * 6),
    "replicated": (Tier.REPLICATED, ((1,), (0,)), (0, 1), 1, [1] * 6),
    "replica groups": (Tier.TABLE_WISE, ((0,),), None, 2, [0] * 6),
}


class Model(torch.nn.Module):
    """A table and a dense layer, and another one that not every batch goes through."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        config = EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])
        self.tables = EmbeddingBagCollection(tables=[config])
        self.bottom, self.top = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, ids, dense=None):
        found = self.tables(ids).values()
        return self.top(found if dense is None else found + self.bottom(dense)).sum()


def plan_of(model, tier=Tier.TABLE_WISE, replicas=((0,),), fetch=None, num_groups=1):
    tables = tables_of(model, batch_size=5)  # no multiple of the processes
    return make.plan(
        make.placed(tables.tables[0], tier, replicas, fetch=fetch),
        tables=tables,
        topology=make.topology(2),
        replica_groups=ReplicaGroups(num_groups=num_groups),
    )


def sharded(model, *layout, **options):
    return shard(model, plan_of(model, *layout), learning_rate=0.1, **options)


def batch(*ids):
    return KeyedJaggedTensor(keys=["f"], values=torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def weights_of_layouts():
    """By layout, what each process has drawn, and the table that it looks up then."""
    found = {}
    for name, (*layout, _) in LAYOUTS.items():
        model = Model(seed=dist.get_rank())
        drawn = model.tables.embedding_bags["t"].weight.detach().clone()
        table = sharded(model, *layout)
        with torch.no_grad():
            found[name] = drawn, table.collections["tables"](batch(*range(6))).values()
        table.close()
    return found


def test_copies_of_rows_are_as_the_first_where_processes_have_drawn_other_weights():
    of_processes = on_ranks(weights_of_layouts, 2)
    for name, (*_, owners) in LAYOUTS.items():
        drawn = [of[name][0] for of in of_processes]
        expected = torch.stack([drawn[owner][row] for row, owner in enumerate(owners)])
        for of in of_processes:
            assert torch.equal(of[name][1], expected), name


def moved_when_frozen():
    """By layout and optimizer, how far a frozen table and one beside it are off what they are to be; and if trained."""
    found = {}
    plain, far = (make.table(name, 6, 4) for name in ("old", "new"))
    for optimizer in (one for one in Optimizer if one.has_decaying_moments):
        old, new = (replace(one, optimizer=optimizer) for one in (plain, far))
        for name, (tier, replicas, fetch, num_groups, _) in LAYOUTS.items():
            for sync in list(GradSync)[1:] if len(replicas) > 1 else [GradSync.NONE]:
                placed = make.placed(old, tier, replicas, fetch=fetch, grad_sync=sync)
                plan = make.plan(
                    *(placed, make.placed(new, Tier.TABLE_WISE, ((0,),))),
                    batch_size=4,
                    topology=make.topology(2),
                    replica_groups=ReplicaGroups(num_groups=num_groups, sync_every=2, moment_scale=1.0),
                )
                settings = FusedSettings(learning_rate=0.1)
                trained, held = ShardedEmbeddings(plan, settings), ShardedEmbeddings(plan, settings, frozen=["old"])
                train(trained, 2)
                held.load_state_dict(trained.state_dict())
                before = tensors_of(held, "old")
                for one in (trained, held):
                    one.adopt(plan)
                    train(one, 2)
                pairs = (tensors_of(held, "old"), before), (tensors_of(held, "new"), tensors_of(trained, "new"))
                found[f"{name} {sync} {optimizer}"] = (
                    [largest(*pair) for pair in pairs],
                    largest(tensors_of(trained, "old"), before),
                )
                for one in (trained, held):
                    one.close()
    return found


def train(embeddings, num_steps):
    for _ in range(num_steps):
        ids = torch.tensor([0, 1, 2, 3]) + dist.get_rank()
        found = embeddings(BatchOfIds(torch.ones(2, 2, dtype=torch.int64), ids))
        found.pooled_BC.square().sum().backward()
        embeddings.end_step()


def tensors_of(embeddings, name):
    state = embeddings.table_state(name)
    return [state.weights_ND, *state.moments.values()]


def largest(some, others):
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


def test_frozen_tables_of_any_layout_stay_with_the_moments_of_training():
    for found in on_ranks(moved_when_frozen, 2):
        assert len(found) == 9 * 4
        for name, (off, moved_by_training) in found.items():
            assert off == [0.0, 0.0], name
            assert moved_by_training > 0.01, name


def gradients_of_other_layers():
    """By step, gradients of two layers, of which process 0 alone uses one; rows that moved; weights of the other."""
    model = Model(seed=0)
    table = sharded(model, find_unused_parameters=True)
    before = table.table_state("t").weights_ND
    found = []
    for _ in range(3):
        table.zero_grad()
        table(batch(0, 1), torch.ones(2, 4) if dist.get_rank() == 0 else None).backward()
        table.end_step()
        found.append([model.bottom.weight.grad.clone(), model.top.weight.grad.clone()])
    moved = (before - table.table_state("t").weights_ND).abs().sum(dim=1)
    top = model.top.weight.detach().clone()
    table.close()
    return found, (moved > 0).tolist(), top


def test_layers_that_some_processes_leave_out_get_the_mean_of_the_gradients_of_those_that_use_them():
    for found, moved, top in on_ranks(gradients_of_other_layers, 2):
        assert moved == [True] * 2 + [False] * 4
        for bottom_grad, top_grad in found:
            # Two samples of ones on one process of two.
            assert torch.allclose(bottom_grad, top.T.expand(4, 4))
            assert top_grad.any()


def state_of(model):
    """Its state, whole on each process."""
    return {
        key: one.full_tensor() if isinstance(one, DTensor) else one.clone() for key, one in model.state_dict().items()
    }


def save_model(folder):
    """The state of a model, saved by torch and by `Checkpoints`."""
    model = Model(seed=1)
    plan = plan_of(model, Tier.ROW_WISE, ((0, 1),))
    one = shard(model, plan, learning_rate=0.1)
    is_parallel = isinstance(one.parallel, torch.nn.parallel.DistributedDataParallel)
    assert is_parallel == (dist.get_world_size() > 1)
    dcp.save(one.state_dict(), checkpoint_id=folder / "torch")
    with Checkpoints(folder / "own") as checkpoints:
        checkpoints.save(1, {"model": one}, plan=plan)
    assert (
        get_model_state_dict(one).keys()
        == one.state_dict().keys()
        == {*(f"module.{name}" for name in model.state_dict())}
    )
    state = state_of(one)
    one.close()
    return state


def load_model(folder):
    """The states of two models that were loaded from these."""
    by_torch, by_checkpoints = sharded(Model(seed=2)), sharded(Model(seed=2))
    state = by_torch.state_dict()
    dcp.load(state, checkpoint_id=folder / "torch")
    by_torch.load_state_dict(state)
    [checkpoint] = (folder / "own").glob("step-*")
    Checkpoint(checkpoint).load({"model": by_checkpoints})
    found = [state_of(one) for one in (by_torch, by_checkpoints)]
    for one in (by_torch, by_checkpoints):
        one.close()
    return found


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2)])
def test_states_of_models_load_on_another_number_of_processes(tmp_path, saving, loading):
    expected, *_ = on_ranks(save_model, saving, tmp_path)
    assert "module.bottom.weight" in expected
    for of_process in on_ranks(load_model, loading, tmp_path):
        for found in of_process:
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), name
