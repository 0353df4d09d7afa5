"""Batches of any size, empty ones and larger ones than usual, on plans of every layout: equal to the reference."""

from functools import partial

import pytest

from autoshard.core import Optimizer
from tests.ranks import on_ranks

#: fp32 sums in another order.
TOLERANCE = 2e-5


@pytest.mark.parametrize(
    ("num_processes", "world_size", "node_size", "num_groups", "num_plans"),
    [
        (2, 2, 1, 1, 6),
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in ((2, 2, 1, 1, 24), (2, 2, 1, 2, 10), (4, 4, 2, 1, 30), (4, 2, 2, 2, 10), (3, 6, 3, 1, 10))
        ),
    ],
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_batches_of_several_sizes_equal_the_unsharded_reference(
    num_processes, world_size, node_size, num_groups, num_plans, is_weighted
):
    from tests.contracts.uneven_worker import errors_of

    of_processes = partial(errors_of, is_weighted=is_weighted)
    errors, *_ = on_ranks(of_processes, num_processes, world_size, node_size, num_groups, num_plans)
    assert len(errors) == num_plans
    assert max(errors) <= TOLERANCE, errors


@pytest.mark.parametrize("is_weighted", [False, True])
def test_batches_of_several_sizes_are_trained_by_optimizers_with_two_moments(is_weighted):
    from tests.contracts.uneven_worker import errors_of

    optimizers = [one for one in Optimizer if one.has_decaying_moments]
    errors, *_ = on_ranks(partial(errors_of, is_weighted=is_weighted), 2, 2, 1, 1, 6, optimizers)
    assert max(errors) <= TOLERANCE, errors
