"""The engine on a pretended GPU: no tensor of the CPU meets one of the GPU, and results are those of the CPU."""

import re
from pathlib import Path

import pytest
import torch

from autoshard.core import DType, PlacedShard, RowRange, RowsBy, Shard, Split, Tier
from autoshard.core.optimizers import UpdateSettings
from autoshard.core.plan import Payload
from autoshard.runtime import participation
from autoshard.runtime.engine.holdings import holdings_of
from autoshard.runtime.engine.ids.addresses import RowOrderMap
from autoshard.runtime.engine.rows.fused import kernel_output
from autoshard.runtime.engine.rows.places import held_chunks
from autoshard.runtime.participation import Participation
from tests import builders as make
from tests.ranks import on_ranks
from tests.runtime.cuda_worker import compare_all
from tests.runtime.pretended_gpu import CUDA, OnGpu, WrongDeviceError, pretended

ROOT = Path(__file__).parents[2]
#: Drawn plans that have among them every split, pooling, exchange, optimizer and way to sum gradients, cut columns,
#: rows that are sent once, row orders, eight-bit numbers on the wire, and such as a GPU's kernels give out themselves.
PLANS = (
    (50, DType.FP32, False),
    (7, DType.INT8, False),
    (4, DType.FP32, False),
    (26, DType.FP16, False),
    (20, DType.BF16, False),
    (50, DType.FP32, True),
    (4, DType.FP32, True),
    (26, DType.FP16, True),
)


def test_the_device_is_told_from_the_cpu():
    with pretended():
        there, here = torch.arange(4, device=CUDA), torch.arange(4)
        assert (there.device, there.is_cuda, here.device.type) == (CUDA, True, "cpu")
        for mixes in (
            lambda: torch.cat([there, here]),
            lambda: here.index_select(0, there),
            lambda: here[there],
            lambda: there.add_(here),
            lambda: torch.searchsorted(there, here),
        ):
            with pytest.raises(WrongDeviceError):
                mixes()
        there += 1
        assert isinstance(there, OnGpu)
        assert (there + there.new_ones(()))[there[:1]].device == CUDA
        assert there[there > 2].tolist() == [3, 4]


def test_row_orders_on_a_gpu_find_the_places_of_rows():
    table = make.table("t", 100)
    shard = Shard(table=table, rows=RowRange(start=0, stop=100, by=RowsBy.ACCESS_RANK), columns=(0, 8))
    placed = PlacedShard(shard=shard, tier=Tier.ROW_WISE, replicas=((0, 1),), split=Split.CYCLIC)
    plan = make.table_wise_plan([table], [0])
    [holding] = holdings_of(type(plan)(tables=plan.tables, topology=plan.topology, shards=(placed,)), 2)
    ids_N = torch.tensor([90, 3, 0, 17, 55])
    [(_, rows_L, places_L)] = held_chunks(holding, 0, RowOrderMap(ids_N, 100, torch.device("cpu")), range(100))
    with pretended():
        [(_, found_L, found_places_L)] = held_chunks(holding, 0, RowOrderMap(ids_N, 100, CUDA), range(100))
    assert found_L.tolist() == rows_L.tolist()
    assert found_places_L.tolist() == places_L.tolist()


@pytest.mark.usefixtures("one_process")
def test_processes_over_nccl_use_the_current_gpu(monkeypatch):
    plan = make.table_wise_plan([make.table("t")], [0], world_size=1)
    assert Participation.agree(plan, UpdateSettings(learning_rate=0.1)).device == torch.device("cpu")
    monkeypatch.setattr("torch.cuda.current_device", lambda: CUDA.index)
    monkeypatch.setattr("autoshard.runtime.engine.groups.dist.get_backend", lambda _: "nccl")
    with pretended([participation]):
        assert Participation.agree(plan, UpdateSettings(learning_rate=0.1)).device == CUDA


def test_every_group_over_nccl_is_told_its_device():
    # Or communicators are made at the first collective, in whichever thread that is.
    folders = ("autoshard", "bench", "examples", "studies")
    files = [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    calls = [call for text in files for call in re.findall(r"init_process_group\(([^)]*nccl[^)]*)\)", text)]
    assert calls
    assert all("device_id=" in call for call in calls)


def test_kernels_give_out_what_travels_where_that_changes_no_number():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for dtype in DType:
        both, one_way = Payload(forward=dtype, backward=dtype), Payload(forward=dtype, backward=DType.FP32)
        is_cast = dtype in (DType.FP16, DType.BF16)
        assert kernel_output(both, gpu) is (dtype if is_cast else DType.FP32)
        # Gradients in fp32 would have to be rounded.
        assert kernel_output(one_way, gpu) is kernel_output(both, cpu) is DType.FP32


@pytest.mark.slow
def test_all_that_a_gpu_computes_is_what_a_cpu_does():
    for compared in on_ranks(compare_all, 2, PLANS):
        for count, differences in compared:
            assert count >= 4
            assert not differences
