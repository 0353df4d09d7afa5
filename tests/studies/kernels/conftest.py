from tests.bench.conftest import harness, quick_settings  # noqa: F401
