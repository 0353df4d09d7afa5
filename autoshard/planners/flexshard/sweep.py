"""Tiers of all tables at once, by what a byte saves of the predicted step.

Shape suffixes: I items, O options, E their shards, V kinds of shards, T tiers, F features of options, X columns of
sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import Exchange, Tier, weight_row_bytes
from autoshard.core.costs import MsArray
from autoshard.planners.flexshard.cuts import TIERS, TierCut, TierOffers
from autoshard.planners.space.cost_gradient import FlatOptions, shared_rates
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.options import ShardingOption
from autoshard.planners.space.planner_space import IndexArray, PlannerSpace
from autoshard.planners.space.rows_by_price import cheapest_ends
from autoshard.planners.space.step_cost import StepSums
from autoshard.planners.space.tiers import num_owners

#: By how much the price of a byte grows until memory suffices, and how near it is known then.
_GROWTH, _NUM_HALVINGS, _NEAR = 8.0, 20, 0.98
#: Shares of the way from one cut to a larger one.
_NUM_SHARES = 32
#: Tables that cost less than this share of all are not cut, nor are those that lose more than this share by estimate.
_LEAST_SHARE, _UNSURE = 2e-3, 0.2
#: Bounds beside one, over it.
_FACTORS = (0.6, 1.6)
#: Share of the memory that may be left without offering more.
_SPARE = 3e-3
#: Milliseconds that options cost which are left out.
_BARRED_MS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierChoice:
    """An option of each item.

    Attributes:
        numbers_I: Their numbers.
        above_I: Numbers of the next choice, which is above the budget; the same if memory does not bind.
        step_ms: The step, as if all ranks were alike.
        price: Milliseconds that a byte has to save; 0 if memory does not bind.
        without: Features that were left out.
    """

    numbers_I: IndexArray
    above_I: IndexArray
    step_ms: float = math.inf
    price: float = 0.0
    without: tuple[int, ...] = ()


class TierSweep:
    """Chooses tiers: memory goes where it saves most of the step per byte, over all tables.

    Tiers put the same on every rank, so that milliseconds and bytes are sums over tables, linear around row-wise
    sharding; choices as a whole are priced in full. Tables are offered all rows in one tier first, then the cut by
    which each row has the tier that is best for it, then cuts beside the chosen one.

    Args:
        space: Tables, each offered its tiers, the least replicated one first.
        offers: What more they may be offered.
        tiered: Indices of the items in tiers.
        memory_multiplier: Bytes that count per replicated byte of weights; 0 for what is held.

    Attributes:
        row_wise_I: Options without replicas that make the shortest step.
        row_wise_bytes: Bytes that they take of a rank.

    Source:
        FlexShard, Sec. 4.3 and 4.6. Differs: what memory saves is of the step by the models' price, and each row has
        the tier that is best for it, where the paper's rule replicates only rows that save memory.
    """

    def __init__(
        self, space: PlannerSpace, offers: TierOffers, tiered: Sequence[int], memory_multiplier: float
    ) -> None:
        self._space, self._offers, self._multiplier = space, offers, memory_multiplier
        self._cuttable = [index for index in tiered if len(space.items[index].tables) == 1]
        self.row_wise_I: IndexArray = np.zeros(len(space.items), dtype=np.int64)
        self._read()
        flat = self._flat
        first_tier_O = flat.tier_E[flat.start_O[flat.first_I]][flat.item_O]
        is_more_O = flat.largest(flat.tier_E != np.repeat(first_tier_O, flat.count_O)) > 0
        # Sums travel by either collective, where they may.
        left_out = (0.0, *self._has_FO[2:].astype(np.float64))
        barred = [_BARRED_MS * (2 * is_more_O + has_O) for has_O in left_out]
        row_wise = [flat.number_O[flat.lowest(self._cost_O + barred_O)] for barred_O in barred]
        steps_ms = self._steps_ms(row_wise)
        self.row_wise_I = row_wise[int(steps_ms.argmin())]
        self._price()
        self.row_wise_bytes = self.bytes_of(self.row_wise_I)

    @property
    def least_bytes(self) -> float:
        """What the options of least memory take of a rank."""
        return float(np.minimum.reduceat(self._bytes_O, self._flat.first_I).sum())

    def sums(self, numbers_I: IndexArray) -> FloatArray:
        """What ranks hold of options in the mean, shape (X,)."""
        return np.asarray(self._rows_OX[self._flat.first_I + numbers_I].sum(axis=0))

    def numbers_of(self, options_I: Sequence[Sequence[ShardingOption]]) -> IndexArray:
        """Numbers of options that items are offered, too."""
        numbers_I = np.array(self._space.add(options_I))
        self._read()
        return numbers_I

    def offer_leanest(self) -> None:
        """Offers cuts by which each row has the tier that takes least memory for it."""
        self._offer({item: self._row_by_row(item, [_BARRED_MS])[1] for item in self._cuttable})

    def within(self, room_bytes: float) -> IndexArray:
        """Options of the shortest step that take so many bytes of a rank, at least `least_bytes`."""
        found = self._shortest(room_bytes)
        among: Collection[int] = self._cuttable
        for _ in range(2):
            # Bytes cost otherwise once there are other options.
            cuts = self._worth_cutting(found, among)
            among = list(cuts) if found.price else ()
            for item, bounds in self._beside(found).items():
                cuts[item] = cuts.get(item, set()) | bounds
            if not cuts:
                break
            self._offer(cuts)
            found = _shorter(self._shortest(room_bytes), found)
        if self.bytes_of(found.numbers_I) < (1 - _SPARE) * room_bytes and (cuts := self._up_to(found)):
            self._offer(cuts)
            filled = self._filled(found, room_bytes)
            found = _shorter(found, replace(filled, step_ms=float(self._steps_ms([filled.numbers_I])[0])))
        return found.numbers_I

    def _read(self) -> None:
        """Reads the space as it is now."""
        kinds = self._space.kinds
        self._flat = flat = FlatOptions.of(self._space)
        share_E = flat.holders_E / self._space.topology.world_size
        self._rows_OX = np.add.reduceat(kinds.rows_VX[flat.kind_E] * share_E[:, None], flat.start_O)
        # What costs something however little of it there is: all-reduces of copies on all ranks, those of copies on
        # nodes, reduce-scatters, answers by all-to-all.
        is_copied_E = flat.is_held(Tier.DATA_PARALLEL)
        is_scattered_E = self._space.prices.is_scattered(kinds.moved_VC)[flat.kind_E]
        has_FE = (is_copied_E, flat.is_held(Tier.FLEX), is_scattered_E, ~is_copied_E & ~is_scattered_E)
        self._has_FO = np.array([flat.largest(has_E) for has_E in has_FE]) > 0
        self._price()

    def _price(self) -> None:
        """Prices options, linear around row-wise sharding."""
        space, flat = self._space, self._flat
        share_E, around_X = flat.holders_E / space.topology.world_size, self.sums(self.row_wise_I)
        self._work_V, self._sync_V = shared_rates(space, around_X)
        self._cost_O = flat.sums((self._work_V + self._sync_V)[flat.kind_E] * share_E)
        _, moved_C, _ = space.kinds.split(around_X)
        self._static_V = space.kinds.bytes_VM[:, 0].copy()
        self._active_V = space.kinds.moved_VC @ space.prices.training_rates(moved_C[None])
        # Gradients of copies, until they are summed.
        self._copied_V = space.prices.synced_bytes(space.kinds.moved_VC).sum(axis=1)
        if self._multiplier:
            self._multiply_copies()
        self._bytes_O = flat.sums((self._static_V + self._active_V)[flat.kind_E] * share_E)

    def _multiply_copies(self) -> None:
        """Lets weights count by the multiplier where there are copies, gradients included, and else once."""
        topology, counted = self._space.topology, set()
        for shard in (one for item in self._space.items for option in item.options for one in option.shards):
            if shard.is_everywhere and shard.kind not in counted:
                counted.add(shard.kind)
                owners, rows = num_owners(shard.tier, topology), shard.parts[0].shard
                row_bytes = weight_row_bytes(rows.table.dtype, rows.table.optimizer, rows.table.embedding_dim)
                times = 1.0 if shard.tier is Tier.ROW_WISE else self._multiplier
                self._static_V[shard.kind] = times * row_bytes * rows.num_embeddings / owners
                self._active_V[shard.kind] -= self._copied_V[shard.kind] / owners
        self._copied_V = np.zeros(len(self._copied_V))

    def bytes_of(self, numbers_I: IndexArray) -> float:
        """What options take of a rank, in the mean."""
        return float(self._bytes_O[self._flat.first_I + numbers_I].sum())

    def _steps_ms(self, choices: Sequence[IndexArray]) -> MsArray:
        codes_BRH, moved_BRC, _ = self._space.kinds.split(np.array([self.sums(one) for one in choices])[:, None])
        sums = StepSums(codes_BRH=codes_BRH.astype(np.float32), moved_BRC=np.ascontiguousarray(moved_BRC))
        return self._space.prices.step_ms(sums)

    def _shortest(self, room_bytes: float) -> TierChoice:
        """The cheapest choice, without more and more of the features that it uses while that makes steps shorter."""
        best: TierChoice | None = None
        pending: list[tuple[int, ...]] = [()]
        price = 0.0
        while pending:
            swept = [self._cheapest(room_bytes, one, price) for one in pending]
            price = max(one.price for one in swept)
            tried = [*swept, *(self._filled(one, room_bytes) for one in swept if one.price)]
            if best is None and self.row_wise_bytes <= room_bytes:
                tried.append(replace(swept[0], numbers_I=self.row_wise_I))
            steps_ms = self._steps_ms([one.numbers_I for one in tried])
            at = int(steps_ms.argmin())
            if best is not None and steps_ms[at] >= best.step_ms:
                break
            best = replace(tried[at], step_ms=float(steps_ms[at]))
            used = np.flatnonzero(self._has_FO[:, self._flat.first_I + best.numbers_I].any(axis=1)).tolist()
            pending = [(*best.without, feature) for feature in used if feature not in best.without]
        assert best is not None, "at least one was swept"
        return best

    def _cheapest(self, room_bytes: float, without: tuple[int, ...], likely_price: float) -> TierChoice:
        """Options of least cost within memory, without some features unless there are too few others."""
        flat, bytes_O = self._flat, self._bytes_O
        cost_O = self._cost_O + _BARRED_MS * self._has_FO[list(without)].any(axis=0)
        above_I = below_I = flat.lowest(cost_O)
        low, high, price = 0.0, likely_price or float(self._cost_O.max()) / max(room_bytes, 1.0), 0.0
        if bytes_O[below_I].sum() > room_bytes:
            while bytes_O[below_I := flat.lowest(cost_O + high * bytes_O)].sum() > room_bytes and high < _BARRED_MS:
                low, high, above_I = high, _GROWTH * high, below_I
            for _ in range(_NUM_HALVINGS):
                middle = math.sqrt(low * high) if low else high / _GROWTH
                tried_I = flat.lowest(cost_O + middle * bytes_O)
                if bytes_O[tried_I].sum() > room_bytes:
                    low, above_I = middle, tried_I
                else:
                    high, below_I = middle, tried_I
                if low > _NEAR * high:
                    break
            price = high
        numbers_I, above_I = flat.number_O[below_I], flat.number_O[above_I]
        return TierChoice(numbers_I=numbers_I, above_I=above_I, price=price, without=without)

    def _filled(self, choice: TierChoice, room_bytes: float) -> TierChoice:
        """The choice with cheaper options of items that the next one changes, as far as memory goes."""
        numbers_I, left = choice.numbers_I.copy(), room_bytes - self.bytes_of(choice.numbers_I)
        for item in np.flatnonzero(choice.above_I != numbers_I).tolist():
            first = self._flat.first_I[item]
            options = slice(first, first + self._flat.options_I[item])
            more_bytes = self._bytes_O[options] - self._bytes_O[first + numbers_I[item]]
            number = int(np.where(more_bytes <= left, self._cost_O[options], np.inf).argmin())
            left, numbers_I[item] = left - more_bytes[number], number
        return replace(choice, numbers_I=numbers_I)

    def _worth_cutting(self, choice: TierChoice, among: Collection[int]) -> dict[int, set[tuple[int, int]]]:
        """For those of some items that cuts may make cheaper, bounds by which each row has the best tier for it."""
        cost_I = self._cost_O[self._flat.first_I + choice.numbers_I]
        least_ms = _LEAST_SHARE * float(cost_I.sum())
        alike: dict[int, list[int]] = {}
        for item in among:
            alike.setdefault(id(self._space.items[item].like[0]), []).append(item)
        found: dict[int, set[tuple[int, int]]] = {}
        for items in alike.values():
            if (all_ms := float(cost_I[items].sum())) > least_ms:
                gain_ms, bounds = self._row_by_row(items[0], {choice.price, 0.0, _GROWTH * choice.price})
                if gain_ms * len(items) > -_UNSURE * all_ms:
                    found |= {item: set(bounds) for item in items}
        return found

    def _row_by_row(self, item: int, prices: Collection[float]) -> tuple[float, set[tuple[int, int]]]:
        """About what is gained over one tier if each row has the best one for it, and (replicated, flexed) then.

        Of what a tier with all rows costs, synchronisation counts by the rows that a batch hits, memory by rows, all
        else by lookups. Bounds are those with all tiers, and without Flex: where it is free beside other traffic, it
        soon is not.

        Args:
            item: Of a single table.
            prices: Milliseconds that a byte has to save.
        """
        space, flat = self._space, self._flat
        kinds: dict[Tier, int] = {}
        for option in space.items[item].options:
            part = option.of_tables[0].parts[0]
            if len(option.shards) == 1 and (part.tier is Tier.DATA_PARALLEL or part.exchange is Exchange.ROWS):
                kinds[part.tier] = option.shards[0].kind
        offered = [tier for tier in TIERS if tier in kinds]
        if len(offered) < 2:
            return -math.inf, set()
        kind_T = np.array([kinds[tier] for tier in offered])
        copied_T = self._copied_V[kind_T] / [num_owners(tier, space.topology) for tier in offered]
        ms_3T = np.array([self._sync_V[kind_T], np.zeros(len(kind_T)), self._work_V[kind_T]])
        bytes_3T = np.array([copied_T, self._static_V[kind_T], self._active_V[kind_T] - copied_T])
        options = slice(flat.first_I[item], flat.first_I[item] + flat.options_I[item])
        is_cut_O = flat.count_O[options] > 1
        found, gains_ms = set(), []
        for price in prices:
            in_one_O = self._cost_O[options] + price * self._bytes_O[options] + _BARRED_MS * is_cut_O
            for with_flex in {True, Tier.FLEX not in offered}:
                tiers = [tier for tier in offered if with_flex or tier is not Tier.FLEX]
                cost_3T = (ms_3T + price * bytes_3T)[:, [offered.index(tier) for tier in tiers]]
                ends, cost_ms = cheapest_ends(space.items[item].like[0], space.tables.batch_size, cost_3T)
                end_of = dict(zip(tiers, ends, strict=True))
                replicated = end_of.get(Tier.DATA_PARALLEL, 0)
                found.add((replicated, end_of.get(Tier.FLEX, replicated)))
                gains_ms.append(float(in_one_O.min()) - cost_ms)
        return max(gains_ms), found

    def _beside(self, choice: TierChoice) -> dict[int, set[tuple[int, int]]]:
        """For items that are cut, each bound times some factors."""
        found: dict[int, set[tuple[int, int]]] = {}
        for item in self._cuttable:
            option = self._space.items[item].options[choice.numbers_I[item]].of_tables[0]
            if len(option.parts) > 1:
                cut, most = TierCut.of(option), option.table.num_embeddings
                moved = [
                    [min(most, round(factor * end)) for factor in _FACTORS] for end in (cut.replicated, cut.flexed)
                ]
                if cut.replicated == cut.flexed:
                    found[item] = {(end, end) for end in moved[0]}
                else:
                    found[item] = {(end, cut.flexed) for end in moved[0]} | {(cut.replicated, end) for end in moved[1]}
        return found

    def _up_to(self, choice: TierChoice) -> dict[int, set[tuple[int, int]]]:
        """For the first item that the next choice changes, cuts on the way there."""
        for item in self._cuttable:
            if choice.numbers_I[item] != choice.above_I[item]:
                numbers = (choice.numbers_I[item], choice.above_I[item])
                low, high = (TierCut.of(self._space.items[item].options[one].of_tables[0]) for one in numbers)
                shares = np.arange(1, _NUM_SHARES) / _NUM_SHARES
                ends = ((low.replicated, high.replicated), (low.flexed, high.flexed))
                between = [(start + shares * (stop - start)).astype(np.int64).tolist() for start, stop in ends]
                return {item: set(zip(*between, strict=True))}
        return {}

    def _offer(self, bounds: Mapping[int, set[tuple[int, int]]]) -> None:
        """Offers items cuts at (replicated, flexed); those that are alike are offered what any of them is."""
        of_table: dict[str, set[tuple[int, int]]] = {}
        for item, of_item in bounds.items():
            of_table.setdefault(self._space.items[item].like[0].name, set()).update(of_item)
        self._space.offer(bounds, lambda table: self._offers.cuts(table, sorted(of_table[table.name])))
        self._read()


def _shorter(one: TierChoice, other: TierChoice) -> TierChoice:
    return other if other.step_ms < one.step_ms else one
