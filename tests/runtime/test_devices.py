"""Devices that are not there, and memory that is not."""

from bisect import bisect_left
from dataclasses import replace

import pytest
import torch

from autoshard.core import (
    MemoryBytes,
    MemoryLevel,
    MemoryPlacement,
    PlacedShard,
    ReplicaGroups,
    RowOrder,
    RowRange,
    RowsBy,
    Shard,
)
from autoshard.core.choices import Device
from autoshard.core.errors import DeviceError
from autoshard.core.quoting import write_bytes
from autoshard.evaluation.batch_memory import row_order_bytes, training_bytes
from autoshard.hardware import free_host_bytes
from autoshard.runtime.engine.ids import addresses
from autoshard.runtime.processes.devices import check_memory, choose_device
from tests import builders as make

CPU = torch.device("cpu")


@pytest.fixture
def more_processes_than_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torch.cuda.device_count() + 2))


@pytest.mark.usefixtures("more_processes_than_gpus")
def test_processes_without_a_gpu_each_use_the_cpu():
    assert choose_device({Device.AUTO}) == torch.device("cpu")
    assert choose_device({Device.CUDA, Device.CPU}) == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"processes need a GPU each, this machine has"):
        choose_device({Device.AUTO, Device.CUDA})


def needed(plan, process, num_processes, device, monkeypatch):
    """Bytes that a check asks a device for, and the host: found out by having less."""

    def is_enough(gpu_bytes, host_bytes):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (gpu_bytes, gpu_bytes))
        monkeypatch.setattr("autoshard.runtime.memory.free_host_bytes", lambda: host_bytes)
        try:
            check_memory(plan, process, num_processes, torch.device(device))
        except DeviceError:
            return False
        return True

    ways = (lambda free: is_enough(free, 1 << 60), lambda free: is_enough(1 << 60, free))
    return [bisect_left(range(1 << 40), True, key=way) for way in ways]


def test_tables_that_do_not_fit_are_refused(monkeypatch):
    # Plans are checked against their own topology, which may be larger than the machine that executes them.
    plan = make.table_wise_plan([make.table("t", 1000, 16)], [0])
    check_memory(plan, 0, 2, CPU)
    # Weights, a moment for each row, and a batch.
    free = 1000 * (16 * 4 + 4) + round(training_bytes(plan).sum()) - 1
    monkeypatch.setattr("autoshard.runtime.memory.free_host_bytes", lambda: free)
    needed, left = write_bytes(free + 1), write_bytes(free)
    with pytest.raises(DeviceError, match=rf"need {needed} on this cpu, {left} are free: scale the tables"):
        check_memory(plan, 0, 2, CPU)


def test_a_host_holds_what_its_own_processes_need(monkeypatch):
    plan = make.table_wise_plan([make.table("large", 1000, 16), make.table("small", 10, 16)], [0, 1])
    _, both = needed(plan, 0, 2, "cpu", monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    (_, first), (_, second) = (needed(plan, process, 2, "cpu", monkeypatch) for process in range(2))
    assert first + second == both
    assert second < 10_000 < 68_000 < first


def test_every_replica_group_holds_the_tables(monkeypatch):
    plan = make.table_wise_plan([make.table("t", 1000, 16)], [0])
    copies = replace(
        make.table_wise_plan([make.table("t", 1000, 16)], [0], 2), replica_groups=ReplicaGroups(num_groups=2)
    )
    _, once = needed(plan, 0, 2, "cpu", monkeypatch)
    _, twice = needed(copies, 1, 2, "cpu", monkeypatch)
    assert twice > 2 * 68_000 > once


def test_a_gpu_holds_caches_with_their_indices_row_orders_and_communicators(monkeypatch):
    table = make.table("t", 1000, 16)
    plan = make.table_wise_plan([table], [0])
    gpu, host = needed(plan, 0, 2, "cuda", monkeypatch)
    assert (gpu, host) == (68_000 + round(training_bytes(plan)[0]) + (1 << 30), 0)

    [shard] = plan.shards
    topology = replace(plan.topology, memory_bytes=MemoryBytes(hbm=1 << 30, ddr=1 << 30))
    for policy, index_bytes, slot_bytes in (("lru", 4, 20), ("lfu", 12, 8)):
        memory = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=6400, policy=policy)
        cached = replace(plan, topology=topology, shards=(replace(shard, memory=memory),))
        # A moment for each row stays on the GPU.
        cache_bytes = 6400 + 100 * slot_bytes + 1000 * index_bytes
        assert needed(cached, 0, 2, "cuda", monkeypatch) == [gpu - 64_000 + cache_bytes, 64_000]

    halves = [
        PlacedShard.table_wise(Shard(table=table, rows=rows, columns=(0, 16)), rank)
        for rank, rows in enumerate(RowRange(start=n, stop=n + 500, by=RowsBy.ACCESS_RANK) for n in (0, 500))
    ]
    cut = replace(plan, shards=tuple(halves))
    listed = replace(cut, row_orders={"t": RowOrder(file="t.parquet", digest="0" * 64, num_ordered=100)})
    # 100 rows, all of them beyond the list: 32 bytes each, and 256 slots of 16, with 16 behind them.
    more = needed(listed, 1, 2, "cuda", monkeypatch)[0] - needed(cut, 1, 2, "cuda", monkeypatch)[0]
    assert more == row_order_bytes(listed) == 100 * 32 + (256 + 16) * 16


def test_memory_that_torch_keeps_of_an_earlier_request_is_free(monkeypatch):
    plan = make.table_wise_plan([make.table("t", 1000, 16)], [0])
    first, _ = needed(plan, 0, 2, "cuda", monkeypatch)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 50_000)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 20_000)
    assert needed(plan, 0, 2, "cuda", monkeypatch)[0] == first - 30_000


@pytest.mark.parametrize("first_id", [0, 300, 900])
def test_row_orders_take_no_more_than_is_counted(first_id):
    table = make.table("t", 1000, 16)
    plan = make.table_wise_plan([table], [0])
    ids_N = torch.arange(first_id, first_id + 100)
    rows = RowRange(start=0, stop=1000, by=RowsBy.ACCESS_RANK)
    shard = PlacedShard.table_wise(Shard(table=table, rows=rows, columns=(0, 16)), 0)
    order = RowOrder(file="t.parquet", digest="0" * 64, num_ordered=100)
    counted = row_order_bytes(replace(plan, shards=(shard,), row_orders={"t": order}))
    held = addresses.RowOrderMap(ids_N, 1000, CPU)
    parts = list(vars(held).values())
    parts += [inner for part in parts if hasattr(part, "__dict__") for inner in vars(part).values()]
    taken = sum(one.nbytes for one in parts if isinstance(one, torch.Tensor))
    assert taken <= counted
    assert taken > 0.9 * counted or first_id < 100


def test_free_memory_is_read_from_the_system():
    assert 1 << 20 < free_host_bytes() < 1 << 50
