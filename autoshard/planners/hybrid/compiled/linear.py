"""A space and its layouts as the compiled search has them: what shards add to ranks, taken as linear.

Shape suffixes: I items, O options, E shards of options, V kinds of shards, P parts of a step, R ranks, K launches, M
memory levels, X shards that are held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import MsArray, kernel_floor
from autoshard.core.step import EMBEDDING_PARTS, KERNEL_PARTS, PART_INDEX, StepPart
from autoshard.planners.hybrid.compiled.library import Mode, Task, library, over_ranks
from autoshard.planners.hybrid.held import HeldShards
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.planner_space import BoolArray, IndexArray, PlannerSpace

IntArray = NDArray[np.int32]

#: Share of a part by which the step's rate by it is found, and its least milliseconds.
_BUMP_SHARE, _LEAST_BUMP_MS = 0.02, 1e-12
#: Least milliseconds that ranks are thought to have of a part in the mean.
_LEAST_MEAN_MS = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearEffort:
    """How much a call of the compiled search does.

    Attributes:
        mode: What it does; all else is of ruin and recreate.
        rounds: Rounds.
        most: Most items of a ruin.
        near: Items of the descent after it.
        heat: Excess over the layout before, as a share of its step, that is accepted at first.
    """

    mode: Mode = Mode.RUIN
    rounds: int = 4
    most: int = 16
    near: int = 96
    heat: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launches:
    """What ranks pay once, however many shards they have that need it.

    Attributes:
        count_VK: How often a shard of each kind uses it.
        added_KP: Milliseconds that it adds to each part of a rank.
    """

    count_VK: IntArray
    added_KP: MsArray

    @classmethod
    def of(cls, space: PlannerSpace, layout: Layout) -> Launches:
        """Reads a space.

        There are launches of fused kernels, by the step's price and by the kernel model where it says them exactly;
        what readers do once if any shard needs it;
        latencies of reduce-scatters; and gradient synchronisation, whose latency is not a rank's.
        """
        prices, kinds = space.prices, space.kinds
        counts, added = [prices.counted(kinds.moved_VC)], [_counted_launches(space, layout)]
        floor = kernel_floor(prices.costs.kernel, kinds.codes_VH.astype(np.float32))
        if floor.is_exact:
            counts.append(np.eye(int(floor.kernel_N.max()) + 1)[floor.kernel_N])
            bases_ms = prices.of_kernels(np.array(floor.forward_base_ms), np.array(floor.backward_base_ms))
            added.append(np.zeros((counts[-1].shape[1], len(EMBEDDING_PARTS))))
            added[-1][:, [PART_INDEX[part] for part in KERNEL_PARTS]] = bases_ms
        counts.append(prices.is_scattered(kinds.moved_VC)[:, None].astype(np.float64))
        added.append(np.zeros((1, len(EMBEDDING_PARTS))))
        exchanges = (StepPart.FORWARD_EXCHANGE, StepPart.BACKWARD_EXCHANGE)
        added[-1][0, [PART_INDEX[part] for part in exchanges]] = prices.scatter_latencies_ms()
        is_used_K = np.concatenate(counts, axis=1).any(axis=0) & np.concatenate(added).any(axis=1)
        count_VK, added_KP = np.concatenate(counts, axis=1)[:, is_used_K], np.concatenate(added)[is_used_K]
        is_synced_V = prices.synced_bytes(kinds.moved_VC).any(axis=1)
        if is_synced_V.any():
            count_VK = np.column_stack([count_VK, is_synced_V])
            added_KP = np.concatenate([added_KP, np.zeros((1, len(EMBEDDING_PARTS)))])
        return cls(count_VK=np.ascontiguousarray(count_VK, dtype=np.int32), added_KP=np.ascontiguousarray(added_KP))


def _counted_launches(space: PlannerSpace, layout: Layout) -> MsArray:
    """Milliseconds that the first shard of each fused kernel adds beside its own, shape (K, P).

    So does the first of those that all readers go another way for: it is counted as a launch of the rank that holds it.
    """
    prices = space.prices
    base_RC = np.repeat(layout.moved_RC.mean(axis=0)[None], layout.num_ranks, axis=0)
    without_with_BRC = prices.with_and_without_counted(base_RC)
    parts_PB = prices.moving_ms(without_with_BRC)[:, :, 0]
    num_counted = len(without_with_BRC) // 2
    return np.asarray((parts_PB[:, num_counted:] - parts_PB[:, :num_counted]).T)


class LinearSearch:
    """Improves layouts of one space by the compiled search.

    Args:
        space: The space; options added to it later are not searched.
        limits: Memory.
        flat: The options.
        around: What shards add is taken as linear around this layout, until `relinearise`.

    Attributes:
        fixed: The arrays of options, as the compiled search has them.
        won_O: How often each option was the best of its item, of those that could be taken.
    """

    def __init__(self, space: PlannerSpace, limits: Limits, flat: FlatOptions, around: Layout) -> None:
        self.space, self.limits, self.flat = space, limits, flat
        self.fixed = _option_arrays(flat)
        self.won_O: IntArray = np.zeros(len(flat.item_O), dtype=np.int32)
        self.relinearise(around)

    def relinearise(self, around: Layout) -> None:
        """Takes what shards add as linear around another layout."""
        self.rates, self.launches = CostGradient.of(self.space, around), Launches.of(self.space, around)
        bytes_VM = self.space.kinds.bytes_VM
        if self.limits.with_activations:
            bytes_VM, _ = _bytes_in_training(self.space, around)
        self._linear = _rate_arrays(self.rates, bytes_VM, self.launches.count_VK, self.launches.added_KP)

    def improved(
        self, layout: Layout, effort: LinearEffort, *, may_O: BoolArray, seed: int, deadline_s: float
    ) -> Layout:
        """The best layout found, by what shards add if that is linear; it may be worse, or not fit, as it is.

        Args:
            layout: Where the search begins; left as it is.
            effort: How much to do.
            may_O: Options that may be taken.
            seed: Source of all chance.
            deadline_s: When to end, by `time.perf_counter`, within microseconds to milliseconds.

        Raises:
            MemoryError: If there is none left.
        """
        compiled = library()
        held = HeldShards.of(self.flat, layout.chosen)
        state = self._state(layout, held)
        arrays: dict[str, NDArray[Any]] = {**self.fixed, **self._linear, **state}
        arrays["won_o"] = self.won_O
        arrays["may_o"] = np.ascontiguousarray(may_O, dtype=np.uint8)
        is_synced_X = held.is_shared_X & (self.rates.sync_V[held.kind_X] > 0)
        task = Task.of(
            arrays,
            num_items=len(layout.chosen),
            num_ranks=layout.num_ranks,
            padded_ranks=state["load_pr"].shape[1],
            num_levels=state["free_mr"].shape[0],
            num_launches=self.launches.count_VK.shape[1],
            node_size=self.space.topology.local_world_size,
            max_shards=int(np.diff(self.fixed["first_site_i"]).max()),
            num_synced=int(is_synced_X.sum()),
            sync_ms=float(self.rates.sync_V[held.kind_X[is_synced_X]].sum()),
            sync_base_ms=self.space.prices.sync_latency_ms(),
            deadline_s=deadline_s,
            seed=seed,
        )
        step_ms = compiled.autoshard_improve(task, effort.mode, effort.rounds, effort.most, effort.near, effort.heat)
        if np.isnan(step_ms):
            raise MemoryError
        return self.layout(state["option_i"], state["site"])

    def layout(self, option_i: IntArray, site: IntArray) -> Layout:
        """The layout of an option of each item, among all, and of sites, from each item's first one on."""
        return _layout(self.space, self.limits, self.flat, option_i, site, self.fixed)

    def choices(self, layout: Layout) -> tuple[IntArray, IntArray]:
        """The option of each item, among all, and sites, from each item's first one on: `layout` reads them back."""
        held, first_site_I = HeldShards.of(self.flat, layout.chosen), self.fixed["first_site_i"]
        site = np.zeros(max(1, int(first_site_I[-1])), dtype=np.int32)
        site[first_site_I[held.item_X] + held.number_X] = held.site_X
        return self.fixed["first_option_i"][:-1] + layout.numbers_I.astype(np.int32), site

    def _state(self, layout: Layout, held: HeldShards) -> dict[str, NDArray[Any]]:
        """The arrays that change, of a layout with the shards that it holds."""
        option_i, site = self.choices(layout)
        return {
            "option_i": option_i,
            "site": site,
            "load_pr": over_ranks(layout.parts_ms()),
            "free_mr": over_ranks(layout.free_bytes().T),
            "count_kr": over_ranks(self._counts(held, layout.num_ranks)),
            "weight_p": self.part_weights(layout),
        }

    def _counts(self, held: HeldShards, num_ranks: int) -> IntArray:
        """How often each rank uses each launch, shape (K, R)."""
        count_XK = self.launches.count_VK[held.kind_X]
        edges_RK = np.zeros((num_ranks + 1, count_XK.shape[1]), dtype=np.int32)
        np.add.at(edges_RK, np.where(held.is_shared_X, 0, held.first_X), count_XK)
        np.add.at(edges_RK, np.where(held.is_shared_X, num_ranks, held.end_X), -count_XK)
        return np.ascontiguousarray(edges_RK.cumsum(axis=0, dtype=np.int32)[:-1].T)

    def part_weights(self, layout: Layout) -> MsArray:
        """Milliseconds of the step by one of each part at its slowest rank, shape (P,)."""
        slowest_P = layout.parts_ms().max(axis=1)
        bump_P = np.maximum(_BUMP_SHARE * slowest_P, _LEAST_BUMP_MS)
        slowest_PB = slowest_P[:, None] + np.column_stack([np.zeros(len(bump_P)), np.diag(bump_P)])
        first_rank_B1C = np.repeat(layout.moved_RC[None, :1], 1 + len(bump_P), axis=0)
        step_ms_B = self.space.prices.compose(slowest_PB, first_rank_B1C)
        return np.asarray(np.maximum((step_ms_B[1:] - step_ms_B[0]) / bump_P, 0.0))


def _bytes_in_training(space: PlannerSpace, around: Layout) -> tuple[FloatArray, FloatArray]:
    """Bytes of a shard of each kind on a rank by memory level, with what training needs for it, taken as linear.

    Args:
        space: The space.
        around: The layout around which it is.

    Returns:
        The bytes, shape (V, M); and those that training needs for one more of each column of what is moved, (C,).
    """
    bytes_VM, rate_C = space.kinds.bytes_VM.copy(), space.prices.training_rates(around.moved_RC)
    bytes_VM[:, 0] += np.ceil(np.maximum(space.kinds.moved_VC @ rate_C, 0.0))
    return bytes_VM, rate_C


def placed(
    space: PlannerSpace,
    flat: FlatOptions,
    rates: CostGradient,
    limits: Limits,
    *,
    option_I: IndexArray,
    order_I: IndexArray,
    may_O: BoolArray,
    around: Layout | None = None,
) -> Layout | None:
    """All items at their cheapest sites, one after the other, where the slowest ranks grow least.

    An item whose shards find no room takes another option, the one that adds least.

    Args:
        space: The space.
        flat: Its options.
        rates: What shards add.
        limits: Memory.
        option_I: The option that each item is to get.
        order_I: The items in their order.
        may_O: Options that may be taken instead.
        around: What training needs for a batch counts, as linear around this layout; None for tables alone.

    Returns:
        None if some item finds no room.

    Raises:
        MemoryError: If there is none left.
    """
    fixed, num_ranks = _option_arrays(flat), space.topology.world_size
    bytes_VM, free_RM = space.kinds.bytes_VM, limits.capacity_RM
    if around is not None:
        bytes_VM, rate_C = _bytes_in_training(space, around)
        free_RM = free_RM.copy()
        free_RM[:, 0] -= space.prices.training_bytes(around.moved_RC[None])[0] - around.moved_RC @ rate_C
    _, _, shard_X = flat.shards_of(option_I)
    kind_X, is_shared_X = flat.kind_E[shard_X], flat.is_shared_E[shard_X]
    even_X = np.where(is_shared_X, 1.0, flat.holders_E[shard_X] / num_ranks)[:, None]
    mean_P = (even_X * np.where(is_shared_X[:, None], rates.shared_VP[kind_X], rates.served_VP[kind_X])).sum(axis=0)
    state = {
        "option_i": option_I.astype(np.int32),
        "site": np.zeros(max(1, int(fixed["first_site_i"][-1])), dtype=np.int32),
        "load_pr": over_ranks(np.zeros((len(mean_P), num_ranks))),
        "free_mr": over_ranks(free_RM.T),
        "count_kr": over_ranks(np.zeros((1, num_ranks), dtype=np.int32)),
        "weight_p": np.ones(len(mean_P)),
        "won_o": np.zeros(len(flat.item_O), dtype=np.int32),
        "may_o": np.ascontiguousarray(may_O, dtype=np.uint8),
    }
    no_launches = np.zeros((1, 1), dtype=np.int32), np.zeros((1, len(mean_P)))
    arrays = {**fixed, **_rate_arrays(rates, bytes_VM, *no_launches), **state}
    task = Task.of(
        arrays,
        num_items=len(option_I),
        num_ranks=num_ranks,
        padded_ranks=state["load_pr"].shape[1],
        num_levels=state["free_mr"].shape[0],
        node_size=space.topology.local_world_size,
        max_shards=int(np.diff(fixed["first_site_i"]).max()),
    )
    order, share_of_P = np.ascontiguousarray(order_I, dtype=np.int32), np.maximum(mean_P, _LEAST_MEAN_MS)
    found = library().autoshard_place(task, order.ctypes.data, share_of_P.ctypes.data)
    if found < 0:
        raise MemoryError
    return _layout(space, limits, flat, state["option_i"], state["site"], fixed) if found else None


def _option_arrays(flat: FlatOptions) -> dict[str, NDArray[Any]]:
    """The arrays that no layout changes."""
    most_I = np.maximum.reduceat(flat.count_O, flat.first_I)
    return {
        "first_option_i": np.append(flat.first_I, len(flat.item_O)).astype(np.int32),
        "first_shard_o": np.append(flat.start_O, len(flat.kind_E)).astype(np.int32),
        "type_o": flat.type_O.astype(np.int32),
        "kind_e": flat.kind_E.astype(np.int32),
        "holders_e": flat.holders_E.astype(np.int32),
        "allowed_e": flat.sites_E.astype(np.int32),
        "allowed": np.append(flat.allowed_ZR.astype(np.uint8).ravel(), np.uint8(0)),
        "first_site_i": np.append(0, np.cumsum(most_I)).astype(np.int32),
        "is_shared_e": flat.is_shared_E.astype(np.uint8),
        "in_node_e": flat.in_node_E.astype(np.uint8),
        "is_free_e": flat.is_free_E.astype(np.uint8),
    }


def _rate_arrays(
    rates: CostGradient,
    bytes_VM: FloatArray,
    count_VK: IntArray,
    added_KP: MsArray,
) -> dict[str, NDArray[Any]]:
    """The arrays of what shards and launches add."""
    return {
        "served_vp": np.ascontiguousarray(rates.served_VP),
        "shared_vp": np.ascontiguousarray(rates.shared_VP),
        "sync_v": np.ascontiguousarray(rates.sync_V),
        "bytes_vm": np.ascontiguousarray(bytes_VM),
        "launches_vk": count_VK,
        "launch_kp": added_KP,
    }


def _layout(
    space: PlannerSpace,
    limits: Limits,
    flat: FlatOptions,
    option_i: NDArray[Any],
    site: NDArray[Any],
    fixed: Mapping[str, NDArray[Any]],
) -> Layout:
    """The layout that the compiled search left."""
    first_I, option_I = fixed["first_site_i"][:-1], option_i.astype(np.int64)
    which_X, number_X, _ = flat.shards_of(option_I)
    held = HeldShards.at(flat, option_I, site[first_I[which_X] + number_X].astype(np.int64))
    numbers = (option_i - fixed["first_option_i"][:-1]).tolist()
    counts, sites = flat.count_O[option_I].tolist(), site.tolist()
    chosen = [
        (number, tuple(sites[first : first + count]))
        for number, first, count in zip(numbers, first_I.tolist(), counts, strict=True)
    ]
    return Layout(space, limits, chosen, held.sums(space.kinds.rows_VX, space.topology.world_size))
