"""What one more piece adds to a step, made linear around what ranks hold.

Shape suffixes: V kinds of pieces, P parts of a step, R ranks, H width of a code, C columns of what is moved, O options,
E pieces of options.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Tier
from autoshard.core.costs import MsArray
from autoshard.planners.hybrid.catalog import Catalog
from autoshard.planners.hybrid.layout import FloatArray, IndexArray, Layout
from autoshard.planners.space.step_cost import KERNEL_PARTS, PARTS, SYNC, MovedArray
from autoshard.planners.space.tiers import SITED_TIERS, is_everywhere, num_holders

#: By how much sums are changed to see what that does: a share, and bytes where there are none.
_BUMP_SHARE, _BUMP_BYTES = 0.05, 1e4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatOptions:
    """All options of a catalog, one after the other.

    Attributes:
        unit_O: Unit of each option.
        number_O: Its number among those of its unit.
        start_O: Its first piece.
        kind_E: Kind of each piece.
        holders_E: Ranks that hold it.
        tier_E: How it is held, by number.
        is_shared_E: Whether all ranks hold it.
        is_node_E: Whether those of a node do.
    """

    unit_O: IndexArray
    number_O: IndexArray
    start_O: IndexArray
    kind_E: IndexArray
    holders_E: IndexArray
    tier_E: IndexArray
    is_shared_E: NDArray[np.bool_]
    is_node_E: NDArray[np.bool_]

    @classmethod
    def of(cls, catalog: Catalog) -> FlatOptions:
        """Reads a catalog as it is now."""
        options = [
            (unit, number, option)
            for unit, one in enumerate(catalog.units)
            for number, option in enumerate(one.options)
        ]
        pieces = [piece for _, _, option in options for piece in option.pieces]
        lengths = [len(option.pieces) for _, _, option in options]
        tiers = [piece.tier for piece in pieces]
        holders = {tier: num_holders(tier, catalog.topology) for tier in SITED_TIERS}
        return cls(
            unit_O=np.array([unit for unit, _, _ in options], dtype=np.int64),
            number_O=np.array([number for _, number, _ in options], dtype=np.int64),
            start_O=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
            kind_E=np.array([piece.kind for piece in pieces], dtype=np.int64),
            holders_E=np.array([holders[tier] for tier in tiers], dtype=np.int64),
            tier_E=np.array([SITED_TIERS.index(tier) for tier in tiers], dtype=np.int64),
            is_shared_E=np.array([is_everywhere(tier) for tier in tiers]),
            is_node_E=np.array([tier is Tier.TABLE_ROW_WISE for tier in tiers]),
        )

    def sums(self, of_pieces_E: FloatArray) -> FloatArray:
        """Sums over the pieces of each option, shape (O,)."""
        return np.asarray(np.add.reduceat(of_pieces_E, self.start_O))

    def largest(self, of_pieces_E: FloatArray | NDArray[np.bool_]) -> FloatArray:
        """Largest over the pieces of each option, shape (O,)."""
        return np.asarray(np.maximum.reduceat(of_pieces_E, self.start_O))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """Milliseconds that a piece of each kind adds.

    Attributes:
        served_VP: To the parts of a rank that holds it, and serves it to all others.
        shared_VP: To the parts of every rank, if all hold it.
        sync_V: To the all-reduce.
    """

    served_VP: MsArray
    shared_VP: MsArray
    sync_V: MsArray

    @classmethod
    def of(cls, catalog: Catalog, layout: Layout | None = None) -> Rates:
        """Around a layout, or around nothing at all."""
        if layout is None:
            mean_C, codes_H = catalog.moved_VC[:1].mean(axis=0), np.zeros(catalog.codes_VH.shape[1])
        else:
            mean_C = layout.moved_RC.mean(axis=0)
            kernel_ms_R = layout.parts_ms()[[PARTS.index(part) for part in KERNEL_PARTS]].sum(axis=0)
            codes_H = layout.codes_RH[int(np.argsort(kernel_ms_R, kind="stable")[len(kernel_ms_R) // 2])]
        one_PC, all_PC = _moving_rates(catalog, mean_C)
        kernel_VP = _kernel_rates(catalog, codes_H)
        moved_VC = catalog.moved_VC
        bump = max(_BUMP_BYTES, _BUMP_SHARE * float(mean_C[SYNC]))
        all_reduce_ms = [catalog.costs.comm.all_reduce_ms(size, catalog.topology) for size in (bump, 2 * bump)]
        return cls(
            served_VP=moved_VC @ one_PC.T + kernel_VP,
            shared_VP=moved_VC @ all_PC.T + kernel_VP,
            sync_V=moved_VC[:, SYNC] * (all_reduce_ms[1] - all_reduce_ms[0]) / bump,
        )


def _moving_rates(catalog: Catalog, mean_C: MovedArray) -> tuple[FloatArray, FloatArray]:
    """Milliseconds per unit of each column: on the rank that has it, and on all ranks that have it alike; (P, C)."""
    num_ranks, width = catalog.topology.world_size, len(mean_C)
    bump_C = np.where(np.arange(width) < SYNC, np.maximum(_BUMP_SHARE * mean_C, _BUMP_BYTES), 1.0)
    base_RC = np.repeat(np.where(np.arange(width) < SYNC, np.maximum(mean_C, 1.0), mean_C)[None], num_ranks, axis=0)
    one_BRC = np.repeat(base_RC[None], width + 1, axis=0)
    all_BRC = one_BRC.copy()
    columns = np.arange(width)
    one_BRC[columns + 1, 0, columns] += bump_C
    all_BRC[columns + 1, :, columns] += bump_C[:, None]
    # Kernels are counted once however many shards run in them; their launches are no rate.
    is_rate_C = columns <= SYNC + 1
    rates = []
    for moved_BRC in (one_BRC, all_BRC):
        parts_PB = catalog.prices.moving_ms(moved_BRC)[:, :, 0]
        rates.append(np.maximum(parts_PB[:, 1:] - parts_PB[:, :1], 0.0) / bump_C * is_rate_C)
    return rates[0], rates[1]


def _kernel_rates(catalog: Catalog, codes_H: FloatArray) -> MsArray:
    """Kernel milliseconds of one more piece where there are such pieces already, shape (V, P)."""
    once_VH = codes_H + catalog.codes_VH
    rates_VP = np.zeros((len(once_VH), len(PARTS)))
    one = catalog.prices.kernels_ms(once_VH[None].astype(np.float32))
    two = catalog.prices.kernels_ms((once_VH + catalog.codes_VH)[None].astype(np.float32))
    for part, with_one, with_two in zip(KERNEL_PARTS, one, two, strict=True):
        rates_VP[:, PARTS.index(part)] = np.maximum((with_two - with_one)[0], 0.0)
    return rates_VP
