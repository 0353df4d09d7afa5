"""Starting processes, following them, and leaving none behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.core import DenseLayers
from autoshard.core.errors import ExecutionError, FormatError, InputError, InvalidOptionError, InvalidPlanError
from autoshard.formats import write_plan
from autoshard.runtime import RunRequest, run_requests
from autoshard.runtime.processes import launch
from autoshard.runtime.processes.job import ErrorRecord
from autoshard.runtime.processes.launch import FORKED, LOCAL, LocalLauncher, failure, last_words
from autoshard.runtime.result_json import RUN
from tests import builders as make

FOREVER = 1_000_000


def run_plan(path, nproc, steps=20, *, timeout_s=600, on_progress=None, launcher=LOCAL, **options):
    request = RunRequest(plan_path=str(path), steps=steps, **options)
    return run_requests([request], nproc, timeout_s=timeout_s, on_progress=on_progress, launcher=launcher)[0]


@pytest.fixture
def plan():
    return make.table_wise_plan([make.table(f"t{index}") for index in range(3)], [0, 1, 1])


@pytest.fixture
def plan_path(plan, tmp_path):
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    return path


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """Where runs keep their files; its name is on the command line of every process of a run."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def processes_of(folder):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:  # it ended meanwhile
                continue
            if str(folder).encode() in command:
                found.append(int(entry.name))
    return found


def worker(folder, rank):
    return int(next(folder.glob(f"*/pid.{rank}")).read_text())


def test_the_launching_process_does_without_torch():
    code = "import sys, autoshard.runtime; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_a_run_measures_and_reports_and_its_workers_find_a_checkout_that_nobody_has_installed(
    plan_path, run_folder, monkeypatch
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    heard, environments = [], set()

    def hear(progress):
        heard.append(progress)
        if environments:  # a process may end in between later
            return
        environments.update((Path("/proc") / str(pid) / "environ").read_bytes() for pid in processes_of(run_folder))

    result = run_plan(plan_path, 2, steps=3, warmup_steps=1, batch_size=12, on_progress=hear)
    assert any(f"PYTHONPATH={Path(__file__).parents[2]}\0".encode() in environment for environment in environments)
    assert [progress.done for progress in heard] == [1, 2, 3, 4]
    assert {progress.total for progress in heard} == {4}
    assert (result.batch_size, result.steps, result.num_processes) == (12, 3, 2)
    assert not result.folded
    assert result.step_ms > 0
    assert result.samples_per_s == pytest.approx(12 / result.step_ms * 1e3)
    assert result.balance == pytest.approx(
        min(rank.kernel_ms for rank in result.ranks) / max(rank.kernel_ms for rank in result.ranks)
    )
    assert result.verification is None
    written = json.dumps(RUN.to_json(result), allow_nan=False)
    assert RUN.from_json(json.loads(written)) == result
    assert list(run_folder.iterdir()) == []


def test_the_last_exception_is_what_a_process_said():
    torchrun = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    lines = ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'x'", torchrun, "=" * 60]
    assert last_words("\n".join(lines)) == "ModuleNotFoundError: No module named 'x'"
    assert last_words("[rank1]: ValueError: no\nnothing else\n====") == "[rank1]: ValueError: no"
    assert (last_words("first\n\nlast\n---"), last_words("")) == ("last", "it said nothing")


@pytest.mark.slow
def test_a_plan_is_verified_on_one_process(plan_path):
    verification = run_plan(plan_path, 1, 1, verify_steps=2).verification
    assert verification.steps == 2
    assert 0 <= verification.max_error <= 5e-6


@pytest.mark.parametrize(
    ("launcher", "starter"),
    [(LOCAL, "forking"), pytest.param(LocalLauncher(), "torch.distributed.run", marks=pytest.mark.slow)],
)
def test_a_killed_worker_is_named_and_its_peers_end(plan_path, run_folder, launcher, starter):
    """Processes of a CPU are forked; torchrun starts those of GPUs, and can start all."""
    commands = set()

    def kill(_):
        if commands:  # there may be more progress before it is seen to be gone
            return
        commands.update((Path("/proc") / str(pid) / "cmdline").read_bytes() for pid in processes_of(run_folder))
        os.kill(worker(run_folder, 1), signal.SIGKILL)

    with pytest.raises(ExecutionError, match=r"^process 1 was killed by signal 9 \(SIGKILL\)$"):
        run_plan(plan_path, 2, FOREVER, on_progress=kill, launcher=launcher)
    assert any(starter.encode() in command for command in commands)
    assert processes_of(run_folder) == []


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "expected"),
    [
        ({"auto"}, False, FORKED),
        ({"auto"}, True, LOCAL),
        ({"cpu", "auto"}, True, FORKED),
        ({"cuda"}, False, LOCAL),
        ({"cuda", "auto"}, True, LOCAL),
    ],
)
def test_processes_of_a_cpu_are_forked(plan_path, tmp_path, monkeypatch, wanted, has_gpu, expected):
    """CUDA cannot be used in a process forked from one that has used it, and FBGEMM's import might."""
    (tmp_path / ("nvidia0" if has_gpu else "nvidiactl")).touch()
    monkeypatch.setattr(launch, "_DEVICES", tmp_path)
    started = []

    def start(*_, launcher, **__):
        started.append(launcher)
        raise ExecutionError("not started")

    monkeypatch.setattr(launch, "running_workers", start)
    with pytest.raises(ExecutionError, match="not started"):
        run_requests([RunRequest(plan_path=str(plan_path), steps=1, device=device) for device in sorted(wanted)], 2)
    assert started == [expected]


@pytest.mark.slow
def test_an_interrupt_ends_every_process(plan_path, run_folder):
    seen = []

    def interrupt(_):
        seen.extend(processes_of(run_folder))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(plan_path, 2, FOREVER, on_progress=interrupt)
    assert len(seen) == 3  # the one that forks, and two workers
    assert processes_of(run_folder) == []
    assert list(run_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ("process 3 was killed", "process 3 was killed by signal 9 (SIGKILL)"),
        ("process 3 has given no sign of life for 15 s", "process 3 has given no sign of life for 15 s"),
        (None, "process 3 was killed by signal 9 (SIGKILL)"),
    ],
)
def test_what_torchrun_saw_and_what_processes_told_each_other_make_one_line(tmp_path, told, text):
    (tmp_path / "stderr").write_text("  rank      : 3 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n", encoding="utf-8")
    kind = "RuntimeError" if told is None else ExecutionError.kind
    record = ErrorRecord(time_s=1.0, kind=kind, message=told or "Connection closed by peer")
    (tmp_path / "error.0.json").write_text(json.dumps(record.to_json()), encoding="utf-8")
    assert str(failure(tmp_path, 1)) == text


def test_a_run_that_takes_too_long_is_ended(plan_path, run_folder):
    with pytest.raises(ExecutionError, match=r"^the run did not end within 0.5 s and was stopped$"):
        run_plan(plan_path, 2, FOREVER, timeout_s=0.5)
    assert processes_of(run_folder) == []


@pytest.mark.slow
def test_workers_end_when_the_process_that_started_them_is_killed(plan_path, run_folder):
    request = f"RunRequest(plan_path={str(plan_path)!r}, steps={FOREVER})"
    code = f"from autoshard.runtime import RunRequest, run_requests; run_requests([{request}], 2)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2]) as launching:
        while len(list(run_folder.glob("*/pid.*"))) < 2:
            assert launching.poll() is None
            time.sleep(0.1)
        launching.kill()
    while processes_of(run_folder):  # pytest's own timeout ends this if they stay
        time.sleep(0.1)


def test_an_error_in_a_worker_comes_back_as_it_was(plan, tmp_path):
    dense = DenseLayers(num_dense_features=2, bottom_mlp=(4,), top_mlp=(2,))
    path = tmp_path / "bad.json"
    write_plan(replace(plan, tables=replace(plan.tables, dense=dense)), path)
    with pytest.raises(InvalidPlanError, match=r"^tables\.dense: of a top perceptron must end in 1, the logit"):
        run_plan(path, 1, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nproc": 3}, r"nproc: must be in \[1, 2\], the plan's ranks; got 3"),
        ({"nproc": 2, "batch_size": 7}, "batch_size: must be a multiple of the 2 processes, got 7"),
        ({"nproc": 2, "engine": "fast"}, 'engine: must be one of thin, torchrec, got "fast"'),
        ({"nproc": 2, "device": "tpu"}, 'device: must be one of auto, cpu, cuda, got "tpu"'),
        ({"nproc": 2, "steps": 0}, "steps: must be a whole number of at least 1, got 0"),
        ({"nproc": 2, "verify_steps": -1}, "verify_steps: must be a whole number of at least 0, got -1"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(plan_path, run_folder, options, text):
    with pytest.raises(InvalidOptionError, match=f"^{text}$"):
        run_plan(plan_path, **options)
    assert list(run_folder.iterdir()) == []


def test_bad_plans_name_their_file(plan, tmp_path):
    with pytest.raises(FormatError, match=r"nowhere.json: cannot be read"):
        run_plan(tmp_path / "nowhere.json", 2)
    torn = tmp_path / "torn.json"
    torn.write_text('{"schema": "autoshard.plan/1"', encoding="utf-8")
    with pytest.raises(InputError, match=r"torn.json"):
        run_plan(torn, 2)
    table = replace(plan.tables.tables[0], embedding_dim=6)
    shard = replace(plan.shards[0].shard, table=table, columns=(0, 6))
    odd = tmp_path / "odd.json"
    write_plan(
        replace(
            plan,
            tables=replace(plan.tables, tables=(table, *plan.tables.tables[1:])),
            shards=(replace(plan.shards[0], shard=shard), *plan.shards[1:]),
        ),
        odd,
    )
    with pytest.raises(InvalidPlanError, match=r"odd.json: shards\[0\].columns: must be a multiple of 4"):
        run_plan(odd, 2)
