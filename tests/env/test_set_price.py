"""Prices of many sets are those of the model."""

import numpy as np
import pytest

from costmodel import CostModelCard, Coverage, FeatureScaling, HeldOutMetrics, LearnedCostModel
from costmodel.card import Interval
from costmodel.features import NUM_FEATURES
from costmodel.predictor import COUNT, FULL_CODE_WIDTH
from costmodel.weights import ENCODER_HIDDEN, weight_shapes
from env.set_price import set_price


@pytest.fixture(scope="module")
def learned():
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in weight_shapes(ENCODER_HIDDEN).items()
    }
    card = CostModelCard(
        device="cpu",
        coverage=Coverage(kinds=("fused/hbm/fp32/rowwise_adagrad/sum",), num_tables=(1, 10), ranges={}),
        encoder_hidden=ENCODER_HIDDEN,
        scaling=FeatureScaling(mean_F=(0.0,) * NUM_FEATURES, std_F=(1.0,) * NUM_FEATURES),
        scale_ms=3.0,
        metrics=HeldOutMetrics(num_samples=1, mae_ms=0.0, mse_ms2=0.0, relative_error=0.0, kendall_tau=1.0),
        interval=Interval(low=-0.1, high=0.1),
        training={},
    )
    return LearnedCostModel(weights, card)


@pytest.mark.parametrize("shape", [(1,), (7, 3), (700, 2, 4)])
def test_the_learned_models_prices(learned, shape):
    rng = np.random.default_rng(1)
    codes = rng.normal(0, 2, (*shape, FULL_CODE_WIDTH)).astype(np.float32)
    codes[..., COUNT] = rng.integers(0, 5, shape)
    price = set_price(learned)
    for sets in (codes, -codes[:1]):
        expected = learned.price(sets.reshape(-1, FULL_CODE_WIDTH)).reshape(sets.shape[:-1])
        assert price(sets) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert (price(codes)[codes[..., COUNT] == 0] == 0).all()


def test_other_models_price_as_they_do(model):
    codes = np.random.default_rng(0).random((4, 3, 40)).astype(np.float32)
    assert (set_price(model)(codes).ravel() == model.price(codes.reshape(-1, 40))).all()
