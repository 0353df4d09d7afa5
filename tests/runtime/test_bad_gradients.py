"""A batch of one process whose gradients are no numbers changes nothing on any of them, or is clipped, or ends all."""

import math

import pytest

from autoshard.core import Optimizer
from autoshard.core.errors import InvalidOptionError
from autoshard.core.optimizers import BadGradients, UpdateSettings
from tests.ranks import on_ranks
from tests.runtime.guard_worker import clipped_by_infinite_gradients, every_way

TRAINED = [one for one in Optimizer if one is not Optimizer.NONE]


@pytest.mark.parametrize(
    ("optimizers", "value", "num_groups"),
    [
        ((Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAM), math.nan, 1),
        *(pytest.param(TRAINED, value, 1, marks=pytest.mark.slow) for value in (math.nan, math.inf)),
        pytest.param((Optimizer.ADAGRAD, Optimizer.ADAM), math.nan, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_bad_batch_of_one_process_is_met_alike_by_all(optimizers, value, num_groups):
    num_processes = 2 * num_groups
    for found in on_ranks(every_way, num_processes, optimizers, value, num_groups):
        for (_, policy, _), (changes, is_finite, num_bad, said) in found.items():
            assert is_finite
            assert num_bad == 1
            assert changes == (policy == "clip")
            told = f"step 3: gradients of the batch of process {num_processes - 1} are not finite; no table was changed"
            assert said == (f"{told} by them" if policy == "error" else None)


def test_infinite_gradients_are_the_limit_on_any_number_of_processes_and_those_of_layers_are_not_limited():
    for of_layer, of_rows in on_ranks(clipped_by_infinite_gradients, 2):
        assert of_layer == [0.5, -0.5, 0.0, 3.0]
        assert of_rows == pytest.approx([0.5, -0.5, 0.0, 0.5])


def test_clipping_bad_gradients_needs_a_limit():
    with pytest.raises(InvalidOptionError, match=r"^on_bad_gradients: clip needs max_gradient$"):
        UpdateSettings(learning_rate=0.1, on_bad_gradients=BadGradients.CLIP)
