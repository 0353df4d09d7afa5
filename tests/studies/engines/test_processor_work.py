import numpy as np
import pytest

from studies.engines import processor_work

pytestmark = pytest.mark.smoke


def test_amounts_are_told_apart_by_what_they_take():
    amounts_NK = np.random.default_rng(0).uniform(1, 100, (40, 3))
    assert processor_work.fitted(amounts_NK, amounts_NK @ [0.5, 0.0, 2.0]) == pytest.approx([0.5, 0.0, 2.0], abs=1e-6)


def test_sums_over_sequences_take_time_both_ways():
    tables = processor_work.tables_of(2, 3, 16, 8)
    forward_ms, backward_ms = processor_work.sums_ms(tables, 3)
    assert forward_ms > 0
    assert backward_ms > 0
