"""V-trace: what states were worth, and how much better than expected the actions were.

Shape suffixes: T steps, B trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VTraceReturns:
    """Targets for the value head and advantages for the policy head; no gradient flows through them."""

    targets_TB: Tensor
    advantages_TB: Tensor


@torch.no_grad()
def vtrace_returns(
    log_ratios_TB: Tensor,
    discounts_TB: Tensor,
    rewards_TB: Tensor,
    values_TB: Tensor,
    bootstrap_B: Tensor,
    *,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> VTraceReturns:
    """Corrects trajectories for the policy having changed since they were collected.

    Args:
        log_ratios_TB: Log-probability of the action now, minus that when it was taken.
        discounts_TB: Discounting factor; 0 where the episode ended with the step.
        rewards_TB: Rewards.
        values_TB: Values of the states, by the value head.
        bootstrap_B: Value of the state after the last step.
        rho_clip: Upper limit of the ratio that weighs a temporal difference.
        c_clip: Upper limit of the ratio that passes later differences on to earlier steps.

    Source:
        AutoShard Eq. 2 and 3, after IMPALA (Espeholt et al. 2018) Sec. 4.1. The advantage is
        rho (r + gamma V_target(s') - V(s)); the paper loses the brackets around it.
    """
    ratios_TB = log_ratios_TB.exp()
    rhos_TB = ratios_TB.clamp(max=rho_clip)
    cs_TB = ratios_TB.clamp(max=c_clip)
    next_values_TB = torch.cat([values_TB[1:], bootstrap_B[None]])
    deltas_TB = rhos_TB * (rewards_TB + discounts_TB * next_values_TB - values_TB)
    corrections_TB = torch.empty_like(deltas_TB)
    correction_B = torch.zeros_like(bootstrap_B)
    for step in range(len(deltas_TB) - 1, -1, -1):
        correction_B = deltas_TB[step] + discounts_TB[step] * cs_TB[step] * correction_B
        corrections_TB[step] = correction_B
    targets_TB = values_TB + corrections_TB
    next_targets_TB = torch.cat([targets_TB[1:], bootstrap_B[None]])
    advantages_TB = rhos_TB * (rewards_TB + discounts_TB * next_targets_TB - values_TB)
    return VTraceReturns(targets_TB=targets_TB, advantages_TB=advantages_TB)
