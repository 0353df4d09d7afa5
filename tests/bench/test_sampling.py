from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import Update
from autoshard.core.errors import InvalidOptionError
from autoshard.core.shard import UPDATE_WRITES
from autoshard.formats import load_tables
from bench.sampling.stream import DEFAULT_WEIGHTS, STRATEGIES, SetSource, stream_sets, table_wise_pool
from tests import builders as make


@pytest.fixture(scope="module")
def source():
    return SetSource(tables=load_tables("metasyn").scaled(1024).sample(50, 5), max_tables=12, memory_bytes=2**24)


@pytest.fixture(scope="module")
def stream(source):
    return drawn(source, 340, seed=3)


def drawn(source, num_sets, **options):
    return list(islice(stream_sets(source, **options), num_sets))


@given(pool_size=st.integers(1, 200), max_tables=st.integers(1, 30), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_subsets_are_parts_of_the_pool(pool_size, max_tables, seed):
    tables = make.tables(*(make.table(f"t{index}", 10 + index) for index in range(pool_size)))
    pool = set(table_wise_pool(tables))
    for chosen in drawn(SetSource(tables=tables, max_tables=max_tables), 40, seed=seed, weights={"random": 1.0}):
        names = [shard.table for shard in chosen.shards]
        assert 1 <= len(names) <= max_tables
        assert len(set(names)) == len(names)
        assert set(chosen.shards) <= pool


def test_subsets_have_all_sizes():
    source = SetSource(tables=make.tables(100), max_tables=15)
    chosen = drawn(source, 400, seed=0, weights={"random": 1.0})
    assert {len(item.shards) for item in chosen} == set(range(1, 16))


def test_no_table_at_all_is_refused():
    with pytest.raises(InvalidOptionError, match="max_tables: must be at least 1, got 0"):
        SetSource(tables=make.tables(), max_tables=0)


def test_a_seed_gives_the_same_sets(source, stream):
    again, other = (drawn(source, 40, seed=seed) for seed in (3, 4))
    assert again == stream[:40] != other


@pytest.mark.parametrize("start", [1, 31, 32, 100, 299])
def test_a_stream_goes_on_where_it_was_left(start, source, stream):
    assert drawn(source, 35, seed=3, start=start) == stream[start : start + 35]


def test_far_positions_are_reached_at_once(source):
    assert len(drawn(source, 5, seed=3, start=3_000_000)) == 5


def test_strategies_get_their_shares(stream):
    counts = Counter(item.source for item in stream[:320])
    assert counts.pop("repeat") == 320 // 32
    total = sum(DEFAULT_WEIGHTS.values())
    assert counts.keys() == {name for name, weight in DEFAULT_WEIGHTS.items() if name != "uncertain"}
    left = sum(DEFAULT_WEIGHTS[name] for name in counts) / total
    for name, number in counts.items():
        assert number / 310 == pytest.approx(DEFAULT_WEIGHTS[name] / total / left, abs=0.015)


def test_the_usual_shares_are_those_that_can_be(source):
    usual = {"singles": 1.0, "memory-limit": 1.0, "uncertain": 1.0}
    stream = stream_sets(replace(source, memory_bytes=None), seed=3, usual=usual)
    assert {next(stream).source for _ in range(31)} == {"singles"}


def test_repeats_are_sets_of_the_last_ones(stream):
    assert [position for position, item in enumerate(stream) if item.source == "repeat"] == list(range(31, 340, 32))
    for position in range(31, 340, 32):
        earlier = [item.shards for item in stream[max(0, position - 264) : position] if item.source != "repeat"]
        assert stream[position].shards in earlier


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"uncertain"}))
def test_every_set_keeps_to_the_limits(name, source):
    for chosen in drawn(source, 40, seed=4, weights={name: 1.0}):
        # Copies see a rank's share of the batch.
        most = 5 * source.max_tables if name == "copies" else source.max_tables
        assert 1 <= len(chosen.shards) <= most
        assert sum(shard.memory_bytes for shard in chosen.shards) <= source.memory_bytes


def test_copies_outnumber_the_tables_of_other_sets(source):
    sets = [chosen.shards for chosen in drawn(source, 40, seed=4, weights={"copies": 1.0})]
    copies = [[shard for shard in shards if shard.update is Update.ALL_REDUCED] for shards in sets]
    assert all(copies)
    assert max(map(len, copies)) > 2 * source.max_tables
    assert any(len(of) < len(shards) for of, shards in zip(copies, sets, strict=True))
    # Each sees a rank's share of the batch.
    # Others hit rows as well: more than the rank's own, by as much as there are ranks.
    shares = [
        (shard.written_rows - own) / (1 + UPDATE_WRITES) / own
        for of in copies
        for shard in of
        if (own := shard.access.expected_distinct(shard.num_lookups)) > 20
    ]
    assert min(shares) >= 1
    assert max(shares) > 2
    assert {shard.num_bags for of in copies for shard in of} <= {
        source.tables.batch_size >> power for power in range(1, 6)
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": -1}, "seed: must be at least 0"),
        ({"seed": 0, "start": -1}, "start: must be at least 0"),
        ({"seed": 0, "weights": {"magic": 1.0}}, 'strategies: must be one of random, .*"magic"'),
        ({"seed": 0, "weights": {"random": float("nan")}}, "strategies.random: must be a number"),
        ({"seed": 0, "weights": {"random": 0.0}}, "strategies: none"),
    ],
)
def test_impossible_streams_are_refused_before_the_first_set(options, said, source):
    with pytest.raises(InvalidOptionError, match=said):
        stream_sets(source, **options)
