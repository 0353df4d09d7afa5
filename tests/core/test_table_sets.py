"""Tables, features and table sets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import AccessProfile, DType, Feature, Optimizer, TableSet
from autoshard.core.errors import InvalidTableError
from tests.builders import table, tables


def test_redrawn_tables_have_new_names_and_may_come_again():
    few, many = tables(9).redrawn(5, seed=0), tables(9).redrawn(40, seed=0)
    drawn = [table.name.rpartition("_")[0] for table in few.tables]
    assert len(set(drawn)) == 5
    assert set(drawn) <= {table.name for table in tables(9).tables}
    assert len({table.name for table in many.tables}) == 40
    assert len({feature.name for table in many.tables for feature in table.features}) == 40
    assert tables(9).redrawn(5, seed=0) == few
    assert tables(9).redrawn(5, seed=1) != few


def test_level_pools_have_no_table_that_decides_alone():
    pool = tables(100)
    costs_ms = [50.0] * 5 + [4.0] * 5 + [1.0] * 90  # those of 4 ms decide only once those of 50 ms are gone
    kept = pool.level(costs_ms, num_tables=40, num_ranks=10)
    assert [table.name for table in kept.tables] == [table.name for table in pool.tables[10:]]
    assert pool.level(costs_ms, num_tables=400, num_ranks=10) == pool.part(1, 1)
    assert pool.level([1.0] * 100, num_tables=100, num_ranks=100) == pool  # no table is that cheap


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Feature(name="", pooling_factor=1.0), "name"),
        (lambda: Feature(name="f", pooling_factor=-1.0), "f.pooling_factor"),
        (lambda: Feature(name="f", pooling_factor=1.0, pooling_variance=math.nan), "f.pooling_variance"),
        (lambda: Feature(name="f", pooling_factor=1.0, pooling_p99=math.inf), "f.pooling_p99"),
        (lambda: table(name=""), "name"),
        (lambda: table(num_embeddings=0, access=AccessProfile.uniform(1)), "num_embeddings"),
        (lambda: table(embedding_dim=16.0), "embedding_dim"),
        (lambda: table(features=()), "features"),
        (lambda: table(access=AccessProfile.uniform(999)), "access"),
        (lambda: tables(batch_size=0), "batch_size"),
        (lambda: TableSet(batch_size=1, tables=()), "tables"),
        (lambda: tables(table(), table()), "tables.name"),
        (
            lambda: tables(table("a"), table("b", features=table("a").features)),
            "tables.features",
        ),
        (lambda: tables(2)["t9"], "tables"),
        (lambda: tables(2).scaled(0), "scale"),
        (lambda: tables(2).sample(3, seed=0), "num_tables"),
        (lambda: tables(2).sample(0, seed=0), "num_tables"),
        (lambda: tables(2).sample(1, seed=-1), "seed"),
        (lambda: tables(2).redrawn(0, seed=0), "num_tables"),
        (lambda: tables(2).redrawn(1, seed=-1), "seed"),
    ],
)
def test_impossible_values_are_refused_by_field(make, field):
    with pytest.raises(InvalidTableError) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("optimizer", "dtype", "bytes_per_row"),
    [
        (Optimizer.SGD, DType.FP32, 16 * 4),
        (Optimizer.ROWWISE_ADAGRAD, DType.FP32, 16 * 4 + 4),
        (Optimizer.ADAGRAD, DType.FP16, 16 * 2 + 16 * 4),
        (Optimizer.ADAM, DType.INT8, 16 * 1 + 2 * 4 + 2 * 16 * 4),
        (Optimizer.NONE, DType.INT8, 32),
        (Optimizer.NONE, DType.FP16, 16 * 2),
    ],
)
def test_bytes_are_weights_and_optimizer_state(optimizer, dtype, bytes_per_row):
    assert table(optimizer=optimizer, dtype=dtype).storage_bytes == 1000 * bytes_per_row


def test_a_shared_table_is_looked_up_by_all_its_features():
    features = (Feature(name="a", pooling_factor=1.0), Feature(name="b", pooling_factor=10.0))
    assert table(features=features).pooling_factor == 11.0


def test_scaling_keeps_lookups_per_row():
    unscaled = tables(3)
    scaled = unscaled.scaled(8)
    assert scaled.batch_size == 8
    for before, after in zip(unscaled.tables, scaled.tables, strict=True):
        assert after.num_embeddings == 125
        per_row = before.pooling_factor * unscaled.batch_size / before.num_embeddings
        assert after.pooling_factor * scaled.batch_size / after.num_embeddings == per_row


def test_scaling_by_one_changes_nothing():
    assert tables(3).scaled(1) == tables(3)


@given(num_tables=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_a_sample_is_a_subset_in_order_that_its_seed_decides(num_tables, seed):
    pool = tables(20)
    task = pool.sample(num_tables, seed)
    assert task == pool.sample(num_tables, seed)
    positions = [pool.tables.index(item) for item in task.tables]
    assert positions == sorted(set(positions))
    assert len(positions) == num_tables


def test_samples_of_other_seeds_differ():
    assert len({tuple(item.name for item in tables(20).sample(5, seed).tables) for seed in range(20)}) > 15
