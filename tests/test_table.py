"""One table, as terminals, Markdown and JSON show it."""

import pytest

from autoshard.console import emit
from autoshard.core.errors import InvalidOptionError
from autoshard.table import Column, Table, facts, texts

TIMES = Table(
    columns=("planner", Column("kernel", "ms", "{:.2f}".format, "right"), Column("why")),
    rows=(("auto", 1.5, "fast"), ("neo [4D]", None, "")),
    title="Times",
    caption="Lower is better.",
    marked=(0,),
)


def printed(capsys, table):
    emit({}, table, as_json=False)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_values_are_printed_by_their_columns():
    assert TIMES.headings == ("planner", "kernel ms", "why")
    assert TIMES.sides == ("left", "right", "left")
    assert TIMES.lines == (("auto", "1.50", "fast"), ("neo [4D]", "", ""))
    assert TIMES.records() == [
        {"planner": "auto", "kernel_ms": 1.5, "why": "fast"},
        {"planner": "neo [4D]", "kernel_ms": None, "why": ""},
    ]
    assert TIMES.to_markdown().splitlines()[1:3] == ["| --- | ---: | --- |", "| auto | 1.50 | fast |"]


def test_terminals_show_titles_and_lines_around_columns_where_wanted(capsys):
    assert printed(capsys, TIMES) == [
        "Times",
        "planner   kernel ms  why",
        "auto           1.50  fast",
        "neo [4D]",
        "Lower is better.",
    ]
    assert printed(capsys, facts([("device", "cpu")])) == ["device  cpu"]
    boxed = printed(capsys, Table(columns=texts("a"), rows=[(1,)], is_boxed=True))
    assert boxed == ["┏━━━┓", "┃ a ┃", "┡━━━┩", "│ 1 │", "└───┘"]


def test_a_table_that_is_too_wide_is_shown_in_parts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "16")
    lines = printed(capsys, Table(columns=texts("name", "first", "second"), rows=[("a", "123456", "1234567")]))
    assert lines == ["name  first", "a     123456", "", "name  second", "a     1234567"]


def test_rows_have_a_value_for_each_column():
    with pytest.raises(InvalidOptionError, match="rows: must have 2 cells each, got 1"):
        Table(columns=("a", "b"), rows=(("1", "2"), ("1",)))
    made = Table.of([3, 4], [("number", lambda one: one), ("square", lambda one: one**2)])
    assert made.lines == (("3", "9"), ("4", "16"))


def test_a_long_table_says_how_many_rows_it_lacks():
    assert TIMES.first(2, "more planner") is TIMES
    cut = TIMES.first(1, "more planner")
    assert cut.lines == (("auto", "1.50", "fast"),)
    assert cut.caption == "Lower is better. 1 more planner; --json lists all"
    long = Table(columns=("a",), rows=[(one,) for one in range(2003)])
    assert long.first(3, "row").caption == "2,000 rows; --json lists all"
