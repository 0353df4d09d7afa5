from dataclasses import replace

import numpy as np
import pytest

from costmodel.features import FEATURE_NAMES, NUM_FEATURES, FeatureScaling, shard_features


def test_features_are_the_21_of_the_paper(make_shard):
    shard = make_shard(num_embeddings=500_000, embedding_dim=32, num_bags=128, pooling_factor=2.5)
    features_NF = shard_features([shard])
    assert features_NF.shape == (1, 21) == (1, NUM_FEATURES) == (1, len(FEATURE_NAMES))
    # 500,000 rows of 32 numbers of 4 bytes are 0.064 GB.
    assert features_NF[0, :4].tolist() == pytest.approx([32, 500_000, 2.5, 0.064])
    assert features_NF[0, 4:] == pytest.approx(shard.access.reuse_bins(128 * 2.5, of="lookups"))
    assert features_NF[0, 4:].sum() == pytest.approx(1)


def test_columns_change_dim_and_size_only(make_shard):
    whole = make_shard(embedding_dim=32)
    half = replace(whole, embedding_dim=16)
    difference_F = shard_features([whole])[0] - shard_features([half])[0]
    changed = {name for name, value in zip(FEATURE_NAMES, difference_F, strict=True) if value}
    assert changed == {"embedding_dim", "size_gb"}


def test_the_batch_shows_in_the_reuse_bins(make_shard):
    few, many = shard_features([make_shard(num_bags=8), make_shard(num_bags=4096)])
    expected_reuse = np.arange(17) @ np.stack([few[4:], many[4:]], axis=1)
    assert expected_reuse[1] > expected_reuse[0] + 1


def test_nothing_looked_up_has_empty_bins(make_shard):
    assert shard_features([make_shard(pooling_factor=0.0)])[0, 4:].tolist() == [0.0] * 17


def test_no_shards():
    assert shard_features([]).shape == (0, NUM_FEATURES)


def test_scaling_normalises_dim_rows_and_pooling_only(dataset):
    features_NF = dataset.features_UF[dataset.shard_N]
    scaled_NF = FeatureScaling.fit(features_NF).apply(features_NF)
    assert scaled_NF.dtype == np.float32
    assert scaled_NF[:, :3].mean(axis=0) == pytest.approx(np.zeros(3), abs=1e-4)
    assert scaled_NF[:, :3].std(axis=0) == pytest.approx(np.ones(3), abs=1e-4)
    assert scaled_NF[:, 3:] == pytest.approx(features_NF[:, 3:].astype(np.float32))


def test_scaling_of_equal_shards_is_finite(make_shard):
    features_NF = shard_features([make_shard(), make_shard()])
    assert FeatureScaling.fit(features_NF).apply(features_NF)[:, :3].tolist() == [[0.0] * 3] * 2
