"""`python -m studies granularity`: what it compares, and what it writes."""

import json
import subprocess
import sys

import pytest

from autoshard.core.errors import InvalidOptionError
from autoshard.formats import load_tables, load_topology
from studies.planners.granularity import AUTO, compare_planners, widened


@pytest.mark.smoke
def test_compares_planners_by_their_steps():
    tables = load_tables("param-a")
    found = compare_planners(
        tables, load_topology("a100-8"), ["cost-greedy", "neo", AUTO], 0.3, title=("param-a", "a100-8")
    )
    steps = {run.planner: run.step_ms for run in found.runs}
    assert found.best_other.step_ms == min(steps["cost-greedy"], steps["neo"])
    assert found.ratio == steps[AUTO] / found.best_other.step_ms
    assert sum(found.held.values()) >= len(tables.tables)
    assert "param-a on a100-8: auto" in found.line


def test_planners_that_cannot_do_a_task_say_why():
    found = compare_planners(
        load_tables("param-b"), load_topology("cpu-8"), ["cost-greedy", AUTO], 0.1, title=("param-b", "cpu-8")
    )
    greedy, auto = found.runs
    assert greedy.step_ms is None
    assert "more than the device memory of the largest rank" in greedy.remark
    assert auto.step_ms > 0
    assert found.ratio is None
    assert "no other planner has a plan" in found.line


def test_writes_all_comparisons(tmp_path):
    arguments = ("--tables", "param-a", "--machines", "a100-8", "--planners", "cost-greedy", "--time-limit", 0.2)
    scale = ("--scale-tables", 12, "--scale-ranks", 16, "--scale-limit", 0.2)
    options = map(str, (*arguments, *scale, "-o", tmp_path, "--json"))
    command = [sys.executable, "-m", "studies", "granularity", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "granularity.json").read_text(encoding="utf-8"))
    assert written == json.loads(done.stdout)
    assert [(one["num_tables"], one["num_ranks"]) for one in written["comparisons"]] == [(2, 8), (12, 16)]
    assert all(one["ratio"] <= 1 + 1e-9 for one in written["comparisons"])


def test_nodes_stay_as_they_are_at_scale():
    wide = widened(load_topology("a100-32"), 128)
    assert [level.size for level in wide.levels] == [8, 128]
    with pytest.raises(InvalidOptionError, match="must be a multiple of 8, got 100"):
        widened(load_topology("a100-32"), 100)
