import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import AccessProfile, DType, Exchange, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.errors import FormatError, SampleStoreError
from autoshard.core.machine import MeasuredMachine
from autoshard.formats.stores.drift import corrected_ms
from autoshard.formats.stores.sample_store import damaged_samples
from autoshard.formats.stores.samples import (
    KERNEL_SAMPLES,
    devices_in,
    measured_sets,
    read_sample_file,
    read_samples,
    set_id_of,
    write_samples,
)
from tests import builders as make

#: What samples say beyond what they must.
TOLD = {"num_attempts": 2, "is_noisy": True, "sm_clock_mhz": 1980.0, "throttle_reasons": "sw_power_cap"}
NOON = make.kernel_sample().collected_at


def sample_of(*shards, minute=0, **fields):
    return make.kernel_sample(*shards, collected_at=NOON + timedelta(minutes=minute), **{**TOLD, **fields})


shards = st.builds(
    make.held,
    st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8),
    st.integers(1, 10**9),
    dtype=st.sampled_from(DType),
    pooling=st.sampled_from(Pooling),
    optimizer=st.sampled_from(Optimizer),
    output=st.sampled_from(Exchange),
    update=st.sampled_from(Update),
    level=st.sampled_from(MemoryLevel),
    cache_bytes=st.integers(0, 2**40),
)
samples = st.builds(
    lambda held, minute, forward_ms: sample_of(*held, minute=minute, forward_ms=forward_ms),
    st.lists(shards, max_size=4),
    st.integers(0, 10**6),
    st.floats(1e-6, 1e6),
)


@given(written=st.lists(samples, min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_read(written, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    file = write_samples(store, written)
    table = read_samples(store)
    expected = tuple(sample.identified() for sample in written)
    assert read_sample_file(file) == expected
    assert table.samples == tuple(dict.fromkeys(expected))
    assert damaged_samples(table.samples) == ()


def test_files_of_the_second_version_are_read_and_keep_their_ids():
    old = read_samples(Path(__file__).parents[1] / "data" / "samples")
    assert damaged_samples(old.samples) == ()
    assert old.machine == MeasuredMachine(
        device_name="Intel(R) Xeon(R) Processor", torch_version="2.13.0+cpu", fbgemm_version="1.8.0"
    )


def test_samples_say_what_the_machine_is(tmp_path):
    here = {"core_cache_bytes": 2**20, "cache_bytes": 2**25, "memory_bytes": 2**33, "clock_mhz": 2596.0}
    here |= {"core": "amd-25-17-avx512", "core_threads": 1, "cache_threads": 2}
    told, silent = sample_of(minute=1, driver_version="580", **here), sample_of(minute=1)
    write_samples(tmp_path, [told])
    assert read_samples(tmp_path).machine == replace(silent.machine, driver_version="580", **here)
    assert told.identified().sample_id != silent.identified().sample_id
    assert told.identified().set_id == silent.identified().set_id


def test_the_bandwidth_of_a_store_is_that_of_the_median_sample(tmp_path):
    write_samples(tmp_path, [sample_of(minute=minute, memory_bytes_per_s=1e10 * minute) for minute in range(4)])
    machine = read_samples(tmp_path).machine
    assert machine.memory_bytes_per_s == 2e10
    assert machine == replace(machine, memory_bytes_per_s=0.0)


def test_sets_of_stores_of_the_second_version_are_counted():
    assert {found.machine.cache_bytes for found in measured_sets(Path(__file__).parents[1] / "data" / "samples")} == {0}


def test_a_store_is_read_in_the_order_of_time(tmp_path):
    for minute in (7, 3, 5):
        write_samples(tmp_path, [sample_of(minute=minute)])
    minutes = [sample.collected_at.minute for sample in read_samples(tmp_path).samples]
    assert minutes == [3, 5, 7]


def test_the_same_sample_gets_the_same_id_and_another_one_another():
    sample = sample_of()
    assert sample.identified().sample_id == sample_of().identified().sample_id
    assert sample.identified().sample_id != sample_of(forward_ms=1.25).identified().sample_id
    assert sample.identified().identified() == sample.identified()


def test_no_half_written_file_is_left(tmp_path):
    file = write_samples(tmp_path, [sample_of()])
    assert list(tmp_path.rglob("*")) == [file.parent, file]
    assert file.parent.name == "device=cpu"
    assert file.name.startswith("part-20260102T120000123456-")


def test_devices_are_kept_apart(tmp_path):
    write_samples(tmp_path, [sample_of()])
    write_samples(tmp_path, [sample_of(device="h200"), sample_of(device="h200", minute=1)])
    assert devices_in(tmp_path) == ("cpu", "h200")
    assert len(read_samples(tmp_path, "h200")) == 2
    with pytest.raises(SampleStoreError, match="several devices; name one of: cpu, h200"):
        read_samples(tmp_path)
    with pytest.raises(SampleStoreError, match='no samples of device "a100"; it holds: cpu, h200'):
        read_samples(tmp_path, "a100")


def test_drift_is_divided_out():
    # The second half was measured while the machine ran at half its speed.
    quick = [sample_of(forward_ms=2.0, backward_ms=6.0, reference_forward_ms=1.0, reference_backward_ms=4.0)] * 3
    slow = [sample_of(forward_ms=4.0, backward_ms=12.0, reference_forward_ms=2.0, reference_backward_ms=8.0)] * 2
    forward_ms, backward_ms = corrected_ms((*quick, *slow))
    np.testing.assert_allclose(forward_ms, 2.0)
    np.testing.assert_allclose(backward_ms, 6.0)


def test_a_changed_sample_is_found():
    honest, changed = sample_of().identified(), replace(sample_of(minute=1).identified(), forward_ms=0.5)
    assert damaged_samples((honest, changed)) == (changed,)


@pytest.mark.parametrize("make_folder", [True, False])
def test_a_store_without_samples_is_an_error(make_folder, tmp_path):
    store = tmp_path / "store"
    if make_folder:
        store.mkdir()
    with pytest.raises(SampleStoreError, match="store"):
        read_samples(store)


def rewritten(file, change):
    table = change(pq.read_table(file))
    pq.write_table(table, file)
    return file


def with_column(name, values):
    def change(table):
        index = table.schema.get_field_index(name)
        return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))

    return change


def with_shard(**values):
    def change(table):
        rows = table["shards"].to_pylist()
        rows[0][0] |= values
        return with_column("shards", rows)(table)

    return change


def as_text(name, table):
    index = table.schema.get_field_index(name)
    return table.set_column(index, name, table[name].cast(pa.string()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["forward_ms"]), "forward_ms: column is missing"),
        (
            lambda table: table.append_column("extra", [[1]]),
            "extra: column is missing, there twice or not",
        ),
        (
            lambda table: as_text("num_rounds", table),
            "num_rounds: column is missing, there twice or not of this schema",
        ),
        (lambda table: with_column("shards", [[None]])(table), "shards: must not be null"),
        (
            lambda table: table.replace_schema_metadata({b"autoshard.schema": b"autoshard.samples/9"}),
            "schema: must be autoshard.samples/6, got autoshard.samples/9; collect into another folder",
        ),
        (lambda table: table.replace_schema_metadata(None), "got none"),
        (with_column("forward_ms", [float("nan")]), "forward_ms: must be a number of at least 0, got "),
        (with_column("backward_ms", [-1.0]), "backward_ms: must be a number of at least 0, got "),
        (with_column("reference_forward_ms", [0.0]), "reference_forward_ms: must be a number in [1e-06, 1e+08], got 0"),
        (with_column("num_rounds", [0]), "num_rounds: must be above 0"),
        (with_column("num_attempts", [0]), "num_attempts: must be above 0"),
        (with_column("sm_clock_mhz", [float("inf")]), "sm_clock_mhz: must be a number of at least 0"),
        (with_column("device", [None]), "device: must not be null"),
        (with_shard(pooling="max"), 'shards.pooling: must be one of sum, mean, sequence; got "max"'),
        (with_shard(num_embeddings=0), "shards.num_embeddings: must be at least 1, got 0"),
        (with_shard(pooling_factor=-1.0), "shards.pooling_factor: must be a number of at least 0, got -1.0"),
        (with_shard(cache_bytes=-1), "shards.cache_bytes: must be at least 0, got -1"),
        (with_shard(table=None), "shards.table: must not be null"),
        (with_shard(num_distinct=9), "shards: has an impossible measured batch"),
        (with_shard(reuse_bins=[1.0]), "shards: has an impossible measured batch"),
        (with_shard(access_ranks=[0.0, 100.0], access_cumulative=[0.0, 0.5]), "knots: must end at"),
        (with_shard(access_ranks=[0.0, 50.0], access_cumulative=[0.0, 1.0]), "shards.access_ranks: describes 50 rows"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(change, message, tmp_path):
    file = rewritten(write_samples(tmp_path, [sample_of()]), change)
    with pytest.raises(FormatError) as raised:
        read_samples(tmp_path)
    assert str(raised.value).startswith(f"{file}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"PAR1 this is no Parquet file PAR1", None])
def test_a_damaged_file_is_an_error_that_names_it(content, tmp_path):
    file = write_samples(tmp_path, [sample_of()])
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(FormatError, match="is no Parquet file, or is damaged") as raised:
        read_samples(tmp_path)
    assert str(raised.value).startswith(f"{file}: ")


def test_a_store_of_files_without_samples_is_an_error(tmp_path):
    file = write_samples(tmp_path, [sample_of()])
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    with pytest.raises(SampleStoreError, match='has files of device "cpu", but no samples'):
        read_samples(tmp_path)


def test_what_is_no_regular_file_is_refused(tmp_path):
    file = write_samples(tmp_path, [sample_of()])
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SampleStoreError, match="must be a regular file, got a pipe"):
        read_samples(tmp_path)


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_errors_quote_no_bytes_of_damaged_files(tmp_path, place):
    file = write_samples(tmp_path, [sample_of()])
    content = bytearray(file.read_bytes())
    content[place] ^= 0x0F
    file.write_bytes(content)
    try:
        read_samples(tmp_path)
    except (SampleStoreError, FormatError) as error:
        assert str(error).isprintable()  # noqa: PT017 not every byte is looked at


def test_a_copied_file_counts_once(tmp_path):
    file = write_samples(tmp_path, [sample_of(), sample_of(minute=1)])
    file.with_name("part-copied.parquet").write_bytes(file.read_bytes())
    table = read_samples(tmp_path)
    assert [sample.collected_at.minute for sample in table.samples] == [0, 1]
    assert table.num_duplicates == 2


def test_two_samples_with_one_id_are_both_kept_and_found(tmp_path):
    honest = sample_of().identified()
    for index, forward_ms in enumerate((2.0, 2.5)):
        file = write_samples(tmp_path, [replace(honest, forward_ms=forward_ms)])
        file = rewritten(file, with_column("sample_id", [honest.sample_id]))
        file.rename(file.with_name(f"part-{index}.parquet"))
    table = read_samples(tmp_path)
    assert table.num_duplicates == 0
    assert [sample.forward_ms for sample in damaged_samples(table.samples)] == [2.5]


def test_a_set_is_known_whatever_its_order_and_names():
    few, many = make.held("few", 100), make.held("many", 200)
    set_id = sample_of(few, many).identified().set_id
    assert sample_of(many, few, forward_ms=9.0).identified().set_id == set_id
    assert sample_of(make.held("x", 200), make.held("y", 100)).identified().set_id == set_id
    assert set_id == set_id_of((few, many), device="cpu", num_threads=1)
    others = [
        sample_of(few, many, many),
        sample_of(few, make.held("many", 200, access=AccessProfile.zipf(200, 1.04))),
        sample_of(few, make.held("many", 200, cache_bytes=1)),
        sample_of(few, many, num_threads=2),
        sample_of(few, many, device="h200"),
    ]
    assert len({set_id, *(sample.identified().set_id for sample in others)}) == 6


def test_measured_sets_are_counted_by_machine_and_software(tmp_path):
    assert measured_sets(tmp_path / "missing") == {}
    first, other, elsewhere = sample_of(), sample_of(make.held("t1", 7)), sample_of(device="h200", device_name="H200")
    write_samples(tmp_path, [first, other])
    write_samples(tmp_path, [sample_of(minute=1), sample_of(minute=2, torch_version="2.14.0")])
    write_samples(tmp_path, [elsewhere])
    one, two, three = (sample.identified().set_id for sample in (first, other, elsewhere))
    write_samples(tmp_path, [sample_of(minute=3, cache_bytes=2**23)])
    unknown = ("", 0, 0)
    assert measured_sets(tmp_path) == {
        (one, "A processor", *unknown, "2.13.0+cpu", "1.8.0"): 2,
        (two, "A processor", *unknown, "2.13.0+cpu", "1.8.0"): 1,
        (one, "A processor", *unknown, "2.14.0", "1.8.0"): 1,
        (one, "A processor", "", 0, 2**23, "2.13.0+cpu", "1.8.0"): 1,
        (three, "H200", *unknown, "2.13.0+cpu", "1.8.0"): 1,
    }
    assert {found.machine.cache_bytes for found in measured_sets(tmp_path)} == {0, 2**23}


def test_only_old_temporary_files_of_ours_are_removed(tmp_path):
    folder = write_samples(tmp_path, [sample_of()]).parent
    old, young, foreign = folder / f".{'0f' * 8}.tmp", folder / f".{'1e' * 8}.tmp", folder / ".other.tmp"
    for file in (old, young, foreign):
        file.write_bytes(b"half")
    for file in (old, foreign):
        os.utime(file, (time.time() - 7200,) * 2)
    assert KERNEL_SAMPLES.remove_leftovers(tmp_path) == (old,)
    assert young.exists()
    assert foreign.exists()
    assert len(read_samples(tmp_path)) == 1


def test_a_killed_writers_temporary_file_is_one_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: os._exit(9))
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    pid = os.fork()
    if pid == 0:
        write_samples(tmp_path, [sample_of()])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    monkeypatch.undo()
    (left,) = (file for file in tmp_path.rglob("*") if file.is_file())
    os.utime(left, (0, 0))
    assert KERNEL_SAMPLES.remove_leftovers(tmp_path) == (left,)


def test_equal_shards_are_rebuilt_once(tmp_path):
    write_samples(tmp_path, [sample_of(), sample_of(minute=1)])
    write_samples(tmp_path, [sample_of(minute=2)])
    held = [sample.shards[0].shard for sample in read_samples(tmp_path).samples]
    assert held[0] is held[1] is held[2]


def test_replicas_write_the_rows_that_were_hit_in_samples_that_say_so(tmp_path):
    replica = replace(make.held(), update=Update.ALL_REDUCED)
    shards = (replica, make.held("t1"))
    old, new = sample_of(*shards).identified(), sample_of(*shards, sums_hit_rows=True).identified()
    # Three distinct rows: their sums, and six writes of an update. Sets are the same, whatever was measured of them.
    assert [one.num_gradient_rows for one in new.local_shards] == [21.0, 0.0]
    assert [one.num_gradient_rows for one in old.local_shards] == [replica.num_embeddings, 0.0]
    assert new.set_id == old.set_id
    assert new.sample_id != old.sample_id
    # Three distinct rows of its own, and 40 that any rank hits: those of all are summed and updated.
    shared = sample_of(*shards, sums_hit_rows=True, updated_rows=(40, 0)).identified()
    assert [one.num_gradient_rows for one in shared.local_shards] == [3 + 7 * 40.0, 0.0]
    assert shared.set_id == old.set_id
    path = write_samples(tmp_path, [old, new, shared])
    assert [one.sums_hit_rows for one in read_sample_file(path)] == [False, True, True]
    assert [one.updated_rows for one in read_sample_file(path)] == [(), (), (40, 0)]
    for rows, message in (
        ((40,), "one for each of 2 shards, got 1"),
        ((10**9, 0), "rows of the shard, got 1000000000"),
    ):
        with pytest.raises(FormatError, match=message):
            sample_of(*shards, updated_rows=rows)


def test_samples_of_earlier_versions_are_read():
    folder = Path(__file__).parents[2] / "docs/data/samples/device=cpu"
    versions = {pq.read_schema(path).metadata[b"autoshard.schema"]: path for path in folder.glob("*.parquet")}
    assert versions.keys() <= {b"autoshard.samples/2", b"autoshard.samples/3"}
    assert not any(one.sums_hit_rows for path in versions.values() for one in read_sample_file(path))
