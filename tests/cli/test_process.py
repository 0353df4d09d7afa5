"""The program as a process: what it imports, how signals and closed outputs end it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard import cli
from autoshard.planners import registry
from scripts.reference_pages import command_summaries, planner_summaries

PROGRAM = Path(sys.executable).with_name("autoshard")


def start(*arguments, **settings):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
    return subprocess.Popen([PROGRAM, *arguments], **pipes)


def unequal_tables():
    """They are never even on eight ranks, so that a search goes on for as long as it may."""
    table = {"num_embeddings": 1000, "embedding_dim": 64, "dtype": "fp32", "pooling": "sum"}
    tables = [
        table
        | {"name": f"t{index}", "features": [{"name": f"f{index}", "pooling_factor": 10.0 + index**1.5}]}
        | {"access": {"kind": "uniform"}}
        for index in range(25)
    ]
    return {"schema": "autoshard.tables/1", "batch_size": 65536, "tables": tables}


def test_it_is_a_module_of_the_interpreter_at_hand():
    command = [sys.executable, "-m", "autoshard", "plan"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "error: Missing argument 'TABLES'. (see autoshard plan --help)\n"


def test_folders_of_the_same_names_elsewhere_are_not_taken(tmp_path):
    for name in ("bench", "costmodel", "env", "policies", "server"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = start("--help", env=environment, cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "Unavailable" not in out


def files_of(process):
    """Files that a process has mapped: libraries and modules."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "/" in line}


def test_an_interrupt_ends_it_with_130_and_without_a_word(tmp_path):
    task, output = tmp_path / "tables.json", tmp_path / "plan.json"
    task.write_text(json.dumps(unequal_tables()))
    # Shells start their background jobs, this one's parents perhaps, with interrupts ignored.
    heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    settings = ("--time-limit", "60", "--set", "policy=false")  # a policy would import torch
    process = start("plan", str(task), "--topology", "cpu-8", *settings, "-o", str(output), **heeding)
    # It searches, and what other planners import for their starts is there: libraries may lose interrupts meanwhile.
    seen, loaded = set(), files_of(process)
    while not any("compiled/_search" in name for name in loaded) or loaded != seen:
        assert process.poll() is None
        time.sleep(0.5)
        seen, loaded = loaded, files_of(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    assert not output.exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_reason_for_a_traceback(unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    process = start("list", "tables", "--json", stdout=writing, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        process = start("list", "tables", "--json", stdout=full, env=environment)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "error: No space left on device\n"


def test_names_that_the_terminal_cannot_show_are_printed_all_the_same(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = start("show", "café☃.json", env=environment, cwd=tmp_path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.count("\n") == 1
    assert "caf\\xe9" in err


def test_commands_import_only_what_they_use():
    helps = [f"{name} --help" for name in cli.OWN_COMMANDS]
    lines = ("--help", "--version", "train --help", *helps, "list planners", "jobs --server http://127.0.0.1:9")
    code = """
import json, sys
from autoshard.cli import main
codes = []
for line in json.loads(sys.argv[1]):
    codes.append(main(line.split()))
    heavy = {"numpy", "torch", "fbgemm_gpu", "torchrec", "plotly", "pyarrow", "fastapi", "gymnasium"}
    found = {name for name in sys.modules if name.partition(".")[0] in heavy}
    found |= {name for name in sys.modules if name.startswith(("autoshard.planners.", "autoshard.evaluation"))}
    assert not found - {"autoshard.planners.registry"}, (line, found)
print(codes)
"""
    command = [sys.executable, "-c", code, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * (len(lines) - 1) + [1]
    assert "`autoshard serve`" in done.stderr


def test_a_list_of_commands_says_what_the_commands_say():
    assert json.loads(cli.SUMMARIES.read_text(encoding="utf-8")) == json.loads(command_summaries())
    own = json.loads(registry.SUMMARIES.read_text(encoding="utf-8"))
    assert own == json.loads(planner_summaries())
    assert {name.partition(":")[0] for name in own} >= {"autoshard.planners.auto", "policies.planning.planner"}
