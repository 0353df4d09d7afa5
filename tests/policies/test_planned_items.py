"""The planner `policy` for tables that are cut: each kind of items has a policy and a plan of its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.core import Constraints, RowsBy, Shard, Tier
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, ModelError
from autoshard.evaluation import evaluate
from autoshard.evaluation.analytic import AnalyticCostModel
from autoshard.planners.space.placement import PlacementProblem
from autoshard.validator import validate_plan
from costmodel import Registry
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.predictor import FULL_CODE_WIDTH
from env import NUM_CHOICE_KINDS, ChoiceKind, CostColumn, Objective, SplitBy
from env.splits import split
from policies.choices import Items
from policies.network.network import PlacementNetwork
from policies.planning.decoding import decode
from policies.planning.joined_parts import joined
from policies.planning.planner import PolicyPlanner
from policies.planning.tasks import items_problem, items_task
from policies.planning.trained import TrainedPolicy
from policies.training.comparison import placed_ms
from tests import builders as make

CUT = [Items.ROW_GROUPS, Items.TIERS]


@pytest.fixture(scope="module")
def tables():
    rng = np.random.default_rng(3)
    return make.pool(rng.uniform(1, 9, 8).tolist(), rows=[2, 3, *rng.integers(100, 5000, 6).tolist()])


@pytest.fixture(scope="module")
def cut_cost(cost, tables):
    """The cost model, for kernels of all kinds that parts of the tables need."""
    model = AnalyticCostModel.for_device("cpu")
    tasks = [items_task(items_problem(tables, make.topology(2), model, items), items) for items in Items]
    problems = [task.parts.problem for task in tasks]
    held = [local for problem in problems for tier in problem.ways for local in problem.locals_by(tier)]
    kinds = tuple(sorted({local.kernel_kind for local in held}))
    card = replace(cost.card, coverage=replace(cost.card.coverage, kinds=kinds))
    return LearnedCostModel(cost.tensors(), card, version=cost.version)


def untrained():
    """What planning promises does not depend on how well a policy was trained."""
    torch.manual_seed(0)
    return PlacementNetwork(FULL_CODE_WIDTH)


@torch.no_grad()
def greedy(cuts=0.0):
    """Takes the choice after which the objective is best, or cuts what may be cut: it has two paths through zeros."""
    network = PlacementNetwork(FULL_CODE_WIDTH)
    for parameter in network.parameters():
        parameter.zero_()
    network.cost_layer.weight[0, CostColumn.OBJECTIVE] = 1
    network.policy_first.weight[0, network.state_width + network.code_width] = 1
    network.cost_layer.weight[1, ChoiceKind.SPLIT - NUM_CHOICE_KINDS] = 1
    network.policy_first.weight[1, network.state_width + network.code_width + 1] = 1
    *hidden, last = (layer for layer in network.policy_rest if isinstance(layer, torch.nn.Linear))
    for layer in hidden:
        layer.weight[0, 0] = layer.weight[1, 1] = 1
    last.weight[0, :2] = torch.tensor([-1.0, cuts])
    return network


def publish(root, cost, items, objective=Objective.STEP, network=None):
    policy = TrainedPolicy(
        network=network or untrained(), cost=cost, training={}, items=items, objective=objective, memory_fill=0.9
    )
    return policy.publish(Registry(root))


@pytest.fixture(scope="module")
def registry(tmp_path_factory, cut_cost):
    root = tmp_path_factory.mktemp("registry")
    publish(root, cut_cost, Items.ROW_GROUPS)
    publish(root, cut_cost, Items.TIERS, network=greedy(cuts=4.0))
    return root


@pytest.fixture
def make_request(registry, cut_cost, tables):
    costs = make.costs(kernel=cut_cost)

    def make_one(items, tables=tables, hbm_bytes=1 << 40, num_ranks=3, registry=registry, bytes_per_s=1e9, **options):
        topology = make.topology(num_ranks, hbm=hbm_bytes, bytes_per_s=bytes_per_s)
        return make.request(tables, topology, costs=costs, options={"items": str(items), **options}, registry=registry)

    return make_one


@pytest.mark.parametrize("items", CUT)
@pytest.mark.parametrize(("share", "num_ranks"), [(1.0, 1), (1.0, 3), (0.4, 3)])
def test_parts_tile_their_tables_within_the_limits(make_request, tables, registry, items, share, num_ranks):
    total = tables.storage_bytes
    hbm_bytes = int(total * max(share, 1 / num_ranks))
    request = make_request(items, hbm_bytes=hbm_bytes, num_ranks=num_ranks, num_samples=4)
    plan = PolicyPlanner().plan(request)
    validate_plan(plan)
    assert max(rank.hbm_bytes for rank in evaluate(plan, request.costs).ranks) <= hbm_bytes
    version = Registry(registry).production_id(items.policy_kind, "cpu")
    assert plan.provenance.models == {items.policy_kind: f"{items.policy_kind}:cpu@{version}"}
    if num_ranks > 1:
        assert len(plan.shards) > len(tables.tables)
    assert plan == PolicyPlanner().plan(request)


@pytest.mark.parametrize("items", CUT)
def test_more_samples_make_shorter_steps(make_request, cut_cost, tmp_path, items):
    publish(tmp_path, cut_cost, items)
    steps_ms = []
    for num_samples in (1, 128):
        request = make_request(items, num_samples=num_samples, registry=tmp_path)
        steps_ms.append(evaluate(PolicyPlanner().plan(request), request.costs).step_ms.value)
    assert steps_ms[1] < steps_ms[0]


@pytest.mark.parametrize("items", CUT)
def test_it_plays_for_what_it_was_trained_for(make_request, cut_cost, tmp_path, items):
    """Where links are slow, the fastest step is not that of the fastest kernels."""
    found = []
    for objective in (Objective.STEP, Objective.MAX_KERNEL):
        publish(tmp_path, cut_cost, items, objective, greedy())
        request = make_request(items, registry=tmp_path, bytes_per_s=3e6)
        found.append(evaluate(PolicyPlanner().plan(request), request.costs))
    for_step, for_kernels = found
    assert for_step.step_ms.value < for_kernels.step_ms.value
    assert for_step.max_kernel_ms > for_kernels.max_kernel_ms


@pytest.mark.parametrize("items", CUT)
def test_constraints_hold(make_request, tables, items):
    constraints = {2: Constraints(pinned_ranks=(2,)), 3: Constraints(colocate_with=("t5",))}
    changed = [
        replace(table, constraints=constraints.get(index, table.constraints))
        for index, table in enumerate(tables.tables)
    ]
    plan = PolicyPlanner().plan(make_request(items, tables=replace(tables, tables=tuple(changed)), num_samples=4))
    validate_plan(plan)
    held = {placed.shard.table.name: placed for placed in plan.shards}
    assert held["t2"].replicas == ((2,),)
    # All of a pinned table is on its rank, so it is one shard.
    assert held["t2"].shard == Shard.whole(held["t2"].shard.table)
    assert held["t3"].replicas == held["t5"].replicas


def test_what_does_not_fit_is_told(make_request):
    with pytest.raises(InfeasiblePlanError, match=make.AMOUNT):
        PolicyPlanner().plan(make_request(Items.ROW_GROUPS, hbm_bytes=10_000))


def test_a_policy_of_other_items_is_not_used(make_request, cut_cost, registry, tmp_path):
    with pytest.raises(ModelError, match="no policy model named cpu has been published"):
        PolicyPlanner().plan(make_request(Items.TABLES))
    publish(tmp_path, cut_cost, Items.TABLES)
    with pytest.raises(ModelError, match="no policy-tiers model named cpu has been published"):
        PolicyPlanner().plan(make_request(Items.TIERS, registry=tmp_path))
    stored = Registry(registry).load("policy-tiers", "cpu")
    Registry(tmp_path).publish("policy-row_groups", "cpu", stored.tensors, stored.card)
    with pytest.raises(ModelError, match="items: must be row_groups, got tiers"):
        PolicyPlanner().plan(make_request(Items.ROW_GROUPS, registry=tmp_path))


def test_a_policy_of_tables_that_were_cut_beforehand_is_not_used(make_request, registry, tmp_path):
    stored = Registry(registry).load("policy-tiers", "cpu")
    Registry(tmp_path).publish("policy-tiers", "cpu", stored.tensors, {**stored.card, "max_splits": 0})
    with pytest.raises(ModelError, match="max_splits: must be 2 for tiers, got 0; `autoshard train policy --items"):
        PolicyPlanner().plan(make_request(Items.TIERS, registry=tmp_path))


def test_items_that_there_are_not_are_refused(make_request):
    with pytest.raises(InvalidOptionError, match=r'items: must be one of tables, row_groups, tiers, got "rows"'):
        PolicyPlanner().plan(make_request("rows"))


def test_neighbouring_parts_that_are_held_alike_become_one():
    tables = make.pool([4, 4, 4, 4])
    hot, rest = zip(*(split(Shard.whole(table), SplitBy.HOT_ROWS, 0) for table in tables.tables), strict=True)
    warm, cold = zip(*(split(part, SplitBy.HOT_ROWS, 1) for part in rest), strict=True)
    model = AnalyticCostModel.for_device("cpu")
    # In whatever order; items are table by table: cold, hot and warm rows.
    problem = PlacementProblem.of(tables, make.topology(2), model, [*cold, *hot, *warm], [Tier.DATA_PARALLEL])
    each = problem.num_ranks
    placement = [[1, 1, 1], [each, each, each], [0, each, 0], [0, 0, 1]]
    plan = joined(problem.to_plan(np.array(placement).ravel()))
    validate_plan(plan)
    found = {
        table.name: [
            (placed.tier, placed.replicas, placed.shard.rows.by)
            for placed in plan.shards
            if placed.shard.table is table
        ]
        for table in tables.tables
    }
    ranks, every = RowsBy.ACCESS_RANK, ((0,), (1,))
    assert found == {
        "t0": [(Tier.TABLE_WISE, ((1,),), RowsBy.INDEX)],
        "t1": [(Tier.DATA_PARALLEL, every, RowsBy.INDEX)],
        "t2": [(Tier.DATA_PARALLEL, every, ranks), (Tier.TABLE_WISE, ((0,),), ranks)],
        "t3": [(Tier.TABLE_WISE, ((rank,),), ranks) for rank in (0, 1, 0)],
    }


def test_the_prediction_is_of_what_was_joined(make_request, tables):
    """A machine of one rank holds every table whole, and its plan costs what whole tables do."""
    request = make_request(Items.ROW_GROUPS, num_ranks=1)
    plan = PolicyPlanner().plan(request)
    assert [placed.shard for placed in plan.shards] == [Shard.whole(table) for table in tables.tables]
    whole = items_problem(tables, request.topology, request.costs.kernel, Items.TABLES)
    whole_plan = whole.to_plan(np.zeros(whole.num_items, dtype=np.int64))
    assert evaluate(plan, request.costs).step_ms == evaluate(whole_plan, request.costs).step_ms


@pytest.mark.parametrize("items", Items)
@pytest.mark.parametrize("objective", [Objective.BALANCE, Objective.STEP])
def test_placements_are_priced_anew_with_all_that_was_cut(tables, cut_cost, items, objective):
    model = cut_cost
    costs = make.costs(kernel=model) if objective is Objective.STEP else None
    problem = items_problem(tables, make.topology(2), model, items)
    task = items_task(problem, items, objective=objective, costs=costs)
    placements = decode(greedy(cuts=4.0), [task])
    assert (len(placements.problems[0].shards) > len(problem.shards)) == (items is Items.TIERS)
    assert placed_ms(placements, model, costs) == pytest.approx(placements.objective_ms_D)
