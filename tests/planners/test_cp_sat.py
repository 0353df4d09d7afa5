"""CP-SAT: proven optima where costs add up, better than its start where they do not, a clear error without OR-tools."""

import itertools
import re
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core.errors import InvalidOptionError, ModelError
from autoshard.evaluation import evaluate
from autoshard.planners.exact.cp_sat import CpSatPlanner
from autoshard.planners.heuristics.karmarkar_karp import KarmarkarKarpPlanner
from tests import builders as make

COSTS = make.costs()


def numbers(plan):
    text = plan.provenance.models["linearised bound"]
    slowest, bound = re.fullmatch(
        r"slowest rank (\S+) ms; with costs made linear no plan is below (\S+) ms", text
    ).groups()
    return float(slowest), float(bound)


@pytest.mark.parametrize(("seed", "spare"), [(0, None), (1, 0.15)])
def test_finds_and_proves_the_optimum_where_costs_add_up(seed, spare):
    task = make.draw_task(9, 3, seed, spare)
    problem = make.problem(*task)
    feasible = (np.array(ranks) for ranks in itertools.product(range(3), repeat=9))
    best_ms = min(problem.rank_ms(ranks_N).max() for ranks_N in feasible if problem.is_feasible(ranks_N))
    plan = CpSatPlanner().plan(make.request(*task, time_limit_s=60.0))
    assert evaluate(plan, COSTS).max_kernel_ms == pytest.approx(best_ms, rel=2e-4)
    slowest_ms, bound_ms = numbers(plan)
    assert slowest_ms == pytest.approx(best_ms, rel=2e-4)
    # The bound is of COSTS alone, with each table's share of the fixed time of a kernel.
    assert bound_ms == pytest.approx(best_ms, rel=0.01)


def test_is_no_worse_than_largest_differencing():
    task = make.draw_task(40, 4, seed=2)
    problem = make.problem(*task)
    start_ms = problem.rank_ms(KarmarkarKarpPlanner().place(problem, 0)).max()
    plan = CpSatPlanner().plan(make.request(*task, options={"effort": 0.2}, time_limit_s=60.0))
    assert evaluate(plan, COSTS).max_kernel_ms <= start_ms * (1 + 1e-6)


def test_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ModelError, match=r"OR-tools cannot be imported .*pip install 'autoshard\[exact\]'"):
        CpSatPlanner().plan(make.request(*make.draw_task(4, 2)))


@pytest.mark.parametrize(("options", "message"), [({"refinements": -1}, "at least 0"), ({"effort": 0.0}, "above 0")])
def test_refuses_options_out_of_range(options, message):
    with pytest.raises(InvalidOptionError, match=message):
        CpSatPlanner().plan(make.request(*make.draw_task(4, 2), options=options))


def test_a_search_that_is_asked_to_stop_ends_with_its_best_plan():
    started = time.monotonic()
    task = make.draw_task(40, 7, seed=3, spare=0.05)
    request = make.request(*task, options={"effort": 1e9}, time_limit_s=3600.0)
    request = replace(request, is_stopped=lambda: time.monotonic() > started + 1.0)
    assert evaluate(CpSatPlanner().plan(request), COSTS).max_kernel_ms > 0
