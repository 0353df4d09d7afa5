"""Small placement problems on the analytic cost model."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import (
    AccessProfile,
    Constraints,
    EmbeddingTable,
    Feature,
    Level,
    Link,
    MemoryBytes,
    TableSet,
    Topology,
)
from autoshard.evaluation.analytic import AnalyticCostModel
from autoshard.planners.placement import PlacementProblem


@pytest.fixture(scope="session")
def model():
    return AnalyticCostModel.for_device("cpu")


@pytest.fixture(scope="session")
def make_problem(model):
    def make(num_tables=7, num_ranks=3, seed=0, hbm_bytes=1 << 40, pinned=None):
        rng = np.random.default_rng(seed)
        tables = []
        for index in range(num_tables):
            rows = int(rng.integers(10, 50_000))
            tables.append(
                EmbeddingTable(
                    name=f"t{index}",
                    num_embeddings=rows,
                    embedding_dim=int(rng.choice([16, 32, 64])),
                    features=(Feature(name=f"f{index}", pooling_factor=float(rng.uniform(0.5, 40))),),
                    access=AccessProfile.zipf(rows, float(rng.uniform(0, 1.2))),
                )
            )
        for index, ranks in (pinned or {}).items():
            tables[index] = replace(tables[index], constraints=Constraints(pinned_ranks=ranks))
        link = Link(bytes_per_s=1e9)
        topology = Topology(
            world_size=num_ranks,
            device="cpu",
            memory_bytes=MemoryBytes(hbm=hbm_bytes),
            levels=(Level(name="node", size=num_ranks, all_to_all=link, all_reduce=link),),
        )
        return PlacementProblem.table_wise(TableSet(batch_size=256, tables=tuple(tables)), topology, model)

    return make
