from tests.costmodel.conftest import dataset, samples, short_options, store, trained  # noqa: F401
