import pytest

from autoshard.core import AccessProfile, LocalShard
from bench.kernels.harness import Harness, Settings
from bench.measuring.devices import find_device
from bench.measuring.timing import RoundSettings


@pytest.fixture(scope="session")
def make_shard():
    def make(table="t", num_embeddings=50, embedding_dim=8, num_bags=16, pooling_factor=2.5, **kinds):
        return LocalShard(
            table=table,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            num_bags=num_bags,
            pooling_factor=pooling_factor,
            access=AccessProfile.zipf(num_embeddings, 0.8),
            **kinds,
        )

    return make


@pytest.fixture(scope="session")
def quick_settings():
    rounds = RoundSettings(num_warmup=0, num_measured=3, num_dropped=1, flush_every_run=False)
    return Settings(rounds=rounds, max_group_sets=4, max_bytes=2**24, reference_bags=8, max_attempts=1)


@pytest.fixture(scope="session")
def harness(quick_settings):
    return Harness(find_device("cpu"), quick_settings)
