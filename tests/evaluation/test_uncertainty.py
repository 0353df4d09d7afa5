"""Errors that sets have in common."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core.costs import KernelCosts, KernelErrors
from autoshard.evaluation.uncertainty.set_errors import NUM_DRAWS, SetErrors, half_widths, numbered

NO_ERRORS = KernelErrors(table=0.0, kind=0.0, company=0.0)


@pytest.fixture
def set_errors():
    """Sets {a, b}, {a} and {b, a} again, of tables a (3 ms) and b (1 ms), of kinds x and y."""
    return SetErrors.of(
        owner_M=np.array([0, 0, 1, 2, 2]),
        tables_M=["a", "b", "a", "b", "a"],
        kinds_M=["x", "y", "x", "y", "x"],
        alone_ms_M=np.array([3.0, 1.0, 3.0, 1.0, 3.0]),
        half_width_X=np.array([0.1, 0.2, 0.1]),
        sets_X=["ab", "a", "ab"],
    )


def test_sets_have_in_common_what_they_share(set_errors):
    of_tables = set_errors.covariance(replace(NO_ERRORS, table=2.0))
    # Shares of a and b: 3/4 and 1/4 of the first set, all of the second one.
    assert of_tables[0, 0] == pytest.approx(4 * 0.1**2 * (0.75**2 + 0.25**2))
    assert of_tables[0, 1] == pytest.approx(4 * 0.1 * 0.2 * 0.75)
    of_sets = set_errors.covariance(replace(NO_ERRORS, company=1.0))
    assert of_sets == pytest.approx(np.array([[0.01, 0, 0.01], [0, 0.04, 0], [0.01, 0, 0.01]]))
    every = KernelErrors(table=2.0, kind=0.5, company=1.0)
    of_kinds = set_errors.covariance(replace(NO_ERRORS, kind=0.5))
    assert set_errors.covariance(every) == pytest.approx(of_tables + of_kinds + of_sets)


def test_draws_are_of_that_covariance_the_same_in_every_call(set_errors):
    errors = KernelErrors(table=2.0, kind=0.5, company=1.0)
    drawn_XE = set_errors.drawn(errors)
    assert drawn_XE.shape == (3, NUM_DRAWS)
    assert drawn_XE.tolist() == set_errors.drawn(errors).tolist()
    assert drawn_XE.mean(axis=1) == pytest.approx(0.0, abs=1e-12)
    assert drawn_XE[0].tolist() == drawn_XE[2].tolist()
    expected_XX = set_errors.covariance(errors)
    # A covariance of 128 independent draws is off by at most 4 standard errors.
    deviations = np.sqrt(np.outer(expected_XX.diagonal(), expected_XX.diagonal()))
    assert (np.abs(drawn_XE @ drawn_XE.T / NUM_DRAWS - expected_XX) < 4 * np.sqrt(2 / 128) * deviations).all()


def test_sets_that_cost_nothing_are_never_off():
    costs = KernelCosts(
        forward_ms_S=np.array([0.0, 0.5]),
        backward_ms_S=np.array([0.0, 0.5]),
        low_ms_S=np.array([0.0, 0.5]),
        high_ms_S=np.array([0.0, 2.0]),
    )
    assert half_widths(costs, NO_ERRORS).tolist() == pytest.approx([0.0, np.log(2.0)])


def test_what_all_kernels_take_more_at_other_hours_is_no_error_of_a_set():
    spread, drift = 0.1, 0.7
    at_this_hour, at_others = (
        KernelCosts(
            forward_ms_S=np.array([1.0, 2.0]),
            backward_ms_S=np.array([1.0, 2.0]),
            low_ms_S=np.array([2.0, 4.0]) * np.exp(-half),
            high_ms_S=np.array([2.0, 4.0]) * np.exp(half),
        )
        for half in (spread, np.hypot(spread, drift))
    )
    assert half_widths(at_this_hour, NO_ERRORS) == pytest.approx(spread)
    assert half_widths(at_others, replace(NO_ERRORS, drift=drift)) == pytest.approx(spread)
    assert half_widths(at_this_hour, replace(NO_ERRORS, drift=drift)).tolist() == [0.0, 0.0]


def test_labels_are_numbered_as_they_come():
    assert numbered(["b", "a", "b"]).tolist() == [0, 1, 0]
