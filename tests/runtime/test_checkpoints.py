"""Checkpoints: saved on some processes under some plan, loaded on others under another one."""

import itertools
import os
import random
import signal
import subprocess
import time

import pytest

from tests.ranks import on_ranks, started
from tests.runtime.checkpoint_worker import (
    LAYOUTS,
    check_a_job,
    check_against_undisturbed,
    check_deltas,
    fill_disk,
    load_layouts,
    save_each_step,
    save_layouts,
)

NAMES = list(LAYOUTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of all layouts of 4 processes."""
    folder = tmp_path_factory.mktemp("layouts")
    on_ranks(save_layouts, 4, folder / "4", NAMES)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """And of 2."""
    on_ranks(save_layouts, 2, folder / "2", NAMES)
    return folder


def test_checkpoints_load_under_other_layouts_on_fewer_processes(folder):
    on_ranks(load_layouts, 2, folder, [("4", name, NAMES[(n + 3) % len(NAMES)]) for n, name in enumerate(NAMES)])


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "loading"), [(4, 4), (4, 2), (2, 4), (2, 2)])
def test_all_pairs_of_layouts(both, saving, loading):
    pairs = [(str(saving), one, other) for one, other in itertools.product(NAMES, repeat=2)]
    on_ranks(load_layouts, loading, both, pairs)


def test_a_job_goes_on_as_if_it_had_not_been_interrupted(tmp_path):
    on_ranks(check_a_job, 2, tmp_path)


#: What is held once, in parts of rows and columns, several times, by access rank, in groups that average all rows or
#: those that were updated.
DELTA_LAYOUTS = [
    ("touched_groups",),
    pytest.param(
        ("grid", "row_wise", "column_wise", "data_parallel", "tiers", "row_groups", "replica_groups"),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("layouts", DELTA_LAYOUTS, ids=len)
def test_deltas_hold_the_rows_that_were_updated(tmp_path, layouts):
    on_ranks(check_deltas, 4, tmp_path, layouts)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_disk_keeps_the_last_checkpoint(small_disk, on_error):
    on_ranks(fill_disk, 2, small_disk, on_error)


@pytest.mark.slow
def test_a_job_that_is_killed_while_it_saves_loses_nothing(tmp_path):
    """SIGKILL of all processes at random moments: what was reported is there, and nothing is half there."""
    rng = random.Random(0)
    for _ in range(12):
        job = started(save_each_step, 2, tmp_path)
        while not (tmp_path / "begun").exists():
            assert not job.join(timeout=0.05)
        (tmp_path / "begun").unlink()
        time.sleep(rng.uniform(0, 1.5))
        for process in job.processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in job.processes:
            process.join()
    assert on_ranks(check_against_undisturbed, 2, tmp_path)[0] > 0
