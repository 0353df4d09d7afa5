"""Repeated measurements: one rule for kernels and dense layers."""

from dataclasses import replace

import pytest

from autoshard.core.dense import DenseKind, DenseShape
from bench.dense.harness import DenseMeasurement
from bench.kernels.harness import Measurement
from bench.measuring.attempts import Timing, combined_spread, mean_of

VALUES = {
    "forward_ms": 1.0,
    "backward_ms": 2.0,
    "forward_spread": 0.1,
    "backward_spread": 0.1,
    "reference_forward_ms": 10.0,
    "reference_backward_ms": 20.0,
    "num_rounds": 9,
}
SHAPE = DenseShape(kind=DenseKind.DOT, batch_size=8, widths=(4, 8))
STEADY = {
    "kernels": Measurement(shards=(), group=1, **VALUES),
    "dense layers": DenseMeasurement(shape=SHAPE, **VALUES),
}


@pytest.mark.parametrize("steady", STEADY.values(), ids=STEADY)
def test_measurements_are_averaged_by_how_steady_they_were(steady):
    # The machine was half as fast, and twice as unsteady; relative to the reference the set took 1.5 times as long.
    slow = replace(
        steady, forward_ms=3.0, forward_spread=0.2, backward_ms=6.0, backward_spread=0.2, reference_forward_ms=20.0,
        reference_backward_ms=40.0,
    )  # fmt: skip
    mean = mean_of([steady, slow], 0.09)
    assert mean.reference_forward_ms == pytest.approx(12.0)  # four times the weight for half the spread
    assert mean.forward_ms / mean.reference_forward_ms == pytest.approx(0.1 * (4 + 1.5) / 5)
    assert mean.backward_ms / mean.reference_backward_ms == pytest.approx(0.1 * (4 + 1.5) / 5)
    assert mean.forward_spread == pytest.approx((4 * 0.1 + 0.2) / 5)
    # 1 / sqrt(1 / 0.1^2 + 1 / 0.2^2)
    assert combined_spread([steady, slow]) == pytest.approx(0.0894427)
    assert (mean.num_attempts, mean.is_noisy) == (2, False)
    assert mean_of([steady, slow], 0.089).is_noisy


def test_more_rounds_have_more_weight():
    first = STEADY["kernels"]
    longer = replace(first, num_rounds=27, forward_ms=2.0)
    mean = mean_of([first, longer], 0.09)
    assert mean.forward_ms == pytest.approx((1.0 + 3 * 2.0) / 4)
    assert mean.num_rounds == 18
    # As good as 27 rounds with 1 / sqrt((1 + 1/3) / 0.1^2)
    assert combined_spread([first, longer]) == pytest.approx(0.1 * (3 / 4) ** 0.5)


def test_a_single_measurement_stays_as_it_is():
    steady = STEADY["kernels"]
    assert mean_of([steady], 0.11) == steady
    assert mean_of([steady], 0.09) == replace(steady, is_noisy=True)


def test_spread_is_weighed_by_time_but_of_dense_layers_the_larger_counts():
    apart = {**VALUES, "backward_spread": 0.4}
    assert Timing(**apart).spread == pytest.approx((0.1 + 2 * 0.4) / 3)
    assert DenseMeasurement(shape=SHAPE, **apart).spread == 0.4
    assert Timing(**{**VALUES, "forward_ms": 0.0, "backward_ms": 0.0}).spread == 0.0
