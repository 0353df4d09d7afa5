"""Starts of the search: every unit takes what would cost least if all ranks were alike, and then its place.

Shape suffixes: U units, O options, E pieces of options, R ranks, M memory levels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from autoshard.core import Tier
from autoshard.planners.hybrid.catalog import Catalog, Option, Piece
from autoshard.planners.hybrid.layout import FloatArray, IndexArray, Layout, Limits
from autoshard.planners.hybrid.rates import FlatOptions, Rates
from autoshard.planners.space.tiers import SITED_TIERS, is_everywhere

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
    may_O = flat.largest(~np.isin(flat.tier_E, [index for index, tier in enumerate(SITED_TIERS) if tier in tiers])) < 1
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


def leanest_options(catalog: Catalog, flat: FlatOptions) -> IndexArray:
    """For each unit the option whose largest piece takes least memory of a rank; shape (U,)."""
    bytes_O = flat.largest(catalog.bytes_VM[flat.kind_E, 0])
    order = np.lexsort((bytes_O, flat.unit_O))
    return np.asarray(flat.number_O[order[np.flatnonzero(np.diff(flat.unit_O[order], prepend=-1))]])


def placed_options(
    catalog: Catalog, rates: Rates, limits: Limits, options: Sequence[int] | IndexArray
) -> Layout | None:
    """Units with their options placed, largest pieces first, where the slowest rank grows least.

    A unit whose pieces find no room takes another option of those that do, the one with the least time.

    Returns:
        None if some unit finds no room at all.
    """
    chosen = [int(number) for number in options]
    by_time = _order(catalog, chosen, rates.served_VP.sum(axis=1))
    found = _placed(catalog, rates, limits, chosen, by_time)
    if found is None:
        found = _placed(catalog, rates, limits, chosen, _order(catalog, chosen, catalog.bytes_VM.sum(axis=1)))
    if found is None:
        return None
    layout = Layout(catalog, limits, found)
    return layout if layout.fits() else None


def _order(catalog: Catalog, chosen: Sequence[int], size_V: FloatArray) -> list[int]:
    """Units whose pieces have no choice of sites come first, then those with the largest pieces."""

    def key(unit: int) -> tuple[int, float]:
        pieces = catalog.units[unit].options[chosen[unit]].pieces
        placed = [piece for piece in pieces if not is_everywhere(piece.tier)]
        if not placed:
            return 0, 0.0
        return min(len(piece.sites) for piece in placed), -max(float(size_V[piece.kind]) for piece in placed)

    return sorted(range(len(chosen)), key=key)


def _placed(
    catalog: Catalog, rates: Rates, limits: Limits, chosen: Sequence[int], order: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]] | None:
    filling = _Filling(catalog, rates, limits)
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    for unit in order:
        sites = filling.put(catalog.units[unit].options[chosen[unit]])
        number = chosen[unit]
        if sites is None:
            tried = [(*filling.tried(option), index) for index, option in enumerate(catalog.units[unit].options)]
            fitting = [(score, index) for score, at, index in tried if at is not None]
            if not fitting:
                return None
            number = min(fitting)[1]
            sites = filling.put(catalog.units[unit].options[number])
            assert sites is not None, "it was tried"
        found[unit] = (number, sites)
    return [found[unit] for unit in range(len(chosen))]


class _Filling:
    """Ranks that fill up unit by unit: kernels, exchanges and memory."""

    def __init__(self, catalog: Catalog, rates: Rates, limits: Limits) -> None:
        self.catalog, self.limits = catalog, limits
        self.node = catalog.topology.local_world_size
        self.load_2R = np.zeros((2, catalog.topology.world_size))
        self.free_RM: FloatArray = limits.capacity_RM.copy()
        self.alone_V2, self.shared_V2 = (
            np.stack([of_VP[:, _KERNEL_PARTS].sum(axis=1), of_VP[:, _MOVING_PARTS].sum(axis=1)], axis=1)
            for of_VP in (rates.served_VP, rates.shared_VP)
        )
        self.sync_V = rates.sync_V

    def tried(self, option: Option) -> tuple[float, tuple[int, ...] | None]:
        """What the slowest rank would grow by with an option, and its sites, without taking it."""
        load_2R, free_RM = self.load_2R.copy(), self.free_RM.copy()
        sites = self.put(option)
        grown = float((self.load_2R.max(axis=1) - load_2R.max(axis=1)).sum())
        grown += sum(float(self.sync_V[piece.kind]) for piece in option.pieces)
        self.load_2R, self.free_RM = load_2R, free_RM
        return grown, sites

    def put(self, option: Option) -> tuple[int, ...] | None:
        """Sites of an option's pieces, which then take their room; None, and no room taken, if there is too little."""
        before = self.load_2R.copy(), self.free_RM.copy()
        sites: list[int] = []
        node: int | None = None
        for piece in option.pieces:
            site = self._put(piece, node)
            if site is None:
                self.load_2R, self.free_RM = before
                return None
            sites.append(site)
            if option.in_one_node and piece.tier is Tier.TABLE_WISE:
                node = site // self.node
        return tuple(sites)

    def _put(self, piece: Piece, node: int | None) -> int | None:
        bytes_M = self.catalog.bytes_VM[piece.kind]
        fits_R = (self.free_RM >= bytes_M).all(axis=1)
        if is_everywhere(piece.tier):
            if not fits_R.all():
                return None
            self.free_RM -= bytes_M
            self.load_2R += self.shared_V2[piece.kind][:, None]
            return 0
        load_2 = self.alone_V2[piece.kind]
        score_R = np.maximum(self.load_2R + load_2[:, None], self.load_2R.max(axis=1)[:, None]).sum(axis=0)
        # Among ranks that make nothing slower, the one with least to do.
        score_R = score_R + 1e-3 * self.load_2R.sum(axis=0)
        if piece.tier is Tier.TABLE_ROW_WISE:
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
        ranks = (
            slice(site * self.node, (site + 1) * self.node)
            if piece.tier is Tier.TABLE_ROW_WISE
            else slice(site, site + 1)
        )
        self.load_2R[:, ranks] += load_2[:, None]
        self.free_RM[ranks] -= bytes_M
        return site
