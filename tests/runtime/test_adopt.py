"""Running jobs go over to other plans of their tables, and fail to without harm."""

import itertools

import pytest

from tests.ranks import on_ranks
from tests.runtime.adopt_worker import LAYOUTS, all_pairs, check_all


@pytest.mark.parametrize(
    ("num_processes", "names"),
    [
        (2, ["tiers", "host memory"]),
        pytest.param(2, list(LAYOUTS), marks=pytest.mark.slow),
        pytest.param(4, list(LAYOUTS), marks=pytest.mark.slow),
    ],
)
def test_plans_follow_each_other(num_processes, names):
    order = all_pairs(names)
    assert {*itertools.pairwise(order)} == {(one, other) for one in names for other in names}
    on_ranks(check_all, num_processes, names)
