"""What ranks hold is the sum of what was put there, and costs what the model says."""

import numpy as np
import pytest

from costmodel.kernel.predictor import COUNT, FULL_CODE_WIDTH
from env.held_sets import HeldSets

NUM_PARTS = 9


@pytest.fixture(scope="module")
def codes_WFH():  # noqa: N802 - a shape suffix
    """Parts as they are and by two tiers; the last one is nothing, the one before it two shards that stay together."""
    rng = np.random.default_rng(1)
    codes_WFH = rng.normal(0, 2, (3, NUM_PARTS, FULL_CODE_WIDTH)).astype(np.float32)
    codes_WFH[..., COUNT:] = 1, 0
    codes_WFH[:, -2, COUNT] = 2
    codes_WFH[:, -1] = 0
    return codes_WFH


def assert_priced(held, model, expected_ERH, codes_WFH, rng):
    """Compares sums, and prices with something more, with those of the model."""
    num_episodes, num_ranks, width = expected_ERH.shape
    np.testing.assert_allclose(held.codes_ERH, expected_ERH, rtol=1e-5, atol=1e-5)
    for way in range(len(codes_WFH)):
        part_E = rng.integers(NUM_PARTS, size=num_episodes)
        held.bring_up(part_E)
        np.testing.assert_array_equal(held.item_EH, codes_WFH[0, part_E])
        with_ERH = expected_ERH + codes_WFH[way, part_E][:, None]
        price_RE = model.predict_ms(with_ERH.reshape(-1, width)).reshape(num_episodes, num_ranks).T
        np.testing.assert_allclose(held.price_with(way), price_RE, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(("num_episodes", "num_ranks"), [(1, 1), (5, 3), (700, 7), (2100, 2)])
@pytest.mark.parametrize("kind", ["learned", "model"])
def test_sums_and_prices_whatever_is_held(request, kind, codes_WFH, num_episodes, num_ranks):
    model, rng = request.getfixturevalue(kind), np.random.default_rng(2)
    codes_WFH = codes_WFH if kind == "learned" else np.abs(codes_WFH)
    held = HeldSets.of(model, codes_WFH, num_episodes, num_ranks)
    expected_ERH = np.zeros((num_episodes, num_ranks, FULL_CODE_WIDTH), dtype=np.float32)
    assert_priced(held, model, expected_ERH, codes_WFH, rng)
    for _ in range(12):
        episodes_D = np.flatnonzero(rng.random(num_episodes) < 0.7)
        part_E, rank_D = rng.integers(NUM_PARTS, size=num_episodes), rng.integers(num_ranks, size=len(episodes_D))
        held.bring_up(part_E)
        if rng.random() < 0.3:
            tier_D = rng.integers(2, size=len(episodes_D))
            held.share(episodes_D, tier_D)
            expected_ERH[episodes_D] += codes_WFH[1 + tier_D, part_E[episodes_D]][:, None]
        else:
            held.hold(episodes_D, rank_D)
            expected_ERH[episodes_D, rank_D] += codes_WFH[0, part_E[episodes_D]]
        assert_priced(held, model, expected_ERH, codes_WFH, rng)
    begun_D = np.arange(num_episodes)[::2]
    held.begin(begun_D)
    expected_ERH[begun_D] = 0
    assert_priced(held, model, expected_ERH, codes_WFH, rng)


def test_nothing_costs_nothing(learned, codes_WFH):
    held = HeldSets.of(learned, codes_WFH, 4, 2)
    held.bring_up(np.full(4, 3))
    held.hold(np.array([1]), np.array([0]))
    held.bring_up(np.full(4, NUM_PARTS - 1))
    price_RE = held.price_with()
    assert price_RE[0, 1] > 0
    assert np.count_nonzero(price_RE) == 1
