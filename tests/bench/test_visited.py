from dataclasses import replace

import pytest

from autoshard.core import Constraints, Tier
from autoshard.formats import load_tables
from autoshard.validator import validate_plan
from bench.sampling.strategies import SetSource
from bench.sampling.visited import PLANNERS, Placements
from tests import builders as make


@pytest.fixture(scope="module")
def source():
    return SetSource(tables=load_tables("metasyn").scaled(1024).sample(140, 3), max_tables=30)


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [None, 2**22])
def test_sets_are_ranks_of_feasible_plans(memory_bytes, source):
    placements = Placements(replace(source, memory_bytes=memory_bytes), 0)
    assert placements.planners == PLANNERS
    finished = []
    for number in range(0, 96, 8):
        visit = placements.visit(number)
        validate_plan(visit.plan)
        held = visit.plan.local_shards()[visit.rank]
        assert set(visit.shards) <= set(held)
        finished.append(len(visit.shards) == len(held))
        if memory_bytes is not None:
            assert visit.plan.topology.memory_of(visit.rank).hbm == memory_bytes
            assert sum(shard.memory_bytes for shard in held) <= memory_bytes
    assert 0.4 < sum(finished) / len(finished) < 0.95


def test_half_filled_ranks_are_states_of_a_placement_by_falling_cost(source):
    placements = Placements(source, 1, planners=("cost-greedy",))
    model = make.costs(source.device).kernel
    for number in range(10):
        visit = placements.visit(number)
        ms = model.predict_ms(model.encode(visit.shards))
        left = [shard for shard in visit.plan.local_shards()[visit.rank] if shard not in visit.shards]
        assert list(ms) == sorted(ms, reverse=True)
        assert not left or model.predict_ms(model.encode(left)).max() <= ms[-1]


def test_tasks_have_several_sizes(source):
    placements = Placements(source, 2, planners=("random",))
    sizes = {
        (len(visit.plan.tables.tables), visit.plan.topology.world_size)
        for visit in map(placements.visit, range(0, 160, 8))
    }
    assert (80, 8) in sizes
    assert len(sizes) > 4


@pytest.mark.parametrize("num_tables", [1, 2, 3])
def test_small_pools_are_placed_too(num_tables, source):
    tables = source.tables.tables[:num_tables]
    bound = replace(tables[0], constraints=Constraints(forbidden_tiers=(Tier.TABLE_WISE,), colocate_with=("gone",)))
    pool = make.tables(bound, *tables[1:])
    placements = Placements(replace(source, tables=pool), 0)
    assert all(1 <= len(placements.draw(number)) <= num_tables for number in range(12))


def test_an_empty_registry_has_no_policy(tmp_path, source):
    placements = Placements(replace(source, registry=tmp_path), 0)
    assert placements.planners == PLANNERS
    assert placements.draw(0)
