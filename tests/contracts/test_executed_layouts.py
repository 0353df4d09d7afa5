"""Whatever the validator accepts runs, and equals the unsharded reference: embeddings, weights and moments."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.core import (
    AccessProfile,
    DType,
    Exchange,
    GroupLayout,
    ImpliedOrder,
    MemoryBytes,
    Payload,
    PlacedShard,
    ReplicaGroups,
    RowsBy,
    Shard,
    SyncRows,
    Tier,
)
from autoshard.core.step import Overlap, StepCollective
from autoshard.evaluation import plan_traffic
from autoshard.evaluation.group_sync import group_sync_bytes
from autoshard.evaluation.traffic import Stream
from autoshard.formats import read_plan, write_plan
from autoshard.formats.row_orders import write_row_order
from autoshard.planners.registry import get_planner
from autoshard.runtime import RunRequest
from tests import builders as make
from tests.contracts.drawn_layouts import drawn_plan, drawn_table, weighted_sums
from tests.ranks import executed

#: fp32 sums in another order, relative to the largest value.
TOLERANCE = 2e-5
#: Global batch of plans whose replica groups average touched rows.
TOUCHED_BATCH = 256
#: Of so many plans, the first is also executed with communication behind computation.
PIPELINED_EVERY = 10
#: Of so many plans, one has weighted lookups.
WEIGHTED_EVERY = 3
#: Processes, ranks of the plans, ranks of a node, plans.
CLUSTERS = [
    (2, 2, 1, 6),
    *(pytest.param(cluster, marks=pytest.mark.slow) for cluster in ((1, 4, 2, 14), (4, 4, 2, 10), (3, 6, 3, 10))),
]
NUM_PLANS_SLOW = int(os.environ.get("AUTOSHARD_RANDOM_PLANS", "200"))


def written(folder, seeds, cluster, payloads=(DType.FP32,), groups=None, verify_steps=3, device="cpu"):
    num_processes, world_size, node_size = cluster
    if device == "cuda" and num_processes > torch.cuda.device_count():
        pytest.skip(f"needs {num_processes} GPUs")
    requests = []
    for seed, payload in ((seed, payload) for payload in payloads for seed in seeds):
        plan, orders = drawn_plan(seed, world_size, node_size, payload, groups)
        plan = weighted_sums(plan) if seed % WEIGHTED_EVERY == 2 else plan
        folder.mkdir(exist_ok=True)
        orders = {
            name: write_row_order(folder / f"{seed}.{payload}.{name}.parquet", np.asarray(ids))
            for name, ids in orders.items()
        }
        write_plan(replace(plan, row_orders=orders), folder / f"{seed}.{payload}.json")
        requests.append(
            RunRequest(
                plan_path=str(folder / f"{seed}.{payload}.json"),
                steps=1,
                warmup_steps=0,
                verify_steps=verify_steps,
                eps=1e-3,
                seed=seed,
                device=device,
            )
        )
    return requests


def executed_plans(folder, seeds, cluster, payloads=(DType.FP32,), **changes):
    return executed(written(folder, seeds, cluster, payloads, **changes), cluster[0])


def assert_equal(results, tolerance=TOLERANCE):
    for result in results:
        assert result.verification.steps == 3
        assert result.verification.max_error <= tolerance, f"{result.plan_path}: {result.verification}"


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda one: "{} processes, {} ranks, nodes of {}".format(*one))
def test_random_plans_equal_the_unsharded_reference(tmp_path, cluster, any_device):
    *cluster, num_plans = cluster
    requests = written(tmp_path, range(num_plans), cluster, device=any_device)
    pipelined = [replace(request, overlap=Overlap.PIPELINED) for request in requests[::PIPELINED_EVERY]]
    results = executed([*requests, *pipelined], cluster[0])
    assert len(results) == num_plans + len(pipelined)
    assert_equal(results)
    for blocking, overlapped in zip(results[:num_plans:PIPELINED_EVERY], results[num_plans:], strict=True):
        assert_the_same(overlapped, blocking)


def assert_the_same(overlapped, blocking):
    """To the last bit: how far both are off the reference, what they learn and what they send."""
    assert (overlapped.overlap, blocking.overlap) == (Overlap.PIPELINED, Overlap.NONE)
    assert overlapped.verification == blocking.verification
    assert (overlapped.first_loss, overlapped.last_loss) == (blocking.first_loss, blocking.last_loss)
    for one, other in zip(overlapped.ranks, blocking.ranks, strict=True):
        assert one.sent_bytes == other.sent_bytes
        if len(blocking.ranks) == 1:
            continue  # with nobody to wait for, an all-reduce may take no time at all
        assert set(one.collectives) == set(other.collectives) >= {StepCollective.INPUT, StepCollective.ALL_REDUCE}


@pytest.mark.slow
def test_replica_groups_equal_copies_that_are_averaged(tmp_path):
    requests, touched = [], []
    for number, layout in enumerate(GroupLayout):
        groups = ReplicaGroups(num_groups=2, layout=layout, sync_every=2, moment_scale=1.5)
        seeds = range(700 + 5 * number, 702 + 5 * number)
        requests += written(tmp_path / layout, seeds, (2, 2, 2), groups=groups)
        groups = replace(groups, sync_rows=SyncRows.TOUCHED)
        touched += written(tmp_path / layout / "touched", [720], (2, 2, 2), groups=groups)
    pipelined = [replace(request, overlap=Overlap.PIPELINED) for request in requests[::2]]
    # So many samples that drawn ids are near what is expected of them; as many steps to every synchronisation.
    touched = [replace(request, batch_size=TOUCHED_BATCH, warmup_steps=1, steps=2) for request in touched]
    results = executed([*requests, *touched, *pipelined], 4)
    assert_equal(results)
    for blocking, overlapped in zip(results[: len(requests) : 2], results[-len(pipelined) :], strict=True):
        assert_the_same(overlapped, blocking)
    for result in results[len(requests) : -len(pipelined)]:
        assert_touched_rows_are_sent_as_predicted(result)


def assert_touched_rows_are_sent_as_predicted(result):
    plan = read_plan(result.plan_path)
    plan = replace(plan, tables=replace(plan.tables, batch_size=TOUCHED_BATCH))
    held = plan.of_one_group().arrays
    expected, everything = (
        sum(group_sync_bytes(replace(plan, replica_groups=replace(plan.replica_groups, sync_rows=rows)), held))
        for rows in (SyncRows.TOUCHED, SyncRows.ALL)
    )
    sent = sum(rank.sent_bytes["group_sync"] for rank in result.ranks)
    per_step = plan.replica_groups.num_groups * expected.sum() / plan.replica_groups.sync_every
    assert sent == pytest.approx(per_step, rel=0.03)
    assert expected.sum() < 0.6 * everything.sum()


@pytest.mark.slow
def test_narrow_payloads_are_near_the_reference(tmp_path, any_device):
    tolerances = {DType.FP16: 3e-3, DType.BF16: 3e-2, DType.INT8: 5e-2}
    results = executed_plans(tmp_path, range(500, 502), (2, 2, 1), tuple(tolerances), device=any_device)
    for number, tolerance in enumerate(tolerances.values()):
        errors = [result.verification.output_error for result in results[2 * number : 2 * number + 2]]
        assert 0 < max(errors) <= tolerance


@pytest.mark.slow
def test_bytes_are_sent_as_predicted(tmp_path):
    # Whole tables that send sums: their bytes do not depend on the ids.
    plan, _ = drawn_plan(4, 2, 2)
    placed = tuple(
        replace(PlacedShard.table_wise(Shard.whole(table), index % 2), exchange=Exchange.PARTIAL_SUMS)
        for index, table in enumerate(plan.tables.tables)
        if table.pooling != "sequence"
    )
    tables = replace(plan.tables, tables=tuple(one.shard.table for one in placed))
    plans = [
        replace(plan, tables=tables, shards=placed, payload=Payload(forward=dtype, backward=dtype), row_orders={})
        for dtype in DType
    ]
    paths = [tmp_path / f"{number}.json" for number in range(len(plans))]
    for path, plan in zip(paths, plans, strict=True):
        write_plan(plan, path)
    values = {"steps": 2, "warmup_steps": 0, "verify_steps": 0, "device": "cpu"}
    results = executed([RunRequest(plan_path=str(path), **values) for path in paths], 2)
    for plan, result in zip(plans, results, strict=True):
        traffic = plan_traffic(plan)
        for stream in (Stream.FORWARD, Stream.BACKWARD):
            pairs = traffic.pairs_RR(stream)
            expected = [pairs[0, 1], pairs[1, 0]]
            assert sum(expected) > 0
            assert [rank.sent_bytes[stream] for rank in result.ranks] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("cluster", [(2, 2, 2), (4, 4, 2), (8, 8, 4), (4, 8, 4)], ids=str)
def test_many_random_plans_equal_the_unsharded_reference(tmp_path, cluster):
    num_plans = NUM_PLANS_SLOW // 4
    for start in range(1000, 1000 + num_plans, 100):
        seeds = range(start, min(start + 100, 1000 + num_plans))
        assert_equal(executed_plans(tmp_path / str(start), seeds, cluster))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_plans_on_8_processes_stay_equal_over_20_steps(tmp_path):
    results = executed_plans(tmp_path, range(3100, 3100 + NUM_PLANS_SLOW // 10), (8, 8, 4), verify_steps=20)
    for result in results:
        found = result.verification
        assert found.steps == 20
        # rtol 1e-5, atol 1e-6: absolute errors keep to atol alone, those of moments are relative to the largest.
        assert max(found.output_error, found.weight_error, found.dense_error) <= 1e-6, f"{result.plan_path}: {found}"
        assert found.moment_error <= 1e-5, f"{result.plan_path}: {found}"


@pytest.mark.slow
def test_rows_in_uneven_shares_equal_the_unsharded_reference(tmp_path):
    """Tables of which even shares do not fit, with rows by id and by access rank, as `auto` cuts them."""
    tables = tuple(
        replace(drawn_table(np.random.default_rng(0), name), num_embeddings=rows, access=AccessProfile.zipf(rows, 1.05))
        for name, rows in (("by_id", 3000), ("by_access", 2000))
    )
    tables = (tables[0], replace(tables[1], row_order=ImpliedOrder.BY_ID))
    needed = sum(table.storage_bytes for table in tables)
    topology = make.topology(
        4, hbm=needed // 12, overrides=((1, MemoryBytes(hbm=needed // 8)), (2, MemoryBytes(hbm=needed)))
    )
    request = make.request(
        make.tables(*tables, batch_size=24),
        topology,
        options={"sharding_types": "row_wise", "steps": 4, "policy": False, "count_activations": False},
    )
    plan = get_planner("auto").plan(request)
    cut = {placed.shard.rows.by for placed in plan.shards if placed.tier is Tier.TABLE_WISE}
    assert cut == {RowsBy.INDEX, RowsBy.ACCESS_RANK}
    write_plan(plan, tmp_path / "plan.json")
    path = str(tmp_path / "plan.json")
    run = RunRequest(plan_path=path, steps=1, warmup_steps=0, verify_steps=3, eps=1e-3, seed=0, device="cpu")
    assert_equal(executed([run], 2))
