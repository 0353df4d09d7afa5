"""TorchRec's plans in files: what torch.save writes is read, and nothing in it is run."""

import contextlib
import io
import pickle
import zipfile

import pytest
import torch
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType

from autoshard.core import DType, MemoryLevel, MemoryPlacement, Payload, Tier
from autoshard.core.errors import FormatError, InputError
from autoshard.formats.torchrec import as_executed, from_torchrec, to_torchrec
from autoshard.formats.torchrec.stored_plans import read_stored_plan, write_stored_plan
from tests import builders as make

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on torchrec's own import


@pytest.fixture
def plan():
    first, second, third = (make.table(name, 100) for name in "abc")
    cached = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=1600, policy="lfu", cache_dtype=first.dtype)
    return make.plan(
        make.placed(first, replicas=((1,),), memory=cached),
        make.placed(second, Tier.ROW_WISE, make.everyone(2)),
        make.placed(third, Tier.DATA_PARALLEL, make.each(2)),
        topology=make.topology(2, device="a100", ddr=1 << 30),
    )


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_stored_plan_is_read_as_it_was(plan, tmp_path, protocol):
    path = tmp_path / "plan.pt"
    torch.save(to_torchrec(plan), path, pickle_protocol=protocol)
    assert from_torchrec(read_stored_plan(path), plan.tables, plan.topology) == as_executed(plan)


def read_changed(plan, path, *, all_of=None, **changes):
    """The plan with attributes of the entry of `a`, or of all entries, changed: its objects and its file, read."""
    exported = to_torchrec(plan)
    (module,) = exported.plan.values()
    for entry in module.values() if all_of else [module["a"]]:
        for name, value in changes.items():
            setattr(entry, name, value)
    write_stored_plan(exported, path)
    found = from_torchrec(exported, plan.tables, plan.topology)
    assert from_torchrec(read_stored_plan(path), plan.tables, plan.topology) == found
    return found


@pytest.mark.parametrize(
    ("params", "num_cached", "num_notes"),
    [
        (None, 20, 1),
        (CacheParams(), 20, 1),
        (CacheParams(load_factor=1), 100, 0),
        (CacheParams(load_factor=0.5), 50, 0),
    ],
)
def test_caches_of_torchrecs_default_size_are_read(plan, tmp_path, caplog, params, num_cached, num_notes):
    cached = read_changed(plan, tmp_path / "plan.pt", cache_params=params).shards[0]
    row_bytes = cached.shard.embedding_dim * 4
    assert cached.memory == MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=num_cached * row_bytes)
    told = {record.message for record in caplog.records}
    table = "embedding_bag_collection.a"
    note = f"caches of {table} have no load factor: they are taken to hold TorchRec's default, 20% of the rows"
    assert told == ({note} if num_notes else set())


def test_load_factors_that_are_no_numbers_are_refused(plan, tmp_path):
    exported = to_torchrec(plan)
    exported.plan["embedding_bag_collection"]["a"].cache_params = CacheParams(load_factor=True)
    write_stored_plan(exported, tmp_path / "plan.pt")
    with pytest.raises(FormatError, match="must have load factors that are numbers, got true"):
        read_stored_plan(tmp_path / "plan.pt")


def test_output_formats_are_carried_where_they_are_one_and_other_settings_noted(plan, tmp_path, caplog):
    path = tmp_path / "plan.pt"
    found = read_changed(plan, path, all_of=True, output_dtype=DataType.FP16)
    assert found.payload == Payload(forward=DType.FP16, backward=DType.FP16)
    assert from_torchrec(to_torchrec(found), plan.tables, plan.topology) == found
    assert not caplog.records
    settings = {"output_dtype": DataType.FP16, "enforce_hbm": True, "stochastic_rounding": False}
    assert read_changed(plan, path, **settings).payload == Payload()
    assert {record.message for record in caplog.records} == {
        f"{setting} of embedding_bag_collection.a is left out, which plans do not hold" for setting in settings
    }


def test_data_parallel_tables_send_no_embeddings(plan, tmp_path):
    [last] = [placed for placed in plan.shards if placed.shard.table.name == "c"]
    alone = make.plan(last, topology=plan.topology)
    assert read_changed(alone, tmp_path / "plan.pt", all_of=True, output_dtype=DataType.INT8).payload == Payload()


def test_torch_reads_what_is_written(plan, tmp_path):
    path = tmp_path / "plan.pt"
    write_stored_plan(to_torchrec(plan), path)
    assert torch.load(path, weights_only=False) == to_torchrec(plan)


def stored(content, path):
    buffer = io.BytesIO()
    torch.save({}, buffer)
    with zipfile.ZipFile(buffer) as empty, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for info in empty.infolist():
            archive.writestr(info.filename, content if info.filename.endswith("data.pkl") else empty.read(info))


class Mkdir:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_a_file_is_called(tmp_path, protocol):
    made, path = tmp_path / "made", tmp_path / "plan.pt"
    stored(pickle.dumps(Mkdir(made), protocol=protocol), path)
    with pytest.raises(FormatError, match=r"^.*plan\.pt: must hold a TorchRec ShardingPlan and nothing else, its desc"):
        read_stored_plan(path)
    assert not made.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "must hold a ShardingPlan, got a list of 2"),
        ({"plan": 3}, "must hold a ShardingPlan, got an object"),
    ],
)
def test_files_of_other_things_are_refused(tmp_path, content, message):
    path = tmp_path / "plan.pt"
    torch.save(content, path)
    with pytest.raises(FormatError, match=f"^.*plan\\.pt: {message}"):
        read_stored_plan(path)


def test_a_damaged_file_is_refused_wherever_it_is_damaged(plan, tmp_path):
    whole = pickle.dumps(to_torchrec(plan), protocol=2)
    path = tmp_path / "plan.pt"
    for place in range(0, len(whole), 17):
        for damaged in (whole[:place], whole[:place] + b"\x94" + whole[place + 1 :]):
            stored(damaged, path)
            with contextlib.suppress(InputError):
                from_torchrec(read_stored_plan(path), plan.tables, plan.topology)
