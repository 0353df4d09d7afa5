"""What of a plan is executed, and what is refused."""

from dataclasses import replace

import pytest
import torch

from autoshard.core import (
    DType,
    Exchange,
    GradSync,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    Tier,
)
from autoshard.core.errors import InvalidOptionError, InvalidPlanError
from autoshard.runtime.ownership import check_levels, even_share, ownership_of
from tests import builders as make


def test_ranks_are_folded_onto_processes():
    tables = [make.table(f"t{index}") for index in range(5)]
    plan = make.table_wise_plan(tables, [0, 3, 7, 4, 3], world_size=8)
    owners = ownership_of(plan, 4)
    assert [one.owners(0) for one in owners.holdings] == [(0,), (3,), (3,), (0,), (3,)]
    assert owners.is_folded
    assert owners.plan_ranks_of(3) == (3, 7)
    assert [table.name for table in owners.tables_of(0)] == ["t0", "t3"]
    assert owners.tables_of(1) == ()
    assert not ownership_of(plan, 8).is_folded


@pytest.mark.parametrize("num_processes", [0, 3])
def test_the_number_of_processes_lies_within_the_ranks(num_processes):
    with pytest.raises(InvalidOptionError, match=r"nproc: must be in \[1, 2\]"):
        ownership_of(make.table_wise_plan([make.table("t")], [0]), num_processes)


def test_a_batch_is_shared_evenly():
    assert even_share(12, 4) == 3
    with pytest.raises(InvalidOptionError, match="batch_size: must be a multiple of the 4 processes, got 10"):
        even_share(10, 4)


def test_the_same_tables_elsewhere_are_another_identity():
    tables = [make.table("a"), make.table("b")]
    here, there = (ownership_of(make.table_wise_plan(tables, ranks), 2) for ranks in ([0, 1], [1, 0]))
    assert here.identity != there.identity
    assert here.identity == ownership_of(make.table_wise_plan(tables, [0, 1]), 2).identity


@pytest.mark.parametrize("exchange", list(Exchange))
@pytest.mark.parametrize(
    ("replicas", "fetch"),
    [
        (((0,), (1,)), None),
        (((0,), (1,)), (0, 1)),
        (((0,), (1,)), (1, 0)),
        (((1,), (0,)), None),
        (((1,),), None),
        (((0, 1),), None),
    ],
)
def test_prices_are_of_the_exchange_that_is_executed(replicas, fetch, exchange):
    plan = make.table_wise_plan([make.table("t")], [0], world_size=2)
    tiers = {((0, 1),): Tier.ROW_WISE, ((1,),): Tier.TABLE_WISE}
    tier = tiers.get(replicas, Tier.REPLICATED if fetch else Tier.DATA_PARALLEL)
    sync = GradSync.SPARSE if len(replicas) > 1 else GradSync.NONE
    placed = replace(plan.shards[0], tier=tier, replicas=replicas, fetch=fetch, exchange=exchange, grad_sync=sync)
    [holding] = ownership_of(replace(plan, shards=(placed,)), 2).holdings
    assert placed.as_run(2).exchange is holding.output


REFUSED_TABLES = [
    ({"dtype": DType.BF16}, r"tables.tables\[0\].dtype", "fp32 and fp16"),
    ({"dtype": DType.INT8}, r"tables.tables\[0\].dtype", "fp32 and fp16"),
    ({"optimizer": Optimizer.NONE}, r"tables.tables\[0\].optimizer", "sgd, rowwise_adagrad, adagrad, adam"),
    ({"embedding_dim": 6}, r"shards\[0\].columns", "multiple of 4"),
]


@pytest.mark.parametrize(("options", "field", "accepted"), REFUSED_TABLES, ids=lambda value: str(value))
def test_tables_that_cannot_be_executed_are_refused(options, field, accepted):
    plan = make.table_wise_plan([make.table("t", **options)], [0])
    with pytest.raises(InvalidPlanError, match=f"^{field}: .*{accepted}"):
        ownership_of(plan, 2)


def test_other_memory_and_groups_are_refused():
    table = make.table("t")
    plan = make.table_wise_plan([table], [0])
    memory = replace(plan.topology.memory_bytes, ddr=1 << 30, ssd=1 << 30)
    roomy = replace(plan, topology=replace(plan.topology, memory_bytes=memory))

    def held(**changes):
        return replace(roomy, shards=(replace(plan.shards[0], **changes),))

    far = MemoryPlacement(level=MemoryLevel.DDR)
    refused = {
        r"shards\[0\].memory.level": held(memory=MemoryPlacement(level=MemoryLevel.SSD)),
        r"shards\[0\].memory.cache_bytes": held(memory=MemoryPlacement(cache_bytes=64)),
        r"shards\[0\].memory.cache_dtype": held(memory=replace(far, cache_bytes=64, cache_dtype=DType.FP16)),
    }
    for field, bad in refused.items():
        with pytest.raises(InvalidPlanError, match=f"^{field}: "):
            ownership_of(bad, 2)


def test_rows_behind_a_cache_take_a_kernel_of_their_own():
    tables = [make.table(name, 1000, 16) for name in "abc"]
    plan = make.table_wise_plan(tables, [0, 0, 0])
    memory = replace(plan.topology.memory_bytes, ddr=1 << 30)
    cached = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=6_400)
    placed = zip(plan.shards, (MemoryPlacement(), cached, MemoryPlacement(level=MemoryLevel.DDR)), strict=True)
    shards = tuple(replace(shard, memory=where) for shard, where in placed)
    plan = replace(plan, topology=replace(plan.topology, memory_bytes=memory), shards=shards)
    owners = ownership_of(plan, 2)
    assert [owners.of_kernel(key, 0) for key in owners.kernels] == [(0,), (1,), (2,)]
    # Weights; in the device's memory a moment for each row, and the cache, with 4 bytes for each row and 20 a slot.
    hbm_bytes = 1000 * 64 + 3 * 1000 * 4 + 6_400 + 1000 * 4 + 100 * 20
    held = [one.num_bytes(0) for one in owners.holdings]
    assert [sum(one[level] for one in held) for level in MemoryLevel] == [hbm_bytes, 128_000, 0]
    for device in ("cpu", "cuda"):
        check_levels(owners, torch.device(device))


def test_caches_of_tables_of_several_widths_are_apart():
    # Lines of a cache are as wide as its widest table: one for all would hold fewer rows than were planned.
    tables = [make.table(name, 1000, dim) for name, dim in (("a", 16), ("b", 64), ("c", 16))]
    plan = make.table_wise_plan(tables, [0, 0, 0])
    assert len(ownership_of(plan, 2).kernels) == 1
    cached = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=6_400)
    memory = replace(plan.topology.memory_bytes, ddr=1 << 30)
    shards = tuple(replace(shard, memory=cached) for shard in plan.shards)
    owners = ownership_of(replace(plan, topology=replace(plan.topology, memory_bytes=memory), shards=shards), 2)
    assert [owners.of_kernel(key, 0) for key in owners.kernels] == [(0, 2), (1,)]


def test_plans_that_are_not_valid_are_refused():
    tables = [make.table("a"), make.table("b")]
    plan = make.table_wise_plan(tables, [0, 1])
    for shards in (plan.shards[:1], (*plan.shards, plan.shards[0])):
        with pytest.raises(InvalidPlanError):
            ownership_of(replace(plan, shards=shards), 2)
