"""A new term of the step's price is seen by planners that propose options of their own: they plan otherwise for it."""

import numpy as np
import pytest

from autoshard.evaluation import evaluate, stages
from autoshard.planners.registry import get_planner
from tests import builders as make

#: Milliseconds that every peer of an all-to-all takes, as a change of the price would have it.
PEER_MS = 0.05
COSTS = make.costs("a100")
TOPOLOGY = make.topology(4, device="a100", bytes_per_s=(2.4e11,), reduce_bytes_per_s=(2.4e10,))
TABLES = make.tables(*(make.table(f"t{index}", 2000, 64, 2.0, alpha=1.05) for index in range(6)), batch_size=8192)


@pytest.mark.parametrize(("name", "options"), [("flexshard", {"memory_budget_bytes": 10**9}), ("neo", {})])
def test_a_cost_of_every_peer_of_an_all_to_all_makes_another_plan(name, options, monkeypatch):
    request = make.request(TABLES, TOPOLOGY, costs=COSTS, options=options)
    before, plain = get_planner(name).plan(request), stages.all_to_alls_ms

    def dearer(links, comm, topology):
        ms = plain(links, comm, topology)
        return ms + np.where(ms > 0, (topology.world_size - 1) * PEER_MS, 0.0)

    monkeypatch.setattr(stages, "all_to_alls_ms", dearer)
    after = get_planner(name).plan(request)
    assert evaluate(after, COSTS).step_ms.value < evaluate(before, COSTS).step_ms.value
