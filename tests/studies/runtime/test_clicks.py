"""Planted click data."""

import math
from itertools import combinations

import pytest
import torch

from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.training.synthetic import Samples
from studies.runtime.clicks import ClickModel, PlantedClicks, normalised_entropy

SMALL = ClickModel(num_tables=3, num_rows=200, embedding_dim=8, num_dense=4, click_rate=0.3)


@pytest.fixture(scope="module")
def clicks():
    return PlantedClicks(SMALL, 7)


@pytest.mark.smoke
def test_batches_depend_on_seed_and_key_alone(clicks):
    batch, again = clicks.draw(64, (3, 0)), PlantedClicks(SMALL, 7).draw(64, (3, 0))
    for other, is_same in (
        (again, True),
        (clicks.draw(64, (3, 1)), False),
        (PlantedClicks(SMALL, 8).draw(64, (3, 0)), False),
    ):
        assert torch.equal(batch.labels_B, other.labels_B) is is_same
        assert torch.equal(batch.dense_BN, other.dense_BN) is is_same
        assert torch.equal(batch.ids.ids_L, other.ids.ids_L) is is_same


@pytest.mark.smoke
def test_labels_follow_the_planted_logits(clicks):
    batch = clicks.draw(1 << 15, (0,))
    logits_B = clicks.logits(batch)
    # Standard errors: sqrt(0.3 * 0.7 / 2^15) = 0.0025, and sqrt(2 / 2^15) of the deviation with room for heavy tails.
    assert float(batch.labels_B.mean()) == pytest.approx(SMALL.click_rate, abs=0.01)
    assert float(logits_B.std()) == pytest.approx(SMALL.logit_deviation, rel=0.1)
    best = normalised_entropy(logits_B, batch.labels_B)
    assert best < 0.9
    for worse in (0.8 * logits_B, 1.25 * logits_B, logits_B + 0.3, logits_B - 0.3, logits_B.roll(1)):
        assert normalised_entropy(worse, batch.labels_B) > best


@pytest.mark.smoke
def test_the_logit_has_the_products_of_all_pairs(clicks):
    # All combinations of two values in each of four fields: three ids, and the dense features.
    values_FB = torch.cartesian_prod(*[torch.arange(2)] * 4).T
    dense_2N = torch.tensor([[1.0, 0.0, -1.0, 2.0], [0.5, -2.0, 0.0, 1.0]])
    ids = BatchOfIds(torch.ones(3, 16, dtype=torch.int64), values_FB[:3].reshape(-1))
    samples = Samples(ids=ids, dense_BN=dense_2N[values_FB[3]], labels_B=torch.zeros(16))
    logits = clicks.logits(samples).double().view(2, 2, 2, 2)
    for pair in combinations(range(4), 2):
        products = logits.diff(dim=pair[0]).diff(dim=pair[1])
        # They are there, and depend on the values of these two fields alone.
        assert products.abs().min() > 1e-3
        assert products.max() - products.min() < 1e-5


@pytest.mark.smoke
def test_knowing_the_click_rate_alone_has_a_normalised_entropy_of_1():
    labels_B = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert normalised_entropy(torch.full((4,), math.log(1 / 3)), labels_B) == pytest.approx(1.0)
    assert normalised_entropy(torch.tensor([20.0, -20.0, -20.0, -20.0]), labels_B) < 1e-6
