from tests.bench.conftest import harness, make_shard, quick_settings  # noqa: F401
