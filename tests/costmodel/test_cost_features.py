from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import DType, Exchange, MemoryLevel, Optimizer, Pooling, Update
from costmodel.kernel.features import (
    FEATURE_NAMES,
    INPUT_NAMES,
    NUM_FEATURES,
    NUM_INPUTS,
    NUM_WORK,
    WORK_NAMES,
    FeatureScaling,
    shard_features,
)
from tests import builders as make

BINS = slice(INPUT_NAMES.index("lookups_reuse_0"), INPUT_NAMES.index("lookups_reuse_0") + 17)


def named(shard):
    return dict(zip(FEATURE_NAMES, shard_features([shard])[0].tolist(), strict=True))


def test_features_are_inputs_and_work():
    shard = make.held(num_embeddings=2**19, embedding_dim=32, num_bags=128, pooling_factor=2.5)
    features_F = shard_features([shard])[0]
    assert features_F.shape == (NUM_FEATURES,) == (NUM_INPUTS + NUM_WORK,)
    assert features_F[BINS] == pytest.approx(shard.access.reuse_bins(128 * 2.5, of="lookups"))
    found = named(shard)
    assert found["log_weight_mib"] == pytest.approx(np.log2(65))  # 2^19 rows of 128 bytes
    assert found["log_num_bags"] == pytest.approx(np.log2(129))
    distinct = shard.access.expected_distinct(320)
    assert found["distinct_share"] == pytest.approx(distinct / 320)
    work = [found[name] for name in WORK_NAMES]
    assert work == pytest.approx([1, 0.128, 0.032, 0.01024, distinct / 1e4, distinct * 32 / 1e6, 0, 0])


def test_columns_change_dim_and_what_follows_only():
    whole = make.held(embedding_dim=32)
    half = replace(whole, embedding_dim=16)
    first, second = named(whole), named(half)
    changed = {name for name in FEATURE_NAMES if first[name] != second[name]}
    assert changed == {"log_embedding_dim", "log_weight_mib", "looked_up_numbers", "distinct_numbers"}


def test_the_batch_shows_in_the_reuse_bins():
    few, many = shard_features([make.held(num_bags=8), make.held(num_bags=4096)])
    expected_reuse = np.arange(17) @ np.stack([few[BINS], many[BINS]], axis=1)
    assert expected_reuse[1] > expected_reuse[0] + 1


@given(
    sizes=st.lists(
        st.tuples(
            st.sampled_from([1, 30, 10_000]),
            st.sampled_from([4, 20, 128]),
            st.floats(0, 50),
            st.sampled_from(list(Update)),
            st.sampled_from(list(Pooling)),
            st.sampled_from([MemoryLevel.HBM, MemoryLevel.DDR]),
        ),
        max_size=12,
    )
)
def test_shards_look_alike_alone_and_among_others(sizes):
    shards = [
        make.held(
            "t",
            rows,
            dim,
            num_bags=64,
            pooling_factor=pooling_factor,
            update=update,
            pooling=pooling,
            level=level,
            cache_bytes=640 if level is MemoryLevel.DDR else 0,
        )
        for rows, dim, pooling_factor, update, pooling, level in sizes
    ]
    one_by_one = np.array([shard_features([shard])[0] for shard in shards]).reshape(-1, NUM_FEATURES)
    features_NF = shard_features(shards)
    np.testing.assert_allclose(features_NF, one_by_one, rtol=1e-12, atol=1e-12)
    bins = [shard.access.reuse_bins(shard.num_lookups, of="lookups") for shard in shards]
    np.testing.assert_allclose(features_NF[:, BINS], np.array(bins).reshape(-1, 17), atol=1e-12)


def test_nothing_looked_up_has_empty_bins_and_no_lookups():
    found = named(make.held(pooling_factor=0.0))
    assert [found[f"lookups_reuse_{index}"] for index in range(17)] == [0.0] * 17
    assert (found["lookups"], found["distinct_rows"], found["distinct_share"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("kinds", "flags"),
    [
        ({}, set()),
        ({"pooling": Pooling.SEQUENCE, "output": Exchange.ROWS}, {"is_unpooled"}),
        ({"output": Exchange.ROWS}, {"is_unpooled"}),
        ({"pooling": Pooling.MEAN}, {"is_mean"}),
        ({"dtype": DType.FP16}, {"is_fp16"}),
        ({"dtype": DType.BF16}, {"is_bf16"}),
        ({"optimizer": Optimizer.SGD}, {"is_sgd"}),
        ({"optimizer": Optimizer.ADAM}, {"is_adam"}),
        ({"update": Update.ALL_REDUCED, "optimizer": Optimizer.SGD}, {"is_all_reduced"}),
        ({"level": MemoryLevel.DDR, "cache_bytes": 640}, {"is_behind_cache"}),
    ],
)
def test_kinds_show_as_flags(kinds, flags):
    found = named(make.held(**kinds))
    assert {name for name in INPUT_NAMES if name.startswith("is_") and found[name]} == flags


def test_a_cache_is_hit_by_what_goes_to_its_rows():
    shard = make.held(level=MemoryLevel.DDR, cache_bytes=10 * 16 * 4)  # ten rows
    found = named(shard)
    assert found["cache_hit_share"] == pytest.approx(float(shard.access.coverage(10)))
    assert found["cache_misses"] > 0
    assert named(make.held())["cache_hit_share"] == 1


def test_gradients_of_all_rows_are_work_where_they_are_all_reduced():
    assert named(make.held(update=Update.ALL_REDUCED))["gradient_numbers"] == pytest.approx(1000 * 16 / 1e7)
    assert named(make.held())["gradient_numbers"] == 0
    hit = make.held(update=Update.ALL_REDUCED, written_rows=300.0)
    assert named(hit)["gradient_numbers"] == pytest.approx(300 * 16 / 1e7)


def test_no_shards():
    assert shard_features([]).shape == (0, NUM_FEATURES)


def test_scaling_normalises_inputs_and_leaves_work(dataset):
    features_NF = dataset.features_UF[dataset.shard_N]
    scaled_NF = FeatureScaling.fit(features_NF).apply(features_NF)
    assert scaled_NF.dtype == np.float32
    varied = features_NF[:, :NUM_INPUTS].std(axis=0) > 1e-6
    assert scaled_NF[:, :NUM_INPUTS].mean(axis=0) == pytest.approx(np.zeros(NUM_INPUTS), abs=0.1)
    assert scaled_NF[:, :5].std(axis=0)[varied[:5]] == pytest.approx(np.ones(varied[:5].sum()), abs=0.1)
    assert scaled_NF[:, NUM_INPUTS:] == pytest.approx(features_NF[:, NUM_INPUTS:].astype(np.float32))


def test_what_is_far_from_all_that_was_seen_looks_far_but_not_farther():
    scaling = FeatureScaling.fit(shard_features([make.held(embedding_dim=dim) for dim in (16, 20, 24)]))
    (scaled_F,) = scaling.apply(shard_features([make.held(embedding_dim=2**20, num_embeddings=10)]))
    assert abs(scaled_F[:NUM_INPUTS]).max() == 6
    assert np.isfinite(scaled_F).all()


def test_scaling_of_equal_shards_is_finite():
    features_NF = shard_features([make.held(), make.held()])
    assert not FeatureScaling.fit(features_NF).apply(features_NF)[:, :NUM_INPUTS].any()
