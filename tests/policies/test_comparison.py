"""Policies are compared on the same tasks, priced by the same model."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from autoshard.formats.metasyn import metasyn
from costmodel import Registry
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.predictor import FULL_CODE_WIDTH
from costmodel.registry.promotion import publish_version
from costmodel.registry.publish_options import PublishOptions
from env import Objective
from policies.choices import Items
from policies.network.network import PlacementNetwork
from policies.planning.decoding import decode
from policies.planning.tasks import TaskKind, TaskSplit, items_task, sample_problems, task_seeds
from policies.planning.trained import TrainedPolicy
from policies.training.comparison import placed_ms, policy_version
from tests import builders as make

NUM_TASKS = 6


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path)


@pytest.fixture(scope="module")
def other_cost(make_cost):
    """Prices twice as high, and a version of its own."""
    twice = make_cost(num_bags=512)
    return LearnedCostModel(twice.tensors(), twice.card, version="f" * 16)


@pytest.fixture(scope="module")
def cost(make_cost):
    return make_cost(num_bags=1024)


@pytest.fixture(scope="module")
def make_tasks():
    """Tasks of MetaSyn's tables as a model sees them, for any items."""
    pool = metasyn().scaled(64)

    def make_one(model, objective, items=Items.TABLES):
        kind = TaskKind(device="cpu", num_tables=6, num_ranks=2, items=items)
        problems = sample_problems(pool, model, kind, task_seeds(TaskSplit.TEST, NUM_TASKS))
        costs = make.costs(kernel=model)
        return [items_task(problem, items, objective=objective, costs=costs) for problem in problems]

    return make_one


@pytest.fixture(scope="module")
def make_policy(cost):
    def make_one(seed=0, **changes):
        torch.manual_seed(seed)
        network = PlacementNetwork(FULL_CODE_WIDTH)
        return TrainedPolicy(**{"network": network, "cost": cost, "training": {"seed": seed}, **changes})

    return make_one


def version_of(policy, make_tasks, costs=None):
    make_one = partial(make_tasks, items=policy.card.items)
    return policy_version(policy, make_one(policy.cost, policy.card.objective), make_one, costs)


def passing(version):
    """Without what keeps untrained policies out."""
    return replace(version, baselines=())


@pytest.mark.parametrize("objective", [Objective.BALANCE, Objective.STEP])
def test_placements_cost_what_their_tasks_say(make_policy, make_tasks, cost, objective):
    costs = make.costs(kernel=cost) if objective is Objective.STEP else None
    placements = decode(make_policy().network, make_tasks(cost, objective))
    assert placed_ms(placements, cost, costs) == pytest.approx(placements.objective_ms_D)


def test_another_policy_is_priced_by_the_new_ones_model(make_policy, make_tasks, cost, other_cost, registry):
    """The old one sees tasks by its own model, for its own objective."""
    old = make_policy(seed=1, cost=other_cost, objective=Objective.MAX_KERNEL)
    version = old.publish(registry)
    (_, comparison) = publish_version(registry, version_of(make_policy(), make_tasks), PublishOptions()).comparisons
    placed = decode(old.network, make_tasks(other_cost, Objective.MAX_KERNEL)).ranks
    tasks = make_tasks(cost, Objective.BALANCE)
    old_ms_P = [task.problem.rank_ms(ranks_N).max() for task, ranks_N in zip(tasks, placed, strict=True)]
    new_ms_P = decode(make_policy().network, tasks).objective_ms_D
    assert comparison.difference == pytest.approx(np.mean(new_ms_P / np.array(old_ms_P) - 1))
    assert (comparison.num_pairs, comparison.against) == (NUM_TASKS, f"version {version}")


def test_the_better_policy_stays(make_policy, make_tasks, cost, registry):
    tasks = make_tasks(cost, Objective.BALANCE)
    mean_ms = {seed: decode(make_policy(seed).network, tasks).objective_ms_D.mean() for seed in range(8)}
    best, worst = min(mean_ms, key=mean_ms.get), max(mean_ms, key=mean_ms.get)
    assert mean_ms[worst] > 1.1 * mean_ms[best]
    first = make_policy(best).publish(registry)
    refused = publish_version(registry, passing(version_of(make_policy(worst), make_tasks)), PublishOptions())
    assert [one.against for one in refused.refused] == [f"version {first}"]
    assert registry.production_id("policy", "cpu") == first
    registry.promote("policy", "cpu", refused.id)
    taken = publish_version(registry, passing(version_of(make_policy(best), make_tasks)), PublishOptions())
    assert taken.id == registry.production_id("policy", "cpu")


def test_an_untrained_policy_is_worse_than_cost_greedy(make_policy, make_tasks):
    for objective in (Objective.MAX_KERNEL, Objective.STEP):
        (comparison,) = version_of(make_policy(objective=objective), make_tasks).baselines
        assert comparison.against == "cost-greedy"
        assert comparison.is_worse
        assert comparison.measure == ("step" if objective is Objective.STEP else "slowest rank")


def test_a_damaged_policy_is_replaced(make_policy, make_tasks, registry):
    first = make_policy(0).publish(registry)
    (registry.root / "policy" / "cpu" / first / "weights.safetensors").write_bytes(b"")
    published = publish_version(registry, passing(version_of(make_policy(1), make_tasks)), PublishOptions())
    assert published.id == registry.production_id("policy", "cpu")
    assert "weights.safetensors: damaged" in published.notes[0]
