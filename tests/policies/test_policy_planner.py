import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.core import Constraints, DType, Optimizer, Pooling
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, ModelError
from autoshard.evaluation.analytic import AnalyticCostModel
from autoshard.planners.auto import AutoPlanner
from autoshard.planners.registry import get_planner
from autoshard.planners.space.placement import PlacementProblem
from autoshard.validator import validate_plan
from costmodel import Registry
from costmodel.kernel.predictor import FULL_CODE_WIDTH
from costmodel.registry.versions import SHIPPED_VARIABLE
from env import Objective
from policies.choices import Items
from policies.network.network import PlacementNetwork
from policies.planning.planner import PolicyPlanner
from policies.planning.trained import TrainedPolicy
from tests import builders as make


@pytest.fixture(scope="module")
def registry(tmp_path_factory, cost):
    """With an untrained policy: what planning promises does not depend on how well it was trained."""
    torch.manual_seed(0)
    policy = TrainedPolicy(network=PlacementNetwork(FULL_CODE_WIDTH), cost=cost, training={"num_updates": 0})
    root = tmp_path_factory.mktemp("registry")
    policy.publish(Registry(root))
    return root


@pytest.fixture
def make_request(registry, model):
    def make_one(tables=None, hbm_bytes=1 << 40, num_ranks=3, seed=0, **options):
        return make.request(
            tables or make.pool(np.random.default_rng(0).uniform(1, 9, 20).tolist()),
            make.topology(num_ranks, hbm=hbm_bytes),
            costs=make.costs(kernel=model),
            seed=seed,
            options=options,
            registry=registry,
        )

    return make_one


def max_ms(plan, model):
    return max(
        model.predict_ms(model.encode(held).sum(axis=0, keepdims=True))[0] for held in plan.local_shards() if held
    )


def test_it_is_found_by_its_name():
    assert isinstance(get_planner("policy"), PolicyPlanner)


def test_every_table_is_placed_within_the_limits(make_request):
    rows = np.random.default_rng(1).integers(100, 5000, 20).tolist()
    tables = make.pool(np.random.default_rng(0).uniform(1, 9, 20).tolist(), rows)
    total = tables.storage_bytes
    for share in (1.0, 0.5, 0.36):
        request = make_request(tables, hbm_bytes=int(total * share))
        plan = PolicyPlanner().plan(request)
        validate_plan(plan)
        assert {placed.shard.table.name for placed in plan.shards} == {table.name for table in tables.tables}


def test_the_same_seed_gives_the_same_plan(make_request):
    assert PolicyPlanner().plan(make_request(num_samples=16)) == PolicyPlanner().plan(make_request(num_samples=16))


def test_more_samples_are_never_worse(make_request, model):
    one, many = (max_ms(PolicyPlanner().plan(make_request(num_samples=number)), model) for number in (1, "64"))
    assert many < one


def test_a_beam_is_never_worse(make_request, model):
    one, many = (max_ms(PolicyPlanner().plan(make_request(beam_width=width)), model) for width in (1, 16))
    assert many < one


def test_candidates_are_compared_by_the_requests_cost_model(make_request, model):
    """A model that is slowest where the policy's is fastest turns the choice around."""

    class Inverted:
        name = "inverted"
        encode = staticmethod(model.encode)
        predict_parts = staticmethod(model.predict_parts)

        @staticmethod
        def predict_ms(codes_SH):
            return 1000.0 / (1.0 + model.predict_ms(codes_SH))

    request = make_request(num_samples=64)
    worst = replace(request, costs=replace(request.costs, kernel=Inverted()))
    assert max_ms(PolicyPlanner().plan(worst), model) > max_ms(PolicyPlanner().plan(request), model)


def test_constraints_hold(make_request):
    tables = make.pool([3, 1, 4, 1, 5, 9])
    pinned = [
        replace(tables.tables[0], constraints=Constraints(pinned_ranks=(2,))),
        replace(tables.tables[1], constraints=Constraints(colocate_with=("t5",))),
        *tables.tables[2:],
    ]
    for seed in range(5):
        plan = PolicyPlanner().plan(make_request(replace(tables, tables=tuple(pinned)), seed=seed, num_samples=4))
        rank_of = {placed.shard.table.name: placed.replicas[0][0] for placed in plan.shards}
        assert rank_of["t0"] == 2
        assert rank_of["t1"] == rank_of["t5"]


def test_a_dead_end_is_repaired(make_request):
    # Items of 5, 5, 3, 3, 3 units on ranks of 10: only 5+5 | 3+3+3 fits. Prices say 5 | 5 first.
    tables = make.pool([9, 9, 1, 1, 1], rows=[5000, 5000, 3000, 3000, 3000])
    tables = replace(tables, tables=tuple(replace(table, embedding_dim=16) for table in tables.tables))
    hbm_bytes = 2 * tables.tables[0].storage_bytes
    request = make_request(tables, hbm_bytes=hbm_bytes, num_ranks=2)
    plan = PolicyPlanner().plan(request)
    validate_plan(plan)
    rank_of = {placed.shard.table.name: placed.replicas[0][0] for placed in plan.shards}
    assert rank_of["t0"] == rank_of["t1"]


def test_no_plan_is_told_in_bytes(make_request):
    # 68, 132, 68 and 132 kB on three ranks of 134 kB: 400 of 402 kB, but the two small ones share no rank.
    with pytest.raises(InfeasiblePlanError, match=make.AMOUNT):
        PolicyPlanner().plan(make_request(make.pool([1, 1, 1, 1]), hbm_bytes=134_000))


@pytest.mark.parametrize("number", [0, 5000])
@pytest.mark.parametrize("option", ["num_samples", "beam_width"])
def test_numbers_of_candidates_out_of_range_are_refused(make_request, option, number):
    with pytest.raises(InvalidOptionError, match=rf"options.{option}: must be in \[1, 4096\]"):
        PolicyPlanner().plan(make_request(**{option: number}))


def test_a_registry_without_a_policy_is_told(make_request, tmp_path):
    with pytest.raises(ModelError, match="no policy model named cpu has been published"):
        PolicyPlanner().plan(replace(make_request(), registry=tmp_path))


def test_a_new_production_version_is_taken_up(make_request, cost, tmp_path):
    registry = Registry(tmp_path)
    plans = []
    for seed in (0, 3):
        torch.manual_seed(seed)
        TrainedPolicy(network=PlacementNetwork(FULL_CODE_WIDTH), cost=cost, training={}).publish(registry)
        plans.append(PolicyPlanner().plan(replace(make_request(), registry=tmp_path)))
    assert plans[0].shards != plans[1].shards


def test_a_shipped_policy_is_used_where_the_user_has_none(registry, make_request, tmp_path, monkeypatch):
    monkeypatch.setenv(SHIPPED_VARIABLE, str(shutil.copytree(registry, tmp_path / "shipped")))
    came = Registry(registry).production_id("policy", "cpu")
    plan = PolicyPlanner().plan(replace(make_request(), registry=tmp_path / "own"))
    assert plan.provenance.models == {"policy": f"policy:cpu@{came} (shipped)"}
    stored = Registry(registry).load("policy", "cpu")
    own = Registry(tmp_path / "own").publish("policy", "cpu", stored.tensors, stored.card | {"training": {"own": True}})
    again = PolicyPlanner().plan(replace(make_request(), registry=tmp_path / "own"))
    assert again.provenance.models == {"policy": f"policy:cpu@{own}"}
    assert again.shards == plan.shards  # it is the same network


def test_a_policy_comes_back_from_the_registry_as_it_was(registry, cost):
    policy = TrainedPolicy.load(Registry(registry), "cpu")
    assert policy.card.cost_model.id == cost.version
    assert policy.cost.card == cost.card
    assert policy.card.training == {"num_updates": 0}
    assert (policy.card.items, policy.card.objective, policy.card.memory_fill) == (
        Items.TABLES,
        Objective.BALANCE,
        None,
    )
    assert policy.cost.tensors().keys() == cost.tensors().keys()


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"schema": "autoshard.policy/9"}, "schema: must be autoshard.policy/3"),
        ({"schema": "autoshard.policy/1"}, "`autoshard train policy` makes one"),
        ({"code_width": 32}, r"code_width: must be a whole number in \[36, 36\], got 32"),
        ({"cost_model": {"id": None}}, "card: is missing"),
        ({"items": "rows"}, 'items: must be one of tables, row_groups, tiers, got "rows"'),
        ({"items": "tiers"}, "items: must be tables, got tiers"),
        ({"objective": ["step"]}, "objective: must be one of balance, max_kernel, step"),
        ({"memory_fill": "much"}, "memory_fill: must be a finite number"),
        ({"unheard_of": 1}, "unheard_of: is not known"),
    ],
)
def test_a_card_that_does_not_fit_is_refused(registry, tmp_path, edit, told):
    stored = Registry(registry).load("policy", "cpu")
    card = json.loads(json.dumps(stored.card)) | edit
    Registry(tmp_path).publish("policy", "cpu", stored.tensors, card)
    with pytest.raises(ModelError, match=told):
        TrainedPolicy.load(Registry(tmp_path), "cpu")


@pytest.mark.parametrize("name", ["policy.step_layer.weight", "cost.fusion.0.weight"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensor: tensor.astype(np.int64), "must be of dtype float32, got int64"),
        (lambda tensor: np.full_like(tensor, 3e38), r"must hold numbers in \[-10000, 10000\], got 3e\+38"),
        (lambda tensor: np.full_like(tensor, np.inf), "not finite"),
    ],
)
def test_odd_weights_are_refused_by_name(registry, tmp_path, name, change, told):
    stored = Registry(registry).load("policy", "cpu")
    tensors = {**stored.tensors, name: change(stored.tensors[name])}
    Registry(tmp_path).publish("policy", "cpu", tensors, stored.card)
    with pytest.raises(ModelError, match=f"{name.split('.', 1)[1]}: .*{told}|{name.split('.', 1)[1]}: {told}"):
        TrainedPolicy.load(Registry(tmp_path), "cpu")


@pytest.mark.parametrize(
    "changes",
    [{"dtype": DType.FP16}, {"dtype": DType.INT8, "pooling": Pooling.MEAN}, {"optimizer": Optimizer.ADAM}],
)
def test_kernels_that_the_policys_cost_model_lacks_are_placed_as_the_nearest(make_request, changes):
    known = make.pool([1, 2, 3])
    tables = replace(known, tables=tuple(replace(table, **changes) for table in known.tables))
    problem_model = make_request().costs.kernel
    with pytest.raises(ModelError, match=r"kernel_kind: .* needs fused/hbm/"):
        PlacementProblem.table_wise(tables, make_request().topology, problem_model)
    request = make_request(tables)
    costs = replace(request.costs, kernel=AnalyticCostModel.for_device("cpu"))
    held = [placed.replicas for placed in PolicyPlanner().plan(replace(request, costs=costs)).shards]
    assert held == [placed.replicas for placed in PolicyPlanner().plan(make_request(known)).shards]


def test_auto_starts_from_the_policy_where_there_is_time_for_it(make_request, registry):
    """And says so: its search is cut to nothing, so that only its starts take time."""
    version = Registry(registry).production_id("policy", "cpu")
    for time_limit_s, named in ((100.0, {"policy": f"policy:cpu@{version}"}), (0.001, {})):
        plan = AutoPlanner().plan(replace(make_request(steps=1), time_limit_s=time_limit_s))
        assert plan.provenance.models.items() >= named.items()
        assert plan.provenance.models.keys() == named.keys() | {"search"}


@pytest.mark.parametrize("field", ["items", "objective", "memory_fill"])
def test_a_card_says_what_its_policy_is_for(registry, tmp_path, field):
    stored = Registry(registry).load("policy", "cpu")
    card = {name: value for name, value in stored.card.items() if name != field}
    Registry(tmp_path).publish("policy", "cpu", stored.tensors, card)
    with pytest.raises(ModelError, match=f"{field}: is missing"):
        TrainedPolicy.load(Registry(tmp_path), "cpu")
