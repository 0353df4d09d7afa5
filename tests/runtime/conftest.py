"""Small plans."""

from collections.abc import Callable

import pytest

from autoshard.core import (
    AccessProfile,
    EmbeddingTable,
    Feature,
    Level,
    Link,
    MemoryBytes,
    PlacedShard,
    Shard,
    ShardingPlan,
    TableSet,
    Topology,
)

MakePlan = Callable[..., ShardingPlan]


def make_table(name: str, num_embeddings: int = 50, embedding_dim: int = 8, **options) -> EmbeddingTable:
    features = options.pop("features", (Feature(name=f"{name}.ids", pooling_factor=2.5),))
    return EmbeddingTable(
        name=name,
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        features=features,
        access=AccessProfile.zipf(num_embeddings, 1.05),
        **options,
    )


@pytest.fixture(name="make_table")
def make_table_fixture():
    return make_table


@pytest.fixture
def make_plan() -> MakePlan:
    """A factory of table-wise plans: tables, the rank of each, ranks in all, samples per step."""

    def make(tables, ranks, world_size=2, batch_size=8) -> ShardingPlan:
        link = Link(bytes_per_s=1e9)
        level = Level(name="node", size=world_size, all_to_all=link, all_reduce=link)
        return ShardingPlan(
            tables=TableSet(batch_size=batch_size, tables=tuple(tables)),
            topology=Topology(
                world_size=world_size, device="cpu", memory_bytes=MemoryBytes(hbm=1 << 30), levels=(level,)
            ),
            shards=tuple(
                PlacedShard.table_wise(Shard.whole(table), rank) for table, rank in zip(tables, ranks, strict=True)
            ),
        )

    return make
