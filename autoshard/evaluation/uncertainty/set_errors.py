"""Errors of priced sets of shards, and what they have in common.

Shape suffixes: M shards as the sets hold them, X sets, T tables, K kinds of kernels, C distinct sets, E draws.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoshard.core import KernelCosts
from autoshard.core.costs import KernelErrors, MsArray

if TYPE_CHECKING:
    from scipy import sparse

#: Draws of every effect; half of them are the other half with the opposite sign, so that their mean is exact.
NUM_DRAWS = 256
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SetErrors:
    """How the errors of X sets depend on the effects of `KernelErrors`, whose standard deviations are 1 here.

    Attributes:
        table_XT: What each set has of every table's effect: its share of the shards' times alone, times the half width.
        kind_XK: The same of kinds of kernels.
        company_XC: The half width, at the number of the set: equal sets have one number.
        half_width_X: Half the width of the logarithm of each set's 90% interval, without drift.
    """

    table_XT: sparse.csr_array
    kind_XK: sparse.csr_array
    company_XC: sparse.csr_array
    half_width_X: MsArray

    @classmethod
    def of(
        cls,
        *,
        owner_M: NDArray[np.int64],
        tables_M: Sequence[Hashable],
        kinds_M: Sequence[Hashable],
        alone_ms_M: MsArray,
        half_width_X: MsArray,
        sets_X: Sequence[Hashable],
    ) -> SetErrors:
        """Of sets given by their shards.

        Args:
            owner_M: Which set holds each shard.
            tables_M: Its table.
            kinds_M: Its kind of kernel.
            alone_ms_M: Its time alone.
            half_width_X: Half the width of the logarithm of each set's 90% interval, without drift.
            sets_X: What equal sets have alike.
        """
        sum_ms_X = np.bincount(owner_M, weights=alone_ms_M, minlength=len(half_width_X))
        share_M = np.divide(alone_ms_M, sum_ms_X[owner_M], out=np.zeros(len(owner_M)), where=sum_ms_X[owner_M] > 0)
        weight_M = share_M * half_width_X[owner_M]
        return cls(
            table_XT=_loads(weight_M, owner_M, tables_M, len(half_width_X)),
            kind_XK=_loads(weight_M, owner_M, kinds_M, len(half_width_X)),
            company_XC=_loads(half_width_X, np.arange(len(half_width_X)), sets_X, len(half_width_X)),
            half_width_X=half_width_X,
        )

    def drawn(self, errors: KernelErrors) -> NDArray[np.float64]:
        """Logarithms of measured over predicted of every set, drawn; shape (X, E), the same in every call."""
        rng = np.random.default_rng(_SEED)
        drawn_XE = np.zeros((len(self.half_width_X), NUM_DRAWS))
        for deviation, loads in self.parts(errors):
            half = rng.standard_normal((loads.shape[1], NUM_DRAWS // 2))
            drawn_XE += deviation * (loads @ np.concatenate([half, -half], axis=1))
        return drawn_XE

    def covariance(self, errors: KernelErrors) -> NDArray[np.float64]:
        """Of these logarithms, shape (X, X)."""
        spread_XX = np.zeros((len(self.half_width_X), len(self.half_width_X)))
        for deviation, loads in self.parts(errors):
            spread_XX += deviation**2 * (loads @ loads.T).toarray()
        return spread_XX

    def parts(self, errors: KernelErrors) -> tuple[tuple[float, sparse.csr_array], ...]:
        """Standard deviations of effects, and what sets have of them: of tables, of kinds, of sets."""
        return (
            (errors.table, self.table_XT),
            (errors.kind, self.kind_XK),
            (errors.company, self.company_XC),
        )


def half_widths(costs: KernelCosts, errors: KernelErrors) -> MsArray:
    """Half the width of the logarithm of each set's 90% interval, without drift; 0 for sets that cost nothing."""
    is_priced_S = (costs.low_ms_S > 0) & np.isfinite(costs.high_ms_S)
    ratio_S = np.divide(costs.high_ms_S, costs.low_ms_S, out=np.ones_like(costs.high_ms_S), where=is_priced_S)
    half_width_S: MsArray = np.sqrt(np.maximum(np.square(np.log(ratio_S) / 2) - errors.drift**2, 0.0))
    return half_width_S


def numbered(labels: Sequence[Hashable]) -> NDArray[np.int64]:
    """A number for each label, alike for equal ones, in the order of their first appearance."""
    number_of: dict[Hashable, int] = {}
    return np.array([number_of.setdefault(label, len(number_of)) for label in labels], dtype=np.int64)


def _loads(weights: MsArray, rows: NDArray[np.int64], labels: Sequence[Hashable], num_rows: int) -> sparse.csr_array:
    from scipy import sparse

    columns = numbered(labels)
    shape = (num_rows, int(columns.max(initial=-1)) + 1)
    return sparse.csr_array((weights, (rows, columns)), shape=shape)
