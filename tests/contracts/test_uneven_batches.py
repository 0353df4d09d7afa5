"""Batches of any size, empty ones and larger ones than usual, on plans of every layout: equal to the reference."""

import pytest

from autoshard.core import Optimizer
from tests.ranks import on_ranks

#: fp32 sums in another order.
TOLERANCE = 2e-5
#: Optimizers that are drawn with a plan, and those with two moments.
DRAWN, DECAYING = (), tuple(one for one in Optimizer if one.has_decaying_moments)


@pytest.mark.parametrize(
    ("num_processes", "world_size", "node_size", "num_groups", "num_plans", "optimizers"),
    [
        (2, 2, 1, 1, 6, (DRAWN, DECAYING)),
        *(
            pytest.param(*of, (DRAWN,), marks=pytest.mark.slow)
            for of in ((2, 2, 1, 1, 24), (2, 2, 1, 2, 10), (4, 4, 2, 1, 30), (4, 2, 2, 2, 10), (3, 6, 3, 1, 10))
        ),
    ],
)
def test_batches_of_several_sizes_equal_the_unsharded_reference(
    num_processes, world_size, node_size, num_groups, num_plans, optimizers
):
    from tests.contracts.uneven_worker import errors_of

    errors_OWP, *_ = on_ranks(errors_of, num_processes, world_size, node_size, num_groups, num_plans, optimizers)
    assert errors_OWP.shape == (len(optimizers), 2, num_plans)
    assert errors_OWP.max() <= TOLERANCE, errors_OWP
