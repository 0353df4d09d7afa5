"""Whole steps of many placements at once, from sums per rank.

Shape suffixes: U shards, N items, K tiers, R ranks, A = R + K choices, B placements, H width of a code, L levels, P
parts of a step, C columns of what is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Costs, LocalShard, PlacedShard, Tier
from autoshard.core.costs import CodeArray, LinkBytes, MsArray
from autoshard.core.plan import Payload
from autoshard.core.step import Coefficients, Overlap, StepPart, plain_coefficients
from autoshard.evaluation.evaluate import price_step
from autoshard.evaluation.step_price import StepPrice
from autoshard.evaluation.traffic import ID_BYTES, LENGTH_BYTES, PairTraffic, synced_bytes
from autoshard.planners.placement import PlacementProblem, RankArray

MovedArray = NDArray[np.float64]

#: Parts whose times ranks differ in, in the order of axis P.
PARTS = (
    StepPart.INPUT,
    StepPart.FORWARD_KERNEL,
    StepPart.FORWARD_EXCHANGE,
    StepPart.BACKWARD_EXCHANGE,
    StepPart.BACKWARD_KERNEL,
)

# Columns of what is moved. First four blocks of bytes between a pair of ranks (lengths, ids, forward, backward): of
# shards that one rank has alone, of those whose rows are split over all ranks, of those whose rows are split within
# nodes, and of those that every rank has.
_NUM_STREAMS = 4
_LENGTHS, _IDS, _FORWARD, _BACKWARD = range(_NUM_STREAMS)
_BLOCKS = {Tier.TABLE_WISE: 0, Tier.ROW_WISE: 1, Tier.FLEX: 2, Tier.DATA_PARALLEL: 3}
#: Then bytes that are all-reduced, features that are served, and a count for each kind of kernel.
_SYNC = _NUM_STREAMS * len(_BLOCKS)
_FEATURES = _SYNC + 1
_FIRST_KERNEL = _FEATURES + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSums:
    """What ranks hold, in any number of placements; both are sums over items.

    Attributes:
        codes_BRH: Of codes.
        moved_BRC: Of what is moved.
    """

    codes_BRH: CodeArray
    moved_BRC: MovedArray


class StepCost:
    """Prices the steps of placements of one problem, as `evaluate` prices their plans.

    What an item moves adds up as its code does: an item on a rank adds a row to that rank's sums, an item that all
    ranks share adds a row to all of them. So a step is a function of two sums per rank.

    Args:
        problem: The problem.
        costs: Models of all parts; `costs.kernel` is the problem's model.

    Attributes:
        moved_NC: What an item adds to the sums of the rank that has it alone.
        moved_KNC: What it adds to the sums of every rank, by tier.

    Raises:
        InvalidPlanError: If the dense layers make no model.
    """

    def __init__(self, problem: PlacementProblem, costs: Costs) -> None:
        self.problem = problem
        self._costs = costs
        plan = problem.to_plan(np.zeros(problem.num_items, dtype=np.int64))
        held = [(plan.shards, problem.locals), *((tier.placed, tier.locals) for tier in problem.tiers)]
        self._kinds = sorted({_kernel(local) for _, locals_ in held for local in locals_})
        moved = [self._moved(placed, locals_) for placed, locals_ in held]
        self.moved_NC, self.moved_KNC = moved[0], np.array(moved[1:]).reshape(-1, *moved[0].shape)
        self._rest = price_step(plan, costs)
        self._weights = {part: _weights(part, costs, self._rest) for part in StepPart}
        self._groups = [np.arange(problem.num_ranks) // level.size for level in problem.topology.levels]

    def prices_alike(self, other: StepCost) -> bool:
        """Whether both make the same step of the same sums, so that their placements can be priced together."""
        mine, theirs = self._rest.times, other._rest.times
        ranked = {part.value: 0.0 for part in PARTS}
        return (
            self._costs is other._costs
            and self.problem.model is other.problem.model
            and _links(self.problem) == _links(other.problem)
            and self._kinds == other._kinds
            and self._weights == other._weights
            and self._rest.overlap is other._rest.overlap
            and (self.problem.tables.dense is None) == (other.problem.tables.dense is None)
            and replace(mine, **ranked) == replace(theirs, **ranked)
        )

    def sums(self, ranks_N: RankArray) -> StepSums:
        """What each rank holds in one placement; B is 1."""
        problem = self.problem
        moved_RC = np.zeros((problem.num_ranks, self.moved_NC.shape[1]))
        alone_N = ranks_N < problem.num_ranks
        np.add.at(moved_RC, ranks_N[alone_N], self.moved_NC[alone_N])
        for index, moved_NC in enumerate(self.moved_KNC):
            moved_RC += moved_NC[ranks_N == problem.num_ranks + index].sum(axis=0)
        return StepSums(codes_BRH=problem.rank_codes(ranks_N)[None], moved_BRC=moved_RC[None])

    def step_ms(self, sums: StepSums) -> MsArray:
        """Step times, shape (B,): equal to what `evaluate` says of the plans, but for rounding."""
        return self._compose(self.parts_ms(sums).max(axis=2), sums.moved_BRC[:, 0, _SYNC])

    def parts_ms(self, sums: StepSums) -> MsArray:
        """Times of `PARTS` on every rank, shape (P, B, R)."""
        parts_PBR = self._moving_ms(sums.moved_BRC)
        forward_BR, backward_BR = self._kernels_ms(sums.codes_BRH)
        parts_PBR[PARTS.index(StepPart.FORWARD_KERNEL)] += forward_BR
        parts_PBR[PARTS.index(StepPart.BACKWARD_KERNEL)] += backward_BR
        return parts_PBR

    def choices_ms(
        self,
        sums: StepSums,
        codes_BH: CodeArray,
        moved_BC: MovedArray,
        codes_KBH: CodeArray,
        moved_KBC: MovedArray,
    ) -> MsArray:
        """Step times after one more item per placement, for every choice; shape (B, A).

        Args:
            sums: What ranks hold so far.
            codes_BH: Codes of the items on a rank alone.
            moved_BC: What they move then.
            codes_KBH: Codes that they add to every rank in a shared tier.
            moved_KBC: What they move then.
        """
        num_placements, num_ranks, width = sums.codes_BRH.shape
        one_AR = np.concatenate([np.eye(num_ranks), np.zeros((len(codes_KBH), num_ranks))])
        moved_BARC = sums.moved_BRC[:, None] + one_AR[None, :, :, None] * moved_BC[:, None, None]
        moved_BARC[:, num_ranks:] += moved_KBC.swapaxes(0, 1)[:, :, None]
        num_choices = len(one_AR)
        moved = moved_BARC.reshape(-1, *moved_BARC.shape[2:])
        parts_PBAR = self._moving_ms(moved).reshape(len(PARTS), num_placements, num_choices, num_ranks)
        now = self._kernels_ms(sums.codes_BRH)
        alone = self._kernels_ms(sums.codes_BRH + codes_BH[:, None])
        shared_BKRH = sums.codes_BRH[:, None] + codes_KBH.swapaxes(0, 1)[:, :, None]
        shared = self._kernels_ms(shared_BKRH.reshape(-1, num_ranks, width))
        is_new_AR = one_AR[:num_ranks].astype(np.bool_)
        for part, now_BR, alone_BR, shared_BR in zip(_KERNEL_PARTS, now, alone, shared, strict=True):
            of_part_BAR = parts_PBAR[PARTS.index(part)]
            of_part_BAR[:, :num_ranks] += np.where(is_new_AR, alone_BR[:, None], now_BR[:, None])
            of_part_BAR[:, num_ranks:] += shared_BR.reshape(num_placements, -1, num_ranks)
        slowest_PBA = parts_PBAR.max(axis=3)
        step_ms = self._compose(slowest_PBA.reshape(len(PARTS), -1), moved[:, 0, _SYNC])
        return step_ms.reshape(num_placements, num_choices)

    def _moved(self, placed: Sequence[PlacedShard], locals_: Sequence[LocalShard]) -> MovedArray:
        """What items move if all are held alike, shape (N, C)."""
        tables, world = self.problem.tables, self.problem.num_ranks
        moved_UC = np.zeros((len(placed), _FIRST_KERNEL + len(self._kinds)))
        for row, one, local in zip(moved_UC, placed, locals_, strict=True):
            pair = PairTraffic.of(one, tables.batch_size / world, Payload())
            start = _NUM_STREAMS * _BLOCKS[one.tier]
            row[start : start + _NUM_STREAMS] = (pair.lengths, pair.ids, pair.forward, pair.backward)
            row[_SYNC] = synced_bytes(one, tables.batch_size) if len(one.replicas) > 1 else 0.0
            row[_FEATURES] = len(one.shard.table.features)
            row[_FIRST_KERNEL + self._kinds.index(_kernel(local))] = 1.0
        return np.stack([moved_UC[list(group)].sum(axis=0) for group in self.problem.members])

    def _kernels_ms(self, codes_BRH: CodeArray) -> tuple[MsArray, MsArray]:
        """What the kernel model's milliseconds add to forward and backward, shapes (B, R)."""
        parts = self.problem.model.price_parts(codes_BRH.reshape(-1, codes_BRH.shape[-1]))
        shape = codes_BRH.shape[:2]
        forward, backward = (self._weights[part][0] for part in _KERNEL_PARTS)
        return forward * parts.forward_ms_S.reshape(shape), backward * parts.backward_ms_S.reshape(shape)

    def _moving_ms(self, moved_BRC: MovedArray) -> MsArray:
        """All of the parts but the kernel model's milliseconds, shape (P, B, R)."""
        streams = [self._stream(moved_BRC, index) for index in range(_NUM_STREAMS)]
        exchange_ms = [self._costs.comm.links_ms(links, self.problem.topology) for links, _, _ in streams]
        handled = [served_BR + asked_BR for _, served_BR, asked_BR in streams]
        served_lengths_BR = streams[_LENGTHS][1] / LENGTH_BYTES / 1e6
        num_kernels_BR = (moved_BRC[..., _FIRST_KERNEL:] > 0).sum(axis=2)
        num_features_BR = moved_BRC[..., _FEATURES]
        one = np.ones_like(num_features_BR)
        work: dict[StepPart, tuple[MsArray, ...]] = {
            StepPart.INPUT: (
                exchange_ms[_LENGTHS] + exchange_ms[_IDS],
                one,
                handled[_IDS] / ID_BYTES / 1e6,
                handled[_LENGTHS] / LENGTH_BYTES / 1e6,
            ),
            StepPart.FORWARD_KERNEL: (0 * one, num_kernels_BR, num_features_BR, served_lengths_BR),
            StepPart.FORWARD_EXCHANGE: (exchange_ms[_FORWARD], one, handled[_FORWARD] / 1e6),
            StepPart.BACKWARD_EXCHANGE: (exchange_ms[_BACKWARD], one, handled[_BACKWARD] / 1e6),
            StepPart.BACKWARD_KERNEL: (0 * one, num_kernels_BR, num_features_BR),
        }
        return np.stack(
            [sum(weight * of for weight, of in zip(self._weights[part], work[part], strict=True)) for part in PARTS]
        )

    def _stream(self, moved_BRC: MovedArray, stream: int) -> tuple[LinkBytes, MsArray, MsArray]:
        """Bytes by level, and all bytes that ranks serve and ask for, their own included; shapes (B, R)."""
        alone_BR, all_BR, node_BR, each_BR = (
            moved_BRC[..., _NUM_STREAMS * block + stream] for block in range(len(_BLOCKS))
        )
        served_LBR, asked_LBR = [], []
        inner_BR, num_inner_R = alone_BR, np.ones(alone_BR.shape[1], dtype=np.int64)
        for level, group_R in enumerate(self._groups):
            starts = np.flatnonzero(np.diff(group_R, prepend=-1))
            sums_BR = np.add.reduceat(alone_BR, starts, axis=1)[:, group_R]
            num_R = np.bincount(group_R)[group_R]
            split_BR = all_BR + (node_BR if level == 0 else 0.0)
            served_LBR.append((num_R - num_inner_R) * (alone_BR + split_BR))
            asked_LBR.append(sums_BR - inner_BR + (num_R - num_inner_R) * split_BR)
            inner_BR, num_inner_R = sums_BR, num_R
        own_BR = all_BR + node_BR + each_BR
        served_BR = sum(served_LBR) + alone_BR + own_BR
        asked_BR = sum(asked_LBR) + alone_BR + own_BR
        served, asked = np.stack(served_LBR), np.stack(asked_LBR)
        if stream == _FORWARD:
            return LinkBytes(leaving_LR=served, arriving_LR=asked), served_BR, asked_BR
        return LinkBytes(leaving_LR=asked, arriving_LR=served), served_BR, asked_BR

    def _compose(self, slowest_PB: MsArray, sync_B: MsArray) -> MsArray:
        """Steps of parts at their slowest ranks, shape (B,)."""
        distinct, which_B = np.unique(sync_B, return_inverse=True)
        all_reduce = self._costs.comm.all_reduce_ms
        sync_ms_B = np.array([all_reduce(float(size), self.problem.topology) for size in distinct])[which_B]
        sync_ms_B *= self._weights[StepPart.DENSE][1] if self.problem.tables.dense is not None else 1.0
        base = self._rest.times
        if self._rest.overlap is Overlap.NONE:
            fixed_ms = base.step_ms(Overlap.NONE) - sum(getattr(base, part.value) for part in PARTS)
            return np.asarray(fixed_ms + slowest_PB.sum(axis=0) + sync_ms_B)
        steps = (
            replace(base, **dict(zip(map(str, PARTS), parts, strict=True)), all_reduce=base.all_reduce + sync_ms)
            for *parts, sync_ms in zip(*slowest_PB.tolist(), sync_ms_B.tolist(), strict=True)
        )
        return np.array([times.step_ms(self._rest.overlap) for times in steps])


def _links(problem: PlacementProblem) -> tuple[object, ...]:
    """What collectives are priced by; memory is none of it."""
    topology = problem.topology
    return (topology.world_size, topology.device, topology.levels)


_KERNEL_PARTS = (StepPart.FORWARD_KERNEL, StepPart.BACKWARD_KERNEL)


def _weights(part: StepPart, costs: Costs, rest: StepPrice) -> Coefficients:
    known = costs.step.coefficients(part, rest.bases[part]) if costs.step else None
    return known or plain_coefficients(part)


def _kernel(local: LocalShard) -> tuple[str, ...]:
    """What a rank's shards must have in common to run in one fused kernel."""
    return (local.pooling, local.dtype, local.update, local.optimizer)
