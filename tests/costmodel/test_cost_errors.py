"""What errors of predictions have in common, found again where it is known."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core.costs import KernelErrors
from autoshard.evaluation.uncertainty.set_errors import SetErrors
from costmodel.kernel.card import Interval
from costmodel.kernel.errors import fitted_errors, half_widths_of, measurement_noise
from costmodel.kernel.metrics import PricedSamples

INTERVAL = Interval(low=-2.0, high=2.0)
HALF_WIDTH = 0.1


@pytest.fixture(scope="module")
def found(trained, dataset):
    """Fits errors to samples that are off by draws of known errors; several draws together."""
    predictor = trained.model.predictor
    priced = replace(PricedSamples.of(predictor, dataset), spread_S=np.full(len(dataset), HALF_WIDTH / 2))
    alone_ms_U = predictor.predict(predictor.encode(dataset.features_UF)).sum(axis=1)
    held = [dataset.shards_U[index] for index in dataset.shard_N.tolist()]
    loads = SetErrors.of(
        owner_M=np.repeat(np.arange(len(dataset)), dataset.num_shards_S),
        tables_M=[shard.table for shard in held],
        kinds_M=[shard.kernel_kind for shard in held],
        alone_ms_M=alone_ms_U[dataset.shard_N],
        half_width_X=np.full(len(dataset), HALF_WIDTH),
        sets_X=dataset.set_S.tolist(),
    )

    def fit(errors, draw):
        factor_S = np.exp(loads.drawn(errors)[:, draw])
        measured = replace(dataset, latency_ms_SO=dataset.latency_ms_SO * (factor_S / priced.ratio_S)[:, None])
        return fitted_errors(predictor, INTERVAL, replace(priced, dataset=measured), 0.0)

    return fit


def test_errors_of_tables_and_of_sets_are_told_apart(found):
    of_tables = [found(KernelErrors(table=0.8, kind=0.0, company=0.0), draw) for draw in range(6)]
    assert np.mean([errors.table for errors in of_tables]) == pytest.approx(0.8, rel=0.25)
    assert np.mean([errors.company for errors in of_tables]) < 0.25
    of_sets = [found(KernelErrors(table=0.0, kind=0.0, company=0.6), draw) for draw in range(6)]
    assert np.mean([errors.company for errors in of_sets]) == pytest.approx(0.6, rel=0.1)
    assert np.mean([errors.table for errors in of_sets]) < 0.2


def test_few_samples_say_what_the_interval_says(trained, dataset):
    few = dataset.take(np.arange(10))
    priced = PricedSamples(dataset=few, ms_SO=few.latency_ms_SO, spread_S=np.ones(10))
    errors = fitted_errors(trained.model.predictor, INTERVAL, priced, 0.0)
    assert errors == KernelErrors(table=0.0, kind=0.0, company=1 / 1.645)


def test_half_widths_are_those_of_the_interval():
    assert half_widths_of(Interval(low=-1.0, high=3.0), np.array([0.1, 0.2])) == pytest.approx([0.2, 0.4])
    with_hours = Interval(low=-1.0, high=3.0, drift=0.7)
    assert half_widths_of(with_hours, np.array([0.1, 0.2])) == pytest.approx([0.2, 0.4])


def test_a_model_says_beside_its_errors_what_other_hours_add(trained):
    model = trained.model
    card = replace(model.card, interval=replace(model.card.interval, drift=0.7))
    at_other_hours = type(model)(model.tensors(), card)
    assert at_other_hours.errors == replace(model.errors, drift=0.7)


def test_noise_is_how_measurements_of_a_set_differ(dataset):
    twice = dataset.take(np.repeat(np.arange(200), 2))
    rng = np.random.default_rng(0)
    noisy = replace(twice, latency_ms_SO=twice.latency_ms_SO * np.exp(0.02 * rng.standard_normal((400, 1))))
    assert measurement_noise(noisy, np.full(400, 0.1)) == pytest.approx(0.2, rel=0.2)
    once = dataset.take(np.flatnonzero(np.bincount(np.unique(dataset.set_S, return_inverse=True)[1])[:100] == 1))
    assert measurement_noise(once, np.ones(len(once))) == 0.0


def test_noise_is_no_error_of_the_model(trained, dataset):
    predictor = trained.model.predictor
    rng = np.random.default_rng(1)
    ms_SO = dataset.latency_ms_SO * np.exp(0.05 * rng.standard_normal((len(dataset), 1)))
    priced = PricedSamples(dataset=dataset, ms_SO=ms_SO, spread_S=np.full(len(dataset), HALF_WIDTH / 2))
    known = fitted_errors(predictor, INTERVAL, priced, 0.4)
    unknown = fitted_errors(predictor, INTERVAL, priced, 0.0)
    assert unknown.company == pytest.approx(0.5, rel=0.15)
    assert known.company**2 == pytest.approx(0.3**2, abs=0.06)


def test_trained_and_calibrated_cards_have_errors(trained):
    card = trained.model.card
    assert card.errors is not None
    assert type(card).from_json(card.to_json(), "card").errors == card.errors
    without = replace(card, errors=None)
    assert "errors" not in without.to_json()
    assert type(card).from_json(without.to_json(), "card").errors is None
