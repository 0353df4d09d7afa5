"""What every registered planner promises (`PlannerProtocol`), this project's own and anyone's."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    Constraints,
    DType,
    Payload,
    ShardingPlan,
)
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, InvalidTableError
from autoshard.evaluation import evaluate
from autoshard.planners.registry import get_planner, planner_names
from autoshard.validator import validate_plan
from tests import builders as make

BATCH = 64
FP32 = Payload()
COSTS = make.costs()
#: Time limits aside, seeds decide: these make `auto` end by its number of steps.
OPTIONS = {"auto": {"steps": 10}, "cp-sat": {"effort": 0.05}}
#: What these tests leave room for is tables, not the inputs and outputs of a batch.
NO_ACTIVATIONS = {"count_activations": False}
SECONDS = 30.0
#: Others' planners, which may give up where a plan exists, or cannot keep to constraints.
GUESTS = {"torchrec"}

pytestmark = pytest.mark.parametrize("name", planner_names())


@pytest.fixture(scope="session")
def make_plan(registry):
    def make_one(name, tables, topology, seed=0, payload=FP32) -> ShardingPlan:
        planner = get_planner(name)
        counts_activations = any(item.name in NO_ACTIVATIONS for item in fields(planner.options_type))
        request = make.request(
            make.tables(*tables, batch_size=BATCH),
            topology,
            costs=COSTS,
            seed=seed,
            time_limit_s=SECONDS,
            options=OPTIONS.get(name, {}) | (NO_ACTIVATIONS if counts_activations else {}),
            registry=registry,
            payload=payload,
        )
        plan = planner.plan(request)
        validate_plan(plan)
        assert (plan.tables, plan.topology, plan.payload) == (request.tables, topology, payload)
        assert plan.predicted in (None, evaluate(plan, COSTS))
        return plan

    return make_one


def table(name, num_embeddings=1000, embedding_dim=16, pooling_factor=2.0, **constraints):
    return make.table(
        name,
        num_embeddings,
        embedding_dim,
        pooling_factor=pooling_factor,
        access=AccessProfile.uniform(num_embeddings),
        constraints=Constraints(**constraints),
    )


def drawn_tables(num_tables, rng):
    return [
        table(
            f"t{index}",
            num_embeddings=int(rng.lognormal(7, 1.5)) + 1,
            embedding_dim=int(rng.choice([4, 16, 64])),
            pooling_factor=round(float(rng.lognormal(1, 1)), 2),
        )
        for index in range(num_tables)
    ]


def ranks_of(plan):
    ranks = {}
    for placed in plan.shards:
        ranks.setdefault(placed.shard.table.name, set()).update(rank for replica in placed.replicas for rank in replica)
    return ranks


@settings(max_examples=5)
@given(num_tables=st.integers(1, 14), world_size=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_respects_tight_memory(make_plan, name, num_tables, world_size, seed):
    # Each rank has what a hidden placement puts there, and 5% more.
    rng = np.random.default_rng(seed)
    tables = drawn_tables(num_tables, rng)
    hidden = rng.integers(0, world_size, num_tables)
    sizes = np.array([item.storage_bytes for item in tables])
    room = [int(1.05 * sizes[hidden == rank].sum()) for rank in range(world_size)]
    try:
        plan = make_plan(name, tables, make.uneven(*room))
    except InfeasiblePlanError:
        assert name in GUESTS, "a placement is known"
        return
    held = [sum(shard.memory_bytes for shard in shards) for shards in plan.local_shards()]
    assert (np.array(held) <= room).all()
    assert sum(held) >= sizes.sum()


def test_repeats_itself_by_seed(make_plan, name):
    tables = drawn_tables(24, np.random.default_rng(1))
    ranks = make.uneven(*[1 << 30] * 4)
    for seed in (0, 3):
        assert make_plan(name, tables, ranks, seed) == make_plan(name, tables, ranks, seed)


@pytest.mark.parametrize(
    ("num_tables", "room"),
    [
        pytest.param(2, 0.5, id="one table is too large for any rank"),
        pytest.param(4, 1.1, id="all together are too large"),
        pytest.param(3, 1.7, id="no two fit on one rank"),
    ],
)
def test_says_which_bytes_are_missing(make_plan, name, num_tables, room):
    tables = [table(f"t{index}") for index in range(num_tables)]
    ranks = make.uneven(*[int(room * tables[0].storage_bytes)] * 2)
    if getattr(get_planner(name), "cuts_tables", False) and num_tables <= 2 * room:
        make_plan(name, tables, ranks)
        return
    with pytest.raises(InfeasiblePlanError, match=make.AMOUNT):
        make_plan(name, tables, ranks)


def test_does_with_more_ranks_than_tables(make_plan, name):
    plan = make_plan(name, [table("a"), table("b")], make.uneven(*[1 << 30] * 6))
    assert set(ranks_of(plan)) == {"a", "b"}


def test_does_with_one_rank(make_plan, name):
    plan = make_plan(name, [table("a"), table("b")], make.uneven(1 << 30))
    assert ranks_of(plan) == {"a": {0}, "b": {0}}


def test_does_with_tables_that_nobody_looks_up(make_plan, name):
    idle = [table(f"t{index}", pooling_factor=0.0) for index in range(5)]
    assert len(ranks_of(make_plan(name, idle, make.uneven(*[1 << 30] * 2)))) == 5
    mixed = [*idle, table("one_row", num_embeddings=1, pooling_factor=100.0)]
    assert len(ranks_of(make_plan(name, mixed, make.uneven(*[1 << 30] * 3)))) == 6


def test_does_with_ranks_without_memory(make_plan, name):
    plan = make_plan(name, [table(f"t{index}") for index in range(4)], make.uneven(0, 1 << 30))
    assert all(ranks == {1} for ranks in ranks_of(plan).values())


def test_keeps_to_constraints(make_plan, name):
    tables = [
        table("pinned", pinned_ranks=(2,)),
        table("either", pinned_ranks=(0, 3)),
        table("first", colocate_with=("second",)),
        table("second", pooling_factor=30.0),
        *drawn_tables(8, np.random.default_rng(2)),
    ]
    ranks = make.uneven(*[1 << 30] * 4)
    if name in GUESTS:
        with pytest.raises(InvalidTableError, match="constraints"):
            make_plan(name, tables, ranks)
        return
    placed = ranks_of(make_plan(name, tables, ranks))
    assert placed["pinned"] == {2}
    assert placed["either"] <= {0, 3}
    assert placed["first"] == placed["second"]


def test_describes_itself(name):
    planner = get_planner(name)
    assert planner.name == name
    assert planner.summary
    for option in fields(planner.options_type):
        assert option.metadata["help"]
        assert type(option.default) in (bool, int, float, str)


def test_refuses_unknown_options(name):
    request = make.request(
        make.tables(table("a"), batch_size=BATCH), make.uneven(1 << 30), costs=COSTS, options={"no_such_option": 1}
    )
    with pytest.raises(InvalidOptionError, match=r"options\.no_such_option: unknown option"):
        get_planner(name).plan(request)


def test_plans_have_the_payload_of_the_request(name, make_plan):
    tables = [table(f"t{index}", 500 * (index + 1)) for index in range(6)]
    payload = Payload(forward=DType.INT8, backward=DType.BF16)
    assert make_plan(name, tables, make.uneven(10**6, 10**6), payload=payload).payload == payload
