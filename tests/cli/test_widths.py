"""Tables and sentences keep to the width of the terminal or $COLUMNS, without breaking a number or a word."""

import contextlib
import io
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.table import Table

from autoshard.cli import main
from autoshard.console import emit

PROGRAM = Path(sys.executable).with_name("autoshard")
TASK = ("criteo-kaggle", "--topology", "cpu-4", "--time-limit", "0.5")
PLANNERS = "random,cost-greedy,karmarkar-karp"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("widths")
    for planner in ("cost-greedy", "random"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(["plan", *TASK, "--planner", planner, "-o", str(folder / f"{planner}.json")]) == 0
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "doctor",
        "list tables",
        "list topologies",
        "list planners",
        "models",
        "show FOLDER/cost-greedy.json",
        "explain FOLDER/cost-greedy.json --table t2",
        "diff FOLDER/random.json FOLDER/cost-greedy.json",
        "simulate criteo-kaggle --topology zionex --ranks 8,16 --planner cost-greedy",
        f"compare {' '.join(TASK)} --planners {PLANNERS}",
        "plan --help",
        "--help",
    ],
)
def test_no_line_is_too_long_and_no_number_or_word_is_broken(line, files, monkeypatch, run):
    words = line.replace("FOLDER", str(files)).split()
    monkeypatch.setenv("COLUMNS", "1000")
    whole, _ = run(*words)
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        text, _ = run(*words)
        assert max(map(cell_len, text.splitlines())) <= width
        # Help breaks at hyphens; searches of other runs find other numbers.
        if not {"--help", "compare", "explain"} & {*words}:
            # What is longer than a line by itself, such as the path of a file, has to be broken.
            assert {word for word in text.split() if len(word) < width} <= {*whole.split()}


def test_a_terminal_is_obeyed(files):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "dumb"}
    plan = files / "cost-greedy.json"
    command = [PROGRAM, "show", plan]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # Linux ends a terminal so
        while part := os.read(ours, 65536):
            text += part
    assert process.wait(timeout=60) == 0
    lines = text.decode().splitlines()
    assert any(line.startswith("rank  shards") or "90% interval" in line for line in lines)
    assert max(map(cell_len, lines)) <= 80


def wide_table():
    table = Table(box=None, pad_edge=False)
    for name in ("planner", *(f"measured value {number}" for number in range(12))):
        table.add_column(name, justify="right")
    table.add_row("auto, refined", *(f"{1234567.5 + number:,}" for number in range(12)))
    return table


def test_columns_that_do_not_fit_are_put_below(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    emit({}, wide_table(), as_json=False)
    text = capsys.readouterr().out
    assert max(map(cell_len, text.splitlines())) <= 80
    assert {f"{1234567.5 + number:,}" for number in range(12)} <= {*text.split()}
    assert text.count("planner") > 1
    assert text.count("refined") == text.count("planner")


@pytest.mark.parametrize("columns", ["", "0", "wide"])
def test_without_a_width_there_is_a_usual_one(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    emit({}, wide_table(), as_json=False)
    assert 80 < max(map(cell_len, capsys.readouterr().out.splitlines())) <= 160
