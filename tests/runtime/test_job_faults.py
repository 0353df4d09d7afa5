"""Training jobs whose processes are killed, stopped or run out of memory, and go on."""

import os
import resource
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.core.errors import DivergedError, ExecutionError, InvalidOptionError
from autoshard.runtime import run_requests
from tests.runtime.test_launch import processes_of, worker
from tests.runtime.test_training_loop import job, last_files

__all__ = ["job"]  # a fixture


@pytest.fixture
def run_folder(monkeypatch):
    """Where runs keep their files, short enough for sockets; it is on the command line of every process of a run."""
    with tempfile.TemporaryDirectory(prefix="runs-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


class Once:
    """Does something when so many steps were made, once."""

    def __init__(self, done, act):
        self.done, self.act, self.at = done, act, None

    def __call__(self, progress):
        if progress.done >= self.done and self.at is None:
            self.at = time.monotonic()
            self.act()


@pytest.mark.slow
def test_a_killed_job_restarts_at_the_exact_sample(job, tmp_path, run_folder):
    (whole,) = run_requests([replace(job, checkpoints_path=str(tmp_path / "whole"))], 2)
    restarts = []
    kill = Once(13, lambda: os.kill(worker(run_folder, 1), signal.SIGKILL))
    (result,) = run_requests([job], 2, on_progress=kill, max_restarts=2, on_restart=restarts.append)
    (restart,) = restarts
    assert str(restart.error) == "process 1 was killed by signal 9 (SIGKILL)"
    assert (restart.number, restart.nproc, result.job.restarts) == (1, 2, 1)
    assert result.job.resumed_from in (5, 10, 15)
    assert result.last_loss == whole.last_loss
    assert last_files(tmp_path / "job") == last_files(tmp_path / "whole")
    assert processes_of(run_folder) == []


@pytest.mark.slow
def test_a_restart_may_have_fewer_processes_down_to_the_least(job, tmp_path, run_folder):
    (whole,) = run_requests([replace(job, checkpoints_path=str(tmp_path / "whole"))], 1)
    restarts = []

    def kill(progress):
        if progress.done % 12 == 0 and len(restarts) < 2:
            os.kill(worker(run_folder, 0), signal.SIGKILL)

    (result,) = run_requests([job], 3, on_progress=kill, max_restarts=5, least_nproc=2, on_restart=restarts.append)
    assert [restart.nproc for restart in restarts] == [2, 2]
    assert (result.num_processes, result.job.trained_steps) == (2, 32)
    assert result.last_loss == pytest.approx(whole.last_loss, abs=1e-6)


@pytest.mark.slow
def test_a_stopped_process_ends_the_job_within_half_a_minute_by_its_name(job, run_folder):
    stop = Once(6, lambda: os.kill(worker(run_folder, 1), signal.SIGSTOP))
    with pytest.raises(ExecutionError, match=r"^process 1 has given no sign of life for 1\d s$"):
        run_requests([replace(job, epochs=100_000)], 2, on_progress=stop)
    assert time.monotonic() - stop.at < 30
    assert processes_of(run_folder) == []


@pytest.mark.slow
def test_a_process_out_of_memory_ends_the_job_by_its_name(job, run_folder):
    def limit():
        pid = worker(run_folder, 1)
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))

    short = Once(6, limit)
    # A process that was forked has what a step needs; it is the next checkpoint that gets no memory.
    ended = r"^process 1(:| was killed by signal)|^checkpoint .*: cannot allocate memory \(process 1\)"
    with pytest.raises(ExecutionError, match=ended):
        run_requests([replace(job, epochs=100_000)], 2, on_progress=short)
    assert time.monotonic() - short.at < 30
    assert processes_of(run_folder) == []


def test_a_job_that_is_to_stop_saves_and_goes_on_later(job, tmp_path, run_folder):
    stop = threading.Event()
    (result,) = run_requests([replace(job, epochs=100_000)], 2, on_progress=Once(7, stop.set), stop=stop)
    assert result.job.is_stopped
    assert last_files(tmp_path / "job")[0] == result.job.trained_steps > 7
    assert processes_of(run_folder) == []


def test_a_job_that_diverges_keeps_its_good_checkpoints_and_is_not_restarted(job, tmp_path):
    table = pq.read_table(job.data_path)
    dense = table["int_0"].to_numpy().copy()
    dense[700] = float("nan")  # in step 11
    pq.write_table(table.set_column(table.column_names.index("int_0"), "int_0", pa.array(dense)), job.data_path)
    restarts = []
    with pytest.raises(DivergedError, match=r"^training diverged by step 15: the loss or the dense layers are not"):
        run_requests([replace(job, shuffle=0, keep=1)], 2, max_restarts=2, on_restart=restarts.append)
    assert restarts == []
    assert [path.name[-2:] for path in (tmp_path / "job").glob("step-*")] == ["10"]


def test_processes_that_cannot_run_the_plan_are_refused_before_the_first_start(job):
    with pytest.raises(InvalidOptionError, match=r"nproc: must be in \[1, 4\], the plan's ranks; got 5"):
        run_requests([job], 5, least_nproc=2, max_restarts=1)
