"""Towers that share a module of tables, sharded and unsharded; states and schedules of sharded models."""

import io
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from autoshard.core import GradSync, Optimizer, Tier
from autoshard.core.errors import InputError
from autoshard.torchrec import shard, tables_of
from tests.builders import each, everyone, placed, plan

LEARNING_RATE, NUM_STEPS, BATCH_SIZE = 0.1, 4, 4
SCHEDULES = {
    "none": lambda _: None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "step": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.1),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=NUM_STEPS, cycle_momentum=False),
}


def pooled(name="t", *, is_weighted=False):
    config = EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=8, feature_names=["id"])
    return EmbeddingBagCollection(tables=[config], is_weighted=is_weighted)


def sequence():
    config = EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["id"])
    return EmbeddingCollection(tables=[config])


class Tower(torch.nn.Module):
    """A module of tables below a part of the model, and a dense layer of its own."""

    def __init__(self, tables):
        super().__init__()
        self.inner = torch.nn.ModuleDict({"tables": tables})
        self.dense = torch.nn.Linear(8, 1)

    def forward(self, batch):
        found = self.inner["tables"](batch)
        return self.dense(found["id"].values() if isinstance(found, dict) else found.values())


class Towers(torch.nn.Module):
    """Two towers in a list, and a path to the tables of their own."""

    def __init__(self, *tables):
        super().__init__()
        self.towers = torch.nn.ModuleList([Tower(one) for one in tables])
        self.again = tables[0]

    def forward(self, batches):
        return torch.cat([tower(batch).sum(0) for tower, batch in zip(self.towers, batches, strict=True)])


def make(kind):
    """Towers that share tables, or with tables of one name each."""
    torch.manual_seed(0)
    if kind == "apart":
        return Towers(pooled(), pooled())
    one = {"pooled": pooled, "sequence": sequence, "weighted": partial(pooled, is_weighted=True)}[kind]()
    return Towers(one, one)


def batches(step, rank):
    """Batches with weights, which only weighted modules look at."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.ones(BATCH_SIZE, dtype=torch.int64)
    return [
        KeyedJaggedTensor(
            keys=["id"],
            values=torch.randint(0, 10, (BATCH_SIZE,), generator=generator),
            lengths=lengths,
            weights=torch.randn(BATCH_SIZE, generator=generator),
        )
        for _ in range(2)
    ]


def loss_of(model, step, rank):
    return (model(batches(step, rank)) ** 2).mean()


def plan_of(model, machine, layout, optimizer=Optimizer.SGD):
    found = tables_of(model, batch_size=BATCH_SIZE * machine.world_size)
    tables = replace(found, tables=tuple(replace(table, optimizer=optimizer) for table in found.tables))
    tier, replicas, sync = {
        "table_wise": (Tier.TABLE_WISE, ((1,),), GradSync.NONE),
        "row_wise": (Tier.ROW_WISE, everyone(machine.world_size), GradSync.NONE),
        "data_parallel": (Tier.DATA_PARALLEL, each(machine.world_size), GradSync.SPARSE),
    }[layout]
    shards = (placed(table, tier, replicas, grad_sync=sync) for table in tables.tables)
    return plan(*shards, tables=tables, topology=machine)


def trained(kind, machine, layout, schedule):
    """Largest difference to the unsharded model over its steps, of outputs and weights; and the sharded model."""
    rank, num = dist.get_rank(), dist.get_world_size()
    plain, model = make(kind), make(kind)
    sharded = shard(model, plan_of(model, machine, layout), learning_rate=LEARNING_RATE)
    dense = torch.optim.SGD([one for one in sharded.parameters() if one.requires_grad], lr=LEARNING_RATE)
    reference = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    schedules = [SCHEDULES[schedule](one) for one in (dense, sharded.optimizer, reference)]
    worst = 0.0
    for step in range(NUM_STEPS):
        with torch.no_grad():
            worst = max(worst, float((sharded(batches(step, rank)) - plain(batches(step, rank))).abs().max()))
        dense.zero_grad()
        loss_of(sharded, step, rank).backward()
        dense.step()
        sharded.end_step()
        reference.zero_grad()
        (sum(loss_of(plain, step, process) for process in range(num)) / num).backward()
        reference.step()
        for one in filter(None, schedules):
            one.step()
    names = ["towers.0.inner.tables.t", "towers.1.inner.tables.t"] if kind == "apart" else ["t"]
    for name, tower in zip(names, plain.towers, strict=False):
        weights = sharded.table_state(name).weights_ND
        expected = next(tower.inner["tables"].parameters())
        worst = max(worst, float((weights - expected).abs().max()))
    return worst, sharded


def paths_are_replaced(sharded):
    model = sharded.module
    held = {id(tower.inner["tables"]) for tower in model.towers} | {id(model.again)}
    return list(sharded.collections) == ["towers.0.inner.tables"] and held == {
        id(one) for one in sharded.collections.values()
    }


def restored(machine):
    """Whether another sharded model, by another plan, is the same after loading what the first one saved."""
    _, first = trained("pooled", machine, "row_wise", "step")
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": first.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    model = make("pooled")
    second = shard(model, plan_of(model, machine, "data_parallel"), learning_rate=1.0)
    told = second.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    rank = dist.get_rank()
    for one in (first, second):
        loss_of(one, 7, rank).backward()
        one.end_step()
    same = [
        torch.allclose(first.table_state("t").weights_ND, second.table_state("t").weights_ND, atol=1e-6),
        torch.equal(first(batches(0, rank)), second(batches(0, rank))),
        second.optimizer.learning_rate == first.optimizer.learning_rate < LEARNING_RATE,
        not told.missing_keys and not told.unexpected_keys,
    ]
    changed = {key: value + 1 for key, value in saved["model"].items() if "tables.t.weights" in key}
    del changed[next(iter(changed))]
    left = second.load_state_dict(changed, strict=False)
    same.append(len(left.missing_keys) > 0)
    return same


class Stubborn(torch.nn.Module):
    """Keeps the module that it was made with."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables

    def __setattr__(self, name, value):
        if name == "tables" and "tables" in self._modules:
            raise TypeError("this tower keeps its tables")
        super().__setattr__(name, value)


def refusals(machine):
    """What `shard` says of models that it cannot replace whole, and whether they are as they were."""
    one = pooled()
    processed = FeatureProcessedEmbeddingBagCollection(
        pooled(is_weighted=True), PositionWeightedModuleCollection({"id": 4})
    )
    adaptive = Optimizer.ROWWISE_ADAGRAD
    models = {
        "stubborn": (torch.nn.ModuleDict({"free": Tower(one), "kept": Stubborn(one)}), Optimizer.SGD),
        "list": (Towers(one, one), Optimizer.SGD),
        "processed": (torch.nn.ModuleList([pooled(), processed]), Optimizer.SGD),
        "adaptive": (Towers(one, one), adaptive),
    }
    told = {}
    for name, (model, optimizer) in models.items():
        plan = plan_of(model, machine, "row_wise", optimizer)
        if name == "list":
            model.plain = [one]
        before = list(model.named_modules(remove_duplicate=False))
        with pytest.raises(InputError) as caught:
            shard(model, plan, learning_rate=LEARNING_RATE)
        told[name] = str(caught.value)
        assert list(model.named_modules(remove_duplicate=False)) == before
    return told


def results(machine):
    differences, replaced = {}, []
    for kind, layout, schedule in (
        ("pooled", "table_wise", "lambda"),
        ("pooled", "row_wise", "none"),
        ("pooled", "data_parallel", "one cycle"),
        ("sequence", "row_wise", "step"),
        ("sequence", "data_parallel", "lambda"),
        ("weighted", "table_wise", "none"),
        ("weighted", "row_wise", "lambda"),
        ("weighted", "data_parallel", "step"),
    ):
        differences[f"{kind} {layout} {schedule}"], sharded = trained(kind, machine, layout, schedule)
        replaced.append(paths_are_replaced(sharded))
    differences["apart"], sharded = trained("apart", machine, "row_wise", "one cycle")
    replaced.append(list(sharded.collections) == ["towers.0.inner.tables", "towers.1.inner.tables"])
    return {
        "differences": differences,
        "replaced": replaced,
        "restored": restored(machine),
        "refusals": refusals(machine),
    }
