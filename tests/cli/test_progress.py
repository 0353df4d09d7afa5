"""What commands say of work that goes on, where lines were asked for."""

import time

import pytest

from autoshard import console


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(console, "_line_every_s", None)
    console.print_progress(0.01)


def said(capsys):
    return capsys.readouterr().err.splitlines()


@pytest.mark.usefixtures("lines")
def test_lines_say_how_much_is_done_and_left(capsys):
    with console.progress("measuring", 40) as advance:
        advance(10)
        time.sleep(0.1)
    heard = said(capsys)
    assert len(heard) > 1
    assert heard[-1].startswith("measuring: 10 of 40 after 0 s, about 0 s left")
    time.sleep(0.05)
    assert said(capsys) == []


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda: console.until("searching", 5.0), "searching: 0 of 5 s"),
        (lambda: console.working("reading"), "reading: 0 s"),
    ],
)
def test_lines_go_on_whatever_the_work_reports(capsys, work, text):
    with work():
        time.sleep(0.1)
    assert text in said(capsys)


def test_nobody_asked(capsys):
    with console.progress("measuring", 40), console.until("searching", 5.0), console.working("reading"):
        time.sleep(0.05)
    assert said(capsys) == []


@pytest.mark.usefixtures("lines")
def test_what_another_process_reports_is_not_said_twice(capsys):
    with console.progress("measuring", 40, is_shown=False):
        time.sleep(0.05)
    assert said(capsys) == []
