"""What ranks hold, as sums that change with one item at a time, and the steps of many such changes at once.

Shape suffixes: I items, B changes, R ranks, H width of a code, C columns of what is moved, M memory levels, X columns
of any sums, P parts of a step, D pairs of a change and a rank that it gives to or takes from, Y shards that changes
give or take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.core import ShardingPlan
from autoshard.core.costs import MsArray
from autoshard.core.quoting import write_bytes
from autoshard.core.step import KERNEL_PARTS, PART_INDEX
from autoshard.planners.space.kinds import LEVELS, FloatArray
from autoshard.planners.space.planner_space import BoolArray, IndexArray, ItemShard, PlannerSpace

#: Option of an item that is to be held by nobody.
NOTHING = -1
#: The option of an item and the site of each of its shards.
Choice = tuple[int, tuple[int, ...]]
#: Items, each with the option and the sites that it gets.
Change = tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """Memory of ranks.

    Attributes:
        capacity_RM: Bytes of each rank by memory level.
        with_activations: Whether what training needs for a batch counts beside the tables.
        less: Names of the options that keep device memory free, for errors.
    """

    capacity_RM: FloatArray
    with_activations: bool = False
    less: tuple[str, ...] = ()

    @classmethod
    def of(cls, space: PlannerSpace, reserved_bytes: int = 0, *, with_activations: bool = False) -> Limits:
        """All memory but what is reserved in each device."""
        topology = space.topology
        memories = [topology.memory_of(rank) for rank in range(topology.world_size)]
        capacity_RM = np.array([[memory[level] for level in LEVELS] for memory in memories], dtype=np.float64)
        capacity_RM[:, 0] -= reserved_bytes
        less = ("reserved_bytes",) if reserved_bytes else ()
        return cls(capacity_RM=capacity_RM, with_activations=with_activations, less=less)


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
    """One option and sites for every item, and the sums over all of them.

    Args:
        space: What there is to choose from.
        limits: Memory.
        chosen: For each item its option and sites; None where nothing is held yet.
        sums_RX: What each rank holds then, if that is known; changed in place by later changes.

    Attributes:
        sums_RX: What each rank holds.
        codes_RH: Of codes, a view.
        moved_RC: Of what is moved, a view.
        bytes_RM: Of bytes by memory level, a view.
    """

    def __init__(
        self,
        space: PlannerSpace,
        limits: Limits,
        chosen: Sequence[Choice | None],
        sums_RX: FloatArray | None = None,
    ) -> None:
        self.space, self.limits = space, limits
        is_known = sums_RX is not None
        self.chosen: list[Choice | None] = list(chosen) if is_known else [None] * len(space.items)
        nothing_RX: FloatArray = np.zeros((space.topology.world_size, space.kinds.rows_VX.shape[1]))
        self.sums_RX = nothing_RX if sums_RX is None else sums_RX
        self.codes_RH, self.moved_RC, self.bytes_RM = space.kinds.split(self.sums_RX)
        self._kernels_ms: tuple[MsArray, MsArray] | None = None
        self._parts_ms: MsArray | None = None
        if not is_known:
            self.apply(tuple((item, *one) for item, one in enumerate(chosen) if one is not None))

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.sums_RX)

    @property
    def numbers_I(self) -> IndexArray:  # noqa: N802 - a shape suffix
        """The option of every item, all of which are held, shape (I,)."""
        return np.array([self.choice(item)[0] for item in range(len(self.chosen))], dtype=np.int64)

    def copy(self) -> Layout:
        """The same layout, to be changed apart."""
        return Layout(self.space, self.limits, self.chosen, self.sums_RX.copy())

    def choice(self, item: int) -> Choice:
        """The option and the sites of an item that is held."""
        chosen = self.chosen[item]
        assert chosen is not None, "it is held"
        return chosen

    def held(self, item: int) -> list[tuple[ItemShard, int]]:
        """The shards of an item with their sites; none if it is held by nobody."""
        chosen = self.chosen[item]
        if chosen is None:
            return []
        return list(zip(self.space.items[item].options[chosen[0]].shards, chosen[1], strict=True))

    def moved(self, item: int, number: int, site: int) -> Change:
        """The change that moves one of an item's shards to another site."""
        option, sites = self.choice(item)
        return ((item, option, (*sites[:number], site, *sites[number + 1 :])),)

    def plan(self) -> ShardingPlan:
        """The plan, its shards in the order of the tables."""
        return self.space.plan(
            placed
            for index, item in enumerate(self.space.items)
            for shard, site in self.held(index)
            for placed in item.placed(shard, site, self.space.topology)
        )

    def apply(self, change: Change) -> None:
        """Gives items other options or sites."""
        _Delta(self, [change]).add_to(self.sums_RX, self.space.kinds.rows_VX)
        for item, option, sites in change:
            self.chosen[item] = None if option == NOTHING else (option, sites)
        self._kernels_ms = self._parts_ms = None

    def parts_ms(self) -> MsArray:
        """Times of `EMBEDDING_PARTS` on every rank, shape (P, R); not to be changed."""
        if self._parts_ms is None:
            self._parts_ms = self.space.prices.moving_ms(self.moved_RC[None])[:, 0]
            for part, ms_R in zip(KERNEL_PARTS, self._kernels(), strict=True):
                self._parts_ms[PART_INDEX[part]] += ms_R
        return self._parts_ms

    def step_ms(self) -> float:
        """The step."""
        slowest_P1 = self.parts_ms().max(axis=1)[:, None]
        return float(self.space.prices.compose(slowest_P1, self.moved_RC[None])[0])

    def fits(self) -> bool:
        """Whether memory does."""
        return bool(self._fits(self.bytes_RM[None], self.moved_RC[None])[0])

    def free_bytes(self) -> FloatArray:
        """Bytes left of each rank by memory level, shape (R, M)."""
        free_RM = self.limits.capacity_RM - self.bytes_RM
        if self.limits.with_activations:
            free_RM[:, 0] -= self.space.prices.training_bytes(self.moved_RC[None])[0]
        return free_RM

    def summary(self) -> str:
        """The slowest rank's kernels, the balance and the fullest rank, as the log of a search has them."""
        kernel_ms_R = np.sum(self._kernels(), axis=0)
        slowest = int(kernel_ms_R.argmax())
        balance = kernel_ms_R.min() / kernel_ms_R[slowest] if kernel_ms_R[slowest] > 0 else 0.0
        capacity_R, free_R = self.limits.capacity_RM[:, 0], self.free_bytes()[:, 0]
        fullest = int(((capacity_R - free_R) / np.maximum(capacity_R, 1)).argmax())
        used, capacity = (write_bytes(one[fullest]) for one in (capacity_R - free_R, capacity_R))
        return (
            f"slowest rank: {slowest}, kernels {kernel_ms_R[slowest]:.4g} ms; balance: {balance:.1%}; "
            f"fullest rank: {fullest}, {used} of {capacity}"
        )

    def price(self, changes: Sequence[Change], exponent: int) -> Priced:
        """Prices changes, each as if it were the only one.

        Args:
            changes: Each of any number of items.
            exponent: p of the p-norm, a power of two.
        """
        delta, prices, shape = _Delta(self, changes), self.space.prices, (len(changes), self.num_ranks)
        moved_BRC = delta.added(self.moved_RC, self.space.kinds.moved_VC)
        bytes_BRM = delta.added(self.bytes_RM, self.space.kinds.bytes_VM)
        parts_PBR = prices.moving_ms(moved_BRC)
        dirty_D = delta.dirty()
        dirty_ms = prices.kernels_ms(delta.codes(dirty_D)[None].astype(np.float32))
        for part, now_R, new_1D in zip(KERNEL_PARTS, self._kernels(), dirty_ms, strict=True):
            kernel_ms = np.broadcast_to(now_R, shape).flatten()
            kernel_ms[dirty_D] = new_1D[0]
            parts_PBR[PART_INDEX[part]] += kernel_ms.reshape(shape)
        slowest_PB = parts_PBR.max(axis=2)
        both = np.concatenate([slowest_PB, _norms(parts_PBR, slowest_PB, exponent)], axis=1)
        first_rank_B1C = np.tile(moved_BRC[:, :1], (2, 1, 1))
        step_ms_B, energy_ms_B = np.split(prices.compose(both, first_rank_B1C), 2)
        fits_B = self._fits(bytes_BRM, moved_BRC)
        return Priced(step_ms_B=step_ms_B, energy_ms_B=np.where(fits_B, energy_ms_B, np.inf))

    def energy_ms(self, exponent: int) -> float:
        """Energy of the layout as it is."""
        return float(self.price([()], exponent).energy_ms_B[0])

    def _kernels(self) -> tuple[MsArray, MsArray]:
        if self._kernels_ms is None:
            forward, backward = self.space.prices.kernels_ms(self.codes_RH[None].astype(np.float32))
            self._kernels_ms = forward[0], backward[0]
        return self._kernels_ms

    def _fits(self, bytes_BRM: FloatArray, moved_BRC: FloatArray) -> BoolArray:
        if self.limits.with_activations:
            bytes_BRM = bytes_BRM.copy()
            bytes_BRM[..., 0] += self.space.prices.training_bytes(moved_BRC)
        return np.asarray((bytes_BRM <= self.limits.capacity_RM).all(axis=(1, 2)))


class _Delta:
    """What changes give to ranks and take from them, as lists of kinds of shards."""

    def __init__(self, layout: Layout, changes: Sequence[Change]) -> None:
        self.layout, self.num_changes = layout, len(changes)
        # Lists of (change, rank, kind, sign), and of (change, kind, sign) for what all ranks get.
        ranked: list[tuple[int, int, int, int]] = []
        shared: list[tuple[int, int, int]] = []
        for index, change in enumerate(changes):
            for item, number, sites in change:
                given = () if number == NOTHING else layout.space.items[item].options[number].shards
                for signed, sign in ((zip(given, sites, strict=True), 1), (layout.held(item), -1)):
                    for shard, site in signed:
                        if shard.is_everywhere:
                            shared.append((index, shard.kind, sign))
                        else:
                            first = site * shard.num_holders
                            ranked += [(index, first + step, shard.kind, sign) for step in range(shard.num_holders)]
        self._ranked_Y4: IndexArray = np.array(ranked, dtype=np.int64).reshape(-1, 4)
        self._shared_Y3: IndexArray = np.array(shared, dtype=np.int64).reshape(-1, 3)

    def add_to(self, sums_RX: FloatArray, of_kind_VX: FloatArray) -> None:
        """Adds the only change to sums, in place."""
        _, rank_Y, kind_Y, sign_Y = self._ranked_Y4.T
        np.add.at(sums_RX, rank_Y, sign_Y[:, None] * of_kind_VX[kind_Y])
        sums_RX += self._everywhere(of_kind_VX)[0]

    def added(self, sums_RX: FloatArray, of_kind_VX: FloatArray) -> FloatArray:
        """Sums after each change, shape (B, R, X)."""
        num_ranks, width = sums_RX.shape
        sums_BRX = np.repeat(sums_RX[None], self.num_changes, axis=0)
        flat = sums_BRX.reshape(-1, width)
        index_Y, rank_Y, kind_Y, sign_Y = self._ranked_Y4.T
        np.add.at(flat, index_Y * num_ranks + rank_Y, sign_Y[:, None] * of_kind_VX[kind_Y])
        if len(self._shared_Y3):
            sums_BRX += self._everywhere(of_kind_VX)[:, None]
        return sums_BRX

    def dirty(self) -> IndexArray:
        """Pairs of change and rank whose codes change, as change * R + rank, rising."""
        num_ranks = self.layout.num_ranks
        index_Y, rank_Y, _, _ = self._ranked_Y4.T
        everywhere = np.unique(self._shared_Y3[:, 0])
        everywhere_D = (everywhere[:, None] * num_ranks + np.arange(num_ranks)).ravel()
        return np.union1d(index_Y * num_ranks + rank_Y, everywhere_D)

    def codes(self, dirty_D: IndexArray) -> FloatArray:
        """Codes of those pairs, shape (D, H)."""
        layout = self.layout
        num_ranks, codes_VH = layout.num_ranks, layout.space.kinds.codes_VH
        codes_DH = layout.codes_RH[dirty_D % num_ranks]
        index_Y, rank_Y, kind_Y, sign_Y = self._ranked_Y4.T
        at_Y = np.searchsorted(dirty_D, index_Y * num_ranks + rank_Y)
        np.add.at(codes_DH, at_Y, sign_Y[:, None] * codes_VH[kind_Y])
        if len(self._shared_Y3):
            codes_DH += self._everywhere(codes_VH)[dirty_D // num_ranks]
        return codes_DH

    def _everywhere(self, of_kind_VX: FloatArray) -> FloatArray:
        index_Y, kind_Y, sign_Y = self._shared_Y3.T
        sums_BX = np.zeros((self.num_changes, of_kind_VX.shape[1]))
        np.add.at(sums_BX, index_Y, sign_Y[:, None] * of_kind_VX[kind_Y])
        return sums_BX


def _norms(parts_PBR: MsArray, slowest_PB: MsArray, exponent: int) -> MsArray:
    """p-norms over ranks, as means so that even parts count as they are; shape (P, B)."""
    scale_PB = np.maximum(slowest_PB, 1e-30)
    power_PBR = parts_PBR / scale_PB[..., None]
    for _ in range(exponent.bit_length() - 1):
        power_PBR *= power_PBR
    return np.asarray(scale_PB * power_PBR.mean(axis=2) ** (1 / exponent))
