import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, count, islice, repeat

import pyarrow.parquet as pq
import pytest

from autoshard.core.errors import FormatError, InvalidTableError, SampleStoreError
from autoshard.formats.stores.sample_store import damaged_samples
from autoshard.formats.stores.samples import read_samples, write_samples
from bench.collecting.kernels import KernelKind
from bench.collecting.set_queue import StreamPosition
from bench.collecting.store_lock import CollectorBusyError, CollectorLock
from bench.collecting.termination import termination_raised
from bench.kernels.harness import Harness
from bench.measuring.devices import find_device
from bench.sampling.stream import ChosenSet, SetSource, stream_sets
from tests import builders as make

ENDLESS = """
import sys
from pathlib import Path
from autoshard.core import AccessProfile, EmbeddingTable, Feature, TableSet
from bench.collecting.kernels import KernelKind
from bench.measuring.devices import find_device
from bench.kernels.harness import Harness, Settings
from bench.sampling.stream import SetSource, stream_sets
from bench.measuring.timing import RoundSettings

tables = tuple(
    EmbeddingTable(name=f"t{index}", num_embeddings=100, embedding_dim=8, access=AccessProfile.uniform(100),
                   features=(Feature(name=f"f{index}", pooling_factor=2.0),))
    for index in range(5)
)
rounds = RoundSettings(num_warmup=0, num_measured=1, num_dropped=0, flush_every_run=False)
harness = Harness(find_device("cpu"), Settings(rounds=rounds, max_group_sets=2, max_bytes=2**24, reference_bags=8,
                                              max_spread=1e9))
source = SetSource(tables=TableSet(batch_size=16, tables=tables), max_tables=3)
sets = stream_sets(source, seed=0, weights={"random": 1.0})
KernelKind.collect(harness, sets, Path(sys.argv[1]), seconds_per_file=0.0)
"""


@pytest.fixture(scope="module")
def harness(quick_settings):
    """Takes every first measurement as it is: how noisy the machine is shall not matter here."""
    return Harness(find_device("cpu"), replace(quick_settings, max_spread=1e9))


@pytest.fixture
def pool():
    return [make.held(f"t{index}", 20 + index) for index in range(8)]


def stream(seed=0):
    tables = make.tables(*(make.table(f"t{index}", 20 + index) for index in range(8)))
    return stream_sets(SetSource(tables=tables, max_tables=3), seed=seed, weights={"random": 1.0})


def test_samples_are_appended(harness, pool, tmp_path):
    advanced = []
    expected = [ChosenSet(shards=pair, source=f"{pair[0].table}") for pair in islice(combinations(pool, 2), 12)]
    for half in (expected[:6], expected[6:]):
        done = KernelKind.collect(
            harness, iter(half), tmp_path, num_samples=6, advance=lambda count, _: advanced.append(count)
        )
        assert done.num_samples == 6
        assert done.added == Counter(chosen.source for chosen in half)
        assert 0 < done.timed_share < 1
    assert sum(advanced) == 12
    table = read_samples(tmp_path)
    assert len({sample.sample_id for sample in table.samples}) == 12
    assert not damaged_samples(table.samples)
    by_shards = Counter((sample.local_shards, sample.source) for sample in table.samples)
    assert by_shards == Counter((chosen.shards, chosen.source) for chosen in expected)
    sample = table.samples[0]
    assert (sample.device, sample.num_threads, sample.num_rounds) == ("cpu", 1, 3)
    assert sample.device_name
    assert sample.torch_version
    assert sample.fbgemm_version != "unknown"
    assert (sample.sm_clock_mhz, sample.throttle_reasons) == (0.0, "")


def test_sets_that_the_store_holds_are_skipped_but_for_repeats(harness, pool, tmp_path):
    known, new = ChosenSet(shards=tuple(pool[:2]), source="random"), ChosenSet(shards=(pool[2],), source="singles")
    KernelKind.collect(harness, iter([known]), tmp_path)
    # The same set in another order, with other names of tables.
    alike = replace(known, shards=tuple(replace(shard, table="x") for shard in reversed(known.shards)))
    again = replace(known, source="repeat")
    done = KernelKind.collect(harness, iter([alike, known, new, new, again]), tmp_path)
    assert done.added == {"singles": 1, "repeat": 1}
    assert done.skipped == {"random": 2, "singles": 1}


def test_sets_of_another_machine_or_software_are_measured_again(harness, pool, tmp_path):
    known = ChosenSet(shards=(pool[0],), source="random")
    KernelKind.collect(harness, iter([known]), tmp_path / "here")
    (sample,) = read_samples(tmp_path / "here").samples
    for name in ("core", "torch_version", "fbgemm_version"):
        write_samples(tmp_path / name, [replace(sample, **{name: "another"})])
        assert KernelKind.collect(harness, iter([known]), tmp_path / name).added == {"random": 1}


def test_a_run_goes_on_where_the_last_one_ended(harness, tmp_path):
    file = tmp_path / "position.json"
    expected = list(islice(stream(), 36))  # with a repeat among them
    for number in (12, 24):
        position = StreamPosition(file)
        sets = islice(stream(), position.start, None)
        done = KernelKind.collect(harness, sets, tmp_path / "store", num_samples=number, position=position)
        assert done.num_samples == number
    measured = [(sample.local_shards, sample.source) for sample in read_samples(tmp_path / "store").samples]
    seen, distinct = set(), []
    for chosen in islice(stream(), StreamPosition(file).start):
        mark = frozenset(shard.table for shard in chosen.shards)
        if chosen.source == "repeat" or mark not in seen:
            distinct.append((chosen.shards, chosen.source))
        seen.add(mark)
    assert Counter(measured) == Counter(distinct)
    assert "repeat" in {source for _, source in measured}
    assert len(expected) <= StreamPosition(file).start


def test_a_lost_position_costs_no_more_than_time(harness, tmp_path):
    KernelKind.collect(harness, stream(), tmp_path, num_samples=20)
    done = KernelKind.collect(harness, stream(), tmp_path, num_samples=5)
    assert done.skipped["random"] >= 20
    ids = [sample.set_id for sample in read_samples(tmp_path).samples if sample.source != "repeat"]
    assert len(ids) == len(set(ids))


def test_a_stream_without_anything_new_ends(harness, pool, tmp_path):
    only = ChosenSet(shards=(pool[0],), source="random")
    done = KernelKind.collect(harness, repeat(only), tmp_path, num_samples=3)
    assert done.added == {"random": 1}
    assert done.skipped["random"] >= 10_000


@pytest.mark.parametrize(
    "content", ["", "[]", '{"start": -1, "done": []}', '{"start": 1}', '{"start": 1, "done": ["a"]}']
)
def test_a_damaged_position_is_an_error(content, tmp_path):
    file = tmp_path / "position.json"
    file.write_text(content)
    with pytest.raises(FormatError, match="is no position of a stream; remove it") as raised:
        StreamPosition(file)
    assert raised.value.source == str(file)


def test_sets_that_cannot_be_measured_are_counted(harness, pool, tmp_path):
    too_large = make.held("large", 2**22, embedding_dim=64)
    odd = make.held("odd", embedding_dim=6)
    sets = [ChosenSet(shards=(shard,), source=shard.table) for shard in (pool[0], too_large, pool[1], odd, pool[2])]
    done = KernelKind.collect(harness, iter(sets), tmp_path, num_samples=3)
    assert done.added == {"t0": 1, "t1": 1, "t2": 1}
    assert done.failed == {"large": 1, "odd": 1}
    assert len(done.reasons) == 2
    assert "odd.embedding_dim: must be a multiple of 4" in " ".join(done.reasons)
    assert "more than the" in " ".join(done.reasons)


def test_a_device_that_measures_nothing_ends_the_run(harness, tmp_path):
    odd = (ChosenSet(shards=(make.held(num_embeddings=n, embedding_dim=6),), source="random") for n in count(1))
    with pytest.raises(InvalidTableError, match="embedding_dim"):
        KernelKind.collect(harness, odd, tmp_path, num_samples=3)


def test_time_ends_a_run_after_the_group_in_hand(harness, tmp_path):
    done = KernelKind.collect(harness, stream(), tmp_path, seconds=1e-9)
    assert 1 <= done.num_samples <= 8
    assert len(done.files) == 1


def test_a_store_of_another_version_is_refused_before_anything_is_measured(harness, tmp_path):
    file = KernelKind.collect(harness, stream(), tmp_path, num_samples=1).files[0]
    pq.write_table(pq.read_table(file).replace_schema_metadata({b"autoshard.schema": b"autoshard.samples/1"}), file)
    advanced = []
    with pytest.raises(FormatError, match=r"must be autoshard\.samples/6, got autoshard\.samples/1; collect"):
        KernelKind.collect(harness, stream(), tmp_path, num_samples=1, advance=lambda *_: advanced.append(1))
    assert advanced == []


def test_a_full_disk_is_an_error_and_loses_nothing(harness, tmp_path):
    """On a real small file system where one can be mounted, else with the largest file's size limited."""
    store = tmp_path / "store"
    with small_disk(store) as fill:
        kept = KernelKind.collect(harness, stream(), store, num_samples=4)
        before = read_samples(store).samples
        fill()
        with pytest.raises(SampleStoreError, match=r"cannot be written: (no space left on device|file too large)"):
            KernelKind.collect(harness, stream(seed=1), store, num_samples=40)
        assert read_samples(store).samples == before
        assert not damaged_samples(read_samples(store).samples)
        assert [file for file in store.rglob("*") if file.is_file() and file.name != "filling"] == list(kept.files)


@contextmanager
def small_disk(folder):
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return

    def fill():
        free = os.statvfs(folder)
        (folder / "filling").write_bytes(bytes(free.f_bavail * free.f_frsize - 4096))

    try:
        yield fill
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_what_was_measured_before_an_error_is_kept(harness, pool, tmp_path):
    sets = [ChosenSet(shards=(shard,), source="random") for shard in pool[:4]]

    def interrupted():
        yield from sets
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        KernelKind.collect(harness, interrupted(), tmp_path)
    assert len(read_samples(tmp_path)) == 4


def test_sigterm_ends_a_run_and_what_was_measured_is_written(harness, tmp_path):
    def terminate(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with termination_raised():
        done = KernelKind.collect(harness, stream(), tmp_path, num_samples=40, advance=terminate)
    assert signal.getsignal(signal.SIGTERM) is before
    assert done.is_terminated
    assert done.num_samples == len(read_samples(tmp_path)) == 1


def test_a_lock_ends_with_its_holder(tmp_path):
    code = (
        "import sys, time; from bench.collecting.store_lock import CollectorLock; "
        "CollectorLock(sys.argv[1], 'x').__enter__()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print('held', flush=True); time.sleep(600)", str(tmp_path)],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(CollectorBusyError, match=f"another collector \\(process {holder.pid}\\) is measuring"):
            CollectorLock(tmp_path, "x").__enter__()
        with CollectorLock(tmp_path, "another device"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with CollectorLock(tmp_path, "x"):
        pass


def test_a_lock_in_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(SampleStoreError, match="cannot be written"):
        CollectorLock(tmp_path / "store", "x").__enter__()


def test_a_store_that_cannot_be_written_is_an_error(harness, tmp_path):
    blocked = tmp_path / "store"
    blocked.write_text("a file")
    with pytest.raises(SampleStoreError, match="store"):
        KernelKind.collect(harness, stream(), blocked, num_samples=1)


def test_a_killed_run_leaves_what_it_wrote(tmp_path):
    store = tmp_path / "store"
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", ENDLESS, str(store)])
    try:
        deadline = time.monotonic() + 120
        while len(list(store.glob("device=cpu/part-*.parquet"))) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    table = read_samples(store)
    assert len(table) >= 2
    assert not damaged_samples(table.samples)
