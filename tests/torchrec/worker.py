"""Trains a small model on each of some processes: by TorchRec with our plan, on our engine, and unsharded."""

import warnings

import torch
import torch.distributed as dist
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import PoolingType

from autoshard.core import GradSync, Tier
from autoshard.core.errors import InputError
from autoshard.torchrec import Planner, from_torchrec, read_model, record, shard, to_torchrec
from tests import builders as make
from tests.torchrec import towers

LEARNING_RATE, BATCH_SIZE, STEPS = 0.1, 4, 3
FEATURES = ("a", "b", "c", "h")


def constant(value):
    """An initial value that is the same for every part of a table: TorchRec draws its shards' weights anew."""
    return lambda weights: torch.nn.init.constant_(weights, value)


class Model(torch.nn.Module):
    """Pooled tables, one feature of which two tables share, a sequence table and a dense layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="t0", num_embeddings=40, embedding_dim=8, feature_names=["b", "a"], init_fn=constant(0.1)
                ),
                EmbeddingBagConfig(
                    name="t1",
                    num_embeddings=30,
                    embedding_dim=16,
                    feature_names=["a", "c"],
                    pooling=PoolingType.MEAN,
                    init_fn=constant(-0.2),
                ),
            ]
        )
        self.history = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="h", num_embeddings=20, embedding_dim=4, feature_names=["h"], init_fn=constant(0.3)
                )
            ]
        )
        self.dense = torch.nn.Linear(8 + 8 + 16 + 16 + 4, 1)

    def forward(self, features):
        pooled, rows = self.bags(features), self.history(features)["h"]
        sums = torch.stack([one.sum(0) for one in torch.split(rows.values(), rows.lengths().tolist())])
        # By name: TorchRec's sharded modules have an order of their own.
        parts = [pooled[name] for name in ("b", "a@t0", "a@t1", "c")]
        return self.dense(torch.cat([*parts, sums], dim=1)).squeeze(1)


def draw(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH_SIZE,), generator=generator)
    ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    target = torch.rand(BATCH_SIZE, generator=generator)
    return KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths), target


def refused_batches():
    """One with weights, one without a feature."""
    features, _ = draw(0, 0)
    lengths, ids = features.lengths(), features.values()
    yield KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths, weights=torch.ones(len(ids)))
    yield KeyedJaggedTensor(keys=["a"], values=ids[:0], lengths=lengths[:BATCH_SIZE] * 0)


def refusal_of(sharded, batch):
    try:
        sharded.collections["bags"](batch)
    except InputError as error:
        return str(error)
    return ""


def joined(parts):
    """Batches of all processes as one."""
    bags = {name: [part.to_dict()[name] for part in parts] for name in FEATURES}
    jagged = {
        name: JaggedTensor(
            values=torch.cat([one.values() for one in of]), lengths=torch.cat([one.lengths() for one in of])
        )
        for name, of in bags.items()
    }
    return KeyedJaggedTensor.from_jt_dict(jagged)


def in_backward(model):
    from torch.distributed.optim import _apply_optimizer_in_backward

    tables = [*model.bags.parameters(), *model.history.parameters()]
    _apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": LEARNING_RATE})
    return model


def losses_of(model, dense, rank, end_step=lambda: None):
    optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        features, target = draw(step, rank)
        loss = ((model(features) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def unsharded(world_size):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        parts = [draw(step, rank) for rank in range(world_size)]
        features, target = joined([part for part, _ in parts]), torch.cat([target for _, target in parts])
        loss = ((model(features) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def split_rows(tables, machine):
    """A plan that TorchRec's module of sequences cannot say: pooled rows split, the sequence table replicated."""
    split = {"tier": Tier.ROW_WISE, "replicas": make.everyone(machine.world_size)}
    copied = {"tier": Tier.DATA_PARALLEL, "replicas": make.each(machine.world_size), "grad_sync": GradSync.SPARSE}
    shards = (make.placed(table, **(copied if table.name == "h" else split)) for table in tables.tables)
    return make.plan(*shards, tables=tables, topology=machine)


def train_all():
    """Losses, differences and refusals, by the way of training."""
    warnings.simplefilter("ignore")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    machine = make.topology(world_size, hbm=1 << 24)
    planner = Planner(topology=machine, batch_size=BATCH_SIZE, timeout_seconds=1.0, planners=("neo", "cost-greedy"))
    trained = in_backward(Model())
    plan = planner.collective_plan(trained)
    found = read_model(trained, batch_size=BATCH_SIZE * world_size)
    model = DistributedModelParallel(trained, device=torch.device("cpu"), plan=plan)
    dense = [parameter for name, parameter in model.named_parameters() if "dense" in name]
    results = {"by_torchrec": losses_of(model, dense, rank)}
    del model
    for name, ours in (("by_same_plan", planner.chosen), ("by_other_plan", split_rows(found.tables, machine))):
        watched = in_backward(Model())
        recorder = record(watched, every=2)
        counted = [draw(step, rank)[0] for step in (0, 1, 2)]
        with torch.no_grad():
            for features in counted:
                watched.bags(features)
        sharded = shard(watched, ours)
        pooled, rows = sharded.collections["bags"](counted[0]), sharded.collections["history"](counted[0])
        assert isinstance(pooled, KeyedTensor)
        assert pooled.keys() == ["b", "a@t0", "a@t1", "c"]
        assert isinstance(rows["h"], JaggedTensor)
        results["refused"] = [refusal_of(sharded, batch) for batch in refused_batches()]
        results[name] = losses_of(sharded, watched.dense.parameters(), rank, sharded.end_step)
        states = {table.name: sharded.table_state(table.name).weights_ND for table in ours.tables.tables}
        results[f"{name}_counted"] = recorder.num_counted
        sharded.close()
    results["unsharded"], reference = unsharded(world_size)
    expected = {"t0": reference.bags, "t1": reference.bags, "h": reference.history}
    weights = {
        "t0": expected["t0"].embedding_bags["t0"].weight,
        "t1": expected["t1"].embedding_bags["t1"].weight,
        "h": expected["h"].embeddings["h"].weight,
    }
    results["difference"] = max(float((states[name] - weights[name]).abs().max()) for name in weights)
    results["round_trip"] = to_torchrec(from_torchrec(plan, found.tables, machine, found.places), found.places) == plan
    results["towers"] = towers.results(machine)
    return results
