"""The rules of sharding as a game: every item takes one of its options, and then a place for each part that needs one.

Shape suffixes: E episodes, D some of them, I items, O options (of an item, or of all), S sites, K parts of an option, X
shards of all options, V kinds of shards, R ranks, M memory levels, P `EMBEDDING_PARTS`, F features.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.step import EMBEDDING_PARTS
from autoshard.evaluation.batch_memory import gradient_ratio
from autoshard.planners.hybrid.compiled.linear import LinearSearch
from autoshard.planners.hybrid.starts import balanced_starts, no_room
from autoshard.planners.space.columns import Readers
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.layout import Choice, Layout, Limits
from autoshard.planners.space.planner_space import PlannerSpace
from autoshard.planners.space.ways import TaskFeatures, Way, price_features, way_features

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_NUM_PARTS = len(EMBEDDING_PARTS)
#: Features of what is placed so far, and of a site.
NUM_CONTEXT, NUM_PLACE = 2 * _NUM_PARTS + 5, _NUM_PARTS + 6
#: Differences between sites are about an eighth of an even share.
_MARGIN_SCALE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Memory:
    """What shards take of memory, as sums: what training needs for a batch is among it, as `training_bytes` counts it.

    Where gradients travel in fewer bytes than what they are of, it counts up to that difference more.

    Attributes:
        own_XM: Of each rank that holds the shard, by memory level.
        all_X: Of every rank's device memory.
        base: Of every rank's device memory, whatever is held.
    """

    own_XM: FloatArray
    all_X: FloatArray
    base: float

    @classmethod
    def of(cls, space: PlannerSpace, limits: Limits, flat: FlatOptions) -> _Memory:
        own_XM = space.kinds.bytes_VM[flat.kind_E].copy()
        all_X = np.zeros(len(own_XM))
        base = 0.0
        if limits.with_activations:
            rows_V = space.prices.columns.of(np.ascontiguousarray(space.kinds.moved_VC))
            ratio = gradient_ratio(space.prices.payload)
            returned_VW = (1 + ratio) * rows_V["returned_bytes"]
            own_V = rows_V["input_bytes"] + max(1.0, ratio) * rows_V["output_bytes"] + returned_VW[:, Readers.ITSELF]
            own_XM[:, 0] += own_V[flat.kind_E]
            of_node_X = returned_VW[flat.kind_E, Readers.NODE]
            assert not of_node_X[~flat.is_shared_E].any(), "what a node reads is held by all nodes"
            own_XM[:, 0] += space.topology.local_world_size * of_node_X
            all_X += flat.holders_E * (returned_VW[:, Readers.ALL] + rows_V["row_order_bytes"])[flat.kind_E]
            no_rank = np.zeros((1, space.topology.world_size, space.kinds.moved_VC.shape[1]))
            base = float(space.prices.training_bytes(no_rank).max())
        return cls(own_XM=own_XM, all_X=all_X, base=base)


class GameTask:
    """What is played: items with their options, and how they are told apart.

    Args:
        space: Items with their options.
        limits: Memory.

    Attributes:
        witness: A layout that fits, by which masks know how an episode can end.
        witness_ms: Its step.
        linear: What shards add to the step, linear around the witness; also the search that improves layouts.
        features: Of the task and its items.
        order_I: Items in falling price, see `TaskFeatures.order`.
        left_I: Share of the price of each item in that order and of all after it.
        ways_OF: What tells options apart, unpriced and priced.

    Raises:
        InfeasiblePlanError: If no layout was found that fits the memory.
    """

    def __init__(self, space: PlannerSpace, limits: Limits) -> None:
        self.space, self.limits = space, limits
        self.flat = FlatOptions.of(space)
        starts = balanced_starts(space, limits, time.perf_counter())
        fitting = [start.layout for start in starts]
        if not fitting:
            raise no_room(space, limits)
        steps_ms = [layout.step_ms() for layout in fitting]
        self.witness = fitting[int(np.argmin(steps_ms))]
        self.witness_ms = min(steps_ms)
        self.linear = LinearSearch(space, limits, self.flat, self.witness)
        rates = self.linear.rates
        self.features = TaskFeatures.of(space, self.flat, CostGradient.of(space))
        self.order_I: IntArray = self.features.order()
        self.left_I = self.features.cost_I[self.order_I][::-1].cumsum()[::-1]
        of_ways_OF = way_features([Way.of(option.of_tables[0]) for item in space.items for option in item.options])
        self.ways_OF = np.concatenate([of_ways_OF, price_features(self.flat, rates, space)], axis=1)
        self._rate_shards(rates)
        self.memory = _Memory.of(space, limits, self.flat)
        self.capacity_RM = limits.capacity_RM.copy()
        self.capacity_RM[:, 0] -= self.memory.base
        self.room_RM = self.room_beside(self.witness)
        if (self.room_RM < 0).any():
            raise InfeasiblePlanError("no layout was found that leaves room for training on a batch at its largest")

    def _rate_shards(self, rates: CostGradient) -> None:
        """What shards add to ranks, and how much of it ranks have in the mean."""
        flat = self.flat
        shared_X1 = flat.is_shared_E[:, None]
        self.load_XP = np.where(shared_X1, rates.shared_VP[flat.kind_E], rates.served_VP[flat.kind_E])
        self.sync_X = np.where(flat.is_shared_E, rates.sync_V[flat.kind_E], 0.0)
        held_P = self.witness.parts_ms().mean(axis=1)
        self.mean_P = np.maximum(held_P, 1e-3 * max(float(held_P.sum()), 1e-30))
        self.unit_ms = float(self.mean_P.sum())
        self.weight_P = self.linear.part_weights(self.witness)

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.space.topology.world_size

    @property
    def most_options(self) -> int:
        """Most options that an item has."""
        return int(self.flat.options_I.max())

    def options_of(self, item: int) -> slice:
        """An item's options among all."""
        first = int(self.flat.first_I[item])
        return slice(first, first + int(self.flat.options_I[item]))

    def shards_of(self, option: int) -> range:
        """The shards of an option, among all."""
        start = int(self.flat.start_O[option])
        return range(start, start + int(self.flat.count_O[option]))

    def room_beside(self, layout: Layout) -> FloatArray:
        """Bytes that a layout leaves of each rank by memory level, shape (R, M); negative where it does not fit."""
        room_RM = self.capacity_RM.copy()
        for item in range(len(self.space.items)):
            self.hold(room_RM, item, layout.choice(item), -1)
        return room_RM

    def hold(self, room_RM: FloatArray, item: int, choice: Choice, sign: int) -> None:
        """Adds what an item's shards take to the room of ranks, times a sign, in place."""
        number, sites = choice
        for shard, site in zip(self.shards_of(int(self.flat.first_I[item]) + number), sites, strict=True):
            self.hold_shard(room_RM, shard, site, sign)

    def hold_shard(self, room_RM: FloatArray, shard: int, site: int, sign: int) -> None:
        """Adds what a shard at a site takes to the room of ranks, times a sign, in place."""
        memory, holders = self.memory, int(self.flat.holders_E[shard])
        room_RM[site * holders : (site + 1) * holders] += sign * memory.own_XM[shard]
        room_RM[:, 0] += sign * memory.all_X[shard]

    def allowed_sites(self, shard: int) -> BoolArray:
        """Sites that constraints leave a shard, shape (S,)."""
        num_sites = self.num_ranks // int(self.flat.holders_E[shard])
        number = int(self.flat.sites_E[shard])
        if number < 0:
            return np.ones(num_sites, dtype=np.bool_)
        return np.asarray(self.flat.allowed_ZR[number, :num_sites])

    def with_room(self, room_RM: FloatArray, option: int, node: int | None = None) -> tuple[int, ...] | None:
        """Sites for the shards of an option, each where most room is left; None if some find none.

        Args:
            room_RM: Bytes left of each rank by memory level; left as it is.
            option: Among all.
            node: The node of options that keep to one; None to look for one.
        """
        if node is None and self.flat.in_node_E[self.flat.start_O[option]]:
            by_room = np.argsort(-room_RM[:, 0].reshape(self.space.topology.num_nodes, -1).sum(axis=1), kind="stable")
            tried = (self.with_room(room_RM, option, one) for one in by_room.tolist())
            return next((sites for sites in tried if sites is not None), None)
        left_RM, sites = room_RM.copy(), []
        for shard in self.shards_of(option):
            left_RM[:, 0] -= self.memory.all_X[shard]
            if self.flat.is_shared_E[shard]:
                left_RM -= self.memory.own_XM[shard]
                sites.append(0)
                continue
            holders = int(self.flat.holders_E[shard])
            least_S = (left_RM - self.memory.own_XM[shard]).reshape(-1, holders, left_RM.shape[1]).min(axis=1)
            fits_S = (least_S >= 0).all(axis=1) & self.allowed_sites(shard)
            if node is not None:
                fits_S &= np.arange(len(fits_S)) // self.space.topology.local_world_size == node
            if not fits_S.any():
                return None
            sites.append(int(np.where(fits_S, least_S[:, 0], -np.inf).argmax()))
            left_RM[sites[-1] * holders : (sites[-1] + 1) * holders] -= self.memory.own_XM[shard]
        return tuple(sites) if (left_RM >= 0).all() else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished:
    """Episodes that have ended.

    Attributes:
        layouts: What each ended with.
        step_ms_E: Their steps.
        rewards_E: The step of the task's witness over theirs.
    """

    layouts: tuple[Layout, ...]
    step_ms_E: MsArray
    rewards_E: FloatArray


class Game:
    """Plays E episodes of one task side by side; all are at the same item.

    Items come in falling price. A step first chooses the sharding option of the item that is up, and then, one after
    the other, the site of each of its parts that not all ranks hold: a rank, or a node. Whatever the mask allows leaves
    a way to the end: for every episode a complete layout is known that fits, its witness, of which the items chosen so
    far are a part. A choice is allowed if the witness still fits with that one item held so, its other parts where most
    room is left; then it is the next witness. So at least the witness's own choice is allowed at every step, and an
    episode that keeps to masks ends within memory limits and constraints, with what training needs for a batch.

    Args:
        task: What is played.
        num_episodes: E.
        witness: A layout that fits, as the first witness of all episodes; the task's own if left out.

    Attributes:
        at: Place of the item that is up, in falling price.
        part: Which of its parts is to be placed; -1 where its option is to be chosen.
    """

    def __init__(self, task: GameTask, num_episodes: int, witness: Layout | None = None) -> None:
        self.task, self.num_episodes = task, num_episodes
        self._witness = witness or task.witness
        room_RM = task.room_RM if witness is None else task.room_beside(witness)
        assert (room_RM >= 0).all(), "the witness fits"
        self._begin(room_RM)

    def _begin(self, room_RM: FloatArray) -> None:
        task, num = self.task, self.num_episodes
        self.at, self.part = 0, -1
        self.load_ERP = np.zeros((num, task.num_ranks, _NUM_PARTS))
        self.sync_E = np.zeros(num)
        self.room_ERM = np.repeat(room_RM[None], num, axis=0)
        self.free_ERM = np.repeat(task.capacity_RM[None], num, axis=0)
        self.option_EI = np.full((num, len(task.order_I)), -1, dtype=np.int64)
        # Sites of the item that is up, those to come where the witness has them; and of all items before.
        self._sites: list[list[int]] = [[] for _ in range(num)]
        self._placed: list[dict[int, tuple[int, ...]]] = [{} for _ in range(num)]
        self._open_item()

    @property
    def is_done(self) -> bool:
        """Whether all items have their places."""
        return self.at == len(self.task.order_I)

    @property
    def item(self) -> int:
        """The item that is up."""
        return int(self.task.order_I[self.at])

    @property
    def is_placing(self) -> BoolArray:
        """Which episodes have a part to place now, shape (E,)."""
        return np.asarray(self._shard_E >= 0)

    @property
    def number_of_part(self) -> int:
        """Number, within its option, of the part that the first episode is to place."""
        return int(self._number_E[0])

    @property
    def num_choices(self) -> int:
        """Options of the item that is up, or sites."""
        return int(self.task.flat.options_I[self.item]) if self.part < 0 else self.task.num_ranks

    def _open_item(self) -> None:
        """Takes what the witness holds of the item that is up out of its room."""
        if not self.is_done:
            held_RM = np.zeros_like(self.task.room_RM)
            self.task.hold(held_RM, self.item, self._witness.choice(self.item), 1)
            self.room_ERM += held_RM

    def mask(self) -> BoolArray:
        """What may be chosen, shape (E, O) or (E, S); S is R, and nodes come first of it."""
        return self._option_mask() if self.part < 0 else self._site_mask()

    def _option_mask(self) -> BoolArray:
        task, flat = self.task, self.task.flat
        options = task.options_of(self.item)
        start, end = (
            int(flat.start_O[options.start]),
            int(flat.start_O[options.stop - 1] + flat.count_O[options.stop - 1]),
        )
        first_O = flat.start_O[options] - start
        own_OM = np.add.reduceat(task.memory.own_XM[start:end], first_O)
        own_OM[:, 0] += np.add.reduceat(task.memory.all_X[start:end], first_O)
        # Where the fullest rank has room for all parts of an option, any sites will do.
        is_free_E = task.flat.sites_E[start:end] < 0
        may_EO = (self.room_ERM.min(axis=1)[:, None] >= own_OM).all(axis=2)
        may_EO &= np.logical_and.reduceat(is_free_E, first_O)
        may_EO[:, self._witness.choice(self.item)[0]] = True
        for episode, option in np.argwhere(~may_EO).tolist():
            may_EO[episode, option] = task.with_room(self.room_ERM[episode], options.start + option) is not None
        return np.asarray(may_EO)

    def _site_mask(self) -> BoolArray:
        may_ES = np.zeros((self.num_episodes, self.task.num_ranks), dtype=np.bool_)
        for episode, shard in enumerate(self._shard_E.tolist()):
            if shard < 0:
                may_ES[episode, 0] = True
                continue
            found_S = self._open_sites(episode, shard)
            may_ES[episode, : len(found_S)] = found_S
        return may_ES

    def _open_sites(self, episode: int, shard: int) -> BoolArray:
        """Sites that one part may take, beside the witness's sites of all others; shape (S,)."""
        task, holders = self.task, int(self.task.flat.holders_E[shard])
        number, own_M = int(self._number_E[episode]), self.task.memory.own_XM[shard]
        now = self._sites[episode][number]
        room_RM = self.room_ERM[episode]
        fits_S = (room_RM >= own_M).all(axis=1).reshape(-1, holders).all(axis=1)
        fits_S[now] = True
        fits_S &= task.allowed_sites(shard)
        if task.flat.in_node_E[shard]:
            local = task.space.topology.local_world_size
            node_S = np.arange(len(fits_S)) // local
            is_here_S = node_S == now // local
            if number == 0:
                for node in range(task.space.topology.num_nodes):
                    if node != now // local and (is_there := node_S == node).any():
                        sites = self._moved_to(episode, node)
                        # What the others leave on the way is known for the sites that they have there.
                        is_here_S |= is_there & (np.arange(len(fits_S)) == (-1 if sites is None else sites[0]))
                        if sites is not None:
                            fits_S[sites[0]] = True
            fits_S &= is_here_S
        return np.asarray(fits_S)

    def _moved_to(self, episode: int, node: int) -> tuple[int, ...] | None:
        """Sites of all parts of the item that is up in another node; None if there is no room."""
        option = int(self.option_EI[episode, self.item]) + int(self.task.flat.first_I[self.item])
        room_RM = self.room_ERM[episode].copy()
        for shard, site in zip(self.task.shards_of(option), self._sites[episode], strict=True):
            self.task.hold_shard(room_RM, shard, site, 1)
        return self.task.with_room(room_RM, option, node)

    def step(self, choice_E: IntArray) -> None:
        """Chooses an option, or a site, in every episode; where an option has no part to place, its choice is void."""
        if self.part < 0:
            self._take_options(choice_E)
        else:
            for episode, shard in enumerate(self._shard_E.tolist()):
                if shard >= 0:
                    self._take_site(episode, shard, int(choice_E[episode]))
        self._go_on()

    def _take_options(self, choice_E: IntArray) -> None:
        task, item = self.task, self.item
        first = int(task.flat.first_I[item])
        own_number, own_sites = self._witness.choice(item)
        self.option_EI[:, item] = choice_E
        for episode, number in enumerate(choice_E.tolist()):
            is_own = number == own_number
            sites = own_sites if is_own else task.with_room(self.room_ERM[episode], first + number)
            assert sites is not None, "the mask allows it"
            self._sites[episode] = list(sites)
            for shard, site in zip(task.shards_of(first + number), sites, strict=True):
                task.hold_shard(self.room_ERM[episode], shard, site, -1)
                if task.flat.is_shared_E[shard]:
                    self._load(episode, shard, 0)

    def _take_site(self, episode: int, shard: int, site: int) -> None:
        task, number = self.task, int(self._number_E[episode])
        now = self._sites[episode][number]
        local = task.space.topology.local_world_size
        if number == 0 and task.flat.in_node_E[shard] and site // local != now // local:
            sites = self._moved_to(episode, site // local)
            assert sites is not None, "the mask allows it"
            option = int(self.option_EI[episode, self.item]) + int(task.flat.first_I[self.item])
            for other, before, after in zip(task.shards_of(option), self._sites[episode], sites, strict=True):
                task.hold_shard(self.room_ERM[episode], other, before, 1)
                task.hold_shard(self.room_ERM[episode], other, after, -1)
            self._sites[episode] = list(sites)
        elif site != now:
            task.hold_shard(self.room_ERM[episode], shard, now, 1)
            task.hold_shard(self.room_ERM[episode], shard, site, -1)
            self._sites[episode][number] = site
        self._load(episode, shard, site)

    def _load(self, episode: int, shard: int, site: int) -> None:
        """Adds what a shard adds to its ranks."""
        task, holders = self.task, int(self.task.flat.holders_E[shard])
        self.load_ERP[episode, site * holders : (site + 1) * holders] += task.load_XP[shard]
        self.sync_E[episode] += task.sync_X[shard]
        task.hold_shard(self.free_ERM[episode], shard, site, -1)

    def _go_on(self) -> None:
        """To the next part that some episode has to place, or to the next item."""
        task = self.task
        first = int(task.flat.first_I[self.item])
        self.part += 1
        found = [self._sited(first + number) for number in self.option_EI[:, self.item].tolist()]
        if any(len(shards) > self.part for shards in found):
            at = [shards[self.part] if len(shards) > self.part else (-1, -1) for shards in found]
            self._shard_E, self._number_E = np.array(at, dtype=np.int64).T
            return
        for episode, sites in enumerate(self._sites):
            self._placed[episode][self.item] = tuple(sites)
        self.at, self.part = self.at + 1, -1
        self._open_item()

    def _sited(self, option: int) -> list[tuple[int, int]]:
        """The shards of an option that need a place, and their numbers there."""
        shards = self.task.shards_of(option)
        return [(shard, shard - shards.start) for shard in shards if not self.task.flat.is_shared_E[shard]]

    def context(self) -> FloatArray:
        """What is placed so far, alike however ranks are numbered; shape (E, F)."""
        task = self.task
        load_ERP = self.load_ERP * (_NUM_PARTS / task.unit_ms)
        free_ER = self.free_ERM[..., 0] / np.maximum(task.capacity_RM[:, 0], 1.0)
        left = 0.0 if self.is_done else float(task.left_I[self.at])
        share = 1 - self.at / len(task.order_I)
        return np.concatenate(
            [
                load_ERP.max(axis=1),
                load_ERP.mean(axis=1),
                np.column_stack(
                    [
                        self.sync_E / task.unit_ms,
                        free_ER.min(axis=1),
                        free_ER.mean(axis=1),
                        np.full(self.num_episodes, left),
                        np.full(self.num_episodes, share),
                    ]
                ),
            ],
            axis=1,
        )

    def places(self) -> FloatArray:
        """What tells the sites of the part that is up apart, shape (E, S, F)."""
        task, num_ranks = self.task, self.task.num_ranks
        places_ESF = np.zeros((self.num_episodes, num_ranks, NUM_PLACE))
        scale = _NUM_PARTS / task.unit_ms
        for holders in np.unique(task.flat.holders_E[self._shard_E[self._shard_E >= 0]]).tolist():
            is_one_E = (self._shard_E >= 0) & (task.flat.holders_E[self._shard_E] == holders)
            shard_D = self._shard_E[is_one_E]
            load_DRP = self.load_ERP[is_one_E]
            most_D1P = load_DRP.max(axis=1, keepdims=True)
            after_DRP = load_DRP + task.load_XP[shard_D][:, None]
            shape = (len(shard_D), num_ranks // holders, holders)
            after_DSP = after_DRP.reshape(*shape, -1).max(axis=2)
            rise_DS = (np.maximum(after_DSP - most_D1P, 0.0) * task.weight_P).sum(axis=2) / task.unit_ms
            power_DRP = _fourth(after_DRP / task.mean_P) - _fourth(load_DRP / task.mean_P)
            energy_DS = np.log1p((power_DRP * task.weight_P * task.mean_P).sum(axis=2) / task.unit_ms)
            energy_DS = energy_DS.reshape(shape).max(axis=2)
            left_DR = self.free_ERM[is_one_E][..., 0] - task.memory.own_XM[shard_D, 0][:, None]
            left_DS = (left_DR / np.maximum(task.capacity_RM[:, 0], 1.0)).reshape(shape).min(axis=2)
            places_ESF[is_one_E, : shape[1]] = np.concatenate(
                [
                    after_DSP * scale,
                    np.stack(
                        [
                            rise_DS,
                            _MARGIN_SCALE * (rise_DS - rise_DS.min(axis=1, keepdims=True)),
                            energy_DS - energy_DS.min(axis=1, keepdims=True),
                            left_DS,
                            np.full_like(left_DS, float(holders > 1)),
                            np.ones_like(left_DS),
                        ],
                        axis=2,
                    ),
                ],
                axis=2,
            )
        return places_ESF

    def chosen(self, episode: int) -> list[Choice | None]:
        """The choices of an episode so far."""
        placed = self._placed[episode]
        return [
            (int(self.option_EI[episode, item]), placed[item]) if item in placed else None
            for item in range(len(self.task.order_I))
        ]

    def finished(self) -> Finished:
        """What all episodes ended with; none has an item without its place."""
        assert self.is_done, "items are left"
        task = self.task
        layouts = tuple(Layout(task.space, task.limits, self.chosen(episode)) for episode in range(self.num_episodes))
        step_ms_E = np.array([layout.step_ms() for layout in layouts])
        return Finished(layouts=layouts, step_ms_E=step_ms_E, rewards_E=task.witness_ms / step_ms_E)


def _fourth(values: FloatArray) -> FloatArray:
    """Fourth powers: the norm by which sites are told apart where the slowest rank is another one."""
    squares = values * values
    return squares * squares
