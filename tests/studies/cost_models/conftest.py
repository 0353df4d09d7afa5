from tests.costmodel.conftest import dataset, make_shard, samples, short_options, store, trained  # noqa: F401
