"""Drift of the machine is divided out by the reference; what is a set's own stays."""

import numpy as np
import pytest

from autoshard.formats.stores.drift import divide_out_drift
from studies.kernels.repeatability import drift_of, variation

RNG = np.random.default_rng(7)
TIMES_S = np.linspace(0, 600, 400)
DRIFT = 1 + 0.25 * np.sin(TIMES_S / 100)


def test_a_drift_that_the_reference_shows_is_divided_out():
    latency_ms = 8 * DRIFT * RNG.normal(1, 0.005, 400)
    reference_ms = 15 * DRIFT * RNG.normal(1, 0.003, 400)
    assert variation(latency_ms).plain > 0.1
    corrected_ms = divide_out_drift(latency_ms, reference_ms)
    assert variation(corrected_ms).plain == pytest.approx((0.005**2 + 0.003**2) ** 0.5, rel=0.15)
    assert np.median(corrected_ms) == pytest.approx(8 * np.median(reference_ms) / 15, rel=0.01)


def test_what_the_reference_does_not_show_stays():
    latency_ms = 8 * DRIFT
    corrected_ms = divide_out_drift(latency_ms, np.full(400, 15.0))
    assert corrected_ms == pytest.approx(latency_ms)


def test_variation_is_deviation_over_location():
    assert variation([9.0, 10.0, 11.0]).plain == pytest.approx(0.1)
    assert variation([9.0, 10.0, 11.0]).robust == pytest.approx(0.14826)
    hiccup = variation([9.0, 10.0, 11.0, 10.0, 500.0])
    assert hiccup.plain > 1
    assert hiccup.robust == pytest.approx(0.14826)


def test_drift_has_a_range_and_a_slope():
    found = drift_of([10.0, 11.0, 12.0], [0.0, 60.0, 120.0])
    assert found.range == pytest.approx(0.2)
    assert found.per_minute == pytest.approx(1 / 11)
