"""Steps of plans as draws: what they take if the kernel model is off by as much as it was on samples kept from it.

Shape suffixes: P plans, X ranks of all plans, R ranks of one plan, M shards as ranks hold them, N distinct shards of
one plan, E draws.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import KernelErrors
from autoshard.core.step import KERNEL_PARTS
from autoshard.evaluation.evaluate import KernelPrices, PricedPlan
from autoshard.evaluation.step_price import StepPrice
from autoshard.evaluation.uncertainty.set_errors import SetErrors, half_widths


def step_draws(priced: Sequence[PricedPlan], errors: KernelErrors) -> NDArray[np.float64]:
    """Steps of plans in milliseconds, shape (P, E), drawn from the errors of the kernel model.

    What is drawn of a table, of a kind of kernel and of a set is the same in all plans, so that plans differ in a draw
    by what they do differently. Collectives and dense layers are taken as priced.

    Args:
        priced: Plans of one task, by the same models.
        errors: Of the kernel model.
    """
    return np.stack(
        [_steps(one.step, factor_RE) for one, factor_RE in zip(priced, _factors(priced, errors), strict=True)]
    )


def slowest_draws(priced: Sequence[PricedPlan], errors: KernelErrors) -> NDArray[np.float64]:
    """As `step_draws`, of the kernels of each plan's slowest rank alone, forward and backward together."""
    return np.stack(
        [
            (one.kernels.costs.kernel_ms_S[:, None] * factor_RE).max(axis=0)
            for one, factor_RE in zip(priced, _factors(priced, errors), strict=True)
        ]
    )


def _factors(priced: Sequence[PricedPlan], errors: KernelErrors) -> list[NDArray[np.float64]]:
    """What the kernels of each rank take over their prices in every draw, plan by plan; shapes (R, E)."""
    factor_XE = np.exp(_errors_of([one.kernels for one in priced], errors).drawn(errors))
    ends = np.cumsum([len(one.kernels.costs.forward_ms_S) for one in priced])[:-1]
    return np.split(factor_XE, ends)


def _errors_of(prices: Sequence[KernelPrices], errors: KernelErrors) -> SetErrors:
    """Of the ranks of several plans, one plan after the other."""
    owners: list[NDArray[np.int64]] = []
    tables: list[str] = []
    kinds: list[str] = []
    alone_ms: list[float] = []
    sets: list[Hashable] = []
    for kernels in prices:
        held_R: list[list[Hashable]] = [[] for _ in kernels.costs.forward_ms_S]
        held = kernels.held
        kinds_U = [local.kernel_kind for local in held.locals_U]
        for number, (which, ranks) in enumerate(zip(held.local_M.tolist(), held.ranks_M, strict=True)):
            table, shard_ms, count = held.table_of(number), float(kernels.alone_ms_U[which]), len(ranks)
            owners.append(len(sets) + ranks)
            tables += [table] * count
            kinds += [kinds_U[which]] * count
            alone_ms += [shard_ms] * count
            for rank in ranks.tolist():
                held_R[rank].append((table, shard_ms))
        sets += [frozenset(held) for held in held_R]
    return SetErrors.of(
        owner_M=np.concatenate(owners),
        tables_M=tables,
        kinds_M=kinds,
        alone_ms_M=np.array(alone_ms),
        half_width_X=np.concatenate([half_widths(kernels.costs, errors) for kernels in prices]),
        sets_X=sets,
    )


def _steps(price: StepPrice, factor_RE: NDArray[np.float64]) -> list[float]:
    """The step of one plan in every draw: kernels of each rank by their factors, each part at its slowest rank."""
    slowest, weights = {}, price.weights
    for part in KERNEL_PARTS:
        work_RF = price.work[part]
        ms_R = work_RF @ np.array(weights[part])
        model_ms_R = weights[part][0] * work_RF[:, 0]
        slowest[part.value] = np.max(ms_R[:, None] + (factor_RE - 1) * model_ms_R[:, None], axis=0).tolist()
    drawn = zip(*slowest.values(), strict=True)
    return [replace(price.times, **dict(zip(slowest, ms, strict=True))).step_ms(price.overlap) for ms in drawn]
