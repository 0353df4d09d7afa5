"""Every planner answers for 131,072 ranks, the most that a topology may have, or says in one line that it cannot."""

import os
import resource
import subprocess
import sys

import pytest

from autoshard.planners.registry import planner_names

#: Without this limit a matrix of all pairs of ranks, 16 GiB and more, would fit into some machines.
MEMORY_BYTES = 6 << 30
TASK = """
import sys
from autoshard.core.errors import InvalidTopologyError
from autoshard.formats import load_tables, load_topology
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_costs, make_plan

tables, topology = load_tables("criteo-kaggle"), load_topology("cpu-host-131072")
request = PlanRequest(tables=tables, topology=topology, costs=make_costs(tables, topology))
try:
    make_plan(sys.argv[1], request)
except InvalidTopologyError as error:
    print(error)
"""
#: Those that need a number for each pair of ranks.
REFUSE = {"oper"}


@pytest.mark.slow
@pytest.mark.parametrize("name", planner_names())
def test_a_planner_answers_for_the_largest_world(name):
    done = subprocess.run(
        [sys.executable, "-c", TASK, name],
        env={name: value for name, value in os.environ.items() if not name.startswith("AUTOSHARD_")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout.count("\n")) == (name in REFUSE)
