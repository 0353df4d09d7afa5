"""What ranks hold, as sums that change with one unit at a time, and the steps of many such changes at once.

Shape suffixes: B changes, R ranks, H width of a code, C columns of what is moved, M memory levels, P parts of a step,
X pairs of a change and a rank that it gives to or takes from, V kinds of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import PlacedShard, ShardingPlan, Tier
from autoshard.core.costs import MsArray
from autoshard.planners.hybrid.catalog import LEVELS, Catalog
from autoshard.planners.space.step_cost import KERNEL_PARTS, PARTS, SYNC

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int64]

#: Option of a unit that is to be held by nobody.
NOTHING = -1
#: Units, each with the option and the sites that it gets.
Change = tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """Memory of ranks.

    Attributes:
        capacity_RM: Bytes of each rank by memory level.
        with_activations: Whether a batch's inputs and outputs count beside the tables.
    """

    capacity_RM: FloatArray
    with_activations: bool = False

    @classmethod
    def of(cls, catalog: Catalog, reserved_bytes: int = 0) -> Limits:
        """All memory but what is reserved in each device; with a reserve, inputs and outputs count."""
        topology = catalog.topology
        memories = [topology.memory_of(rank) for rank in range(topology.world_size)]
        capacity_RM = np.array([[memory[level] for level in LEVELS] for memory in memories], dtype=np.float64)
        capacity_RM[:, 0] -= reserved_bytes
        return cls(capacity_RM=capacity_RM, with_activations=reserved_bytes > 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """What changes would lead to.

    Attributes:
        step_ms_B: The step.
        energy_ms_B: As the step, with parts at a p-norm over ranks instead of the slowest rank; infinite where memory
            would not do.
    """

    step_ms_B: MsArray
    energy_ms_B: MsArray


class Layout:
    """One option and sites for every unit, and the sums over all of them.

    Args:
        catalog: What there is to choose from.
        limits: Memory.
        chosen: For each unit its option and sites; None where nothing is held yet.
    """

    def __init__(self, catalog: Catalog, limits: Limits, chosen: Sequence[tuple[int, tuple[int, ...]] | None]) -> None:
        self.catalog, self.limits = catalog, limits
        num_ranks = catalog.topology.world_size
        self.chosen: list[tuple[int, tuple[int, ...]] | None] = [None] * len(catalog.units)
        self.codes_RH = np.zeros((num_ranks, catalog.codes_VH.shape[1]))
        self.moved_RC = np.zeros((num_ranks, catalog.moved_VC.shape[1]))
        self.bytes_RM = np.zeros((num_ranks, len(LEVELS)))
        self._kernels_ms: tuple[MsArray, MsArray] | None = None
        self.apply(tuple((unit, *one) for unit, one in enumerate(chosen) if one is not None))

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.codes_RH)

    def copy(self) -> Layout:
        """The same layout, to be changed apart."""
        return Layout(self.catalog, self.limits, self.chosen)

    def plan(self) -> ShardingPlan:
        """The plan, its shards in the order of the tables."""
        placed: dict[str, list[PlacedShard]] = {}
        for unit, one in enumerate(self.chosen):
            assert one is not None, "all units have a place"
            for shard in self.catalog.placed(unit, *one):
                placed.setdefault(shard.shard.table.name, []).append(shard)
        tables = self.catalog.tables
        shards = tuple(shard for table in tables.tables for shard in placed[table.name])
        return ShardingPlan(tables=tables, topology=self.catalog.topology, shards=shards)

    def apply(self, change: Change) -> None:
        """Gives units other options or sites."""
        delta = _Delta(self, [change])
        catalog = self.catalog
        for of_kind_VX, sums_RX in (
            (catalog.codes_VH, self.codes_RH),
            (catalog.moved_VC, self.moved_RC),
            (catalog.bytes_VM, self.bytes_RM),
        ):
            delta.add_to(sums_RX, of_kind_VX)
        for unit, option, sites in change:
            self.chosen[unit] = None if option == NOTHING else (option, sites)
        self._kernels_ms = None

    def parts_ms(self) -> MsArray:
        """Times of `PARTS` on every rank, shape (P, R)."""
        prices = self.catalog.prices
        parts_PR = prices.moving_ms(self.moved_RC[None])[:, 0]
        for part, ms_R in zip(KERNEL_PARTS, self._kernels(), strict=True):
            parts_PR[PARTS.index(part)] += ms_R
        return parts_PR

    def step_ms(self) -> float:
        """The step."""
        slowest_P1 = self.parts_ms().max(axis=1)[:, None]
        return float(self.catalog.prices.compose(slowest_P1, self.moved_RC[:1, SYNC])[0])

    def fits(self) -> bool:
        """Whether memory does."""
        return bool(self._fits(self.bytes_RM[None], self.moved_RC[None])[0])

    def free_bytes(self) -> FloatArray:
        """Bytes left of each rank by memory level, shape (R, M)."""
        free_RM = self.limits.capacity_RM - self.bytes_RM
        if self.limits.with_activations:
            free_RM[:, 0] -= self.catalog.prices.activation_bytes(self.moved_RC[None])[0]
        return free_RM

    def price(self, changes: Sequence[Change], exponent: int) -> Priced:
        """Prices changes, each as if it were the only one.

        Args:
            changes: Each of any number of units.
            exponent: p of the p-norm, a power of two.
        """
        delta = _Delta(self, changes)
        catalog, prices, shape = self.catalog, self.catalog.prices, (len(changes), self.num_ranks)
        moved_BRC = delta.added(self.moved_RC, catalog.moved_VC)
        parts_PBR = prices.moving_ms(moved_BRC)
        dirty_X = delta.dirty()
        dirty_ms = prices.kernels_ms(delta.codes(dirty_X)[None].astype(np.float32))
        for part, now_R, new_1X in zip(KERNEL_PARTS, self._kernels(), dirty_ms, strict=True):
            kernel_X = np.broadcast_to(now_R, shape).flatten()
            kernel_X[dirty_X] = new_1X[0]
            parts_PBR[PARTS.index(part)] += kernel_X.reshape(shape)
        slowest_PB = parts_PBR.max(axis=2)
        sync_B = moved_BRC[:, 0, SYNC]
        fits_B = self._fits(delta.added(self.bytes_RM, catalog.bytes_VM), moved_BRC)
        energy_ms_B = prices.compose(_norms(parts_PBR, slowest_PB, exponent), sync_B)
        return Priced(step_ms_B=prices.compose(slowest_PB, sync_B), energy_ms_B=np.where(fits_B, energy_ms_B, np.inf))

    def energy_ms(self, exponent: int) -> float:
        """Energy of the layout as it is."""
        return float(self.price([()], exponent).energy_ms_B[0])

    def _kernels(self) -> tuple[MsArray, MsArray]:
        if self._kernels_ms is None:
            forward, backward = self.catalog.prices.kernels_ms(self.codes_RH[None].astype(np.float32))
            self._kernels_ms = forward[0], backward[0]
        return self._kernels_ms

    def _fits(self, bytes_BRM: FloatArray, moved_BRC: FloatArray) -> NDArray[np.bool_]:
        if not self.limits.with_activations:
            return np.asarray((bytes_BRM <= self.limits.capacity_RM).all(axis=(1, 2)))
        held_BRM = bytes_BRM.copy()
        held_BRM[..., 0] += self.catalog.prices.activation_bytes(moved_BRC)
        return np.asarray((held_BRM <= self.limits.capacity_RM).all(axis=(1, 2)))


class _Delta:
    """What changes give to ranks and take from them, as lists of kinds of pieces."""

    def __init__(self, layout: Layout, changes: Sequence[Change]) -> None:
        self.layout, self.num_changes = layout, len(changes)
        # Lists of (change, rank, kind, sign), and of (change, kind, sign) for what all ranks get.
        ranked: list[tuple[int, int, int, int]] = []
        shared: list[tuple[int, int, int]] = []
        node = layout.catalog.topology.local_world_size
        units = layout.catalog.units
        for index, change in enumerate(changes):
            for unit, option, sites in change:
                known = units[unit].options
                old = layout.chosen[unit]
                moves = [] if option == NOTHING else [(known[option], sites, 1)]
                if old is not None:
                    moves.append((known[old[0]], old[1], -1))
                for one, at, sign in moves:
                    for piece, site in zip(one.pieces, at, strict=True):
                        if piece.tier is Tier.TABLE_WISE:
                            ranked.append((index, site, piece.kind, sign))
                        elif piece.tier is Tier.TABLE_ROW_WISE:
                            ranked += [
                                (index, rank, piece.kind, sign) for rank in range(site * node, (site + 1) * node)
                            ]
                        else:
                            shared.append((index, piece.kind, sign))
        self._ranked_X4: IndexArray = np.array(ranked, dtype=np.int64).reshape(-1, 4)
        self._shared_X3: IndexArray = np.array(shared, dtype=np.int64).reshape(-1, 3)

    def add_to(self, sums_RX: FloatArray, of_kind_VX: FloatArray) -> None:
        """Adds the only change to sums, in place."""
        _, rank_X, kind_X, sign_X = self._ranked_X4.T
        np.add.at(sums_RX, rank_X, sign_X[:, None] * of_kind_VX[kind_X])
        _, kind_X, sign_X = self._shared_X3.T
        sums_RX += (sign_X[:, None] * of_kind_VX[kind_X]).sum(axis=0)

    def added(self, sums_RX: FloatArray, of_kind_VX: FloatArray) -> FloatArray:
        """Sums after each change, shape (B, R, X)."""
        num_ranks, width = sums_RX.shape
        sums_BRX = np.repeat(sums_RX[None], self.num_changes, axis=0)
        flat = sums_BRX.reshape(-1, width)
        index_X, rank_X, kind_X, sign_X = self._ranked_X4.T
        np.add.at(flat, index_X * num_ranks + rank_X, sign_X[:, None] * of_kind_VX[kind_X])
        if len(self._shared_X3):
            sums_BRX += self._everywhere(of_kind_VX)[:, None]
        return sums_BRX

    def dirty(self) -> IndexArray:
        """Pairs of change and rank whose codes change, as change * R + rank, rising."""
        num_ranks = self.layout.num_ranks
        index_X, rank_X, _, _ = self._ranked_X4.T
        everywhere = np.unique(self._shared_X3[:, 0])
        everywhere_X = (everywhere[:, None] * num_ranks + np.arange(num_ranks)).ravel()
        return np.union1d(index_X * num_ranks + rank_X, everywhere_X)

    def codes(self, dirty_X: IndexArray) -> FloatArray:
        """Codes of those pairs, shape (X, H)."""
        layout = self.layout
        num_ranks, codes_VH = layout.num_ranks, layout.catalog.codes_VH
        codes_XH = layout.codes_RH[dirty_X % num_ranks]
        index_X, rank_X, kind_X, sign_X = self._ranked_X4.T
        at_X = np.searchsorted(dirty_X, index_X * num_ranks + rank_X)
        np.add.at(codes_XH, at_X, sign_X[:, None] * codes_VH[kind_X])
        if len(self._shared_X3):
            codes_XH += self._everywhere(codes_VH)[dirty_X // num_ranks]
        return codes_XH

    def _everywhere(self, of_kind_VX: FloatArray) -> FloatArray:
        index_X, kind_X, sign_X = self._shared_X3.T
        sums_BX = np.zeros((self.num_changes, of_kind_VX.shape[1]))
        np.add.at(sums_BX, index_X, sign_X[:, None] * of_kind_VX[kind_X])
        return sums_BX


def _norms(parts_PBR: MsArray, slowest_PB: MsArray, exponent: int) -> MsArray:
    """p-norms over ranks, as means so that even parts count as they are; shape (P, B)."""
    scale_PB = np.maximum(slowest_PB, 1e-30)
    power_PBR = parts_PBR / scale_PB[..., None]
    for _ in range(exponent.bit_length() - 1):
        power_PBR *= power_PBR
    return np.asarray(scale_PB * power_PBR.mean(axis=2) ** (1 / exponent))
