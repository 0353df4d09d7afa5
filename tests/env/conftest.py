"""Small placement problems on the analytic cost model, and a learned one."""

from itertools import pairwise

import numpy as np
import pytest

from autoshard.core import (
    Constraints,
    MemoryBytes,
    RowRange,
    RowsBy,
    Shard,
    Tier,
)
from autoshard.evaluation import AnalyticCostModel
from autoshard.planners.space.placement import PlacementProblem
from costmodel import CostModelCard, FeatureScaling, HeldOutMetrics, LearnedCostModel, TrainedCoverage
from costmodel.kernel.card import Interval
from costmodel.kernel.features import NUM_FEATURES
from costmodel.kernel.weights import ENCODER_HIDDEN, weight_shapes
from tests import builders as make


@pytest.fixture(scope="session")
def model():
    return AnalyticCostModel.for_device("cpu")


# Wide enough for all that the tests make up.
RANGES = dict.fromkeys(("num_bags", "pooling_factor", "embedding_dim", "num_embeddings"), (0.0, 1e12))
KINDS = tuple(
    f"{update}/hbm/fp32/{pooling}"
    for update in ("fused", "all_reduced")
    for pooling in ("rowwise_adagrad/sum", "rowwise_adagrad/rows", "none/sum", "none/rows")
)


@pytest.fixture(scope="session")
def learned():
    """A cost model of random weights."""
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in weight_shapes(ENCODER_HIDDEN).items()
    }
    card = CostModelCard(
        device="cpu",
        coverage=TrainedCoverage(kinds=KINDS, num_tables=(1, 10), ranges=RANGES),
        encoder_hidden=ENCODER_HIDDEN,
        scaling=FeatureScaling(mean_F=(0.0,) * NUM_FEATURES, std_F=(1.0,) * NUM_FEATURES),
        scale_ms=3.0,
        metrics=HeldOutMetrics(num_samples=1, mae_ms=0.0, mse_ms2=0.0, relative_error=0.0, kendall_tau=1.0),
        interval=Interval(low=-0.1, high=0.1),
        training={},
    )
    return LearnedCostModel(weights, card)


TIERS = (Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE)


@pytest.fixture(scope="session")
def costs(model):
    return make.costs(kernel=model)


def _row_groups(table):
    """The table in three segments of falling access frequency, or whole if it is that small."""
    ends = sorted({0, table.num_embeddings // 20, table.num_embeddings // 4, table.num_embeddings})
    return [
        Shard(
            table=table,
            rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK),
            columns=(0, table.embedding_dim),
        )
        for start, stop in pairwise(ends)
    ]


@pytest.fixture(scope="session")
def make_problem(model):
    """Tables drawn at random, whole or in row groups, on ranks of one node or of nodes of two."""

    def make_one(
        num_tables=7, num_ranks=3, seed=0, hbm_bytes=1 << 40, pinned=None, groups=False, tiers=(), overrides=()
    ):
        rng = np.random.default_rng(seed)
        tables = [
            make.table(
                f"t{index}",
                int(rng.integers(10, 50_000)),
                int(rng.choice([4, 16, 32, 64])),
                float(rng.uniform(0.5, 40)),
                alpha=float(rng.uniform(0, 1.2)),
                constraints=Constraints(pinned_ranks=(pinned or {}).get(index, ())),
            )
            for index in range(num_tables)
        ]
        sizes = (2, num_ranks) if num_ranks % 2 == 0 and num_ranks > 2 else (num_ranks,)
        uneven = tuple((rank, MemoryBytes(hbm=size)) for rank, size in overrides)
        topology = make.topology(*sizes, hbm=hbm_bytes, latency_s=1e-5, overrides=uneven)
        shards = [part for table in tables for part in (_row_groups(table) if groups else [Shard.whole(table)])]
        return PlacementProblem.of(make.tables(*tables, batch_size=256), topology, model, shards, tiers)

    return make_one
