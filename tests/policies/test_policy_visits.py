"""The benchmark measures what a registry's policy visits: `bench` finds it as a planner, and knows no more of it."""

import numpy as np
import torch

from autoshard.planners.registry import get_planner
from bench.sampling.strategies import SetSource
from bench.sampling.visited import PLANNERS, SETS_PER_PLAN, Placements
from costmodel import Registry
from costmodel.kernel.predictor import FULL_CODE_WIDTH
from policies.network.network import PlacementNetwork
from policies.planning.trained import TrainedPolicy
from tests import builders as make


def test_plans_of_a_registrys_policy_are_visited(cost, tmp_path):
    torch.manual_seed(0)
    TrainedPolicy(network=PlacementNetwork(FULL_CODE_WIDTH), cost=cost, training={"num_updates": 0}).publish(
        Registry(tmp_path)
    )
    tables = make.pool(np.random.default_rng(0).uniform(1, 9, 20).tolist())
    placements = Placements(SetSource(tables=tables, max_tables=20, registry=tmp_path), 0)
    assert placements.planners == (*PLANNERS, "policy")
    visit = placements.visit(len(PLANNERS) * SETS_PER_PLAN)
    request = make.request(visit.plan.tables, visit.plan.topology, registry=tmp_path)
    assert get_planner("policy").plan(request).local_shards() == visit.plan.local_shards()
