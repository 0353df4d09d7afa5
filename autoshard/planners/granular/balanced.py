"""Starts of the search: every unit takes what would cost least if all ranks were alike, and then its place.

Shape suffixes: U units, O options, E pieces of options, R ranks, M memory levels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Tier
from autoshard.planners.granular.catalog import Catalog, Option
from autoshard.planners.granular.layout import FloatArray, IndexArray, Layout, Limits
from autoshard.planners.granular.rates import FlatOptions, Rates
from autoshard.planners.schemes import Hold

#: Doublings and halvings of the price of memory.
_NUM_PRICES = 24
#: Share of the memory that choices made as if all ranks were alike may use: pieces do not pack without gaps.
_PACKED_SHARE = 0.95
_KERNEL_PARTS, _MOVING_PARTS = [1, 4], [0, 2, 3]


def balanced_options(
    catalog: Catalog,
    flat: FlatOptions,
    rates: Rates,
    limits: Limits,
    *,
    max_lump: float = math.inf,
    tiers: Collection[Tier] = tuple(Tier),
) -> IndexArray:
    """For each unit the option that costs least if all ranks were alike, within their memory together; shape (U,).

    Args:
        catalog: What there is to choose from.
        flat: Its options.
        rates: What pieces add.
        limits: Memory.
        max_lump: Most that a single piece may add to its rank, over the mean of what ranks have.
        tiers: Which tiers options may use.
    """
    num_ranks = catalog.topology.world_size
    alone_E = rates.served_VP[flat.kind_E].sum(axis=1)
    shared_E = rates.shared_VP[flat.kind_E].sum(axis=1)
    cost_O = flat.sums(np.where(flat.is_shared_E, shared_E, alone_E * flat.holders_E / num_ranks))
    cost_O = cost_O + flat.sums(np.where(flat.is_shared_E, rates.sync_V[flat.kind_E], 0.0))
    lump_O = flat.largest(np.where(flat.is_shared_E, 0.0, alone_E))
    bytes_EM = catalog.bytes_VM[flat.kind_E] * (flat.holders_E / num_ranks)[:, None]
    hbm_O = flat.sums(bytes_EM[:, 0])
    options = [option for unit in catalog.units for option in unit.options]
    may_O = np.array([all(tier in tiers for scheme in option.schemes for tier in scheme.tiers) for option in options])
    fits_O = flat.largest(catalog.bytes_VM[flat.kind_E, 0]) <= limits.capacity_RM[:, 0].max()
    barred_O = np.where(may_O & fits_O, 0.0, 1e12)

    def choose(price_per_byte: float, limit_ms: float) -> IndexArray:
        # A piece above the limit adds what it is above it to the slowest rank.
        score_O = cost_O + np.maximum(lump_O - limit_ms, 0.0) + price_per_byte * hbm_O + barred_O
        order = np.lexsort((score_O, flat.unit_O))
        first = np.flatnonzero(np.diff(flat.unit_O[order], prepend=-1))
        return np.asarray(order[first])

    chosen_U = choose(0.0, math.inf)
    if math.isfinite(max_lump):
        chosen_U = choose(0.0, max_lump * float(cost_O[chosen_U].sum()))
    limit_ms = max_lump * float(cost_O[chosen_U].sum()) if math.isfinite(max_lump) else math.inf
    room = _PACKED_SHARE * float(np.maximum(limits.capacity_RM[:, 0], 0.0).mean())
    if hbm_O[chosen_U].sum() > room:
        low, high = 0.0, float(cost_O[chosen_U].sum()) / max(room, 1.0) * 2**20
        for _ in range(_NUM_PRICES * 2):
            middle = math.sqrt(low * high) if low else high / 2**_NUM_PRICES
            if hbm_O[choose(middle, limit_ms)].sum() > room:
                low = middle
            else:
                high = middle
        chosen_U = choose(high, limit_ms)
    return np.asarray(flat.number_O[chosen_U])


def placed_options(
    catalog: Catalog, rates: Rates, limits: Limits, options: Sequence[int] | IndexArray
) -> Layout | None:
    """Units with their options placed, largest pieces first, where the slowest rank grows least.

    Returns:
        None if some piece finds no place with enough memory.
    """
    filling = _Filling(catalog, rates, limits)
    chosen = [catalog.units[unit].options[int(number)] for unit, number in enumerate(options)]
    sites: list[list[int]] = [[0] * len(option.pieces) for option in chosen]
    waiting = []
    for unit, option in enumerate(chosen):
        for index, piece in enumerate(option.pieces):
            if piece.hold in (Hold.RANK, Hold.NODE):
                waiting.append((-float(rates.served_VP[piece.kind].sum()), unit, index))
            else:
                filling.put_everywhere(piece.kind)
    # What has least choice comes first, then what is largest.
    waiting.sort(key=lambda one: (len(chosen[one[1]].pieces[one[2]].sites), one))
    nodes: dict[int, int] = {}
    for _, unit, index in waiting:
        option = chosen[unit]
        site = filling.put(option, index, nodes.get(unit))
        if site is None:
            return None
        sites[unit][index] = site
        if option.in_one_node and option.pieces[index].hold is Hold.RANK:
            nodes[unit] = catalog.topology.node_of(site)
    found = [(int(number), tuple(at)) for number, at in zip(options, sites, strict=True)]
    layout = Layout(catalog, limits, found)
    return layout if layout.fits() else None


class _Filling:
    """Ranks that fill up piece by piece: kernels, exchanges and memory."""

    def __init__(self, catalog: Catalog, rates: Rates, limits: Limits) -> None:
        self.catalog, self.limits = catalog, limits
        self.node = catalog.topology.local_world_size
        num_ranks = catalog.topology.world_size
        self.load_2R = np.zeros((2, num_ranks))
        self.free_RM: FloatArray = limits.capacity_RM.copy()
        self.load_V2 = np.stack(
            [rates.served_VP[:, _KERNEL_PARTS].sum(axis=1), rates.served_VP[:, _MOVING_PARTS].sum(axis=1)], axis=1
        )

    def put_everywhere(self, kind: int) -> None:
        self.free_RM -= self.catalog.bytes_VM[kind]

    def put(self, option: Option, index: int, node: int | None) -> int | None:
        """Site of a piece; None if it fits nowhere."""
        piece = option.pieces[index]
        load_2 = self.load_V2[piece.kind]
        fits_R = (self.free_RM >= self.catalog.bytes_VM[piece.kind]).all(axis=1)
        score_R = np.maximum(self.load_2R + load_2[:, None], self.load_2R.max(axis=1)[:, None]).sum(axis=0)
        score_R = score_R + 1e-3 * self.load_2R.sum(axis=0)
        if piece.hold is Hold.NODE:
            fits_S, score_S = fits_R.reshape(-1, self.node).all(axis=1), score_R.reshape(-1, self.node).max(axis=1)
        else:
            fits_S, score_S = fits_R, score_R
            if node is not None:
                fits_S = fits_S & (np.arange(len(fits_S)) // self.node == node)
        may_S = np.zeros(len(fits_S), dtype=np.bool_)
        may_S[list(piece.sites)] = True
        may_S &= fits_S
        if not may_S.any():
            return None
        site = int(np.where(may_S, score_S, np.inf).argmin())
        ranks = self._ranks(piece.hold, site)
        self.load_2R[:, ranks] += load_2[:, None]
        self.free_RM[ranks] -= self.catalog.bytes_VM[piece.kind]
        return site

    def _ranks(self, hold: Hold, site: int) -> NDArray[np.int64]:
        return np.arange(site * self.node, (site + 1) * self.node) if hold is Hold.NODE else np.array([site])
