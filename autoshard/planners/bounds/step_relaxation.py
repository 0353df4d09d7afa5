"""Lower bounds on steps: the linear relaxation of choosing an option for every item.

Shape suffixes: I items, O options, E shards of options, V kinds of shards, P parts of a step, Q parts and
synchronisation, R ranks, C columns of what is moved, M memory levels, K views of a topology, J fused kernels, X
variables, H width of a code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.core.costs import MsArray, kernel_floor
from autoshard.core.step import EMBEDDING_PARTS, KERNEL_PARTS, PART_INDEX, Overlap
from autoshard.planners.bounds.moving_floor import MovingFloor
from autoshard.planners.space.cost_gradient import FlatOptions
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.planner_space import BoolArray, IndexArray, PlannerSpace

#: What bounds are lowered by, as a share: the solver's tolerance, and sums of codes in single precision.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """What no plan of a space is below, in milliseconds: proven, or an estimate, as `StepRelaxation` says.

    Attributes:
        step_ms: Of the step.
        parts_ms: Of each part at its slowest rank, in the order of `EMBEDDING_PARTS`.
    """

    step_ms: float
    parts_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Options:
    """What each option of a space adds to parts of the step, at least.

    Attributes:
        item_O: Item of each option.
        mean_KOQ: To the mean over all ranks, by view.
        lump_KOQ: To a rank that holds its largest shard.
        latency_OQ: Where it moves anything.
        bytes_OM: To the memory of all ranks together.
        everywhere_OJ: Whether it has all ranks run each kernel.
        may_launch_O: Whether some shard is not on all ranks, or runs in a mixed kernel.
        is_mixed_J: Whether some options have all ranks run a kernel, and others only some.
    """

    item_O: IndexArray
    mean_KOQ: MsArray
    lump_KOQ: MsArray
    latency_OQ: MsArray
    bytes_OM: FloatArray
    everywhere_OJ: BoolArray
    may_launch_O: BoolArray
    is_mixed_J: BoolArray


class StepRelaxation:
    """Bounds steps of a planner space: items may be split over their options, and ranks are as even as can be.

    A part of the step takes as long as its slowest rank, which is no faster than the mean of all ranks, and no faster
    than a rank that holds the largest shard of an item's option by itself. Both are linear in shares of options, so
    the least step is a linear programme with five parts, synchronisation and the memory of all ranks together. Ranks
    launch every kernel that some item has all of them run, and one that runs another kernel launches one more.
    Where collectives overlap with computation, parts are bounded one by one and then put together.

    The bound is proven where prices have linear floors: kernels of analytic models, whose bound is sharp, and of
    learned ones, which may take as little as half of the sum of their shards' own times; collectives by latency and
    bandwidth. Other prices give an estimate.

    Args:
        space: Items and options.
        capacity_RM: Bytes of each rank by memory level.
    """

    def __init__(self, space: PlannerSpace, capacity_RM: FloatArray) -> None:
        self._space, self._capacity_RM = space, capacity_RM
        self._floor = MovingFloor.of(space.prices)
        self._kernels = kernel_floor(space.costs.kernel, space.kinds.codes_VH.astype(np.float32))

    @property
    def is_exact(self) -> bool:
        """Whether kernels take what their floor says, so that no estimate is sharper than what is proven."""
        return self._kernels.is_exact

    @property
    def is_proven(self) -> bool:
        """Whether bounds hold for every plan of the space."""
        return self._kernels.is_proven and self._floor.is_proven

    def bounds(self, kernel_factors: tuple[float, float] = (1.0, 1.0)) -> StepBounds:
        """The least step and the least of each part.

        Args:
            kernel_factors: What the floors of forward and backward kernels are multiplied with. Above 1, the bound is
                an estimate.
        """
        programme = _Programme(
            self._options(kernel_factors), self._floor.base_Q, self._launches(kernel_factors), self._capacity_RM
        )
        parts_ms = [programme.least(np.eye(len(EMBEDDING_PARTS) + 1)[part]) for part in range(len(EMBEDDING_PARTS))]
        prices = self._space.prices
        if prices.overlap is Overlap.NONE:
            fixed_ms = float(prices.synced_ms(np.zeros((1, 2)))[0])
            step_ms = fixed_ms + programme.least(np.ones(len(EMBEDDING_PARTS) + 1))
        else:
            step_ms = float(prices.compose(np.array(parts_ms)[:, None], np.zeros((1, 2)))[0])
        return StepBounds(
            step_ms=step_ms * (1 - _TOLERANCE),
            parts_ms=tuple(one * (1 - _TOLERANCE) for one in parts_ms),
        )

    def kernel_factors(self, codes_RH: FloatArray) -> tuple[float, float]:
        """By how much kernels of a plan's ranks take longer than their floors, at least: forward and backward.

        Args:
            codes_RH: Sums of the codes that each rank holds.
        """
        model = self._space.costs.kernel
        codes = codes_RH[np.abs(codes_RH).sum(axis=1) > 0].astype(np.float32)
        floor, actual = kernel_floor(model, codes), model.predict_parts(codes)
        pairs = (
            (actual.forward_ms_S, floor.forward_base_ms + floor.forward_ms_N),
            (actual.backward_ms_S, floor.backward_base_ms + floor.backward_ms_N),
        )
        forward, backward = (float(np.min(now / np.maximum(least, 1e-30), initial=np.inf)) for now, least in pairs)
        return forward if np.isfinite(forward) else 1.0, backward if np.isfinite(backward) else 1.0

    def _launches(self, kernel_factors: tuple[float, float]) -> MsArray:
        """What each kernel of a rank adds to its parts, shape (Q,)."""
        launch_Q = np.zeros(len(EMBEDDING_PARTS) + 1)
        bases = (self._kernels.forward_base_ms, self._kernels.backward_base_ms)
        weights = self._space.prices.kernel_weights
        for part, weight, factor, base_ms in zip(KERNEL_PARTS, weights, kernel_factors, bases, strict=True):
            launch_Q[PART_INDEX[part]] = weight * factor * base_ms
        return launch_Q

    def _options(self, kernel_factors: tuple[float, float]) -> _Options:
        space, num_ranks = self._space, self._space.topology.world_size
        flat = FlatOptions.of(space)
        served_KVQ = self._served(self._floor.slope_KQC, kernel_factors)
        alone_KVQ = self._served(self._floor.lump_KQC, kernel_factors)
        moved_VC, bytes_VM = space.kinds.moved_VC, space.kinds.bytes_VM
        latency_VQ = self._floor.latencies(moved_VC)
        share_E = flat.holders_E / num_ranks
        # Every rank sees all of the synchronisation, which only shards that all ranks hold take part in.
        share_EQ = np.where(np.arange(len(EMBEDDING_PARTS) + 1) < len(EMBEDDING_PARTS), share_E[:, None], 1.0)
        holds = np.array([[[keeps]] for keeps in self._floor.lumps_hold_K])
        latency_OQ = np.maximum.reduceat(latency_VQ[flat.kind_E], flat.start_O)
        lump_KOQ = np.maximum.reduceat(alone_KVQ[:, flat.kind_E] * holds, flat.start_O, axis=1)
        fits_O = self._fits(flat, bytes_VM)
        kernels = np.unique(self._kernels.kernel_N)
        is_shared_E1 = flat.is_shared_E[:, None]
        runs_EJ = self._kernels.kernel_N[flat.kind_E][:, None] == kernels
        is_mixed_J = (runs_EJ & is_shared_E1).any(axis=0) & (runs_EJ & ~is_shared_E1).any(axis=0)
        may_launch_E = ~flat.is_shared_E | (runs_EJ & is_mixed_J).any(axis=1)
        return _Options(
            item_O=flat.item_O[fits_O],
            mean_KOQ=np.add.reduceat(served_KVQ[:, flat.kind_E] * share_EQ, flat.start_O, axis=1)[:, fits_O],
            lump_KOQ=lump_KOQ[:, fits_O],
            latency_OQ=latency_OQ[fits_O],
            bytes_OM=np.add.reduceat(bytes_VM[flat.kind_E] * flat.holders_E[:, None], flat.start_O)[fits_O],
            everywhere_OJ=np.logical_or.reduceat(runs_EJ & is_shared_E1, flat.start_O)[fits_O],
            may_launch_O=np.logical_or.reduceat(may_launch_E, flat.start_O)[fits_O],
            is_mixed_J=is_mixed_J,
        )

    def _served(self, slope_KQC: MsArray, kernel_factors: tuple[float, float]) -> MsArray:
        """What a shard of each kind adds to a rank that holds it, from slopes of what is moved, shape (K, V, Q)."""
        moved_VC = self._space.kinds.moved_VC
        served_KVQ: MsArray = np.einsum("vc,kqc->kvq", moved_VC, slope_KQC)
        floors = (self._kernels.forward_ms_N, self._kernels.backward_ms_N)
        weights = self._space.prices.kernel_weights
        for part, weight, factor, floor_ms_V in zip(KERNEL_PARTS, weights, kernel_factors, floors, strict=True):
            served_KVQ[:, :, PART_INDEX[part]] += weight * factor * floor_ms_V
        return served_KVQ

    def _fits(self, flat: FlatOptions, bytes_VM: FloatArray) -> BoolArray:
        """Options whose shards each fit on some rank, or on all ranks if all hold them; shape (O,)."""
        most_M, least_M = self._capacity_RM.max(axis=0), self._capacity_RM.min(axis=0)
        room_EM = np.where(flat.is_shared_E[:, None], least_M, most_M)
        return np.asarray(np.logical_and.reduceat((bytes_VM[flat.kind_E] <= room_EM).all(axis=1), flat.start_O))


class _Programme:
    """The linear programme, solved by HiGHS with different weights of the parts.

    Variables are shares of options, then the time and the latency of every part, then for every kernel whether all
    ranks run it, and at last whether some rank runs another one.
    """

    def __init__(self, options: _Options, base_Q: MsArray, launch_Q: MsArray, capacity_RM: FloatArray) -> None:
        self._options, self._base_Q, self._launch_Q = options, base_Q, launch_Q
        num_options, num_parts, num_kernels = len(options.item_O), len(base_Q), options.everywhere_OJ.shape[1]
        self._time, self._latency, self._runs = (num_options + start * num_parts for start in range(3))
        self._width = self._runs + num_kernels + 1
        self._starts = np.flatnonzero(np.diff(options.item_O, prepend=-1))
        self._rows: list[tuple[IndexArray, FloatArray]] = []
        self._limits: list[float] = []
        for part in range(num_parts):
            self._add_part(part)
        self._add_launches()
        self._add_memory(np.maximum(capacity_RM, 0.0).sum(axis=0))

    def least(self, weights_Q: FloatArray) -> float:
        """The least weighted sum of the parts' times; 0, which bounds everything, where numbers are beyond a solver."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        cost_X = np.zeros(self._width)
        cost_X[self._time : self._latency] = weights_Q
        num_options, num_items = len(self._options.item_O), len(self._starts)
        ends = np.append(self._starts, num_options)
        chosen = csr_array((np.ones(num_options), np.arange(num_options), ends), shape=(num_items, self._width))
        columns, values = (np.concatenate(of_rows) for of_rows in zip(*self._rows, strict=True))
        row_ends = np.cumsum([0, *(len(columns) for columns, _ in self._rows)])
        if not (np.isfinite(values).all() and np.isfinite(self._limits).all()):
            return 0.0
        found: Any = linprog(
            cost_X,
            A_ub=csr_array((values, columns, row_ends), shape=(len(self._rows), self._width)),
            b_ub=np.array(self._limits),
            A_eq=chosen,
            b_eq=np.ones(num_items),
            method="highs",
        )
        # A plan exists, so only trouble within the solver leaves nothing.
        return float(found.fun) if found.status == 0 else 0.0

    def _add(self, columns: IndexArray, values: FloatArray, limit: float = 0.0) -> None:
        self._rows.append((columns, values))
        self._limits.append(limit)

    def _of_items(self) -> list[IndexArray]:
        """Options of each item."""
        return np.split(np.arange(len(self._options.item_O)), self._starts[1:])

    def _add_part(self, part: int) -> None:
        """The part's time is at least the mean of the ranks with latency, and at least each item's largest shard."""
        options, base_ms, launch_ms = self._options, float(self._base_Q[part]), float(self._launch_Q[part])
        runs = np.arange(self._runs, self._width)
        for mean_OQ in options.mean_KOQ:
            columns = np.concatenate([np.arange(self._time), [self._time + part, self._latency + part], runs])
            values = np.concatenate([mean_OQ[:, part], [-1.0, 1.0], np.full(len(runs), launch_ms)])
            self._add(columns, values, -base_ms)
        latency_O = options.latency_OQ[:, part]
        lump_O = options.lump_KOQ[:, :, part].max(axis=0) + latency_O + launch_ms
        least_ms = max(self._least_mean(mean_OQ[:, part]) for mean_OQ in options.mean_KOQ) + launch_ms
        for of_item in self._of_items():
            if latency_O[of_item].any():
                self._add(np.append(of_item, self._latency + part), np.append(latency_O[of_item], -1.0))
            # What no choice of the item brings above the mean adds nothing.
            if lump_O[of_item].max() > least_ms:
                self._add(np.append(of_item, self._time + part), np.append(lump_O[of_item], -1.0), -base_ms)

    def _add_launches(self) -> None:
        """All ranks run the kernels of what all hold. Ranks with shards of their own run one more, or one of these.

        The load of shards that all ranks hold is even. All else is on ranks with at least one more kernel, and m of R
        ranks with a load of L in all take L / m and its launch, no less than L / R and the launch. This holds unless
        shards that are not everywhere run in a kernel that all ranks run anyway.
        """
        options, other = self._options, self._width - 1
        mixed = self._runs + np.flatnonzero(options.is_mixed_J)
        for of_item in self._of_items():
            for kernel in np.flatnonzero(options.everywhere_OJ[of_item].any(axis=0)).tolist():
                shared = of_item[options.everywhere_OJ[of_item, kernel]]
                self._add(np.append(shared, self._runs + kernel), np.append(np.ones(len(shared)), -1.0))
            local = of_item[options.may_launch_O[of_item]]
            if len(local):
                columns = np.concatenate([local, [other], mixed])
                self._add(columns, np.concatenate([np.ones(len(local)), -np.ones(1 + len(mixed))]))
        runs = np.arange(self._runs, self._width)
        self._add(runs, -np.ones(len(runs)), -1.0)

    def _add_memory(self, room_M: FloatArray) -> None:
        """Options take no more than the memory of all ranks, where they could."""
        for used_O, room in zip(self._options.bytes_OM.T, room_M.tolist(), strict=True):
            if np.maximum.reduceat(used_O, self._starts).sum() > room:
                # In shares of the room, since bytes are beyond what a solver scales.
                self._add(np.flatnonzero(used_O), used_O[used_O > 0] / max(room, 1.0), 1.0)

    def _least_mean(self, mean_O: FloatArray) -> float:
        """The mean of the ranks where every item takes the option that adds least."""
        return float(np.minimum.reduceat(mean_O, self._starts).sum())
