import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.training.returns import vtrace_returns

numbers = st.floats(-2, 2, width=32)


def column(values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def by_the_formula(log_ratios, discounts, rewards, values, bootstrap, rho_clip, c_clip):
    """IMPALA Sec. 4.1 as written: a sum over later steps, each with the product of the c between."""
    ratios = [math.exp(value) for value in log_ratios]
    rhos, cs = [min(ratio, rho_clip) for ratio in ratios], [min(ratio, c_clip) for ratio in ratios]
    after = [*values[1:], bootstrap]
    targets = []
    for start in range(len(values)):
        target, weight = values[start], 1.0
        for step in range(start, len(values)):
            target += weight * rhos[step] * (rewards[step] + discounts[step] * after[step] - values[step])
            weight *= discounts[step] * cs[step]
        targets.append(target)
    next_targets = [*targets[1:], bootstrap]
    advantages = [
        rho * (reward + discount * following - value)
        for rho, reward, discount, following, value in zip(rhos, rewards, discounts, next_targets, values, strict=True)
    ]
    return targets, advantages


@given(
    steps=st.lists(st.tuples(numbers, st.sampled_from([0.0, 0.9, 1.0]), numbers, numbers), min_size=1, max_size=8),
    bootstrap=numbers,
    rho_clip=st.sampled_from([0.5, 1.0, 10.0]),
    c_clip=st.sampled_from([0.5, 1.0]),
)
def test_the_recursion_is_the_formula(steps, bootstrap, rho_clip, c_clip):
    columns = [list(values) for values in zip(*steps, strict=True)]
    returns = vtrace_returns(
        *(column(values) for values in columns),
        torch.tensor([bootstrap], dtype=torch.float64),
        rho_clip=rho_clip,
        c_clip=c_clip,
    )
    targets, advantages = by_the_formula(*columns, bootstrap, rho_clip, c_clip)
    assert returns.targets_TB[:, 0].tolist() == pytest.approx(targets, abs=1e-6)
    assert returns.advantages_TB[:, 0].tolist() == pytest.approx(advantages, abs=1e-6)


def test_on_policy_targets_are_what_came_of_the_episode():
    zeros, rewards = column([0.0] * 4), column([0.0, 0.0, 0.7, 0.0])
    discounts, values = column([1.0, 1.0, 0.0, 1.0]), column([0.1, 0.9, 0.4, 0.3])
    returns = vtrace_returns(zeros, discounts, rewards, values, torch.tensor([0.25], dtype=torch.float64))
    # The third step ends an episode with 0.7; the last belongs to the next, which is worth 0.25 so far.
    assert returns.targets_TB[:, 0].tolist() == pytest.approx([0.7, 0.7, 0.7, 0.25])
    assert returns.advantages_TB[:, 0].tolist() == pytest.approx([0.6, -0.2, 0.3, -0.05])


def test_an_action_that_the_policy_would_not_take_again_counts_for_nothing():
    returns = vtrace_returns(
        column([-50.0, 0.0]), column([1.0, 0.0]), column([0.0, 1.0]), column([0.2, 0.5]), torch.zeros(1).double()
    )
    assert returns.targets_TB[0, 0].item() == pytest.approx(0.2)
    assert returns.advantages_TB[0, 0].item() == pytest.approx(0.0)
