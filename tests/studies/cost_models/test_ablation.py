import numpy as np
import pytest

from autoshard.core import DType, Optimizer, Update
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import FEATURE_NAMES, INPUT_NAMES, WORK_NAMES, shard_features
from studies.cost_models.evaluation import FULL, REMOVALS, without
from tests import builders as make

#: A shard that differs from another in one thing, which its group's removal makes invisible.
DIFFERENCES = {
    "dimension": {"embedding_dim": 128},
    "pooling factor": {"pooling_factor": 30.0},
    "access distribution": {"alpha": 1.3},
    "batch size": {"num_bags": 4096},
    "kinds of kernels": {"dtype": DType.FP16, "optimizer": Optimizer.ADAM, "update": Update.ALL_REDUCED},
}


@pytest.fixture
def pair():
    def pair(**difference):
        shards = (make.held(), make.held(**difference))
        return CostDataset(
            shards_U=shards,
            features_UF=shard_features(shards),
            shard_N=np.array([0, 1]),
            num_shards_S=np.array([1, 1]),
            set_S=np.array([0, 1]),
            latency_ms_SO=np.array([[1.0, 2.0], [3.0, 4.0]]),
            collected_at_S=np.full(2, ""),
        )

    return pair


@pytest.mark.parametrize("removed", DIFFERENCES)
def test_what_is_removed_cannot_be_seen(pair, removed):
    dataset = pair(**DIFFERENCES[removed])
    full, less = dataset.features_UF, without(dataset, removed).features_UF
    assert not np.array_equal(full[0], full[1])
    assert np.array_equal(less[0], less[1])


@pytest.mark.parametrize("removed", [name for name in REMOVALS if name not in DIFFERENCES])
def test_columns_of_the_others(dataset, removed):
    """Rows leave their number, and with it the size; the size leaves itself, and work all of its columns."""
    less = without(dataset, removed)
    changed = {FEATURE_NAMES[index] for index in np.flatnonzero(np.ptp(less.features_UF, axis=0) == 0)}
    changed -= {FEATURE_NAMES[index] for index in np.flatnonzero(np.ptp(dataset.features_UF, axis=0) == 0)}
    expected = {
        "rows (hash size)": {"log_num_embeddings"},
        "table size": {"log_weight_mib"},
        "work": {name for name in WORK_NAMES if np.ptp(dataset.features_UF[:, FEATURE_NAMES.index(name)]) > 0},
    }[removed]
    assert expected <= changed
    assert not changed & (set(INPUT_NAMES) - expected)


@pytest.mark.smoke
def test_measurements_stay_and_nothing_is_edited(dataset):
    before = dataset.features_UF.copy()
    for removed in REMOVALS:
        less = without(dataset, removed)
        assert np.array_equal(less.latency_ms_SO, dataset.latency_ms_SO)
        assert np.isfinite(less.features_UF).all()
    assert np.array_equal(dataset.features_UF, before)
    assert without(dataset, FULL) is dataset
