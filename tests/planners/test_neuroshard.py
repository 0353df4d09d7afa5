"""NeuroShard's search: its greedy by hand, its limits, and what its plans keep to.

Shape suffixes: P shards of a list, R ranks.
"""

import time
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import AccessProfile, Constraints
from autoshard.core.errors import InvalidOptionError
from autoshard.evaluation import evaluate
from autoshard.planners.neuroshard.beam import BeamSearch
from autoshard.planners.neuroshard.capped_greedy import CappedGreedy
from autoshard.planners.neuroshard.planner import NeuroShardPlanner, whole_tables
from autoshard.validator import validate_plan
from tests import builders as make

COSTS = make.costs()

FOREVER = float("inf")


def search_of(task, *, caps=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5), **limits):
    space = whole_tables(make.request(*task))
    greedy = CappedGreedy(space, np.full(task[1].world_size, 1e12), np.array(caps))
    return BeamSearch(space, greedy, **{"beam_width": 3, "num_candidates": 10, "max_steps": 10, **limits})


def planned(task, **options):
    made = NeuroShardPlanner().plan(make.request(*task, options=options, time_limit_s=60.0))
    validate_plan(made)
    return made


def widths(plan):
    found = {}
    for placed in plan.shards:
        found.setdefault(placed.shard.table.name, []).append(placed.shard.embedding_dim)
    return found


def test_greedy_by_hand():
    # By falling cost: 8, 7, 6, 5, 4 lookups of the same width. On two ranks 8 | 7, then 6 joins 7, 5 joins 8, 4 joins
    # 13 = 8 + 5 or 13 = 7 + 6: caches and launches aside the ranks are alike, and neither has more memory in use.
    tables = make.tables(*(make.table(f"t{n}", pooling_factor=float(n)) for n in (8, 7, 6, 5, 4)), batch_size=4096)
    found = search_of((tables, make.topology(2)), caps=[1.0], max_steps=0).run(FOREVER)
    # One cap, at the mean of 40 dimensions: two tables of 16 on a rank, and the fifth fits on none.
    assert found is None
    found = search_of((tables, make.topology(2)), caps=[1.0, 2.0], max_steps=0).run(FOREVER)
    ranks_P = found.packed.ranks_P
    assert ranks_P[:4].tolist() == [0, 1, 1, 0]


def test_caps_keep_dimensions_even():
    task = make.draw_task(40, 4, seed=2)
    dims_P = np.array([table.embedding_dim for table in task[0].tables])
    for cap in (1.1, 1.2):
        found = search_of(task, caps=[cap], max_steps=0).run(FOREVER)
        sums_R = np.bincount(found.packed.ranks_P, weights=dims_P, minlength=4)
        assert sums_R.max() <= cap * dims_P.sum() / 4


def test_the_step_is_that_of_the_plan():
    for seed in range(3):
        task = make.draw_task(20, 4, seed=seed)
        plan = NeuroShardPlanner().plan(make.request(*task, time_limit_s=60.0))
        said = float(plan.provenance.models["search"].rsplit("-> ", 1)[1].removesuffix(" ms"))
        assert evaluate(plan, COSTS).step_ms.value == pytest.approx(said, rel=1e-4)


def test_halves_what_one_rank_would_wait_for():
    large = make.table("large", 100_000, 64, 40.0, access=AccessProfile.uniform(100_000))
    small = [make.table(f"s{index}", embedding_dim=8, pooling_factor=1.0) for index in range(6)]
    task = make.tables(large, *small, batch_size=8192), make.topology(4)
    assert widths(planned(task))["large"] == [16] * 4
    assert widths(planned(task, steps=1))["large"] == [32] * 2
    assert widths(planned(task, steps=0))["large"] == [64]


def test_nothing_is_halved_once_the_time_of_the_request_is_over():
    large = make.table("large", 100_000, 64, 40.0, access=AccessProfile.uniform(100_000))
    task = make.tables(large, make.table("small", embedding_dim=8), batch_size=8192), make.topology(4)
    for age_s, expected in ((0.0, [16] * 4), (60.0, [64])):
        request = make.request(*task, time_limit_s=60.0, started_s=time.perf_counter() - age_s)
        assert widths(NeuroShardPlanner().plan(request))["large"] == expected


def test_halves_keep_a_multiple_of_four_columns():
    tables = (make.table("a", 50_000, 24, 40.0), make.table("b", 50_000, 20, 40.0), make.table("c", 10, 4, 1.0))
    found = widths(planned((make.tables(*tables, batch_size=8192), make.topology(4))))
    assert set(found["a"]) <= {24, 12}
    assert found["b"] == [20]
    assert found["c"] == [4]


def test_more_steps_are_never_worse():
    task = make.draw_task(24, 4, seed=5)
    steps_ms = [search_of(task, max_steps=steps).run(FOREVER).step_ms for steps in (0, 1, 2, 4, 8)]
    assert steps_ms == sorted(steps_ms, reverse=True)


def test_packing_many_lists_is_packing_each():
    search = search_of(make.draw_task(12, 3, seed=4), max_steps=2)
    search.run(FOREVER)
    shards = [search.shards([(item, 0) for item in range(12)])] * 2
    lists = [shards[0], shards[1][::-1]]
    both = search.greedy.pack(lists)
    for one, found in zip(lists, both, strict=True):
        (alone,) = search.greedy.pack([one])
        assert alone.step_ms == found.step_ms
        assert alone.ranks_P.tolist() == found.ranks_P.tolist()


def test_tables_that_share_ranks_stay_whole():
    together = [
        make.table("a", 50_000, 64, 40.0, constraints=Constraints(colocate_with=("b",))),
        make.table("b", 50_000, 64, 1.0, constraints=Constraints(pinned_ranks=(2,))),
    ]
    tables = (*together, make.table("c", 50_000, 64, 30.0, constraints=Constraints(pinned_ranks=(1, 3))))
    plan = planned((make.tables(*tables, batch_size=8192), make.topology(4)))
    ranks = {placed.shard.table.name: placed.replicas[0][0] for placed in plan.shards}
    assert (ranks["a"], ranks["b"]) == (2, 2)
    assert widths(plan)["a"] == [64]
    assert {placed.replicas[0][0] for placed in plan.shards if placed.shard.table.name == "c"} <= {1, 3}


def test_places_whole_tables_where_no_cap_leaves_room():
    # Ten narrow tables on one rank and a wide one on the other exceed 1.5 times the mean of 14 dimensions: 20.
    tables = [make.table(f"t{index}", 1000, 4, 1.0) for index in range(2)]
    tables.append(make.table("wide", 1000, 20, 1.0))
    task = make.tables(*tables, batch_size=256), make.topology(2)
    assert widths(planned(task, steps=0)) == {"t0": [4], "t1": [4], "wide": [20]}
    pinned = [replace(table, constraints=Constraints(pinned_ranks=(0,))) for table in tables]
    plan = planned((replace(task[0], tables=tuple(pinned)), task[1]))
    assert {placed.replicas for placed in plan.shards} == {((0,),)}


@pytest.mark.parametrize("name", ["beam_width", "candidates", "caps"])
def test_limits_are_at_least_1(name):
    with pytest.raises(InvalidOptionError, match=rf"options\.{name}: must be at least 1, got 0"):
        planned(make.draw_task(3, 2), **{name: 0})
