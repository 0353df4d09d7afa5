from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import DType
from autoshard.core.errors import FormatError, InvalidOptionError, SampleStoreError
from autoshard.core.machine import MeasuredMachine
from autoshard.formats.stores.collective_samples import (
    COLLECTIVE_SAMPLES,
    GroupLevel,
    Operator,
    Splits,
)
from autoshard.formats.stores.measured_samples import MACHINE_COLUMNS
from autoshard.formats.stores.sample_store import damaged_samples
from tests import builders as make

NOON = make.collective_sample().collected_at


def sample_of(minute=0, **fields):
    return make.collective_sample(**{"collected_at": NOON + timedelta(minutes=minute), **fields})


unequal = st.builds(
    make.collective,
    splits=st.just(Splits.UNEQUAL),
    skew=st.floats(0.01, 3.0),
    split_seed=st.integers(0, 2**40),
    bytes_per_rank=st.integers(1, 2**40),
)
equal = st.builds(
    make.collective, st.sampled_from(Operator), level=st.sampled_from(GroupLevel), dtype=st.sampled_from(DType)
)
samples = st.builds(
    sample_of,
    st.integers(0, 10**6),
    of=equal | unequal,
    latency_ms=st.floats(1e-6, 1e6),
    spread=st.floats(0, 10),
)


@given(written=st.lists(samples, min_size=1, max_size=5, unique=True))
@settings(max_examples=30)
def test_what_is_written_is_read(written, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    file = COLLECTIVE_SAMPLES.write(store, written)
    read = COLLECTIVE_SAMPLES.read(store)
    assert read == tuple(sample.identified() for sample in written)
    assert COLLECTIVE_SAMPLES.read_file(file) == read
    assert [sample.identified() for sample in read] == list(read)


def test_a_store_has_one_folder_per_device_and_no_half_written_file(tmp_path):
    file = COLLECTIVE_SAMPLES.write(tmp_path, [sample_of()])
    assert file.parent == tmp_path / "collectives" / "device=cpu"
    assert file.name.startswith("part-20260102T120000123456-")
    assert list(file.parent.iterdir()) == [file]
    COLLECTIVE_SAMPLES.write(tmp_path, [sample_of(device="h200", backend="nccl")])
    assert COLLECTIVE_SAMPLES.devices(tmp_path) == ("cpu", "h200")
    assert [sample.backend for sample in COLLECTIVE_SAMPLES.read(tmp_path, "h200")] == ["nccl"]
    with pytest.raises(SampleStoreError, match="holds several devices; name one of: cpu, h200"):
        COLLECTIVE_SAMPLES.read(tmp_path)
    with pytest.raises(SampleStoreError, match='no samples of collectives of device "a100"; it holds: cpu, h200'):
        COLLECTIVE_SAMPLES.read(tmp_path, "a100")


def test_a_sample_that_is_there_twice_counts_once(tmp_path):
    COLLECTIVE_SAMPLES.write(tmp_path, [sample_of(minute=3), sample_of(minute=1)])
    COLLECTIVE_SAMPLES.write(tmp_path, [sample_of(minute=1)])
    assert sorted(sample.collected_at.minute for sample in COLLECTIVE_SAMPLES.read(tmp_path)) == [1, 3]


def test_no_samples_are_an_error(tmp_path):
    assert COLLECTIVE_SAMPLES.devices(tmp_path / "nowhere") == ()
    with pytest.raises(SampleStoreError, match="`autoshard collect --kinds collectives` adds some"):
        COLLECTIVE_SAMPLES.read(tmp_path / "nowhere")


def test_another_sample_has_another_id():
    sample = sample_of()
    assert sample.identified().sample_id == sample_of().identified().sample_id
    other = replace(sample, collective=replace(sample.collective, bytes_per_rank=8192))
    assert sample.identified().sample_id != other.identified().sample_id


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"bytes_per_rank": 0}, "bytes_per_rank"),
        ({"splits": Splits.UNEQUAL}, "skew"),
        ({"skew": 0.5}, "skew"),
        ({"splits": Splits.UNEQUAL, "skew": float("nan")}, "skew"),
        ({"operator": Operator.ALL_REDUCE, "splits": Splits.UNEQUAL, "skew": 0.5}, "splits"),
    ],
)
def test_impossible_collectives_are_refused(values, field):
    with pytest.raises(InvalidOptionError) as caught:
        make.collective(**values)
    assert caught.value.field == field


def with_column(name, value):
    def change(table):
        item = table.schema.field(name)
        return table.set_column(table.schema.get_field_index(name), item, pa.array([value], item.type))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.replace_schema_metadata({b"autoshard.schema": b"autoshard.collective-samples/9"}),
            f"schema: must be {COLLECTIVE_SAMPLES.schema}, got autoshard.collective-samples/9",
        ),
        (lambda table: table.replace_schema_metadata(None), "got none"),
        (lambda table: table.drop_columns(["latency_ms"]), "latency_ms: column is missing"),
        (
            lambda table: table.append_column("extra", [[1]]),
            "extra: column is missing, there twice or not",
        ),
        (
            lambda table: table.append_column("level", table["level"]),
            "level: column is missing, there twice or not of this schema",
        ),
        (lambda table: table.cast(with_type(table.schema, "nproc", pa.float64())), "nproc: column is missing"),
        (with_column("latency_ms", None), "latency_ms: must not be null"),
        (with_column("operator", None), "operator: must not be null"),
        (with_column("latency_ms", float("nan")), "latency_ms: must be a number in \\[1e-06, 1e\\+08\\], got "),
        (with_column("latency_ms", float("inf")), "latency_ms: must be a number in \\[1e-06, 1e\\+08\\], got "),
        (with_column("latency_ms", 0.0), "latency_ms: must be a number in \\[1e-06, 1e\\+08\\], got 0"),
        (with_column("spread", -0.5), "spread: must be a number of at least 0"),
        (with_column("reference_ms", 0.0), "reference_ms: must be a number in \\[1e-06, 1e\\+08\\], got 0"),
        (with_column("node_size", 0), "node_size: must be above 0"),
        (with_column("node_size", 3), "group_size: is impossible"),
        (with_column("group_size", 5), "group_size: is impossible: 5 ranks"),
        (with_column("max_sent_bytes", 5), "max_sent_bytes: is below the mean"),
        (with_column("bytes_per_rank", 0), "bytes_per_rank: must be at least 1, got 0"),
        (with_column("skew", 1.0), "skew: must be above 0 and finite for unequal splits"),
        (
            with_column("operator", "broadcast"),
            'operator: must be one of all_to_all, reduce_scatter, all_gather, all_reduce; got "broadcast"',
        ),
        (with_column("dtype", "fp64"), 'dtype: must be one of fp32, fp16, bf16, int8; got "fp64"'),
    ],
)
def test_files_of_another_kind_are_refused(change, message, tmp_path):
    file = COLLECTIVE_SAMPLES.write(tmp_path, [sample_of()])
    pq.write_table(change(pq.read_table(file)), file)
    with pytest.raises(FormatError, match=message) as caught:
        COLLECTIVE_SAMPLES.read(tmp_path)
    assert str(caught.value).startswith(str(file))


def with_type(schema, name, kind):
    return schema.set(schema.get_field_index(name), pa.field(name, kind))


@pytest.mark.parametrize("length", [0, 10, -20])
def test_damaged_files_are_refused(length, tmp_path):
    file = COLLECTIVE_SAMPLES.write(tmp_path, [sample_of()])
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(FormatError, match="is no Parquet file, or is damaged"):
        COLLECTIVE_SAMPLES.read(tmp_path)


def test_a_store_that_cannot_be_written_is_an_error(tmp_path):
    blocked = tmp_path / "store"
    blocked.write_text("not a folder")
    with pytest.raises(SampleStoreError, match="cannot be written"):
        COLLECTIVE_SAMPLES.write(blocked, [sample_of()])


def test_samples_of_the_first_version_know_their_machine_by_its_name(tmp_path):
    told = make.collective_sample(core="amd-25-17-avx512", cache_bytes=2**25)
    assert (told.machine.core, told.machine.cache_bytes) == ("amd-25-17-avx512", 2**25)
    file = COLLECTIVE_SAMPLES.write(tmp_path, [make.collective_sample()])
    (new,) = COLLECTIVE_SAMPLES.read_file(file)
    table = pq.read_table(file, partitioning=None).drop_columns(list(MACHINE_COLUMNS))
    pq.write_table(table.replace_schema_metadata({b"autoshard.schema": b"autoshard.collective-samples/1"}), file)
    assert COLLECTIVE_SAMPLES.read_file(file) == (new,)
    assert damaged_samples([new]) == ()
    assert new.machine == MeasuredMachine(
        device_name=new.device_name,
        torch_version=new.torch_version,
        fbgemm_version=getattr(new, "fbgemm_version", ""),
    )
