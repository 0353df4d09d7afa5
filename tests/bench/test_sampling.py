from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core.errors import InvalidOptionError
from bench.sampling import choose_sets


@given(pool_size=st.integers(1, 200), max_tables=st.integers(1, 30), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_sets_are_parts_of_the_pool(pool_size, max_tables, seed, make_shard):
    pool = [make_shard(f"t{index}", 10 + index) for index in range(pool_size)]
    for chosen in islice(choose_sets(pool, max_tables=max_tables, seed=seed), 40):
        names = [shard.table for shard in chosen.shards]
        assert 1 <= len(names) <= max_tables
        assert len(set(names)) == len(names)
        assert set(chosen.shards) <= set(pool)


def test_a_seed_gives_the_same_sets(make_shard):
    pool = [make_shard(f"t{index}") for index in range(30)]
    first, again, other = (list(islice(choose_sets(pool, max_tables=9, seed=seed), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_all_sizes_and_sources_occur(make_shard):
    pool = [make_shard(f"t{index}", 10 + index % 7, pooling_factor=0.5 + index) for index in range(100)]
    chosen = list(islice(choose_sets(pool, max_tables=15, seed=0), 640))
    sources = Counter(item.source for item in chosen)
    assert sources["repeat"] == 640 // 32
    assert min(sources["random"], sources["random_placement"], sources["greedy_placement"]) > 100
    assert {len(item.shards) for item in chosen if item.source == "random"} == set(range(1, 16))
    earlier = {item.shards for item in chosen if item.source != "repeat"}
    assert all(item.shards in earlier for item in chosen if item.source == "repeat")


def test_greedy_placements_are_more_even_than_random_ones(make_shard):
    pool = [make_shard(f"t{index}", pooling_factor=float(1 + index % 20)) for index in range(200)]
    loads = {"random_placement": [], "greedy_placement": []}
    for item in islice(choose_sets(pool, max_tables=40, seed=0), 400):
        if item.source in loads:
            loads[item.source].append(sum(shard.num_lookups for shard in item.shards))
    spread = {source: (max(values) - min(values)) for source, values in loads.items()}
    assert spread["greedy_placement"] < spread["random_placement"]


def test_no_table_at_all_is_refused(make_shard):
    with pytest.raises(InvalidOptionError, match="max_tables: must be at least 1, got 0"):
        choose_sets([make_shard()], max_tables=0, seed=0)
