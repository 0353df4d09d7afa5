"""A cost model with weights set by hand, and problems, tasks and registries that go with it."""

import numpy as np
import pytest

from autoshard.planners.space.placement import PlacementProblem
from costmodel import CostModelCard, FeatureScaling, HeldOutMetrics, TrainedCoverage
from costmodel.kernel.card import Interval
from costmodel.kernel.features import INPUT_NAMES, NUM_FEATURES, NUM_WORK, WORK_NAMES
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.weights import ENCODER_HIDDEN, LOG_PRICE_RANGE, weight_shapes
from env import PlacementTask
from tests import builders as make

METRICS = HeldOutMetrics(num_samples=1, mae_ms=0.0, mse_ms2=0.0, relative_error=0.0, kendall_tau=1.0)
KIND = "fused/hbm/fp32/rowwise_adagrad/sum"


def additive_cost_model(num_bags):
    """Prices a set at the sum of its pooling factors in milliseconds, 0.4 of it forward and 0.6 backward."""
    weights = {name: np.zeros(shape, dtype=np.float32) for name, shape in weight_shapes(ENCODER_HIDDEN).items()}
    prices_OK = weights["encoder.log_prices.0.bias"].reshape(2, NUM_WORK)
    prices_OK[:] = LOG_PRICE_RANGE[0]  # as good as nothing
    lookups_per_unit = 1e4
    prices_OK[:, WORK_NAMES.index("lookups")] = np.log(np.array([0.4, 0.6]) * lookups_per_unit / num_bags)
    weights["log_overhead"][:] = -30.0
    # The dimension is in the code, but not in the price.
    weights["encoder.trunk.0.weight"][0, INPUT_NAMES.index("log_embedding_dim")] = 1.0
    weights["encoder.trunk.2.weight"][0, 0] = weights["encoder.traits.0.weight"][0, 0] = 1.0
    card = CostModelCard(
        device="cpu",
        coverage=TrainedCoverage(
            kinds=(KIND,),
            num_tables=(1, 10),
            ranges=dict.fromkeys(("num_bags", "embedding_dim", "num_embeddings", "pooling_factor"), (0.0, 1e9)),
        ),
        encoder_hidden=ENCODER_HIDDEN,
        scaling=FeatureScaling(mean_F=(0.0,) * NUM_FEATURES, std_F=(1.0,) * NUM_FEATURES),
        scale_ms=1.0,
        metrics=METRICS,
        interval=Interval(low=-0.1, high=0.1),
        training={},
    )
    return LearnedCostModel(weights, card, version="0123456789abcdef")


@pytest.fixture(scope="session")
def make_cost():
    return additive_cost_model


@pytest.fixture(scope="session")
def cost():
    return additive_cost_model(num_bags=64)


@pytest.fixture(scope="session")
def model(cost):
    return cost


@pytest.fixture(scope="session")
def make_problem(model):
    def make_one(pooling_factors, num_ranks=2, rows=1000, hbm_bytes=1 << 40):
        return PlacementProblem.table_wise(
            make.pool(pooling_factors, rows), make.topology(num_ranks, hbm=hbm_bytes), model
        )

    return make_one


@pytest.fixture(scope="session")
def make_tasks(make_problem):
    """Tasks with pooling factors drawn at random."""

    def make_one(num_tasks, num_tables=6, num_ranks=2, seed=0):
        rng = np.random.default_rng(seed)
        return [
            PlacementTask.of(make_problem(rng.uniform(1, 10, num_tables).tolist(), num_ranks)) for _ in range(num_tasks)
        ]

    return make_one
