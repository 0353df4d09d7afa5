"""Small planning tasks, priced by the analytic model."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import (
    AccessProfile,
    Constraints,
    CostModels,
    DenseLayers,
    EmbeddingTable,
    Feature,
    ImpliedOrder,
    Level,
    Link,
    MemoryBytes,
    Pooling,
    TableSet,
    Tier,
    Topology,
)
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.placement import PlacementProblem

Task = tuple[TableSet, Topology]


@pytest.fixture(scope="session")
def costs() -> CostModels:
    return CostModels(kernel=AnalyticCostModel.for_device("cpu"), comm=AlphaBetaComm())


@pytest.fixture(scope="session")
def make_table() -> Callable[..., EmbeddingTable]:
    def make(name, num_embeddings=1000, embedding_dim=16, pooling_factor=4.0, constraints=None, **changes):
        return EmbeddingTable(
            row_order=ImpliedOrder.BY_ID,
            name=name,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            features=(Feature(name=f"{name}_f", pooling_factor=pooling_factor),),
            access=AccessProfile.uniform(num_embeddings),
            constraints=constraints or Constraints(),
            **changes,
        )

    return make


@pytest.fixture(scope="session")
def make_topology() -> Callable[..., Topology]:
    def make(world_size, hbm_bytes=1 << 40, **changes):
        link = Link(bytes_per_s=1e9)
        return Topology(
            world_size=world_size,
            device="cpu",
            memory_bytes=MemoryBytes(hbm=hbm_bytes),
            levels=(Level(name="node", size=world_size, all_to_all=link, all_reduce=link),),
            **changes,
        )

    return make


@pytest.fixture(scope="session")
def draw_task(make_table, make_topology) -> Callable[..., Task]:
    """A task of tables drawn with a seed; `spare` is the share of memory beyond what an even spread needs."""

    def draw(num_tables, world_size, seed=0, spare=None, batch_size=256):
        rng = np.random.default_rng(seed)
        tables = [
            make_table(
                f"t{index}",
                num_embeddings=int(rng.lognormal(9, 1.2)) + 1,
                embedding_dim=int(rng.choice([16, 32, 64])),
                pooling_factor=round(float(rng.lognormal(2, 0.8)), 3),
            )
            for index in range(num_tables)
        ]
        tables = [replace(item, access=AccessProfile.zipf(item.num_embeddings, 0.9)) for item in tables]
        table_set = TableSet(batch_size=batch_size, tables=tuple(tables))
        total = sum(item.storage_bytes for item in tables)
        return table_set, make_topology(world_size, total if spare is None else int(total / world_size * (1 + spare)))

    return draw


@pytest.fixture(scope="session")
def make_problem(costs) -> Callable[[Task], PlacementProblem]:
    return lambda task: PlacementProblem.table_wise(*task, costs.kernel)


@pytest.fixture(scope="session")
def make_request(costs) -> Callable[..., PlanRequest]:
    def make(task, **changes):
        return PlanRequest(tables=task[0], topology=task[1], costs=costs, **changes)

    return make


@pytest.fixture
def two_nodes(make_topology):
    def make(world_size=8, **memory):
        levels = tuple(
            Level(
                name=f"level{size}",
                size=size,
                all_to_all=Link(bytes_per_s=speed, latency_s=1e-5),
                all_reduce=Link(bytes_per_s=speed),
            )
            for size, speed in ((world_size // 2, 4e9), (world_size, 5e8))
        )
        memory_bytes = MemoryBytes(**({"hbm": 1 << 40} | memory))
        return replace(make_topology(world_size), levels=levels, memory_bytes=memory_bytes)

    return make


@pytest.fixture
def mixed_task(draw_task, two_nodes):
    """Pooled tables, a sequence table, pinned ones and two that share their ranks."""
    tables, _ = draw_task(9, 8, seed=5)
    first, second, third, fourth, *others = tables.tables
    # Batches of sequences differ in length, which counts in memory alone.
    long = tuple(replace(feature, pooling_variance=9.0 * feature.pooling_factor**2) for feature in first.features)
    constrained = (
        replace(first, pooling=Pooling.SEQUENCE, features=long),
        replace(second, constraints=Constraints(pinned_ranks=(2, 5))),
        replace(third, constraints=Constraints(colocate_with=(fourth.name,))),
        fourth,
        replace(others[0], constraints=Constraints(forbidden_tiers=(Tier.TABLE_WISE, Tier.DATA_PARALLEL))),
        *others[1:],
    )
    dense = DenseLayers(num_dense_features=13, bottom_mlp=(64, 16), top_mlp=(64, 1), interaction="dot")
    dims_alike = tuple(replace(table, embedding_dim=16) for table in constrained)
    return replace(tables, tables=dims_alike, dense=dense), two_nodes()
