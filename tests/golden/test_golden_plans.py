"""Planners answer as they did when their answers were recorded; a change of prices is recorded anew, and looked at."""

import json

import pytest

from tests.golden.plans import RECORDED, answer, planners_of, tasks

KEPT = json.loads(RECORDED.read_text(encoding="utf-8"))
TITLES = list(dict.fromkeys(key.rpartition(": ")[0] for key in KEPT))
#: Asked for in every run; the others by `make test-all`.
QUICK = ("two large tables on a node", "criteo in bf16")


@pytest.mark.parametrize(
    "title", [title if title in QUICK else pytest.param(title, marks=pytest.mark.slow) for title in TITLES]
)
def test_plans_and_prices_are_those_recorded(title):
    task = tasks()[title]
    for name in planners_of(task):
        expected, found = KEPT[f"{title}: {name}"], answer(name, task)
        assert found.keys() == expected.keys(), (name, found, expected)
        for figure, value in expected.items():
            close = value if isinstance(value, str) else pytest.approx(value, rel=1e-9)
            assert found[figure] == close, (name, figure)


def test_what_is_recorded_is_what_is_asked_for():
    assert set(KEPT) == {f"{title}: {name}" for title, task in tasks().items() for name in planners_of(task)}
