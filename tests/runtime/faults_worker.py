"""Processes that look up bad batches, each bad on some of the processes.

Arguments: number of processes, folder, replica groups. Each writes one JSON object to the folder, in a file of its
rank: what each batch was refused with, by name, and what is wrong afterwards.
"""

# ruff: noqa: E402

import json
import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist

NUM_PROCESSES, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
# Forked after the imports that take longest, which each would make anew otherwise.
RANK = next((rank for rank in range(1, NUM_PROCESSES) if os.fork() == 0), 0)
# Before all other imports, as in many trainers: torch and TorchRec keep the group at hand then.
dist.init_process_group("gloo", init_method=f"file://{FOLDER}/rendezvous", rank=RANK, world_size=NUM_PROCESSES)

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from autoshard.core import (
    Feature,
    GradSync,
    PlacedShard,
    Pooling,
    ReplicaGroups,
    Shard,
    Tier,
)
from autoshard.core.errors import ExecutionError, InputError
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine import groups as process_groups
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.torchrec import shard, tables_of
from tests import builders as make
from tests.contracts.drawn_layouts import weighted_sums

NAMES, ROWS, B = ["a", "b", "c"], 10, 4


def tiered_plan(num_processes, num_groups):
    """A table in rows, one that is whole, and a sequence table that all hold."""
    size, poolings = num_processes // num_groups, (Pooling.SUM, Pooling.MEAN, Pooling.SEQUENCE)
    in_rows, whole, everywhere = (
        make.placed(
            make.table(f"t{name}", ROWS, 8, features=(Feature(name=name, pooling_factor=1.0),), pooling=pooling)
        )
        for name, pooling in zip(NAMES, poolings, strict=True)
    )
    if size > 1:
        in_rows = replace(in_rows, tier=Tier.ROW_WISE, replicas=make.everyone(size))
        everywhere = make.placed(everywhere.shard, Tier.DATA_PARALLEL, make.each(size), grad_sync=GradSync.SPARSE)
    return make.plan(
        in_rows,
        whole,
        everywhere,
        batch_size=B * num_processes,
        topology=make.topology(num_processes),
        replica_groups=ReplicaGroups(num_groups=num_groups, sync_every=100),
    )


def lengths(*, size=B, dtype=torch.int64):
    return torch.ones(len(NAMES), size, dtype=dtype)


def ids(*, size=B):
    return torch.arange(len(NAMES) * size) % ROWS


def keyed(*, keys=("a", "b", "c"), size=B, **changes):
    given = {"values": ids(size=size), "lengths": lengths(size=size).view(-1)} | changes
    return KeyedJaggedTensor(keys=list(keys), **given)


def good():
    return BatchOfIds(lengths(), ids())


def bad_batches():
    """By name, batches that the last process gives; the others give a good one."""
    negative = lengths()
    negative[1, :2] = torch.tensor([-1, 3])
    yield "too few features", BatchOfIds(lengths()[:2], ids()[: 2 * B])
    yield "negative lengths", BatchOfIds(negative, ids())
    yield "lengths of more ids", BatchOfIds(lengths(), ids()[:-1])
    yield "lengths of fewer ids", BatchOfIds(lengths(), torch.cat([ids(), ids()]))
    yield "lengths of floats", BatchOfIds(lengths(dtype=torch.float32), ids())
    yield "lengths in a row", BatchOfIds(lengths().view(-1), ids())
    yield "ids of floats", BatchOfIds(lengths(), ids().float())
    yield "ids of booleans", BatchOfIds(lengths(), ids() > 0)
    yield "ids in a list", BatchOfIds(lengths(), ids().tolist())
    yield "sparse ids", BatchOfIds(lengths(), ids().to_sparse())
    yield "an id too large", BatchOfIds(lengths(), ids() + 1)
    yield "a negative id", BatchOfIds(lengths(), ids() - 1)
    yield "another device", BatchOfIds(lengths().to("meta"), ids().to("meta"))
    yield "ids on another device", BatchOfIds(lengths(), ids().to("meta"))
    yield "nothing", None
    yield "a dict", {"a": ids()}
    yield "an error of its own", InputError("the file ends here", field="loader")
    yield "keyed: missing feature", keyed(keys=("a", "b", "other"))
    yield "keyed: weights", keyed(weights=torch.ones(len(NAMES) * B))
    yield "keyed: an id too large", keyed(keys=("c", "a", "b"), values=ids() + 1)
    yield "keyed: ids of floats", keyed(values=ids().float())
    yield "keyed: lengths of fewer ids", keyed(keys=("c", "b", "a"), values=torch.cat([ids(), ids()]))
    yield "keyed: a length missing", keyed(lengths=lengths().view(-1)[:-1])
    yield "keyed: lengths of several sizes", keyed(stride_per_key_per_rank=[[2], [6], [6]])
    inverse = torch.zeros(3, 8, dtype=torch.int64)
    inverse[2, 7] = 4
    yield "keyed: inverse indices", keyed(inverse_indices=(NAMES, inverse))
    yield "keyed: inverse indices of some", keyed(inverse_indices=(NAMES[:2], inverse[:2]))
    yield "ids without samples", BatchOfIds(lengths(size=0), ids()[:2])


def bad_weights():
    """By name, weights that the last process gives; the others give good ones."""
    given_L = torch.ones(len(NAMES) * B)
    yield "no weights", None
    yield "too few weights", given_L[1:]
    yield "a weight that is no number", given_L.index_fill(0, torch.tensor(B), torch.nan)


class Model(torch.nn.Module):
    """A model of TorchRec."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        configs = [
            EmbeddingBagConfig(name=f"m{name}", num_embeddings=ROWS, embedding_dim=8, feature_names=[name])
            for name in NAMES
        ]
        self.bags, self.dense = EmbeddingBagCollection(tables=configs), torch.nn.Linear(8 * len(NAMES), 1)

    def forward(self, features):
        return self.dense(self.bags(features).values())


def sharded_model(num_processes):
    model = Model()
    plan = tiered_plan(num_processes, 1)
    tables = tables_of(model, batch_size=B * num_processes)
    shards = tuple(
        PlacedShard.table_wise(Shard.whole(table), rank % num_processes) for rank, table in enumerate(tables.tables)
    )
    return shard(model, replace(plan, tables=tables, shards=shards), learning_rate=0.1)


def refusal(look_up, batch):
    try:
        look_up(batch)
    except InputError as error:
        return str(error)
    return None


def is_refused_once_closed(use):
    try:
        use()
    except ExecutionError as error:
        return str(error) == process_groups.CLOSED
    return False


def recorded_groups():
    """References to the process groups that are made from now on."""
    known, new_group = [], dist.new_group

    def recorded(*args, **settings):
        made = new_group(*args, **settings)
        if isinstance(made, dist.ProcessGroup):  # else this process is none of it
            known.append(weakref.ref(made))
        return made

    dist.new_group = recorded
    return known


def main(rank, num_processes, num_groups):
    torch.set_num_threads(1)
    known = recorded_groups()
    engine = ShardedEmbeddings(tiered_plan(num_processes, num_groups), FusedSettings(learning_rate=0.1))
    expected = engine(good())
    ways = {
        "forward": engine,
        "start": lambda batch: engine.start(batch).wait(),
        "distribute": lambda batch: engine(engine.distribute(batch)),
        "prefetch": lambda batch: engine(engine.prefetch(batch)),
    }
    refused, wrong = {}, []
    for name, batch in bad_batches():
        for way, look_up in ways.items():
            refused[f"{name}, {way}"] = refusal(look_up, batch if rank == num_processes - 1 else good())
        found = engine(good())
        pairs = (found.pooled_BC, expected.pooled_BC), (found.sequences["c"], expected.sequences["c"])
        if not all(torch.equal(*pair) for pair in pairs):
            wrong.append(f"the batch after {name}")
    first = BatchOfIds(lengths(), ids() - 3) if rank == 0 else None
    refused["on all, forward"] = refusal(engine, first)
    refused["the first process's, forward"] = refusal(engine, first if rank == 0 else good())
    rates = engine.optimizer.param_groups[0]
    usual, bad = rates["lr"], float("nan") if rank == num_processes - 1 else rates["lr"]
    for way, look_up in ways.items():
        rates["lr"] = bad
        refused[f"a bad learning rate, {way}"] = refusal(look_up, good())
        rates["lr"] = usual
    under_way = engine.prefetch(good())
    rates["lr"] = bad
    if not torch.equal(engine(under_way).pooled_BC, expected.pooled_BC):
        wrong.append("a batch that was prefetched before the learning rate was bad")
    refused["a bad learning rate, later"] = refusal(engine, good())
    rates["lr"] = usual
    plan = weighted_sums(tiered_plan(num_processes, num_groups))
    weighted = ShardedEmbeddings(plan, FusedSettings(learning_rate=0.1))
    for name, weights_L in bad_weights():
        of_last = replace(good(), weights_L=weights_L)
        batch = of_last if rank == num_processes - 1 else replace(good(), weights_L=torch.ones(len(NAMES) * B))
        refused[f"{name}, forward"] = refusal(weighted, batch)
        refused[f"{name}, prefetch"] = refusal(lambda given: weighted(weighted.prefetch(given)), batch)
    # A process whose data has ended has no weights either.
    size = B if rank == 0 else 0
    weighted(BatchOfIds(lengths(size=size), ids(size=size), weights_L=torch.ones(len(NAMES) * B) if size else None))
    weighted.close()
    model = sharded_model(num_processes)
    refused_by_model = ("keyed: missing feature", "keyed: inverse indices", "nothing")
    for name, batch in bad_batches():
        if name in refused_by_model:
            refused[f"model: {name}"] = refusal(model, batch if rank == num_processes - 1 else keyed())
    # Weights of lookups are left aside, as by the module; a smaller batch is the start of a larger one.
    left_aside, size = model(keyed(weights=torch.ones(len(NAMES) * B))), B - rank
    smaller = ids().view(len(NAMES), B)[:, :size].reshape(-1)
    logits = model(keyed(size=size, values=smaller))
    if not torch.allclose(logits, left_aside[:size]):
        wrong.append("a smaller batch of the model")
    logits.sum().backward()

    # What a trainer may keep at module level; nothing of it keeps process groups.
    prefetched, started = engine.prefetch(good()), engine.start(good())
    kept = started.wait().pooled_BC.sum()
    trained = engine(prefetched).pooled_BC.sum()
    trained.backward()
    engine.end_step()
    known.append(weakref.ref(dist.group.WORLD))
    for closed in (engine, model):
        closed.close()
        closed.close()
    uses = {name: (lambda use=use: use(good())) for name, use in ways.items()}
    uses |= {"end_step": engine.end_step, "table_state": lambda: engine.table_state("ta"), "backward": kept.backward}
    uses["model"] = lambda: model(keyed())
    wrong += [f"{name} once closed" for name, use in uses.items() if not is_refused_once_closed(use)]
    dist.barrier()
    dist.destroy_process_group()
    wrong += ["a process group is left" for one in known if one() is not None]
    found = {"refused": refused, "wrong": wrong, "groups": len(known)}
    (FOLDER / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(RANK, NUM_PROCESSES, int(sys.argv[3]))
    if RANK == 0:
        ended = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(1, NUM_PROCESSES)]
        sys.exit(any(ended))
