"""A cost model with weights set by hand, and problems, tasks and registries that go with it."""

import numpy as np
import pytest

from autoshard.core import (
    AccessProfile,
    EmbeddingTable,
    Feature,
    ImpliedOrder,
    Level,
    Link,
    MemoryBytes,
    TableSet,
    Topology,
)
from autoshard.planners.space.placement import PlacementProblem
from costmodel import CostModelCard, FeatureScaling, HeldOutMetrics, TrainedCoverage
from costmodel.kernel.card import Interval
from costmodel.kernel.features import INPUT_NAMES, NUM_FEATURES, NUM_WORK, WORK_NAMES
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.weights import ENCODER_HIDDEN, LOG_PRICE_RANGE, weight_shapes
from env import PlacementTask

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
def make_tables():
    def make(pooling_factors, rows=1000):
        rows = [rows] * len(pooling_factors) if isinstance(rows, int) else rows
        tables = [
            EmbeddingTable(
                row_order=ImpliedOrder.BY_ID,
                name=f"t{index}",
                num_embeddings=num_rows,
                embedding_dim=16 * (1 + index % 2),
                features=(Feature(name=f"f{index}", pooling_factor=float(factor)),),
                access=AccessProfile.zipf(num_rows, 1.0),
            )
            for index, (factor, num_rows) in enumerate(zip(pooling_factors, rows, strict=True))
        ]
        return TableSet(batch_size=64, tables=tuple(tables))

    return make


@pytest.fixture(scope="session")
def make_topology():
    def make(num_ranks, hbm_bytes=1 << 40, device="cpu"):
        link = Link(bytes_per_s=1e9)
        return Topology(
            world_size=num_ranks,
            device=device,
            memory_bytes=MemoryBytes(hbm=hbm_bytes),
            levels=(Level(name="node", size=num_ranks, all_to_all=link, all_reduce=link),),
        )

    return make


@pytest.fixture(scope="session")
def make_problem(model, make_tables, make_topology):
    def make(pooling_factors, num_ranks=2, rows=1000, hbm_bytes=1 << 40):
        return PlacementProblem.table_wise(
            make_tables(pooling_factors, rows), make_topology(num_ranks, hbm_bytes), model
        )

    return make


@pytest.fixture(scope="session")
def make_tasks(make_problem):
    """Tasks with pooling factors drawn at random."""

    def make(num_tasks, num_tables=6, num_ranks=2, seed=0):
        rng = np.random.default_rng(seed)
        return [
            PlacementTask.of(make_problem(rng.uniform(1, 10, num_tables).tolist(), num_ranks)) for _ in range(num_tasks)
        ]

    return make
