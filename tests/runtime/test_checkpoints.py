"""Checkpoints: saved on some processes under some plan, loaded on others under another one."""

import itertools
import os
import random
import signal
import subprocess
import time

import pytest
import torch

from autoshard.core.errors import InputError
from autoshard.runtime.checkpoints import Checkpoints
from autoshard.runtime.checkpoints.exchange import export_weights
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from tests import builders as make
from tests.ranks import on_ranks, started
from tests.runtime.checkpoint_worker import (
    LAYOUTS,
    check_a_job,
    check_against_undisturbed,
    check_deltas,
    check_shared,
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


@pytest.mark.parametrize("num_processes", [1, 2])
def test_embeddings_and_layers_that_parts_of_a_model_share_are_saved_and_loaded(tmp_path, num_processes):
    on_ranks(check_shared, num_processes, tmp_path)


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


@pytest.mark.usefixtures("one_process")
def test_tables_of_one_name_are_saved_and_loaded_whole_and_refused_in_deltas_and_exports(tmp_path, monkeypatch):
    plan = make.table_wise_plan([make.table("t", 6, 4)], [0], world_size=1)

    def opened():
        return {name: ShardedEmbeddings(plan, settings) for name in ("online", "target")}

    settings = FusedSettings(learning_rate=0.1, marks_rows=True)
    saved, loaded = opened(), opened()
    for value, one in enumerate(saved.values()):
        one.load_weights("t", torch.full((6, 4), float(value)))
    told = r"^t: is there twice, as online\.tables\.t and target\.tables\.t, which deltas and exported weights do not"
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved, plan=plan)
        with pytest.raises(InputError, match=told):
            checkpoints.save(2, saved, plan=plan, delta=True)
        checkpoints.latest().load(loaded)
        assert [one.table_state("t").weights_ND.unique().tolist() for one in loaded.values()] == [[0.0], [1.0]]
        with pytest.raises(InputError, match=told):
            export_weights(checkpoints.latest(), tmp_path / "weights.safetensors")
        # One that was written all the same is not read.
        monkeypatch.setattr("autoshard.runtime.checkpoints.checkpoints.check_told_apart", lambda _: None)
        for step in (2, 3):
            checkpoints.save(step, saved, plan=plan, delta=True)
        checkpoints.wait()
        with pytest.raises(InputError, match=told):
            checkpoints.latest().load(loaded)


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
