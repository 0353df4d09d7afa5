"""What stores of all kinds of samples have in common."""

import os
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.core.errors import FormatError, SampleStoreError
from autoshard.formats.stores.collective_samples import COLLECTIVE_SAMPLES
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
from autoshard.formats.stores.sample_store import damaged_samples
from autoshard.formats.stores.samples import KERNEL_SAMPLES
from tests.formats.test_collective_samples import sample_of as collective_sample
from tests.formats.test_dense_samples import sample_of as dense_sample
from tests.formats.test_samples import sample_of as kernel_sample


@pytest.fixture(
    params=[
        (KERNEL_SAMPLES, kernel_sample),
        (DENSE_SAMPLES, dense_sample),
        (COLLECTIVE_SAMPLES, collective_sample),
    ],
    ids=["kernels", "dense", "collectives"],
)
def kind(request):
    return request.param


def test_a_part_that_is_no_regular_file_or_too_large_is_not_read(kind, tmp_path):
    samples, sample_of = kind
    file = samples.write(tmp_path, [sample_of()])
    with file.open("r+b") as opened:
        opened.truncate(3 << 40)
    with pytest.raises(FormatError, match=r"must be at most 1,073,741,824 bytes, got 3,298,534,883,328") as raised:
        samples.read(tmp_path)
    assert str(raised.value).startswith(f"{file}: ")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SampleStoreError, match="must be a regular file, got a pipe") as raised:
        samples.read(tmp_path)
    assert str(raised.value).startswith(f"{file}: ")


def test_a_bad_value_is_named_with_its_column(kind, tmp_path):
    samples, sample_of = kind
    name = "num_rounds"
    file = samples.write(tmp_path, [sample_of()])
    table = pq.read_table(file)
    index = table.schema.get_field_index(name)
    item = table.schema.field(index)
    pq.write_table(table.set_column(index, item, pa.array([-3], item.type)), file)
    with pytest.raises(FormatError, match=f"{name}: must be above 0, got -3"):
        samples.read(tmp_path)


def test_columns_are_read_in_any_order(kind, tmp_path):
    samples, sample_of = kind
    file = samples.write(tmp_path, [sample_of(core="amd-25-17-avx512")])
    read = samples.read(tmp_path)
    table = pq.read_table(file, partitioning=None)
    pq.write_table(table.select(table.schema.names[::-1]), file)
    assert samples.read(tmp_path) == read
    assert damaged_samples(read) == ()


@pytest.mark.parametrize("name", ["device", "extra"])
def test_a_column_that_is_there_twice_is_named(kind, name, tmp_path):
    samples, sample_of = kind
    file = samples.write(tmp_path, [sample_of()])
    table = pq.read_table(file, partitioning=None)
    for _ in range(1 if name in table.schema.names else 2):
        table = table.append_column(name, table["device_name"])
    pq.write_table(table, file)
    with pytest.raises(FormatError, match=f"{name}: column is missing, there twice or not of this schema"):
        samples.read(tmp_path)


def test_a_text_that_is_no_utf_8_is_damage(kind, tmp_path):
    samples, sample_of = kind
    file = samples.write(tmp_path, [sample_of()])
    table = pq.read_table(file)
    index = table.schema.get_field_index("git_commit")
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")]
    )
    pq.write_table(table.set_column(index, table.schema.field(index), bad), file)
    with pytest.raises(FormatError, match="is no Parquet file, or is damaged"):
        samples.read(tmp_path)


def test_only_equal_samples_are_copies(kind, tmp_path):
    samples, sample_of = kind
    honest = sample_of().identified()
    for index, sample in enumerate((honest, honest, replace(honest, device_name="Another processor"))):
        file = samples.write(tmp_path, [sample])
        table = pq.read_table(file)
        column = table.schema.get_field_index("sample_id")
        changed = table.set_column(column, table.schema.field(column), pa.array([honest.sample_id]))
        pq.write_table(changed, file)
        file.rename(file.with_name(f"part-{index}.parquet"))
    read = samples.read(tmp_path)
    assert [sample.device_name for sample in read] == [honest.device_name, "Another processor"]
    assert damaged_samples(read) == read[1:]


def test_old_temporary_files_of_every_kind_are_removed(kind, tmp_path):
    samples, sample_of = kind
    left = samples.write(tmp_path, [sample_of()]).with_name(f".{'0f' * 8}.tmp")
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 7200,) * 2)
    assert samples.remove_leftovers(tmp_path) == (left,)
    assert not left.exists()
