"""Saves and restores tables, and trains them by schedules: what each of some processes does."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from autoshard.core import (
    DType,
    GradSync,
    Optimizer,
    PlacedShard,
    ReplicaGroups,
    Shard,
    SyncRows,
    Tier,
)
from autoshard.core.errors import InputError
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.averaging import RowStates, average
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.state import TableState
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make
from tests.contracts.drawn_layouts import drawn_plan, other_layout

SETTINGS = FusedSettings(learning_rate=0.1, eps=1e-3)
#: Plans drawn at random, each restored under another one of the same tables.
SEEDS = range(40, 48)


def opened(plan, orders):
    orders = {name: torch.from_numpy(np.asarray(ids)) for name, ids in orders.items()}
    return ShardedEmbeddings(plan, SETTINGS, row_orders=orders)


def step(embeddings, number):
    ids = draw_samples(embeddings.owners.tables, 1, embeddings.local_batch_size, (number, dist.get_rank())).ids
    found = embeddings(ids)
    loss = found.pooled_BC.square().sum() + sum(one.square().sum() for one in found.sequences.values())
    loss.backward()
    embeddings.end_step()


def assert_same(one, other):
    for table in one.owners.tables.tables:
        a, b = one.table_state(table.name), other.table_state(table.name)
        torch.testing.assert_close(a.weights_ND, b.weights_ND, atol=1e-6, rtol=1e-5)
        for name in a.moments:
            torch.testing.assert_close(a.expanded(name), b.expanded(name), atol=1e-6, rtol=1e-5)


def cuts_of(embeddings, table):
    """Columns of the table's shards."""
    return {one.columns for one in embeddings.owners.holdings if one.of.name == table.name}


def check_restores(folder, world_size):
    """Two steps and one after a restart are three in one go, under the same plan and, but for moments of cut rows,
    another one."""
    for seed in SEEDS:
        plan, orders = drawn_plan(seed, world_size, 1)
        straight, same = opened(plan, orders), opened(plan, orders)
        step(straight, 0)
        step(straight, 1)
        saved = straight.state_dict()
        assert same.load_state_dict(saved).missing_keys == []
        other = opened(*other_layout(seed, plan))
        for table in plan.tables.tables:
            check_pieces(straight, other, table)
        after = {table.name: other.table_state(table.name) for table in plan.tables.tables}
        for table in plan.tables.tables:
            state = straight.table_state(table.name)
            assert torch.equal(after[table.name].weights_ND, state.weights_ND)
            if state.moments and cuts_of(other, table) == {(0, table.embedding_dim)}:
                expected_ND = state.expanded()
                if table.optimizer is Optimizer.ROWWISE_ADAGRAD:
                    expected_ND = expected_ND.mean(dim=1, keepdim=True).expand_as(expected_ND)
                torch.testing.assert_close(after[table.name].expanded(), expected_ND, atol=0, rtol=1e-6)
        for one in (straight, same, other):
            step(one, 2)
        assert_same(straight, same)
        uncut = all(
            table.optimizer is not Optimizer.ROWWISE_ADAGRAD or cuts_of(one, table) == {(0, table.embedding_dim)}
            for table in plan.tables.tables
            for one in (straight, other)
        )
        if uncut:
            assert_same(straight, other)
        if seed == SEEDS[0]:
            dcp.save(saved, checkpoint_id=folder / "saved")
            check_shares(saved)
            whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in saved.items()}
            if dist.get_rank() == 0:
                torch.save(whole, folder / "saved.pt")


def check_shares(saved):
    """No process has more of a table than an even share of its rows."""
    for key, tensor in saved.items():
        if not key.endswith(("num_steps", "moment_columns")):
            assert len(tensor.to_local()) <= -(-len(tensor) // dist.get_world_size())


def check_pieces(source, target, table):
    """A table goes over in pieces; row-wise moments of whole rows take one number a row."""
    num_rows = table.num_embeddings
    size = num_rows // 3 + 1
    for start in range(0, num_rows, size):
        rows = range(start, min(start + size, num_rows))
        state = source.table_state(table.name, rows)
        assert state.weights_ND.shape == (len(rows), table.embedding_dim)
        if table.optimizer is Optimizer.ROWWISE_ADAGRAD and cuts_of(source, table) == {(0, table.embedding_dim)}:
            assert state.expanded().stride(1) == 0
        target.load_table_state(table.name, state, rows)


def table(name, optimizer, dtype=DType.FP32, rows=23):
    return make.table(name, rows, 8, optimizer=optimizer, dtype=dtype)


def laid(plan, tables, layout, **changes):
    """A plan of other tables on the same ranks."""
    size = plan.topology.world_size
    fields = {
        "table_wise": {"tier": Tier.TABLE_WISE},
        "row_wise": {"tier": Tier.ROW_WISE, "replicas": make.everyone(size)},
        "dense": {"tier": Tier.DATA_PARALLEL, "replicas": make.each(size)},
        "sparse": {"tier": Tier.DATA_PARALLEL, "replicas": make.each(size), "grad_sync": GradSync.SPARSE},
    }[layout]
    shards = tuple(make.placed(one, **fields) for one in tables)
    return replace(plan, tables=make.tables(*tables, batch_size=8), shards=shards, **changes)


def check_columns(plan):
    """Cut in two, each half of a row-wise table has a moment; whole, a row has the mean of both, and cut again its own
    part of that."""
    one = table("t", Optimizer.ROWWISE_ADAGRAD)
    halves = tuple(
        PlacedShard(shard=replace(Shard.whole(one), columns=columns), tier=Tier.TABLE_WISE, replicas=((rank,),))
        for rank, columns in enumerate(((0, 4), (4, 8)))
    )
    whole = laid(plan, [one], "row_wise")
    cut, joined, again = (
        opened(of, {}) for of in (replace(whole, shards=halves), whole, replace(whole, shards=halves))
    )
    step(cut, 0)
    state = cut.table_state("t")
    left_N, right_N = state.moments["moments"].unbind(dim=1)
    assert not torch.equal(left_N, right_N)
    joined.load_state_dict(cut.state_dict())
    mean_N = (left_N + right_N) / 2
    torch.testing.assert_close(joined.table_state("t").expanded(), mean_N[:, None].expand(-1, 8))
    again.load_table_state("t", state)
    assert torch.equal(again.table_state("t").moments["moments"], state.moments["moments"])
    again.load_state_dict(joined.state_dict())
    torch.testing.assert_close(again.table_state("t").expanded(), mean_N[:, None].expand(-1, 8))


def check_shapes_of_moments(plan):
    """A part's moment is the mean over its columns of what is loaded, whichever way that tells the moments of a row."""
    one = make.table("t", 23, 16, optimizer=Optimizer.ROWWISE_ADAGRAD)
    whole = laid(plan, [one], "row_wise")
    cuts = ((0, 4), (4, 12), (12, 16))
    uneven = opened(
        replace(
            whole, shards=tuple(replace(whole.shards[0], shard=replace(Shard.whole(one), columns=cut)) for cut in cuts)
        ),
        {},
    )
    halves_NK = torch.rand(23, 2)
    dist.broadcast(halves_NK, 0)
    left_N, right_N = halves_NK.unbind(dim=1)
    weights_ND, mean_N = torch.zeros(23, 16), (left_N + right_N) / 2
    for moments, columns, expected in (
        (left_N, None, [left_N, left_N, left_N]),
        (left_N[:, None], None, [left_N, left_N, left_N]),
        (left_N[:, None].expand(-1, 16), None, [left_N, left_N, left_N]),
        (halves_NK, None, [left_N, mean_N, right_N]),
        (halves_NK, (0, 8, 16), [left_N, mean_N, right_N]),
        (halves_NK, (0, 4, 16), [left_N, right_N, right_N]),
        (halves_NK.repeat_interleave(8, dim=1), None, [left_N, mean_N, right_N]),
    ):
        uneven.load_table_state("t", TableState(weights_ND, {"moments": moments}, columns))
        state = uneven.table_state("t")
        assert state.columns == (0, 4, 12, 16)
        assert state.moments["moments"].shape == (23, 3)
        for own_N, expected_N in zip(state.moments["moments"].unbind(dim=1), expected, strict=True):
            if expected_N is mean_N:
                torch.testing.assert_close(own_N, expected_N)
            else:
                assert torch.equal(own_N, expected_N)
        saved = uneven.state_dict()
        assert saved["tables.t.moment_columns"].tolist() == [0, 4, 12, 16]
        assert torch.equal(saved["tables.t.moments"].full_tensor(), state.moments["moments"])
    for columns in ((0, 16, 4), (0, 4), (4, 16), ()):
        with pytest.raises(InputError, match=r"^t: must have columns that rise from 0 to 16, got \["):
            uneven.load_table_state("t", TableState(weights_ND, {"moments": halves_NK}, columns))
    with pytest.raises(InputError, match=r"^t: must be moments of shape \(23, 16\), got \(23, 2\)"):
        uneven.load_table_state("t", TableState(weights_ND, {"moments": halves_NK}, (0, 4, 8, 16)))


def check_replica_groups(plan):
    """Groups are restored between two synchronisations, each with its own state, too; a whole state only after one."""
    for rows in SyncRows:
        groups = ReplicaGroups(num_groups=2, sync_every=3, sync_rows=rows)
        tables = [table("t", Optimizer.ROWWISE_ADAGRAD), table("u", Optimizer.ADAGRAD), table("v", Optimizer.SGD)]
        of_groups = laid(plan, tables, "table_wise", replica_groups=groups)
        straight, restored = opened(of_groups, {}), opened(of_groups, {})
        for number in range(3):
            step(straight, number)
        restored.load_state_dict(straight.state_dict())
        for number in (3, 4):
            for one in (straight, restored):
                step(one, number)
        assert_same(straight, restored)
        with pytest.raises(InputError, match=r"^state_dict: replica groups differ until step 6"):
            straight.state_dict()
        later = opened(of_groups, {})
        for one in tables:
            later.load_table_state(one.name, straight.table_state(one.name))
        later.num_steps = straight.num_steps
        for one in (straight, later):
            step(one, 5)
        assert_same(straight, later)
        step(straight, 6)
        straight.average_groups()
        restored.load_state_dict(straight.state_dict())
        assert_same(straight, restored)


def check_averages():
    """Means over two processes: halves of fp16 sums travel, and are rounded once; in pieces, and of marked rows."""
    group, rank = dist.distributed_c10d._get_default_group(), dist.get_rank()
    for pieces in ({}, {"piece_bytes": 64}):
        for is_marked in (False, True):
            drawn = [
                [
                    torch.randn(shape, generator=torch.Generator().manual_seed(10 * process + n))
                    for n, shape in enumerate(((13, 5), (7, 4), (7,)))
                ]
                for process in range(2)
            ]
            half, full, moments = (one.clone() for one in drawn[rank])
            half = half.half()
            marks = [torch.zeros(len(one), dtype=torch.uint8) for one in (half, full)] if is_marked else [None, None]
            if is_marked:
                marks[0][3 + rank], marks[1][6] = 1, 1
            sent = average(
                [RowStates(half, {}, marks[0]), RowStates(full, {"moments": moments}, marks[1])], group, **pieces
            )
            means = [
                (drawn[0][0].half().float() + drawn[1][0].half().float()).div(2).half(),
                (drawn[0][1] + drawn[1][1]) / 2,
                (drawn[0][2] + drawn[1][2]) / 2,
            ]
            rows = [[3, 4], [6], [6]] if is_marked else [range(13), range(7), range(7)]
            for got, own, mean, touched in zip((half, full, moments), drawn[rank], means, rows, strict=True):
                expected = own.to(got.dtype)
                expected[list(touched)] = mean[list(touched)]
                assert torch.equal(got, expected)
            # 65 numbers do not come out even for two processes; of marked rows, 2 of 5 and one of 4 and its moment.
            if not pieces:
                assert sent == (13 + 7 + 2 * 5 * 2 + 5 * 4 if is_marked else 66 * 2 + 28 * 4 + 7 * 4)


class Model(torch.nn.Module):
    """A user's model around sharded tables."""

    def __init__(self, plan):
        super().__init__()
        self.tables, self.dense = opened(plan, {}), torch.nn.Linear(16, 1)

    def forward(self, ids):
        return self.dense(self.tables(ids).pooled_BC)


def check_modules(plan, folder):
    """`state_dict` of a module around the tables, with torch.save, checkpoints of torch.distributed and DDP."""
    plan = laid(plan, [table("t", Optimizer.ROWWISE_ADAGRAD), table("u.v", Optimizer.SGD, DType.FP16)], "row_wise")
    model, wrapped = Model(plan), DistributedDataParallel(Model(plan))
    step(model.tables, 0)
    saved = model.state_dict()
    assert list(saved) == [
        *("tables.num_steps", "tables.tables.t.weights", "tables.tables.t.moments", "tables.tables.u.v.weights"),
        *("dense.weight", "dense.bias"),
    ]
    assert saved["tables.tables.t.moments"].shape == (23,)
    assert saved["tables.tables.u.v.weights"].dtype == torch.float16
    dcp.save(saved, checkpoint_id=folder / "dcp")
    target = wrapped.module.state_dict()
    dcp.load(target, checkpoint_id=folder / "dcp")
    wrapped.load_state_dict({f"module.{key}": value for key, value in target.items()})
    assert_same(wrapped.module.tables, model.tables)
    assert wrapped.module.tables.num_steps == 1
    step(model.tables, 1)
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        found = get_model_state_dict(model, options=options)
        assert isinstance(found["tables.tables.t.weights"], DTensor) is not options.full_state_dict
        other = Model(plan)
        set_model_state_dict(other, found, options=options)
        assert_same(other.tables, model.tables)
    mapped = folder / f"{dist.get_rank()}.pt"
    torch.save(model.state_dict(), mapped)
    wrapped.module.load_state_dict(torch.load(mapped, mmap=True))
    assert_same(wrapped.module.tables, model.tables)


def check_refusals(plan):
    """Nothing is written of a state that does not fit, and its fault is told in a line."""
    plan = laid(plan, [table("t", Optimizer.ROWWISE_ADAGRAD), table("u", Optimizer.SGD)], "row_wise")
    embeddings, other = opened(plan, {}), opened(plan, {})
    step(embeddings, 0)
    good = embeddings.table_state("t")
    weights_ND, moments_N = good.weights_ND, good.moments["moments"]
    for name, state, rows, message in (
        ("t", TableState(weights_ND[1:], good.moments), None, r"^t: must be weights of shape \(23, 8\), got \(22, 8\)"),
        (
            "t",
            TableState(weights_ND, {"moments": moments_N[:, None].expand(-1, 3)}),
            None,
            r"^t: must be moments of shape \(23, 8\), got \(23, 3\)",
        ),
        ("t", TableState(weights_ND), None, r"^t: must have moments, of rowwise_adagrad; load_weights sets"),
        ("u", TableState(weights_ND, good.moments), None, r"^u: must have no moments: the table is trained with sgd"),
        ("t", TableState(weights_ND.long(), good.moments), None, r"^t: weights must be a tensor of floating-point"),
        ("t", TableState(weights_ND.to("meta"), good.moments), None, r"^t: weights must be .* on meta"),
        ("t", good, range(20, 24), r"^rows: must be a range in \[0, 23\], got range\(20, 24\)"),
        ("t", good, range(10), r"^t: must be weights of shape \(10, 8\), got \(23, 8\)"),
        ("w", good, None, r'^tables: no table is named "w"'),
    ):
        with pytest.raises(InputError, match=message):
            other.load_table_state(name, state, rows)
    saved = embeddings.state_dict()
    with pytest.raises(RuntimeError, match=r"u: must be weights of shape \(23, 8\), got \(5, 8\)"):
        other.load_state_dict(saved | {"tables.u.weights": weights_ND[:5]})
    weights = saved["tables.u.weights"]
    copies = DTensor.from_local(weights.full_tensor(), weights.device_mesh, [Replicate()], run_check=False)
    with pytest.raises(RuntimeError, match=r"u: must be whole, or sharded by rows over 2 processes, got \(Replicate"):
        other.load_state_dict(saved | {"tables.u.weights": copies})
    with pytest.raises(RuntimeError, match=r"t: weights and moments must both be whole, or both be sharded"):
        other.load_state_dict(saved | {"tables.t.moments": saved["tables.t.moments"].full_tensor()})
    assert_same(other, opened(plan, {}))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "tables.x.weights"'):
        other.load_state_dict(saved | {"tables.x.weights": weights_ND})
    del saved["tables.t.moments"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "tables.t.moments"'):
        other.load_state_dict(saved)
    other = opened(plan, {})
    told = other.load_state_dict({"tables.u.weights": saved["tables.u.weights"]}, strict=False)
    assert told.missing_keys == ["num_steps", "tables.t.moments", "tables.t.weights"]
    assert torch.equal(other.table_state("u").weights_ND, embeddings.table_state("u").weights_ND)
    for rate in (-0.1, float("nan")):
        other.optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(InputError, match=r"^learning_rate: must be a number of at least 0"):
            step(other, 0)
    with pytest.raises(InputError, match=r"^param_groups: takes no parameters"):
        other.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


#: Of torch's own, on an optimizer of tables as on one of parameters.
SCHEDULES = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda number: 0.0 if number == 2 else 1 / (1 + number)),
    "step": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.1),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=5, cycle_momentum=False),
}


def check_schedules(plan):
    """Tables follow a schedule as torch's own optimizers do, however they are held."""
    tables = [table("t", Optimizer.SGD), table("u", Optimizer.ADAGRAD)]
    for layout, schedule in zip(
        ("table_wise", "row_wise", "dense", "sparse"), ("lambda", "step", "one cycle", "lambda"), strict=True
    ):
        follow(laid(plan, tables, layout), schedule)
    groups = ReplicaGroups(num_groups=2, sync_every=1, moment_scale=2.0)
    follow(laid(plan, tables[:1], "table_wise", replica_groups=groups), "step")


def follow(plan, schedule):
    embeddings, num = opened(plan, {}), dist.get_world_size()
    weights = {
        one.name: torch.nn.Parameter(embeddings.table_state(one.name).weights_ND.clone()) for one in plan.tables.tables
    }
    kinds = {
        Optimizer.SGD: lambda one: torch.optim.SGD([one], lr=0.1),
        Optimizer.ADAGRAD: lambda one: torch.optim.Adagrad([one], lr=0.1, eps=SETTINGS.eps),
    }
    plain = [kinds[one.optimizer](weights[one.name]) for one in plan.tables.tables]
    schedules = [SCHEDULES[schedule](one) for one in (embeddings.optimizer, *plain)]
    for number in range(5):
        step(embeddings, number)
        for process in range(num):
            ids = draw_samples(plan.tables, 1, embeddings.local_batch_size, (number, process)).ids
            at = 0
            for feature, one in enumerate(plan.tables.tables):
                lengths_B = ids.lengths_FB[feature].long()
                own_L = ids.ids_L[at : at + int(lengths_B.sum())].long()
                at += len(own_L)
                offsets_B = lengths_B.cumsum(0) - lengths_B
                sums_BD = torch.nn.functional.embedding_bag(own_L, weights[one.name], offsets_B, mode="sum")
                (sums_BD.square().sum() / num).backward()
        for one in plain:
            one.step()
            one.zero_grad()
        for one in schedules:
            one.step()
        for one in plan.tables.tables:
            torch.testing.assert_close(
                embeddings.table_state(one.name).weights_ND, weights[one.name].detach(), atol=1e-5, rtol=1e-5
            )
    assert embeddings.optimizer.learning_rate == plain[0].param_groups[0]["lr"] != 0.1


def check_all(folder):
    """Saves tables in a folder."""
    warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
    world_size = dist.get_world_size()
    plan, _ = drawn_plan(0, world_size, 1)
    check_averages()
    check_restores(folder, world_size)
    check_columns(plan)
    check_shapes_of_moments(plan)
    check_replica_groups(plan)
    check_modules(plan, folder)
    check_refusals(plan)
    check_schedules(plan)
