"""Changes that look worthwhile, by rates made linear around a layout.

Shape suffixes: V kinds of pieces, P parts of a step, R ranks, S sites, O options, E pieces of options, U units.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Tier
from autoshard.core.costs import MsArray
from autoshard.planners.hybrid.catalog import Option, Piece
from autoshard.planners.hybrid.exchanges import best_exchanges
from autoshard.planners.hybrid.layout import Change, FloatArray, Layout
from autoshard.planners.hybrid.rates import FlatOptions, Rates
from autoshard.planners.space.tiers import is_everywhere

#: Changes of each kind that a step of the search prices.
_NUM_OPTIONS, _NUM_MOVES, _NUM_EXCHANGES = 24, 8, 48
#: Options of other units that are tried whatever they seem to cost.
_NUM_RANDOM = 8
#: Places that are tried for a piece that is to leave a rank.
_NUM_TARGETS = 4


class Neighbourhood:
    """Estimates of what changes of one layout would save, and the best of them.

    A part of the step counts at a p-norm over ranks; its gradient says what a millisecond on each rank is worth.

    Args:
        layout: The layout.
        flat: All options of its catalog.
        rates: What pieces add.
        exponent: p.
    """

    def __init__(self, layout: Layout, flat: FlatOptions, rates: Rates, exponent: int) -> None:
        self.layout, self.flat, self.catalog, self.rates = layout, flat, layout.catalog, rates
        self.exponent = exponent
        self.node = self.catalog.topology.local_world_size
        self.parts_PR = parts_PR = layout.parts_ms()
        worth_PR = _worth(parts_PR, exponent)
        self.rank_VR: MsArray = rates.served_VP @ worth_PR
        self.shared_V: MsArray = rates.shared_VP @ worth_PR.sum(axis=1) + rates.sync_V
        self.free_RM = layout.free_bytes()
        self.slowest = list(dict.fromkeys(parts_PR.argmax(axis=1).tolist()))
        self.on_rank = self._pieces_on_ranks()

    def changes(self, rng: np.random.Generator) -> list[Change]:
        """Changes to be priced, each of one unit or two."""
        return [*self._other_options(rng), *self._moves(rng), *self._exchanges(rng)]

    def sites_of(self, unit: int, option: Option) -> tuple[int, ...] | None:
        """The cheapest sites for an option's pieces with the memory there is; None if there are none."""
        free_RM = self.free_RM.copy()
        held = self.layout.chosen[unit]
        if held is not None:
            self._take(free_RM, self.catalog.units[unit].options[held[0]].pieces, held[1], -1.0)
        sites: list[int] = []
        node: int | None = None
        used: set[int] = set()
        for piece in option.pieces:
            bytes_M = self.catalog.bytes_VM[piece.kind]
            if is_everywhere(piece.tier):
                if (free_RM < bytes_M).any():
                    return None
                free_RM -= bytes_M
                sites.append(0)
                continue
            site = self._site(piece, (free_RM >= bytes_M).all(axis=1), used, node)
            if site is None:
                return None
            sites.append(site)
            used.add(site)
            free_RM[self._ranks(piece.tier, site)] -= bytes_M
            if option.in_one_node and piece.tier is Tier.TABLE_WISE:
                node = site // self.node
        return tuple(sites)

    def _site(self, piece: Piece, fits_R: NDArray[np.bool_], used: set[int], node: int | None) -> int | None:
        cost_S = self.site_costs(piece)
        if piece.tier is Tier.TABLE_ROW_WISE:
            fits_R = np.asarray(fits_R.reshape(-1, self.node).all(axis=1))
        may_S = np.zeros(len(fits_R), dtype=np.bool_)
        may_S[list(piece.sites)] = True
        may_S &= fits_R
        if node is not None:
            may_S = may_S & (np.arange(len(may_S)) // self.node == node)
        unused_S = may_S.copy()
        unused_S[list(used)] = False
        may_S = unused_S if unused_S.any() else may_S
        return int(np.where(may_S, cost_S, np.inf).argmin()) if may_S.any() else None

    def site_costs(self, piece: Piece) -> MsArray:
        """What a piece would add at each of its sites, shape (S,)."""
        cost_R = self.rank_VR[piece.kind]
        return np.asarray(cost_R.reshape(-1, self.node).sum(axis=1) if piece.tier is Tier.TABLE_ROW_WISE else cost_R)

    def _other_options(self, rng: np.random.Generator) -> list[Change]:
        """Options that seem to save most, at their cheapest sites, and some at random."""
        flat, cheapest_V = self.flat, self.rank_VR.min(axis=1)
        by_node_V = self.rank_VR.reshape(len(self.rank_VR), -1, self.node).sum(axis=2).min(axis=1)
        alone_E = np.where(flat.is_node_E, by_node_V[flat.kind_E], cheapest_V[flat.kind_E])
        cost_O = flat.sums(np.where(flat.is_shared_E, self.shared_V[flat.kind_E], alone_E))
        now_U = np.array([self._cost(unit) for unit in range(len(self.catalog.units))])
        is_other_O = np.ones(len(cost_O), dtype=np.bool_)
        chosen_U = np.array([one[0] if one else -1 for one in self.layout.chosen])
        is_other_O &= chosen_U[flat.unit_O] != flat.number_O
        saved_O = np.where(is_other_O, now_U[flat.unit_O] - cost_O, -np.inf)
        count = min(_NUM_OPTIONS, len(saved_O))
        best = np.argpartition(-saved_O, count - 1)[:count]
        others = rng.integers(0, len(saved_O), _NUM_RANDOM)
        found: list[Change] = []
        for index in dict.fromkeys([*best[np.argsort(-saved_O[best], kind="stable")].tolist(), *others.tolist()]):
            if not is_other_O[index]:
                continue
            unit, number = int(flat.unit_O[index]), int(flat.number_O[index])
            sites = self.sites_of(unit, self.catalog.units[unit].options[number])
            if sites is not None:
                found.append(((unit, number, sites),))
        return found

    def _moves(self, rng: np.random.Generator) -> list[Change]:
        """Pieces of the slowest ranks that may not go anywhere, to where they cost least."""
        found: list[tuple[float, Change]] = []
        for rank in self.slowest:
            pieces = self.on_rank[rank]
            for index in rng.permutation(len(pieces))[: 2 * _NUM_MOVES].tolist():
                unit, number = pieces[index]
                chosen = self.layout.chosen[unit]
                assert chosen is not None, "it is on a rank"
                option = self.catalog.units[unit].options[chosen[0]]
                piece = option.pieces[number]
                if piece.tier is Tier.TABLE_WISE and not option.in_one_node and len(piece.sites) == len(self.free_RM):
                    continue  # that is what exchanges do
                cost_S = self.site_costs(piece)
                fits_R = (self.free_RM >= self.catalog.bytes_VM[piece.kind]).all(axis=1)
                fits_S = fits_R.reshape(-1, self.node).all(axis=1) if piece.tier is Tier.TABLE_ROW_WISE else fits_R
                if option.in_one_node and piece.tier is Tier.TABLE_WISE:
                    fits_S = fits_S & (np.arange(len(fits_S)) // self.node == rank // self.node)
                sites = np.array(piece.sites)
                sites = sites[fits_S[sites] & (sites != chosen[1][number])]
                for site in sites[np.argsort(cost_S[sites], kind="stable")[:_NUM_TARGETS]].tolist():
                    moved = (*chosen[1][:number], site, *chosen[1][number + 1 :])
                    found.append((float(cost_S[chosen[1][number]] - cost_S[site]), ((unit, chosen[0], moved),)))
        found.sort(key=lambda one: -one[0])
        return [change for _, change in found[:_NUM_MOVES]]

    def _exchanges(self, rng: np.random.Generator) -> list[Change]:
        """Pieces of the slowest ranks to other ranks, or against pieces of theirs."""
        found = []
        count = -(-_NUM_EXCHANGES // len(self.slowest))
        for rank in self.slowest:
            found += best_exchanges(
                self.layout,
                self.rates.served_VP,
                self.parts_PR,
                self.free_RM,
                rank,
                self.exponent,
                count,
                rng,
            )
        return found

    def _cost(self, unit: int) -> float:
        chosen = self.layout.chosen[unit]
        if chosen is None:
            return 0.0
        total = 0.0
        for piece, site in zip(self.catalog.units[unit].options[chosen[0]].pieces, chosen[1], strict=True):
            if not is_everywhere(piece.tier):
                total += float(self.site_costs(piece)[site])
            else:
                total += float(self.shared_V[piece.kind])
        return total

    def _pieces_on_ranks(self) -> list[list[tuple[int, int]]]:
        """For each rank, the pieces that have it, as unit and number."""
        on_rank: list[list[tuple[int, int]]] = [[] for _ in range(len(self.free_RM))]
        for unit, chosen in enumerate(self.layout.chosen):
            if chosen is None:
                continue
            for number, piece in enumerate(self.catalog.units[unit].options[chosen[0]].pieces):
                if not is_everywhere(piece.tier):
                    for rank in self._ranks(piece.tier, chosen[1][number]):
                        on_rank[rank].append((unit, number))
        return on_rank

    def _ranks(self, tier: Tier, site: int) -> range:
        return range(site * self.node, (site + 1) * self.node) if tier is Tier.TABLE_ROW_WISE else range(site, site + 1)

    def _take(self, free_RM: FloatArray, pieces: tuple[Piece, ...], sites: tuple[int, ...], sign: float) -> None:
        for piece, site in zip(pieces, sites, strict=True):
            bytes_M = sign * self.catalog.bytes_VM[piece.kind]
            if not is_everywhere(piece.tier):
                free_RM[self._ranks(piece.tier, site)] -= bytes_M
            else:
                free_RM -= bytes_M


def _worth(parts_PR: MsArray, exponent: int) -> MsArray:
    """Gradient of the p-norms (as means over ranks) of each part, shape (P, R)."""
    scale_P1 = np.maximum(parts_PR.max(axis=1, keepdims=True), 1e-30)
    share_PR = parts_PR / scale_P1
    mean_P1 = np.maximum((share_PR**exponent).mean(axis=1, keepdims=True), 1e-300)
    return np.asarray(share_PR ** (exponent - 1) * mean_P1 ** (1 / exponent - 1) / parts_PR.shape[1])
