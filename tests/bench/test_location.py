import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measuring.robust_stats import locate, standard_errors


@given(
    level_S=st.lists(st.floats(0.1, 100.0), min_size=2, max_size=6),
    drift_R=st.lists(st.floats(0.5, 2.0), min_size=5, max_size=9),
)
def test_slow_rounds_leave_no_trace(level_S, drift_R):
    located = locate(np.outer(level_S, drift_R), num_dropped=1)
    np.testing.assert_allclose(located.mean_ms_S / located.mean_ms_S[0], np.array(level_S) / level_S[0])
    np.testing.assert_allclose(located.spread_S, 0.0, atol=1e-9)


def test_a_lone_hiccup_is_dropped():
    latency_ms = np.full((3, 5), 2.0)
    latency_ms[1, 2] = 50.0
    located = locate(latency_ms, num_dropped=1)
    np.testing.assert_allclose(located.mean_ms_S, 2.0)


def test_spread_is_the_deviation_of_single_runs():
    noise_SR = np.random.default_rng(0).normal(1.0, 0.02, (20, 2000))
    noise_SR[3, :100] = 9.0  # hiccups do not count
    located = locate(noise_SR * np.linspace(1, 50, 20)[:, None], num_dropped=200)
    np.testing.assert_allclose(located.spread_S, 0.02, rtol=0.15)


def test_sets_that_run_nothing_take_no_time():
    located = locate(np.array([[0.0, 0.0], [1.0, 1.0]]), num_dropped=0)
    assert located.mean_ms_S.tolist() == [0.0, 1.0]
    assert locate(np.zeros((2, 2)), num_dropped=0).mean_ms_S.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("num_rounds", "num_dropped"), [(3, 1), (4, 1), (6, 1), (9, 2), (20, 2)])
def test_standard_errors_are_those_of_normal_runs_however_few(num_rounds, num_dropped):
    noise_SR = np.random.default_rng(0).normal(1.0, 0.02, (20_000, num_rounds))
    errors_S = standard_errors(noise_SR, num_dropped)
    assert np.mean(errors_S) == pytest.approx(0.02 / np.sqrt(num_rounds), rel=0.05)


def test_what_runs_nothing_has_no_error():
    assert standard_errors(np.array([[0.0] * 4, [1.0] * 4]), 1).tolist() == [0.0, 0.0]
