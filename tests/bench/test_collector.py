import signal
import subprocess
import sys
import time
from itertools import islice

import pytest

from autoshard.core.errors import SampleStoreError
from autoshard.formats.samples import read_samples
from bench.collector import collect_samples
from bench.sampling import ChosenSet, choose_sets

ENDLESS = """
import sys
from pathlib import Path
from autoshard.core import AccessProfile, LocalShard
from bench.collector import collect_samples
from bench.devices import find_device
from bench.harness import Harness, Settings
from bench.sampling import choose_sets
from bench.timing import RoundSettings

pool = [
    LocalShard(table=f"t{index}", num_embeddings=100, embedding_dim=8, num_bags=16, pooling_factor=2.0,
               access=AccessProfile.uniform(100))
    for index in range(5)
]
rounds = RoundSettings(num_warmup=0, num_measured=1, num_dropped=0, flush_every_run=False)
harness = Harness(find_device("cpu"), Settings(rounds=rounds, max_group_sets=2, max_bytes=2**24, reference_bags=8))
collect_samples(harness, choose_sets(pool, max_tables=3, seed=0), Path(sys.argv[1]), seconds_per_file=0.0)
"""


@pytest.fixture
def pool(make_shard):
    return [make_shard(f"t{index}", 20 + index) for index in range(8)]


def test_samples_are_appended(harness, pool, tmp_path):
    advanced = []
    for seed in (0, 1):
        sets = choose_sets(pool, max_tables=3, seed=seed)
        done = collect_samples(
            harness, sets, tmp_path, num_samples=6, advance=lambda count, seconds: advanced.append((count, seconds))
        )
        assert done.num_samples == 6
    assert [count for count, _ in advanced] == [4, 2, 4, 2]
    assert all(seconds > 0 for _, seconds in advanced)
    table = read_samples(tmp_path)
    assert len(table) == 12
    assert len({sample.sample_id for sample in table.samples}) == 12
    assert not table.damaged()
    expected = [chosen for seed in (0, 1) for chosen in islice(choose_sets(pool, max_tables=3, seed=seed), 6)]
    assert [sample.local_shards for sample in table.samples] == [chosen.shards for chosen in expected]
    assert [sample.source for sample in table.samples] == [chosen.source for chosen in expected]
    sample = table.samples[0]
    assert (sample.device, sample.num_threads, sample.num_rounds) == ("cpu", 1, 3)
    assert sample.device_name
    assert sample.torch_version
    assert sample.fbgemm_version != "unknown"


def test_time_ends_a_run_after_the_group_in_hand(harness, pool, tmp_path):
    done = collect_samples(harness, choose_sets(pool, max_tables=3, seed=0), tmp_path, seconds=1e-9)
    assert done.num_samples == 4
    assert len(done.files) == 1


def test_what_was_measured_before_an_error_is_kept(harness, pool, tmp_path):
    sets = [ChosenSet(shards=(pool[0],), source="random")] * 4

    def interrupted():
        yield from sets
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_samples(harness, interrupted(), tmp_path)
    assert len(read_samples(tmp_path)) == 4


def test_a_store_that_cannot_be_written_is_an_error(harness, pool, tmp_path):
    blocked = tmp_path / "store"
    blocked.write_text("a file")
    with pytest.raises(SampleStoreError, match="store"):
        collect_samples(harness, choose_sets(pool, max_tables=3, seed=0), blocked, num_samples=1)


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
    assert len(table) >= 4
    assert not table.damaged()
