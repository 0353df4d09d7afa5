from dataclasses import replace

import pytest

from autoshard.core import DType, MemoryLevel, Optimizer, Pooling
from autoshard.core.errors import InvalidOptionError
from autoshard.formats import load_tables
from bench.sampling.kinds import OtherKinds
from bench.sampling.strategies import LargerBatches, NearMemoryLimit, SetSource, SingleTables
from bench.sampling.stream import stream_sets, table_wise_pool


@pytest.fixture(scope="module")
def source():
    return SetSource(tables=load_tables("metasyn").scaled(256).sample(60, 2), max_tables=9)


@pytest.mark.parametrize("memory_bytes", [2**20, 2**23, 2**27, 2**31])
def test_sets_near_the_limit_fill_nine_tenths_of_it(memory_bytes, source):
    strategy = NearMemoryLimit(replace(source, memory_bytes=memory_bytes), 0)
    sizes = set()
    for number in range(60):
        shards = strategy.draw(number)
        sizes.add(len(shards))
        assert 0.9 * memory_bytes <= sum(shard.memory_bytes for shard in shards) <= memory_bytes
        assert len({shard.table for shard in shards}) == len(shards)
        assert all(shard.access.num_rows == shard.num_embeddings for shard in shards)
    assert len(sizes) > 3


def test_a_limit_is_needed_and_must_hold_rows(source):
    with pytest.raises(InvalidOptionError, match="memory_bytes: the strategy memory-limit needs one"):
        stream_sets(source, seed=0, weights={"memory-limit": 1.0})
    with pytest.raises(InvalidOptionError, match="memory_bytes: 1,000 bytes are too few"):
        NearMemoryLimit(replace(source, memory_bytes=1000), 0)


def test_singles_go_through_the_whole_pool_before_one_comes_again(source):
    strategy = SingleTables(source, 7)
    laps = [[strategy.draw(60 * lap + place) for place in range(60)] for lap in (0, 1)]
    expected = sorted(shard.table for shard in table_wise_pool(source.tables))
    assert all(sorted(shard.table for (shard,) in lap) == expected for lap in laps)
    assert laps[0] != laps[1]


@pytest.mark.parametrize(("device", "largest"), [("cpu:amd-epyc", 8192), ("a100", 65536)])
def test_batches_go_up_to_the_largest_of_the_device(device, largest, source):
    strategy = LargerBatches(replace(source, device=device), 0)
    sets = [strategy.draw(number) for number in range(150)]
    own = source.tables.batch_size
    batches = {shard.num_bags for shards in sets for shard in shards}
    assert batches == {own << power for power in range(1, 20) if own << power <= largest}
    assert max(batches) == largest
    several = [shards for shards in sets if len(shards) > 1]
    assert all(sum(shard.num_bags for shard in shards) <= 2 * own * source.max_tables for shards in several)
    assert {len(shards) for shards in sets} == set(range(1, source.max_tables + 1))


def test_larger_batches_need_tables_with_a_smaller_one(source):
    with pytest.raises(InvalidOptionError, match=r"tables.batch_size: .*batch of at most 4,096, got 65,536"):
        LargerBatches(replace(source, tables=replace(source.tables, batch_size=65536)), 0)


def test_kinds_are_those_that_the_device_runs(source):
    def accepts(shard):
        return shard.level is MemoryLevel.HBM and not (shard.dtype is DType.BF16 and shard.pooling is Pooling.SEQUENCE)

    strategy = OtherKinds(replace(source, accepts=accepts), 0)
    sets = [strategy.draw(number) for number in range(150)]
    shards = [shard for chosen in sets for shard in chosen]
    assert all(map(accepts, shards))
    kinds = {(shard.dtype, shard.pooling, shard.optimizer) for shard in shards}
    assert len(kinds) == (9 - 1) * 3
    assert {kind[2] for kind in kinds} == {Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAM}
    alone = [len({(shard.dtype, shard.pooling, shard.optimizer) for shard in chosen}) == 1 for chosen in sets]
    assert any(alone)
    assert not all(alone)
    sequences = [shard for shard in shards if shard.pooling is Pooling.SEQUENCE]
    assert all(shard.output == "rows" for shard in sequences)


def test_a_device_of_one_kind_has_no_others(source):
    one = replace(
        source,
        accepts=lambda shard: (
            (shard.dtype, shard.pooling) == (DType.FP32, Pooling.SUM)
            and shard.optimizer is Optimizer.SGD
            and shard.level is MemoryLevel.HBM
        ),
    )
    with pytest.raises(InvalidOptionError, match="accepts: the strategy kinds needs a device that runs several"):
        OtherKinds(one, 0)


@pytest.mark.parametrize("limits", [{"max_tables": 0}, {"memory_bytes": 0}])
def test_impossible_limits_are_refused(limits, source):
    with pytest.raises(InvalidOptionError, match="must be at least 1, got 0"):
        replace(source, **limits)


def test_all_kinds_come_before_any_comes_again(source):
    strategy = OtherKinds(replace(source, accepts=lambda shard: shard.level is MemoryLevel.HBM), 0)
    sets = [strategy.draw(number) for number in range(27 * 8)]
    laps = [sets[start : start + 27] for start in range(0, len(sets), 27)]
    # Of three tables and more that each draw a kind of their own, hardly any set has one kind by chance.
    of_lap = [[kinds_of(shards) for shards in lap if len(shards) > 2] for lap in laps]
    alone = [[next(iter(kinds)) for kinds in found if len(kinds) == 1] for found in of_lap]
    assert all(len(found) > 5 for found in alone)
    assert all(len(set(found)) == len(found) for found in alone)


def kinds_of(shards):
    return {(shard.dtype, shard.pooling, shard.optimizer) for shard in shards}
