"""What one more shard adds to a step, made linear around what ranks hold.

Shape suffixes: I items, V kinds of shards, P parts of a step, R ranks, H width of a code, C columns of what is moved, O
options, E shards of options, Y some options, X their shards, Z sets of sites.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Tier
from autoshard.core.costs import MsArray
from autoshard.core.step import EMBEDDING_PARTS, KERNEL_PARTS, PART_INDEX
from autoshard.planners.space.columns import MovedArray
from autoshard.planners.space.kinds import FloatArray, ShardKinds
from autoshard.planners.space.layout import Layout
from autoshard.planners.space.options import ShardingType
from autoshard.planners.space.planner_space import BoolArray, IndexArray, ItemOption, ItemShard, PlannerSpace
from autoshard.planners.space.step_cost import BUMP_BYTES, BUMP_SHARE, StepPrices

_TIERS = {tier: number for number, tier in enumerate(Tier)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatOptions:
    """All options of a space, one after the other.

    Attributes:
        options_I: Number of options of each item.
        first_I: Its first option; the others follow.
        item_O: Item of each option.
        number_O: Its number among those of its item.
        type_O: Number of its sharding type.
        types: The sharding types by their numbers.
        start_O: Its first shard.
        count_O: Its number of shards.
        is_uneven_O: Whether it has rows in uneven shares.
        number_E: Number of each shard within its option.
        kind_E: Its kind.
        tier_E: Number of its tier; see `is_held`.
        holders_E: Ranks that hold it.
        is_shared_E: Whether these are all ranks.
        is_free_E: Whether it may be on any rank by itself.
        in_node_E: Whether it must be in the node of the other shards of its option.
        sites_E: Number of the set of sites that constraints leave it; -1 where these are all.
        num_sites_E: How many sites that are.
        allowed_ZR: The sets: which sites are allowed, and no others of as many as there are ranks.
    """

    options_I: IndexArray
    first_I: IndexArray
    item_O: IndexArray
    number_O: IndexArray
    type_O: IndexArray
    types: tuple[ShardingType, ...]
    start_O: IndexArray
    count_O: IndexArray
    is_uneven_O: BoolArray
    number_E: IndexArray
    kind_E: IndexArray
    tier_E: IndexArray
    holders_E: IndexArray
    is_shared_E: BoolArray
    is_free_E: BoolArray
    in_node_E: BoolArray
    sites_E: IndexArray
    num_sites_E: IndexArray
    allowed_ZR: BoolArray

    @classmethod
    def of(cls, space: PlannerSpace) -> FlatOptions:
        """Reads a space as it is now."""
        # Items share their options as objects, which are read once.
        known: dict[tuple[int, ...], int] = {}
        alike_I = [known.setdefault(tuple(map(id, item.options)), len(known)) for item in space.items]
        first_I = np.unique(np.array(alike_I, dtype=np.int64), return_index=True)[1]
        distinct = cls._read([space.items[index].options for index in first_I.tolist()], space.topology.world_size)
        return distinct if len(known) == len(alike_I) else distinct._of_items(np.array(alike_I, dtype=np.int64))

    @classmethod
    def _read(cls, options_I: Sequence[Sequence[ItemOption]], num_ranks: int) -> FlatOptions:
        """Reads the options of some items."""
        options = [option for of_item in options_I for option in of_item]
        types: dict[ShardingType, int] = {}
        type_O = np.array([types.setdefault(option.of_tables[0].name, len(types)) for option in options])
        shards = [shard for option in options for shard in option.shards]
        num_options_I = np.array([len(of_item) for of_item in options_I], dtype=np.int64)
        item_O, number_O, first_I = ragged(num_options_I)
        count_O = np.array([len(option.shards) for option in options], dtype=np.int64)
        _, number_E, start_O = ragged(count_O)
        # Most shards share what is allowed to them, as objects.
        known: dict[int, tuple[int, int]] = {}
        sets: list[BoolArray] = []
        for shard in shards:
            if id(shard.allowed_S) in known:
                continue
            number = -1
            if not shard.allowed_S.all():
                number = len(sets)
                sets.append(np.pad(shard.allowed_S, (0, num_ranks - len(shard.allowed_S))))
            known[id(shard.allowed_S)] = number, int(shard.allowed_S.sum())
        sites_E2 = np.array([known[id(shard.allowed_S)] for shard in shards], dtype=np.int64)
        return cls(
            options_I=num_options_I,
            first_I=first_I,
            item_O=item_O,
            number_O=number_O,
            type_O=type_O,
            types=tuple(types),
            start_O=start_O,
            count_O=count_O,
            is_uneven_O=np.array([option.is_uneven for option in options]),
            number_E=number_E,
            kind_E=np.array([shard.kind for shard in shards], dtype=np.int64),
            tier_E=np.array([_TIERS[shard.tier] for shard in shards], dtype=np.int64),
            holders_E=np.array([shard.num_holders for shard in shards], dtype=np.int64),
            is_shared_E=np.array([shard.is_everywhere for shard in shards]),
            is_free_E=np.array([shard.is_free for shard in shards]),
            in_node_E=np.array([shard.in_one_node for shard in shards]),
            sites_E=sites_E2[:, 0],
            num_sites_E=sites_E2[:, 1],
            allowed_ZR=np.array(sets, dtype=np.bool_).reshape(-1, num_ranks),
        )

    def _of_items(self, item_I: IndexArray) -> FlatOptions:
        """The options of items that are like these, which may be named more than once."""
        item_O, number_O, option_O = self.options_of(item_I)
        _, number_E, shard_E = self.shards_of(option_O)
        options_I, count_O = self.options_I[item_I], self.count_O[option_O]
        return FlatOptions(
            options_I=options_I,
            first_I=np.cumsum(options_I) - options_I,
            item_O=item_O,
            number_O=number_O,
            type_O=self.type_O[option_O],
            types=self.types,
            start_O=np.cumsum(count_O) - count_O,
            count_O=count_O,
            is_uneven_O=self.is_uneven_O[option_O],
            number_E=number_E,
            kind_E=self.kind_E[shard_E],
            tier_E=self.tier_E[shard_E],
            holders_E=self.holders_E[shard_E],
            is_shared_E=self.is_shared_E[shard_E],
            is_free_E=self.is_free_E[shard_E],
            in_node_E=self.in_node_E[shard_E],
            sites_E=self.sites_E[shard_E],
            num_sites_E=self.num_sites_E[shard_E],
            allowed_ZR=self.allowed_ZR,
        )

    def is_held(self, tier: Tier, shard_X: IndexArray | slice = slice(None)) -> BoolArray:
        """Which shards are held by a tier: of all of them, or of some, shape (E,) or (X,)."""
        return np.asarray(self.tier_E[shard_X] == _TIERS[tier])

    def are_within(self, tiers: Collection[Tier]) -> BoolArray:
        """Which options hold all of their shards in some tiers, shape (O,)."""
        return np.asarray(self.largest(~np.isin(self.tier_E, [_TIERS[tier] for tier in tiers])) < 1)

    def sums(self, of_shards_E: FloatArray) -> FloatArray:
        """Sums over the shards of each option, shape (O,)."""
        return np.asarray(np.add.reduceat(of_shards_E, self.start_O))

    def lowest(self, score_O: FloatArray) -> IndexArray:
        """The option of each item with the lowest score, shape (I,)."""
        lowest_I = np.minimum.reduceat(score_O, self.first_I)
        found = np.flatnonzero(score_O == lowest_I[self.item_O])
        if len(found) > len(lowest_I):
            found = found[np.flatnonzero(np.diff(self.item_O[found], prepend=-1))]
        return np.asarray(found)

    def options_of(self, item_I: IndexArray) -> tuple[IndexArray, IndexArray, IndexArray]:
        """All options of some items: which of these each belongs to, its number there, and itself; shapes (Y,)."""
        which_Y, number_Y, _ = ragged(self.options_I[item_I])
        return which_Y, number_Y, self.first_I[item_I][which_Y] + number_Y

    def shards_of(self, option_Y: IndexArray) -> tuple[IndexArray, IndexArray, IndexArray]:
        """The shards of some options: which of these each belongs to, its number there, and itself; shapes (X,)."""
        which_X, number_X, _ = ragged(self.count_O[option_Y])
        return which_X, number_X, self.start_O[option_Y][which_X] + number_X

    def largest(self, of_shards_E: FloatArray | NDArray[np.bool_]) -> FloatArray:
        """Largest over the shards of each option, shape (O,)."""
        return np.asarray(np.maximum.reduceat(of_shards_E, self.start_O))


def ragged(lengths_Y: IndexArray) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Rows of so many entries, one after the other: each entry's row and its number there, and where rows start."""
    start_Y = np.cumsum(lengths_Y) - lengths_Y
    row_X = np.repeat(np.arange(len(lengths_Y)), lengths_Y)
    return row_X, np.arange(len(row_X)) - start_Y[row_X], start_Y


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostGradient:
    """Milliseconds that a shard of each kind adds.

    Attributes:
        served_VP: To the parts of a rank that holds it, and serves it to all others.
        shared_VP: To the parts of every rank, if all hold it.
        sync_V: To the all-reduce.
    """

    served_VP: MsArray
    shared_VP: MsArray
    sync_V: MsArray

    @classmethod
    def of(cls, space: PlannerSpace, layout: Layout | None = None) -> CostGradient:
        """Around a layout, or around nothing at all."""
        if layout is None:
            mean_C, codes_H = space.kinds.moved_VC[:1].mean(axis=0), np.zeros(space.kinds.codes_VH.shape[1])
        else:
            mean_C = layout.moved_RC.mean(axis=0)
            kernel_ms_R = layout.parts_ms()[[PART_INDEX[part] for part in KERNEL_PARTS]].sum(axis=0)
            codes_H = layout.codes_RH[int(np.argsort(kernel_ms_R, kind="stable")[len(kernel_ms_R) // 2])]
        return cls.around(space.kinds, space.prices, mean_C, codes_H)

    @classmethod
    def around(cls, kinds: ShardKinds, prices: StepPrices, mean_C: MovedArray, codes_H: FloatArray) -> CostGradient:
        """Around what ranks hold in the mean, of kinds of shards."""
        kernel_VP = _kernel_rates(kinds, prices, codes_H)
        return cls(
            served_VP=kinds.moved_VC @ prices.moving_rates(mean_C, prices.topology.world_size).T + kernel_VP,
            shared_VP=kinds.moved_VC @ prices.moving_rates(mean_C, 1).T + kernel_VP,
            sync_V=_sync_rates(kinds, prices, mean_C),
        )


def shard_costs(flat: FlatOptions, rates: CostGradient, num_ranks: int) -> MsArray:
    """Milliseconds of the step by each shard of all options, as if all ranks were alike; shape (E,)."""
    alone_E = rates.served_VP[flat.kind_E].sum(axis=1)
    shared_E = rates.shared_VP[flat.kind_E].sum(axis=1) + rates.sync_V[flat.kind_E]
    return np.asarray(np.where(flat.is_shared_E, shared_E, alone_E * flat.holders_E / num_ranks))


def shard_cost(rates: CostGradient, num_ranks: int) -> Callable[[ItemShard], float]:
    """As `shard_costs`, of one shard."""
    alone_V: list[float] = rates.served_VP.sum(axis=1).tolist()
    shared_V: list[float] = (rates.shared_VP.sum(axis=1) + rates.sync_V).tolist()

    def cost_ms(shard: ItemShard) -> float:
        return shared_V[shard.kind] if shard.is_everywhere else alone_V[shard.kind] * shard.num_holders / num_ranks

    return cost_ms


def shared_rates(space: PlannerSpace, sums_X: FloatArray) -> tuple[MsArray, MsArray]:
    """Milliseconds that a shard of each kind adds if all ranks hold some of it: to all parts, and to the all-reduce.

    Args:
        space: The kinds, and prices.
        sums_X: What every rank holds.

    Returns:
        Two arrays of shape (V,).
    """
    codes_H, moved_C, _ = space.kinds.split(sums_X)
    kernel_VP = _kernel_rates(space.kinds, space.prices, codes_H)
    parts_VP = space.kinds.moved_VC @ space.prices.moving_rates(moved_C, 1).T + kernel_VP
    return parts_VP.sum(axis=1), _sync_rates(space.kinds, space.prices, moved_C)


def _sync_rates(kinds: ShardKinds, prices: StepPrices, mean_C: MovedArray) -> MsArray:
    """Milliseconds of a step that the gradients of a shard of each kind add which replicas sum, shape (V,)."""
    bump = max(BUMP_BYTES, BUMP_SHARE * float(prices.synced_bytes(mean_C).max()))
    bumps_B2 = bump * np.concatenate([np.eye(2), 2 * np.eye(2)])
    once_ms, twice_ms = prices.synced_ms(bumps_B2).reshape(2, 2)
    return np.asarray(prices.synced_bytes(kinds.moved_VC) @ (twice_ms - once_ms) / bump)


def _kernel_rates(kinds: ShardKinds, prices: StepPrices, codes_H: FloatArray) -> MsArray:
    """Kernel milliseconds of one more shard where there are such shards already, shape (V, P)."""
    once_VH = codes_H + kinds.codes_VH
    rates_VP = np.zeros((len(once_VH), len(EMBEDDING_PARTS)))
    one = prices.kernels_ms(once_VH[None].astype(np.float32))
    two = prices.kernels_ms((once_VH + kinds.codes_VH)[None].astype(np.float32))
    for part, with_one, with_two in zip(KERNEL_PARTS, one, two, strict=True):
        rates_VP[:, PART_INDEX[part]] = np.maximum((with_two - with_one)[0], 0.0)
    return rates_VP
