import fcntl
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from autoshard.formats.stores.samples import read_samples
from costmodel.kernel.card import CostModelCard, HeldOutMetrics, Interval, TrainedCoverage
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import NUM_INPUTS, NUM_WORK, FeatureScaling
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.training import CostTrainingOptions, train_cost_model
from costmodel.kernel.weights import weight_shapes

#: 400 measured sets of MetaSyn's tables, rows and batch divided by 64, on one CPU thread.
SAMPLES = Path(__file__).parents[1] / "data" / "samples"


@pytest.fixture(scope="session")
def store():
    return SAMPLES


@pytest.fixture(scope="session")
def samples(store):
    return read_samples(store, "cpu")


@pytest.fixture(scope="session")
def dataset(samples):
    return CostDataset.from_samples(samples)


@pytest.fixture(scope="session")
def short_options():
    return CostTrainingOptions(num_updates=400, batch_size=64)


@pytest.fixture(scope="session")
def trained(dataset, short_options, tmp_path_factory):
    """Trained once for all processes that share the tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    file = folder / "trained.pickle"
    with (folder / "trained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            made = train_cost_model(dataset, device="cpu", options=short_options, seed=0)
            file.write_bytes(pickle.dumps(made))
        return pickle.loads(file.read_bytes())


@pytest.fixture
def random_weights():
    rng = np.random.default_rng(3)
    shapes = weight_shapes((24,))
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def card():
    return CostModelCard(
        device="cpu",
        coverage=TrainedCoverage(
            kinds=("fused/hbm/fp32/rowwise_adagrad/sum",),
            num_tables=(1, 5),
            ranges={
                "num_bags": (64, 1024),
                "embedding_dim": (16, 32),
                "num_embeddings": (10, 1e6),
                "pooling_factor": (1, 50),
            },
        ),
        encoder_hidden=(24,),
        scaling=FeatureScaling(
            mean_F=(0.5,) * NUM_INPUTS + (0.0,) * NUM_WORK, std_F=(20.0,) * NUM_INPUTS + (1.0,) * NUM_WORK
        ),
        scale_ms=2.0,
        metrics=HeldOutMetrics(num_samples=9, mae_ms=0.1, mse_ms2=0.2, relative_error=0.03, kendall_tau=0.9),
        interval=Interval(low=-1.5, high=2.0, coverage=0.9, half_width=0.05),
        training={"num_samples": 10},
    )


@pytest.fixture
def random_model(random_weights, card):
    return LearnedCostModel(random_weights, card)
