"""The study of `auto` against all: its tasks, what counts as a loss, and what it refuses."""

import numpy as np
import pytest

from studies.__main__ import main
from studies.planners.never_beaten import Contest, drawn_request, drawn_subsets, losses_table


def contest(auto_ms, **others_ms):
    return Contest(
        title="task",
        auto_ms=auto_ms,
        planners_ms={"neo": others_ms.get("neo"), "oper": others_ms.get("oper")},
        subsets_ms={"table_wise": others_ms.get("table_wise")},
        longer_ms={"table_wise": others_ms.get("longer")},
    )


@pytest.mark.parametrize("seed", range(8))
def test_tasks_are_drawn_by_seed(seed):
    title, request = drawn_request(seed, None)
    again, same = drawn_request(seed, None)
    assert (title, request.tables, request.topology) == (again, same.tables, same.topology)
    assert len(set(drawn_subsets(seed))) == len(drawn_subsets(seed))
    assert 1 <= len(request.tables.tables) <= 160


def test_losses_are_excesses_above_the_slack():
    one = contest((1.0, 0.9), neo=0.9995, oper=0.8, table_wise=0.5, longer=0.9)
    assert one.losses(longer=False) == pytest.approx({"oper": 0.25, "table_wise": 1.0})
    assert one.losses(longer=True) == pytest.approx({"oper": 0.125})
    assert "beaten by table_wise 100.00%, oper 25.00%; at the longer limit by oper 12.50%" in one.line


def test_no_plan_loses_to_any():
    one = contest((None, 1.0), neo=2.0)
    assert one.losses(longer=False) == {"neo": np.inf}
    assert one.losses(longer=True) == {}


def test_counts_tasks_by_opponent():
    contests = [
        contest((1.0, 0.9), neo=2.0, oper=0.8, table_wise=0.5, longer=0.9),
        contest((1.0, 0.9), neo=2.0, table_wise=2.0),
    ]
    assert losses_table(contests).lines == (
        ("neo", "2", "0", "", "0", ""),
        ("oper", "1", "1", "25.00%", "1", "12.50%"),
        ("auto of fewer sharding types", "2", "1", "100.00%", "0", ""),
    )


def test_runs(capsys):
    options = ["--tasks", "1", "--first", "1", "--steps", "2", "--planners", "cost-greedy,neo", "--longer", "2"]
    assert main(["never-beaten", *options]) == 0
    assert "| cost-greedy | 1 | 0 |" in capsys.readouterr().out
