"""Goes from plan to plan while it trains: what each of some processes does."""

import itertools
import warnings
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from autoshard.core import (
    DType,
    Exchange,
    GradSync,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    PlacedShard,
    Pooling,
    ReplicaGroups,
    RowRange,
    RowsBy,
    Shard,
    Split,
    SyncRows,
    Tier,
)
from autoshard.core.errors import DeviceError, ExecutionError, InputError, InvalidPlanError
from autoshard.runtime import execution, memory
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows import moving
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from autoshard.runtime.weights import initial_chunk
from tests import builders as make

SETTINGS = FusedSettings(learning_rate=0.1, eps=1e-3)
#: Ranks of the plans, on two nodes; fewer processes run several each.
RANKS, NODES = 4, ((0, 1), (2, 3))
TABLES = (
    make.table("sgd", 53, 16, optimizer=Optimizer.SGD, dtype=DType.FP16, row_order=None),
    make.table("rowwise", 61, 16, optimizer=Optimizer.ROWWISE_ADAGRAD, pooling=Pooling.MEAN, row_order=None),
    make.table("adagrad", 40, 16, optimizer=Optimizer.ADAGRAD, row_order=None),
    make.table("adam", 33, 16, optimizer=Optimizer.PARTIAL_ROWWISE_ADAM, row_order=None),
    make.table("lamb", 35, 16, optimizer=Optimizer.LAMB, row_order=None),
    make.table("sequence", 47, 16, optimizer=Optimizer.ROWWISE_ADAGRAD, pooling=Pooling.SEQUENCE, row_order=None),
)


@dataclass(frozen=True)
class Layout:
    """A way to hold tables: the shards of one, by its number; and row orders, and fields of the plan."""

    shards: object
    orders: dict = field(default_factory=dict)
    changes: dict = field(default_factory=dict)


def cut(table, rows=((0, 1),), columns=((0, 16),), by=RowsBy.INDEX):
    """Shards of a table, of shares of its rows and of some columns."""
    return [
        Shard(
            table=table,
            rows=RowRange(start=int(first * table.num_embeddings), stop=int(last * table.num_embeddings), by=by),
            columns=of,
        )
        for first, last in rows
        for of in columns
    ]


def on_each(table, ranks, **cuts):
    """Shards on ranks of their own, in turn."""
    return [
        PlacedShard.table_wise(shard, ranks[number % len(ranks)]) for number, shard in enumerate(cut(table, **cuts))
    ]


def all_with(table, *, rows=((0, 1),), by=RowsBy.INDEX, **fields):
    return [make.placed(shard, **fields) for shard in cut(table, rows=rows, by=by)]


def row_wise(table, **fields):
    exchange = Exchange.ROWS if table.pooling is Pooling.SEQUENCE else Exchange.PARTIAL_SUMS
    return all_with(table, **{"tier": Tier.ROW_WISE, "replicas": make.everyone(RANKS), "exchange": exchange, **fields})


def tiers(table, number):
    """The hottest rows everywhere, the next ones dealt to all, the last ones on one rank."""
    sync = list(GradSync)[1 + number % 3]
    by = RowsBy.ACCESS_RANK
    return [
        *all_with(table, rows=((0, 0.2),), by=by, tier=Tier.DATA_PARALLEL, replicas=make.each(RANKS), grad_sync=sync),
        *row_wise(table, rows=((0.2, 0.7),), by=by, split=(Split.HASH, Split.CYCLIC)[number % 2]),
        *all_with(table, rows=((0.7, 1),), by=by, replicas=((3 - number % 4,),)),
    ]


ORDERS = {
    table.name: np.random.default_rng(number).permutation(table.num_embeddings)[: 10 + 5 * number]
    for number, table in enumerate(TABLES)
}
LAYOUTS = {
    "table-wise": Layout(lambda table, number: on_each(table, [number % 4])),
    "row-wise": Layout(lambda table, _: row_wise(table)),
    "column-wise": Layout(
        lambda table, number: on_each(table, [number % 4, (number + 2) % 4], columns=((0, 4), (4, 12), (12, 16)))
    ),
    "tiers": Layout(tiers, ORDERS),
    "data parallel": Layout(
        lambda table, number: all_with(
            table, tier=Tier.DATA_PARALLEL, replicas=make.each(RANKS), grad_sync=list(GradSync)[1 + number % 3]
        )
    ),
    "grid": Layout(
        lambda table, number: on_each(
            table, [(number + at) % 4 for at in range(4)], rows=((0, 0.3), (0.3, 1)), columns=((0, 8), (8, 16))
        )
    ),
    "node-wise": Layout(lambda table, number: row_wise(table, tier=Tier.TABLE_ROW_WISE, replicas=(NODES[number % 2],))),
    "a copy per node": Layout(
        lambda table, _: row_wise(table, tier=Tier.FLEX, replicas=NODES, grad_sync=GradSync.SPARSE)
    ),
    # All tables but those of LAMB, whose rows a GPU cannot have there.
    "host memory": Layout(
        lambda table, number: [
            replace(one, memory=MemoryPlacement(level=MemoryLevel.DDR)) if table.name != "lamb" else one
            for one in on_each(table, [(number + at) % 4 for at in range(2)], rows=((0, 0.5), (0.5, 1)))
        ]
    ),
    "replica groups": Layout(
        lambda table, number: on_each(table, [number % 2]),
        changes={
            "replica_groups": ReplicaGroups(num_groups=2, sync_every=2, sync_rows=SyncRows.TOUCHED, moment_scale=1.0)
        },
    ),
}


def plan_of(name, tables=TABLES):
    layout = LAYOUTS[name]
    shards = [shard for number, table in enumerate(tables) for shard in layout.shards(table, number)]
    return make.plan(
        *shards,
        tables=make.tables(*tables, batch_size=8 * RANKS),
        topology=make.topology(2, RANKS, ddr=1 << 40),
        **layout.changes,
    )


def orders_of(name):
    return {table: torch.from_numpy(ids) for table, ids in LAYOUTS[name].orders.items()}


def opened(name):
    return ShardedEmbeddings(plan_of(name), SETTINGS, row_orders=orders_of(name))


def batch(embeddings, number):
    return draw_samples(embeddings.owners.tables, 1, embeddings.local_batch_size, (number, dist.get_rank())).ids


def train(embeddings, ids):
    """One step; the embeddings in the order of features."""
    found = embeddings(ids)
    outputs = [found.pooled_BC, *found.sequences.values()]
    sum(one.square().sum() for one in outputs).backward()
    embeddings.end_step()
    return [*found.sequences, *(one.detach() for one in outputs)]


def states(embeddings):
    return {table.name: embeddings.table_state(table.name) for table in TABLES}


def tensors(found):
    return [tensor for one in found.values() for tensor in (one.weights_ND, *one.moments.values())]


def assert_equal(one, other):
    """Bit for bit."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def begun_with(name, found, steps, learning_rate):
    """The job that begins with a plan, from states of the tables."""
    embeddings = opened(name)
    for table, state in found.items():
        embeddings.load_table_state(table, state)
    embeddings.num_steps = steps
    embeddings.optimizer.param_groups[0]["lr"] = learning_rate
    return embeddings


def all_pairs(names):
    """Names one after the other, so that each follows each one, itself included."""
    found = []
    for number, name in enumerate(names):
        found.append(name)
        for other in names[number + 1 :]:
            found += [name, other]
    return [*found, names[0]]


def check_pairs(names):
    """A job that goes over to a plan equals one that begins with it, from the same state: bit for bit."""
    order = all_pairs(names)
    embeddings, number = opened(order[0]), 0
    for table in TABLES:
        drawn_ND = initial_chunk(table, 0, SETTINGS.seed).to(embeddings.table_state(table.name).weights_ND)
        assert torch.equal(embeddings.table_state(table.name).weights_ND, drawn_ND)
    for before, name in itertools.pairwise(order):
        for _ in range(2):
            train(embeddings, batch(embeddings, number))
            number += 1
        embeddings.optimizer.param_groups[0]["lr"] = rate = 0.1 / (1 + number)
        found = states(embeddings)
        ahead = [embeddings.prefetch(batch(embeddings, number + ahead)) for ahead in range(2)]
        sent_bytes = embeddings.adopt(plan_of(name), orders_of(name))
        assert sent_bytes >= 0
        if before == name:
            assert sent_bytes == 0
        other = begun_with(name, found, embeddings.num_steps, rate)
        assert_equal(tensors(states(embeddings)), tensors(states(other)))
        for prefetched in ahead:
            assert_equal(train(embeddings, prefetched), train(other, batch(other, number)))
            number += 1
        assert_equal(tensors(states(embeddings)), tensors(states(other)))
        other.close()
    embeddings.close()


def failing(monkeypatch, where, error, rank, after=0):
    """Makes a function fail on one process, after some calls."""
    owner, name = where
    usual, calls = getattr(owner, name), [0]

    def fails(*args, **kwargs):
        calls[0] += 1
        if dist.get_rank() == rank and calls[0] > after:
            raise error
        return usual(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)


def check_failures():
    """An error of one process before all have the new plan is the error of all, which go on with the old one."""
    embeddings, undisturbed = opened("row-wise"), opened("row-wise")
    for number in range(2):
        assert_equal(train(embeddings, batch(embeddings, number)), train(undisturbed, batch(undisturbed, number)))
    number, last = 2, dist.get_world_size() - 1
    lacking = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
    for where, error, after, expected, text in (
        (
            (execution, "FusedKernels"),
            lacking,
            0,
            DeviceError,
            f"process {last}: out of memory: CUDA out of memory. Tri",
        ),
        ((execution, "Replicas"), MemoryError(), 0, DeviceError, f"process {last}: out of memory: "),
        (
            (execution, "OutputExchange"),
            RuntimeError("no such kernel"),
            0,
            ExecutionError,
            "RuntimeError: no such kern",
        ),
        ((moving, "_legs"), lacking, 3, DeviceError, "out of memory: CUDA"),
        ((moving._Round, "write"), lacking, 1, DeviceError, "out of memory: CUDA"),
        ((memory, "free_host_bytes"), DeviceError("gone", field="memory"), 0, DeviceError, "memory: gone"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moving, "ROUND_BYTES", 1024)
            failing(patch, where, error, last, after)
            with pytest.raises(expected, match=text):
                embeddings.adopt(plan_of("data parallel"))
        assert_equal(train(embeddings, batch(embeddings, number)), train(undisturbed, batch(undisturbed, number)))
        number += 1
    check_refusals(embeddings)
    assert_equal(train(embeddings, batch(embeddings, number)), train(undisturbed, batch(undisturbed, number)))
    assert_equal(tensors(states(embeddings)), tensors(states(undisturbed)))


def check_refusals(embeddings):
    """Plans that cannot follow, or not on all processes."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    plan, other = plan_of("table-wise"), make.table("sgd", 54, 16, optimizer=Optimizer.SGD, dtype=DType.FP16)
    other_tables = plan_of("table-wise", (other, *TABLES[1:]))
    larger = replace(plan, tables=replace(plan.tables, batch_size=16 * RANKS))
    odd = replace(plan, shards=(*plan.shards[:-1], *on_each(TABLES[-1], [0], columns=((0, 2), (2, 16)))))
    bad_order = {"sgd": torch.tensor([1, 1])}
    for given, orders, expected, text in (
        (other_tables, {}, InputError, r'^plan.tables: must be .*: table "sgd" there is not table "sgd" here'),
        (larger, {}, InputError, r"^plan.batch_size: must be that of the plan that is executed, 32, got 64"),
        (odd if is_last else plan, {}, InvalidPlanError, r"columns: must be a multiple of 4"),
        (plan_of("row-wise") if is_last else plan, {}, InputError, r"another plan"),
        (plan_of("tiers"), bad_order, InputError, r"^row order: must list each row once"),
    ):
        with pytest.raises(expected, match=text):
            embeddings.adopt(given, orders)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_host_bytes", lambda: 1000 if is_last else 1 << 40)
        with pytest.raises(DeviceError, match=r"^the plan's tables need .* on this cpu beside .*, 1000 B are free"):
            embeddings.adopt(plan)


def check_batches_of_the_plan_before():
    """Batches that were distributed or looked up under the plan before are refused; groups that differ are, too."""
    embeddings = opened("table-wise")
    distributed, looked_up = embeddings.distribute(batch(embeddings, 0)), embeddings(batch(embeddings, 0))
    embeddings.adopt(plan_of("replica groups"))
    with pytest.raises(InputError, match=r"^batch: was distributed under the plan before this one"):
        embeddings(distributed)
    with pytest.raises(ExecutionError, match=r"their plan was replaced"):
        looked_up.pooled_BC.sum().backward()
    train(embeddings, batch(embeddings, 0))
    with pytest.raises(InputError, match=r"^adopt: replica groups differ until step 2"):
        embeddings.adopt(plan_of("table-wise"))
    train(embeddings, batch(embeddings, 1))
    before = embeddings.sent_bytes()
    embeddings.adopt(plan_of("table-wise"))
    assert embeddings.sent_bytes() == before
    assert before["forward"] > 0
    embeddings.close()


def updated(embeddings):
    """Rows of all tables that were updated since they were last saved, as all processes together have them."""
    own = {(one.table, row) for one in embeddings.take_updates() for row in one.ids_L.tolist()}
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return set().union(*everybody)


def check_marks():
    """Rows that were updated since they were last saved still are under a new plan, in whatever columns."""
    settings = replace(SETTINGS, marks_rows=True)
    embeddings, undisturbed = (ShardedEmbeddings(plan_of("column-wise"), settings) for _ in range(2))
    for one in (embeddings, undisturbed):
        train(one, batch(one, 0))
        one.take_updates()
        train(one, batch(one, 1))
    for name in ("grid", "tiers", "data parallel"):
        embeddings.adopt(plan_of(name), orders_of(name))
    expected = updated(undisturbed)
    assert 0 < len(expected) < sum(table.num_embeddings for table in TABLES)
    assert updated(embeddings) == expected
    assert updated(embeddings) == set()


def check_near_copies():
    """Rows of which there is a copy on the node come from there."""
    embeddings, given_to = opened("a copy per node"), set()
    usual = dist.isend

    def recorded(given, *, group, group_dst):
        given_to.add(group_dst)
        return usual(given, group=group, group_dst=group_dst)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving.dist, "isend", recorded)
        embeddings.adopt(plan_of("table-wise"))
    [own] = [node for node in NODES if dist.get_rank() in node]
    # As many processes as ranks; two processes are of one node here, with ranks of both.
    if dist.get_world_size() == RANKS:
        assert given_to
        assert given_to <= set(own)
    embeddings.close()


def check_all(names):
    """All of it on this process."""
    warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "ROUND_BYTES", 4096)
        check_pairs(names)
    check_failures()
    check_marks()
    check_near_copies()
    check_batches_of_the_plan_before()
