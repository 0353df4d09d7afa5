"""What commands say of work that goes on, where lines were asked for."""

import re
import time

import pytest

from autoshard import console


@pytest.fixture
def lines():
    console.print_progress(0.01)
    yield
    console.print_progress(None)


def said(capsys):
    return capsys.readouterr().err.splitlines()


def heard(capsys, enough):
    """Lines until they are enough, by a function of them; pytest's own timeout ends the wait for them."""
    lines = []
    while not enough(lines):
        time.sleep(0.01)
        lines += said(capsys)
    return lines


@pytest.mark.usefixtures("lines")
def test_lines_say_how_much_is_done_and_left(capsys):
    with console.progress("measuring", 40) as advance:
        advance(10)
        lines = heard(capsys, lambda lines: len(lines) > 1)
    assert re.match(r"measuring: 10 of 40 after \d+ s, about \d+ s left", lines[-1])
    said(capsys)  # what came before it ended
    time.sleep(0.05)
    assert said(capsys) == []


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda: console.until("searching", 5000.0), r"searching: \d+ of 5000 s"),
        (lambda: console.working("reading"), r"reading: \d+ s"),
    ],
)
def test_lines_go_on_whatever_the_work_reports(capsys, work, text):
    with work():
        (line, *_) = heard(capsys, bool)
    assert re.fullmatch(text, line)


def test_nobody_asked(capsys):
    with console.progress("measuring", 40), console.until("searching", 5.0), console.working("reading"):
        time.sleep(0.05)
    assert said(capsys) == []


@pytest.mark.usefixtures("lines")
def test_what_another_process_reports_is_not_said_twice(capsys):
    with console.progress("measuring", 40, is_shown=False):
        time.sleep(0.05)
    assert said(capsys) == []
