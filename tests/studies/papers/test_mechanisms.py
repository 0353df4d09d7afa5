"""The file of what the papers say: what it names exists, and no table or figure of a paper's evaluation is left out."""

import ast
import json
import re
from functools import cache, reduce
from importlib import import_module
from pathlib import Path

import pytest

from autoshard.core.errors import FormatError
from scripts.generated import ROOT
from scripts.paper_page import code_file, paper_blocks
from studies.papers.mechanisms import FILE, Mechanism, Paper, State, read_mechanisms

pytestmark = pytest.mark.smoke
ROWS = read_mechanisms().rows
#: Tables and figures with results or data; the others of each paper are drawings or lists of symbols.
TABLES = {
    Paper.AUTOSHARD: {1, 2, 3},
    Paper.FLEXSHARD: {1, 2, 3, 4, 5, 6},
    Paper.OPER: {2, 3},
    Paper.TWO_D: {1, 2},
    Paper.NEO: {2, 3},
}
FIGURES = {
    Paper.AUTOSHARD: {4, 8, 9, 10, 11, 12, 13},
    Paper.FLEXSHARD: {1, 3, 4, 5, 6, 7},
    Paper.OPER: {6, 7, 8, 9, 10},
    Paper.TWO_D: {2, 4, 5, 6, 7},
    Paper.NEO: {5, 8, 9, 10, 11},
}


@cache
def names_in(file):
    found = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def numbers_after(word, text):
    """Numbers that follow a word: of `Fig. 6 and 7`, 6 and 7; of `Tables 1 to 3`, 1 to 3."""
    found = set()
    for listed in re.findall(rf"{word}\.?s? ((?:\d+|, | and | to )+)", text):
        low, *high = map(int, listed.split(" to ")[0:2]) if re.fullmatch(r"\d+ to \d+", listed) else (None,)
        found |= set(range(low, high[0] + 1)) if high else {int(number) for number in re.findall(r"\d+", listed)}
    return found


@pytest.mark.parametrize("paper", list(Paper))
def test_code_that_is_named_exists(paper):
    for name in {name for row in read_mechanisms().of(paper) for name in row.code}:
        module, _, path = name.partition(":")
        assert reduce(getattr, path.split("."), import_module(module)) is not None, name
        assert (ROOT / code_file(name)).is_file(), name


def test_tests_that_are_named_exist():
    tests = {name for row in ROWS for name in row.tests}
    assert [name for name in sorted(tests) if name.partition("::")[2] not in names_in(name.partition("::")[0])] == []


@pytest.mark.parametrize("paper", list(Paper))
def test_no_table_and_no_figure_is_left_out(paper):
    places = " ".join(row.at for row in read_mechanisms().of(paper))
    assert numbers_after("Table", places) >= TABLES[paper]
    assert numbers_after("Fig", places) >= FIGURES[paper]


def test_what_is_as_printed_is_tested():
    assert [row.at for row in ROWS if row.state is State.SAME and not row.tests] == []


def test_no_row_is_there_twice():
    keys = [(row.paper, row.at, row.mechanism) for row in ROWS]
    assert len(set(keys)) == len(keys)


def test_numbers_are_read_as_they_are_written():
    assert numbers_after("Fig", "Sec. 2, Fig. 6 and 7 Table 3") == {6, 7}
    assert numbers_after("Table", "Tables 1 to 3 Fig. 9") == {1, 2, 3}
    assert numbers_after("Table", "Sec. 6.2, Tables 5 and 6, executed") == {5, 6}


def test_the_page_has_every_row():
    text = "\n".join(paper_blocks())
    assert sum(line.startswith("| ") for line in text.splitlines()) == len(ROWS) + 3 * len(Paper) + 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"at": ""}, "needs `at` and `mechanism`"),
        ({"code": ()}, "Sec. 1: needs the code of what is here"),
        ({"state": State.PARTLY, "differs": ""}, "Sec. 1: needs what differs, and why"),
    ],
)
def test_rows_say_what_they_have_to(changes, text):
    row = {"paper": Paper.NEO, "at": "Sec. 1", "mechanism": "m", "state": State.SAME, "code": ("a:b",), "tests": ()}
    with pytest.raises(ValueError, match=re.escape(text)):
        Mechanism(**{**row, "theirs": "", "ours": "", "differs": "d", **changes})


def test_another_file_is_refused_with_its_name(tmp_path):
    document = json.loads(FILE.read_text(encoding="utf-8"))
    document["rows"][0]["state"] = "perhaps"
    path: Path = tmp_path / "rows.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(FormatError, match=r"rows.json"):
        read_mechanisms(path)
