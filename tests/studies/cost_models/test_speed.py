import pytest

from autoshard.formats.stores.samples import read_samples
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.training import CostTrainingOptions
from studies.cost_models.speed import time_pricing, time_training, timings_table


@pytest.mark.smoke
def test_every_figure_is_timed(store, dataset):
    options = CostTrainingOptions(num_updates=5, batch_size=16)
    trained, training = time_training(dataset, "cpu", 1, options)
    assert trained.model.card.training["num_samples"] + trained.model.card.metrics.num_samples == 10_000
    small = CostDataset.from_samples(read_samples(store, "cpu"))
    timings = (training, *time_pricing(trained.model, small, 3))
    assert [timing.bound for timing in timings] == [60, 5, 2, 2]
    assert all(0 < timing.lowest <= timing.median for timing in timings)
    table = timings_table(timings)
    assert [line[0] for line in table.lines] == [timing.name for timing in timings]
    assert table.lines[0][-2:] == ("60 s", "1")
