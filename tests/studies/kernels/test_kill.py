import json
import subprocess
import sys

import pytest

from autoshard.core.errors import InvalidOptionError
from autoshard.formats.stores.sample_store import damaged_samples
from autoshard.formats.stores.samples import read_samples
from bench.collecting.kernels import KernelKind
from bench.sampling.stream import SetSource, stream_sets
from studies.kernels.kill_test import KillTestOptions, StoreWatch
from tests import builders as make


def run(*arguments):
    command = [sys.executable, "-W", "ignore", "-m", "studies", "kill-test", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def check_kills(result, times):
    assert len(result["kills"]) == times
    assert result["num_samples"] > 0
    assert result["moments"]["writing"] >= times // 3


def lost(result, store):
    """Faults, damaged samples, and how many samples are gone."""
    table = read_samples(store)
    return result["faults"], damaged_samples(table.samples), max(0, result["num_samples"] - len(table))


def test_killed_collectors_lose_nothing(tmp_path):
    result = run("--times", "2", "--store", str(tmp_path / "store"))
    check_kills(result, 2)
    assert lost(result, tmp_path / "store") == ([], (), 0)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_fifty_kills_lose_nothing(tmp_path):
    result = run("--times", "50", "--store", str(tmp_path / "store"), "--seed", "1")
    check_kills(result, 50)
    assert lost(result, tmp_path / "store") == ([], (), 0)
    assert set(result["moments"]) == {"starting", "running", "writing"}


@pytest.fixture
def watched(harness, tmp_path):
    source = SetSource(tables=make.tables(*(make.table(f"t{index}", 20 + index) for index in range(8))), max_tables=3)
    sets = stream_sets(source, seed=0, weights={"random": 1.0})
    done = KernelKind.collect(harness, sets, tmp_path, num_samples=2)
    watch = StoreWatch(tmp_path)
    assert watch.check() == ((), 0)
    assert watch.check_as_read() == ()
    return watch, done.files[0]


def test_a_lost_file_is_noticed(watched):
    watch, file = watched
    watch.promise("part-never-written.parquet")
    file.rename(file.with_name(".0123456789abcdef.tmp"))
    assert watch.check() == ((f"{file.name} was lost", "part-never-written.parquet was lost"), 1)


@pytest.mark.smoke
def test_a_truncated_file_is_noticed(watched):
    watch, file = watched
    copy = file.with_name("part-20260102T120000123456-0123456789ab.parquet")
    copy.write_bytes(file.read_bytes()[:-20])
    (fault,), _ = watch.check()
    assert "is no Parquet file, or is damaged" in fault


def test_a_foreign_file_is_noticed(watched):
    watch, file = watched
    file.with_name("part-half.parquet.tmp").write_bytes(b"")
    assert watch.check() == (("part-half.parquet.tmp is no file of a store",), 0)


def test_samples_that_are_gone_are_noticed(watched):
    watch, file = watched
    copy = file.with_name("part-20260102T120000123456-0123456789ab.parquet")
    file.rename(copy)
    assert watch.check()[0] == (f"{file.name} was lost",)


def test_a_store_in_use_is_refused(tmp_path):
    (tmp_path / "something").write_text("")
    with pytest.raises(InvalidOptionError, match="must be missing or an empty folder"):
        KillTestOptions(store=tmp_path)
