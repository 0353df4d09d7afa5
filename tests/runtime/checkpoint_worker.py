"""Saves and loads checkpoints: what each of some processes does."""

import contextlib
import itertools
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from autoshard.core import (
    DType,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    PlacedShard,
    ReplicaGroups,
    RowRange,
    RowsBy,
    Shard,
    SyncRows,
    Tier,
)
from autoshard.core.errors import ExecutionError, FormatError, InputError
from autoshard.runtime.checkpoints import Checkpoint, Checkpoints, RandomState
from autoshard.runtime.checkpoints.exchange import export_weights
from autoshard.runtime.checkpoints.resharding import reshard
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make

SETTINGS = FusedSettings(learning_rate=0.1, eps=1e-3)
OPTIMIZERS = (
    Optimizer.SGD,
    Optimizer.ADAGRAD,
    Optimizer.ROWWISE_ADAGRAD,
    Optimizer.ADAM,
    Optimizer.PARTIAL_ROWWISE_ADAM,
    Optimizer.LAMB,
    Optimizer.PARTIAL_ROWWISE_LAMB,
)


def table(optimizer, rows, dim=16, name=None, **fields):
    return make.table(name or f"t.{optimizer}", rows, dim, optimizer=optimizer, row_order=None, **fields)


#: One of each optimizer: more rows than processes come out even for, columns for 2 and 4 cuts.
TABLES = tuple(
    table(optimizer, rows) for optimizer, rows in zip(OPTIMIZERS, (37, 101, 64, 50, 33, 45, 41), strict=True)
)


#: So many rows that a step updates few of them.
LARGE_TABLES = tuple(table(optimizer, 2_000) for optimizer in OPTIMIZERS)


def _columns(table, cuts):
    size = table.embedding_dim // cuts
    return [replace(Shard.whole(table), columns=(size * n, size * (n + 1))) for n in range(cuts)]


def _rows(table, *bounds, by=RowsBy.INDEX):
    edges = (0, *bounds, table.num_embeddings)
    return [
        replace(Shard.whole(table), rows=RowRange(start=start, stop=stop, by=by))
        for start, stop in itertools.pairwise(edges)
    ]


def _on(shard, rank):
    return PlacedShard.table_wise(shard, rank)


def _over(shard, tier, replicas, **fields):
    return PlacedShard(shard=shard, tier=tier, replicas=replicas, **fields)


#: Each takes a table, its number and how many ranks there are.
LAYOUTS = {
    "table_wise": lambda table, n, size: [_on(Shard.whole(table), n % size)],
    "row_wise": lambda table, _, size: [_over(Shard.whole(table), Tier.ROW_WISE, make.everyone(size))],
    "column_wise": lambda table, n, size: [
        _on(shard, (n + k) % size) for k, shard in enumerate(_columns(table, min(size, 4)))
    ],
    "grid": lambda table, _, size: [_over(shard, Tier.ROW_WISE, make.everyone(size)) for shard in _columns(table, 2)],
    "node_wise": lambda table, n, size: [
        _over(Shard.whole(table), Tier.TABLE_ROW_WISE, (((0, 1), (2, 3))[n % 2],))
        if size > 2
        else _on(Shard.whole(table), n % size)
    ],
    "data_parallel": lambda table, _, size: [make.placed(Shard.whole(table), Tier.DATA_PARALLEL, make.each(size))],
    "tiers": lambda table, n, size: [
        make.placed(hot, Tier.DATA_PARALLEL, make.each(size)) if k == 0 else _on(hot, (n + k) % size)
        for k, hot in enumerate(_rows(table, 5, 30, by=RowsBy.ACCESS_RANK))
    ],
    "row_groups": lambda table, n, size: [_on(shard, (n + k) % size) for k, shard in enumerate(_rows(table, 7, 20))],
    "replica_groups": lambda table, n, size: [_on(Shard.whole(table), n % (size // 2))],
    "host_memory": lambda table, n, size: [
        replace(_on(Shard.whole(table), n % size), memory=MemoryPlacement(level=MemoryLevel.DDR))
    ],
}


def laid_out(layout, size, tables=TABLES):
    """A plan that holds tables in one way, and its row orders."""
    groups = ReplicaGroups(num_groups=2, moment_scale=1.0) if layout == "replica_groups" else ReplicaGroups()
    shards = [shard for n, table in enumerate(tables) for shard in LAYOUTS[layout](table, n, size)]
    plan = make.plan(
        *shards,
        tables=make.tables(*tables, batch_size=2 * size),
        topology=make.topology(min(size, 2), size, ddr=1 << 40),
        replica_groups=groups,
    )
    rng = np.random.default_rng(5)
    orders = {table.name: torch.from_numpy(rng.permutation(table.num_embeddings)) for table in tables}
    return plan, orders if layout == "tiers" else {}


def opened(plan, orders=None, **settings):
    return ShardedEmbeddings(plan, replace(SETTINGS, **settings), row_orders=orders)


def step(embeddings, number):
    ids = draw_samples(embeddings.owners.tables, 1, embeddings.local_batch_size, (number, dist.get_rank())).ids
    embeddings(ids).pooled_BC.square().sum().backward()
    embeddings.end_step()


def whole(embeddings):
    """Weights of all tables, and their moments by name, by table, all of shape (N, D)."""
    states = {table.name: embeddings.table_state(table.name) for table in embeddings.owners.tables.tables}
    return {
        name: (one.weights_ND.clone(), {moment: one.expanded(moment).clone() for moment in one.moments})
        for name, one in states.items()
    }


def save_layouts(folder, layouts):
    """A checkpoint of each layout after two steps, and beside it what it holds, and what comes of a third step."""
    for layout in layouts:
        plan, orders = laid_out(layout, dist.get_world_size())
        embeddings = opened(plan, orders)
        step(embeddings, 0)
        step(embeddings, 1)
        with Checkpoints(folder / layout) as checkpoints:
            checkpoints.save(2, {"embeddings": embeddings}, plan=plan)
        saved = whole(embeddings)
        step(embeddings, 2)
        if dist.get_rank() == 0:
            torch.save((saved, whole(embeddings)), folder / layout / "states.pt")
        else:
            whole(embeddings)
        embeddings.close()


def load_layouts(folder, pairs):
    """Loads checkpoints, (folder, layout of the checkpoint, layout to load it in) each: all is there bit for bit."""
    for of, saved_layout, layout in pairs:
        plan, orders = laid_out(layout, dist.get_world_size())
        embeddings = opened(plan, orders)
        checkpoint = Checkpoint(next((folder / of / saved_layout).glob("step-*")))
        checkpoint.load({"embeddings": embeddings})
        saved, after = torch.load(folder / of / saved_layout / "states.pt")
        assert embeddings.num_steps == 2
        check_states(embeddings, plan, saved)
        if layout == saved_layout and checkpoint.manifest.num_processes == dist.get_world_size():
            step(embeddings, 2)
            check_states(embeddings, plan, after)
        embeddings.close()


def check_states(embeddings, plan, expected):
    for name, (weights_ND, moments) in whole(embeddings).items():
        expected_weights_ND, expected_moments = expected[name]
        assert torch.equal(weights_ND, expected_weights_ND), name
        assert moments.keys() == expected_moments.keys()
        for moment in plan.tables[name].optimizer.moments:
            found_ND, expected_ND = moments[moment.name], expected_moments[moment.name]
            if not moment.is_per_row:
                assert torch.equal(found_ND, expected_ND), name
                continue
            for first, last in {placed.shard.columns for placed in plan.shards if placed.shard.table.name == name}:
                part, found = expected_ND[:, first:last], found_ND[:, first:last]
                is_one_N = part.amin(dim=1) == part.amax(dim=1)
                assert torch.equal(found[is_one_N], part[is_one_N]), name
                mean_ND = part.mean(dim=1, keepdim=True).expand_as(part)
                torch.testing.assert_close(found, mean_ND, atol=0, rtol=1e-6)


def job(layout="row_wise", tables=TABLES, seed=0):
    """A job's plan, its embeddings and its state, with dense layers that are trained."""
    plan, orders = laid_out(layout, dist.get_world_size(), tables)
    torch.manual_seed(seed)
    dense = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(dense.parameters())
    embeddings = opened(plan, orders)
    state = {"embeddings": embeddings, "dense": dense, "optimizer": optimizer, "random": RandomState()}
    return SimpleNamespace(plan=plan, embeddings=embeddings, dense=dense, optimizer=optimizer, state=state)


def train(of, number):
    step(of.embeddings, number)
    of.optimizer.zero_grad()
    of.dense(torch.full((1, 4), number + 1.0)).square().sum().backward()
    of.optimizer.step()


def check_a_job(folder):
    """A whole job goes on as if it had not been interrupted: layers, their optimizer and random numbers, too."""
    straight, resumed = job(), job(seed=1)
    train(straight, 0)
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    with Checkpoints(folder / "job", keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for number in (1, 2, 3):
            checkpoints.save(number, straight.state, plan=straight.plan)
        checkpoints.wait()
        assert [one.step for one in checkpoints.all()] == [2, 3]
        latest = checkpoints.latest()
        assert latest.verify() == []
        assert latest.plan == straight.plan
        expected = (random.random(), np.random.rand(), torch.rand(2))
        latest.load(resumed.state)
        found = (random.random(), np.random.rand(), torch.rand(2))
        assert found[:2] == expected[:2]
        assert torch.equal(found[2], expected[2])
        for one in (straight, resumed):
            train(one, 1)
        assert torch.equal(straight.dense.weight, resumed.dense.weight)
        assert_equal(straight, resumed)
        # A part of it, for a job that only looks up.
        other = job(seed=2)
        with pytest.raises(InputError, match=r"^dense: is in the checkpoint, and nothing takes it: give it, or load"):
            latest.load({"embeddings": other.embeddings})
        latest.load({"embeddings": other.embeddings}, partial=True)
        train(other, 1)
        assert_equal(straight, other)
        with pytest.raises(InputError, match=r"^step: must be above 3, of which there is a checkpoint, got 3"):
            checkpoints.save(3, straight.state, plan=straight.plan)
        check_random_states()
        check_refusals(latest, folder)
        check_states_that_differ(checkpoints, straight)


def check_random_states():
    """Of more processes than saved it, each draws numbers of its own, the same each time."""
    one = RandomState()
    saved = {"processes": one.state_dict()["processes"][:1]}
    drawn = []
    for _ in range(2):
        one.load_state_dict(saved)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, drawn[0])
    for numbers in zip(*everybody, strict=True):
        assert len(set(numbers)) == len(everybody)
    with pytest.raises(InputError, match=r"^processes: must hold the states of at least one process"):
        one.load_state_dict({})


def assert_equal(one, other):
    states = whole(other.embeddings)
    for name, (weights_ND, moments) in whole(one.embeddings).items():
        assert torch.equal(weights_ND, states[name][0])
        for moment, tensor_ND in moments.items():
            assert torch.equal(tensor_ND, states[name][1][moment])


def check_refusals(checkpoint, folder):
    """What cannot be kept is refused by name, before anything is changed."""
    for first, message in (
        (table(Optimizer.SGD, 36), r"^t.sgd.num_embeddings: must be 37, as in the checkpoint, got 36"),
        (table(Optimizer.SGD, 37, 8), r"^t.sgd.embedding_dim: must be 16, as in the checkpoint, got 8"),
        (table(Optimizer.SGD, 37, dtype=DType.FP16), r"^t.sgd.dtype: must be fp32, as in the checkpoint, got fp16"),
        (
            table(Optimizer.ADAGRAD, 37, name="t.sgd"),
            r"^t.sgd.optimizer: must be sgd, as in the checkpoint, got adagrad",
        ),
        (table(Optimizer.SGD, 37, name="u"), r"^u: is a table of the plan, and not in the checkpoint"),
        (None, r"^t.sgd: is a table of the checkpoint, and not in the plan"),
    ):
        tables = [first, *TABLES[1:]] if first else TABLES[1:]
        target = job(tables=tuple(tables))
        before = whole(target.embeddings)
        with pytest.raises(InputError, match=message):
            checkpoint.load(target.state)
        assert_unchanged(target, before)
    target = job()
    before = whole(target.embeddings)
    wider = torch.nn.Linear(5, 2)
    for change, message in (
        ({"dense": wider}, r"^dense.weight: must be of shape \(2, 5\), got \(2, 4\) in the checkpoint"),
        (
            {"dense": torch.nn.Sequential(target.dense)},
            r"^dense.0.bias: is a parameter of the model, and not in the checkpoint",
        ),
        (
            {"dense": torch.nn.Linear(4, 2, bias=False)},
            r"^dense.bias: is in the checkpoint, and no parameter or buffer of the model",
        ),
        ({"loader": target.optimizer}, r"^loader: is not in the checkpoint, which has embeddings, dense, optimizer"),
        ({"a.b": target.optimizer}, r'^state: must be names without a dot, got "a.b"'),
        ({"dense": 3}, r"^dense: must have state_dict and load_state_dict, got int"),
    ):
        with pytest.raises(InputError, match=message):
            checkpoint.load(target.state | change)
    check_damaged(checkpoint, target, folder)
    assert_unchanged(target, before)
    with pytest.raises(InputError, match=r"job: is no checkpoint: must have a manifest.json, which is written last"):
        Checkpoint(folder / "job")


def assert_unchanged(target, before):
    for name, (weights_ND, _) in whole(target.embeddings).items():
        assert torch.equal(weights_ND, before[name][0])


def check_damaged(checkpoint, target, folder):
    """Each kind of damage to a file is told with its name; a size is told also where nothing is hashed."""
    is_first = dist.get_rank() == 0
    for number, (name, damage, verify, message) in enumerate(
        (
            ("__1_0.distcp", alter, True, r"__1_0.distcp: is altered, its hash is another than when it was saved"),
            ("__0_0.distcp", truncate, False, r"__0_0.distcp: has [\d,]+ bytes, [\d,]+ were saved"),
            (".metadata", Path.unlink, False, r".metadata: is missing"),
            ("plan.json", alter, True, r"plan.json: is altered"),
        )
    ):
        copy = folder / f"damaged{number}" / "step-000000000003"
        if is_first:
            shutil.copytree(checkpoint.folder, copy)
            damage(copy / name)
        dist.barrier()
        with pytest.raises(FormatError, match=message):
            Checkpoint(copy).load(target.state, verify=verify)
    with pytest.raises(ExecutionError, match=r"process 1 loads another checkpoint than process 0"):
        Checkpoint(checkpoint.folder if is_first else checkpoint.folder.with_name("step-000000000002")).load(
            target.state
        )


def alter(path):
    """Changes a byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


class Position:
    """A loader's position."""

    def __init__(self, samples):
        self.samples = samples

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state_dict):
        self.samples = state_dict["samples"]


def check_states_that_differ(checkpoints, of):
    """What only one process has would be lost: it is refused, and the last checkpoint stays. Buffers may differ."""
    rank = dist.get_rank()
    one_of_many = np.arange(2_000)
    one_of_many[1_000] += rank
    for differing in (rank, torch.tensor(rank), torch.full((2, 3), rank, dtype=torch.bfloat16), one_of_many):
        checkpoints.save(4, of.state | {"loader": Position({"at": [differing]})}, plan=of.plan)
        with pytest.raises(
            ExecutionError, match=r"^checkpoint of step 4 was not written: loader: differs between .* 0 and 1"
        ):
            checkpoints.wait()
        checkpoints.wait()
        assert checkpoints.latest().step == 3
    norm = torch.nn.BatchNorm1d(2)
    norm.running_mean.fill_(rank)
    same = Position([torch.ones(2), torch.ones(0), one_of_many[:9], None])
    checkpoints.save(4, of.state | {"dense": norm, "loader": same}, plan=of.plan)
    checkpoints.wait()
    assert checkpoints.latest().step == 4
    with pytest.raises(InputError, match=r"^plan: must be that of the embeddings: it has other tables"):
        checkpoints.save(5, of.state, plan=laid_out("row_wise", 2, TABLES[1:])[0])


def shared(seed):
    """A plan, and a model two parts of which share its embeddings and a layer; another layer has the same weights."""
    plan, orders = laid_out("row_wise", dist.get_world_size(), TABLES[:3])
    torch.manual_seed(seed)
    part = torch.nn.ModuleDict({"tables": opened(plan, orders, marks_rows=True), "dense": torch.nn.Linear(4, 2)})
    tied = torch.nn.Linear(4, 2)
    tied.weight = part["dense"].weight
    return plan, torch.nn.ModuleDict({"first": part, "second": part, "tied": tied})


def check_shared(folder):
    """Embeddings at two paths of a model are stored under the first, and load at both, of deltas too."""
    (plan, saved), (_, loaded) = shared(seed=0), shared(seed=1)
    with Checkpoints(folder / "shared") as checkpoints:
        for number in (1, 2):
            step(saved["first"]["tables"], number)
            checkpoints.save(number, {"model": saved}, plan=plan, delta=True)
            expected = whole(saved["first"]["tables"])
            checkpoints.wait()
            latest = checkpoints.latest()
            assert latest.manifest.base == (1 if number == 2 else None)
            assert {one.key for one in latest.manifest.tables} == {
                f"model.first.tables.tables.{table.name}" for table in TABLES[:3]
            }
            latest.load({"model": loaded})
            check_states(loaded["second"]["tables"], plan, expected)
            assert loaded["second"]["tables"].num_steps == number
            assert torch.equal(loaded["tied"].weight, saved["first"]["dense"].weight)


def fill_disk(folder, on_error):
    """Saves on a disk with less and less room: a checkpoint is whole or not there, and the one before it stays."""
    of = job()
    is_first = dist.get_rank() == 0
    with Checkpoints(folder / "checkpoints", keep=1, on_error=on_error) as checkpoints:
        checkpoints.save(1, of.state, plan=of.plan)
        checkpoints.wait()
        [needed] = [one.manifest.num_bytes for one in checkpoints.all()]
        outcomes = []
        for number, room in enumerate(range(0, 2 * needed, needed // 6)):
            if is_first:
                (folder / "ballast").unlink(missing_ok=True)
                disk = os.statvfs(folder)
                (folder / "ballast").write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - room)))
            dist.barrier()
            before = checkpoints.latest().step
            checkpoints.save(number + 2, of.state, plan=of.plan)
            if on_error == "raise" and room < needed // 2:
                with pytest.raises(ExecutionError) as told:
                    checkpoints.wait()
                pattern = rf"checkpoint of step {number + 2} was not written: .*no space left on device.*"
                assert re.fullmatch(rf"{pattern}; the last one is of step {before}", str(told.value))
            else:
                with contextlib.suppress(ExecutionError):
                    checkpoints.wait()
            [kept] = checkpoints.all()
            outcomes.append(kept.step == number + 2)
            assert outcomes[-1] or kept.step == before
            assert kept.verify() == []
            dist.barrier()
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert not list((folder / "checkpoints").glob(".*"))


#: Steps of the job that is killed.
KILLED_STEPS = 400


def save_each_step(folder):
    """A job that saves at each step, and says so once a checkpoint is there; it goes on from the last one."""
    of = job()
    with Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        last = checkpoints.latest()
        if last is not None:
            assert last.step >= reported(folder)
            last.load(of.state)
        (folder / "begun").touch()
        for number in range(0 if last is None else last.step, KILLED_STEPS):
            train(of, number)
            checkpoints.save(number + 1, of.state, plan=of.plan)
            if dist.get_rank() == 0 and number and (number % 3 == 0):
                checkpoints.wait()
                (folder / "reported.new").write_text(str(checkpoints.latest().step))
                (folder / "reported.new").rename(folder / "reported")


def reported(folder):
    path = folder / "reported"
    return int(path.read_text()) if path.exists() else 0


def check_against_undisturbed(folder):
    """The last checkpoint is that of a job that nobody disturbed."""
    of, straight = job(seed=1), job()
    with Checkpoints(folder / "checkpoints") as checkpoints:
        assert not list((folder / "checkpoints").glob(".*"))
        for one in checkpoints.all():
            assert one.verify() == []
        latest = checkpoints.latest()
        assert latest.step >= reported(folder)
        latest.load(of.state)
    for number in range(latest.step):
        train(straight, number)
    assert_equal(of, straight)
    assert torch.equal(of.dense.weight, straight.dense.weight)
    return latest.step


def check_deltas(folder, layouts):
    """Rows that were updated since the checkpoint before, upon it, are the state of the job, whatever the layout."""
    for layout in layouts:
        plan, orders = laid_out(layout.replace("touched", "replica"), dist.get_world_size(), LARGE_TABLES)
        if layout == "touched_groups":
            plan = replace(plan, replica_groups=replace(plan.replica_groups, sync_rows=SyncRows.TOUCHED))
        embeddings = opened(plan, orders, marks_rows=True)
        states = []
        with Checkpoints(folder / layout, keep=1) as checkpoints:
            for number in range(1, 4):
                step(embeddings, number)
                checkpoints.save(number, {"embeddings": embeddings}, plan=plan, delta=True)
                states.append(whole(embeddings))
            checkpoints.wait()
            # Of three to keep one, which needs the other two.
            assert [(one.step, one.manifest.base) for one in checkpoints.all()] == [(1, None), (2, 1), (3, 2)]
            first, *deltas = checkpoints.all()
            for one in deltas:
                assert one.manifest.num_bytes < first.manifest.num_bytes / 4
            for target in (layout.replace("touched", "replica"), "node_wise"):
                other_plan, other_orders = laid_out(target, dist.get_world_size(), LARGE_TABLES)
                for one, saved in zip(checkpoints.all(), states, strict=True):
                    other = opened(other_plan, other_orders)
                    one.load({"embeddings": other})
                    assert other.num_steps == one.step
                    check_states(other, other_plan, saved)
                    other.close()
            check_exported(deltas[-1], states, plan, folder)
            assert reshard(deltas[-1], plan) == reshard(first, plan)
            # All rows again, which need no other.
            checkpoints.save(4, {"embeddings": embeddings}, plan=plan)
            checkpoints.wait()
            assert [one.step for one in checkpoints.all()] == [4]
            check_updates_after_errors(checkpoints, embeddings, plan)
        embeddings.close()


def check_exported(delta, states, plan, folder):
    """An inference server that writes the exported rows to its tables has the job's."""
    if dist.get_rank():
        return
    export_weights(delta, folder / "rows.safetensors", prefix="sparse.")
    file = load_file(folder / "rows.safetensors")
    for one in plan.tables.tables:
        served_ND, changed_ND = states[-2][one.name][0].clone(), states[-1][one.name][0]
        assert not torch.equal(served_ND, changed_ND)
        for key, ids_L in file.items():
            place, _, part = key.rpartition(".")
            if place.startswith(f"sparse.embedding_bags.{one.name}.") and part == "ids":
                first, last = map(int, place.rpartition(".")[2].split("-"))
                served_ND[ids_L, first:last] = file[f"{place}.weight"]
        assert torch.equal(served_ND, changed_ND)


def check_updates_after_errors(checkpoints, embeddings, plan):
    """After a checkpoint that was not written, a delta would lack its rows: the next one has all."""
    step(embeddings, 5)
    checkpoints.save(5, {"embeddings": embeddings}, plan=plan, delta=True)
    differing = {"embeddings": embeddings, "loader": Position(dist.get_rank())}
    checkpoints.save(6, differing, plan=plan, delta=True)
    with pytest.raises(ExecutionError, match=r"^checkpoint of step 6 was not written: loader: differs"):
        checkpoints.wait()
    checkpoints.save(7, {"embeddings": embeddings}, plan=plan, delta=True)
    checkpoints.wait()
    assert [(one.step, one.manifest.base) for one in checkpoints.all()] == [(7, None)]
    unmarked = job()
    with pytest.raises(InputError, match=r"^marks_rows: must be True in the settings of the embeddings, for deltas"):
        checkpoints.save(8, unmarked.state, plan=unmarked.plan, delta=True)
    unmarked.embeddings.close()
