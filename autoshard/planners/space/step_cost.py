"""Whole steps from sums over what ranks hold.

Shape suffixes: B placements, R ranks, H width of a code, C columns of what is moved, L levels, P parts of a step, U
shards, E streams; of placement problems N items, K shared tiers, W = 1 + K ways to hold an item, A = R + K choices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    Collective,
    CostModels,
    DType,
    Payload,
    PlacedShard,
    Shard,
    ShardingPlan,
    TableSet,
    Topology,
)
from autoshard.core.costs import CodeArray, LinkBytes, MsArray
from autoshard.core.shard import FusedKernel, fused_kernel
from autoshard.core.step import KERNEL_PARTS, Overlap, StepPart
from autoshard.evaluation.batch_memory import dense_bytes, gradient_ratio, peak_factor
from autoshard.evaluation.evaluate import price_step
from autoshard.evaluation.reader_work import READER_PARTS, batch_ms, counted_parts, reader_ms
from autoshard.evaluation.stages import syncs_ms
from autoshard.evaluation.step_price import embedding_columns, part_weights
from autoshard.evaluation.traffic import HELD_ID_BYTES, Stream, id_bytes, message_bytes, pair_bytes, sync_bytes
from autoshard.planners.space.options import placed_shard
from autoshard.planners.space.placement import PlacementProblem, RankArray, rank_sums, summed_members

MovedArray = NDArray[np.float64]

_NS_PER_MS = 1e6

#: Parts whose times ranks differ in, in the order of axis P.
PARTS = (
    StepPart.INPUT,
    StepPart.FORWARD_KERNEL,
    StepPart.FORWARD_EXCHANGE,
    StepPart.BACKWARD_EXCHANGE,
    StepPart.BACKWARD_KERNEL,
)

# Columns of what is moved. First three blocks of bytes between a pair of ranks (lengths, ids, forward, backward): of
# rows that a rank serves to all ranks, of those that it serves to its node, and of those that it serves to itself.
_NUM_STREAMS = len(Stream)
_TO_ALL, _TO_NODE, _TO_ITSELF = range(3)
#: Then bytes of a rank's own samples in the reduce-scatter and in the all-gather, alike on all ranks.
_SCATTERED = slice(_NUM_STREAMS * 3, _NUM_STREAMS * 3 + 2)
_READER_INDICES = [PARTS.index(part) for part in READER_PARTS]
_SCATTERED_INDICES = [list(Stream).index(stream) for stream in (Stream.FORWARD, Stream.BACKWARD)]
#: All-to-alls of a step, and the first stream of each: lengths and ids travel together.
_EXCHANGES = (StepPart.INPUT, StepPart.FORWARD_EXCHANGE, StepPart.BACKWARD_EXCHANGE)
_FIRST_STREAMS = [list(Stream).index(stream) for stream in (Stream.LENGTHS, Stream.FORWARD, Stream.BACKWARD)]
#: Then bytes of gradients that are all-reduced and all-gathered, nanoseconds that all ranks work on reading what a rank
#: serves, by `READER_PARTS`, those that the ranks of its node do and those that it does itself, features that are
#: served, a rank's inputs with the gradients of copied rows, its outputs, embeddings that all ranks, its node or it
#: alone get back, and a count for each kind of kernel.
SYNC = slice(_SCATTERED.stop, _SCATTERED.stop + 2)
READ_BY_ALL, READ_BY_NODE, READ_BY_ITSELF = (
    slice(start, start + len(READER_PARTS))
    for start in range(SYNC.stop, SYNC.stop + 3 * len(READER_PARTS), len(READER_PARTS))
)
FEATURES, _INPUTS, _OUTPUTS = range(READ_BY_ITSELF.stop, READ_BY_ITSELF.stop + 3)
_BACK_TO_ALL, _BACK_TO_NODE, _BACK_TO_ITSELF, _FIRST_KERNEL = range(_OUTPUTS + 1, _OUTPUTS + 5)
#: Bytes by which rates and latencies are told apart.
_BUMP_BYTES = 1e4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSums:
    """What ranks hold, in any number of placements; both are sums over shards.

    Attributes:
        codes_BRH: Of codes.
        moved_BRC: Of what is moved.
    """

    codes_BRH: CodeArray
    moved_BRC: MovedArray


class StepPrices:
    """Prices the steps of one task from sums per rank, as `evaluate` prices plans.

    What a shard moves adds up as its code does: every rank that holds some of it adds a row to its sums, alike for all
    of them. So a step is a function of two sums per rank.

    Args:
        tables: The task's tables.
        topology: The task's topology.
        costs: Models of all parts.
        kernels: Kinds of kernels that shards may run in, by `fused_kernel`.
        payload: Number formats of what is sent.

    Raises:
        InvalidPlanError: If the dense layers make no model.
    """

    def __init__(
        self,
        tables: TableSet,
        topology: Topology,
        costs: CostModels,
        kernels: Collection[FusedKernel],
        payload: Payload,
    ) -> None:
        self.tables, self.topology, self.costs, self.payload = tables, topology, costs, payload
        self._id_bytes = id_bytes(tables.tables)
        self._local_batch = tables.batch_size / topology.world_size
        self._counted_parts = np.array(counted_parts(costs))
        self._batch_ms = self._counted_parts * batch_ms(topology)
        self._kernels = {kernel: index for index, kernel in enumerate(sorted(set(kernels)))}
        # All that does not depend on who holds what; one shard is enough to say it.
        some = PlacedShard.table_wise(Shard.whole(tables.tables[0]), 0)
        self._rest = price_step(ShardingPlan(tables=tables, topology=topology, shards=(some,), payload=payload), costs)
        self._weights = part_weights(costs, self._rest.bases)
        self._dense_bytes = dense_bytes(tables, tables.batch_size / topology.world_size)
        # Of each level the first rank of each group, and for each rank the size of its group.
        group_LR = [np.arange(topology.world_size) // level.size for level in topology.levels]
        self._groups = [
            (np.flatnonzero(np.diff(group_R, prepend=-1)), np.bincount(group_R)[group_R]) for group_R in group_LR
        ]

    def prices_alike(self, other: StepPrices) -> bool:
        """Whether both make the same step of the same sums, so that their placements can be priced together."""
        mine, theirs = self._rest.times, other._rest.times
        ranked = {part.value: 0.0 for part in PARTS}
        return (
            self.costs is other.costs
            and _links(self.topology) == _links(other.topology)
            and self._kernels == other._kernels
            and self.payload == other.payload
            and self._weights == other._weights
            and self._rest.overlap is other._rest.overlap
            and (self.tables.dense is None) == (other.tables.dense is None)
            and replace(mine, **ranked) == replace(theirs, **ranked)
        )

    @property
    def num_columns(self) -> int:
        """C."""
        return _FIRST_KERNEL + len(self._kernels)

    @property
    def overlap(self) -> Overlap:
        """Which parts hide behind each other."""
        return self._rest.overlap

    @property
    def kernel_weights(self) -> tuple[float, float]:
        """What the kernel model's milliseconds count for in forward and backward."""
        forward, backward = (self._weights[part][0] for part in KERNEL_PARTS)
        return forward, backward

    @property
    def has_rising_weights(self) -> bool:
        """Whether no part of the step gets shorter with more work."""
        return all(weight >= 0 for part in (*PARTS, StepPart.DENSE) for weight in self._weights[part])

    def on(self, topology: Topology) -> StepPrices:
        """Prices of the same task on other links."""
        return StepPrices(self.tables, topology, self.costs, self._kernels, self.payload)

    def moved(self, placed_U: Sequence[PlacedShard]) -> MovedArray:
        """What shards add to the sums of each rank that holds some of them, shape (U, C).

        Args:
            placed_U: Each on one replica, or on one for each node or each rank, from which that node or rank reads.
        """
        tables = [placed.shard.table for placed in placed_U]
        block_U = np.array([self._block(len(placed.replicas)) for placed in placed_U], dtype=np.int64)
        kernels = [self._kernels[fused_kernel(placed.shard.table, placed.update)] for placed in placed_U]
        rows_UC = np.zeros((len(placed_U), self.num_columns))
        rows_UC[np.arange(len(placed_U)), _FIRST_KERNEL + np.array(kernels, dtype=np.int64)] = 1.0
        rows_UC[:, FEATURES] = [len(table.features) for table in tables]
        mean_UE = self._pair_bytes(placed_U, [1.0] * len(placed_U))
        is_scattered_U = np.array(
            [placed.collective is Collective.REDUCE_SCATTER for placed in placed_U], dtype=np.bool_
        )
        rows_UC[is_scattered_U, _SCATTERED] = mean_UE[is_scattered_U][:, _SCATTERED_INDICES]
        mean_UE[:, _SCATTERED_INDICES] *= ~is_scattered_U[:, None]
        for block in (_TO_ALL, _TO_NODE, _TO_ITSELF):
            is_of_block_U = block_U == block
            rows_UC[is_of_block_U, _NUM_STREAMS * block : _NUM_STREAMS * (block + 1)] = mean_UE[is_of_block_U]
        rows_UC[:, SYNC] = sync_bytes(placed_U, self.tables.batch_size)
        read_UP = self._read_ns(placed_U)
        for block, columns in ((_TO_ALL, READ_BY_ALL), (_TO_NODE, READ_BY_NODE), (_TO_ITSELF, READ_BY_ITSELF)):
            rows_UC[block_U == block, columns] = read_UP[block_U == block]
        peak_UE = self._pair_bytes(placed_U, [peak_factor(table, self._local_batch) for table in tables])
        self._add_held(rows_UC, placed_U, peak_UE, block_U, is_scattered_U)
        return rows_UC

    def _pair_bytes(self, placed_U: Sequence[PlacedShard], lookups_factor_U: Sequence[float]) -> MsArray:
        return pair_bytes(
            placed_U, self._local_batch, self.payload, id_bytes=self._id_bytes, lookups_factor_N=lookups_factor_U
        )

    def _read_ns(self, placed_U: Sequence[PlacedShard]) -> MsArray:
        """What a reader works on what it reads of one of a shard's owners, by `READER_PARTS`; shape (U, 3)."""
        read_UP = reader_ms(placed_U, self._local_batch, self.topology) * self._counted_parts
        num_owners_U = np.array([len(placed.replicas[0]) for placed in placed_U], dtype=np.float64)
        return np.asarray(_NS_PER_MS * read_UP / num_owners_U[:, None])

    def _block(self, num_replicas: int) -> int:
        """Whether rows are read by all ranks, by those of their node, or by their own rank alone."""
        if num_replicas == 1:
            return _TO_ALL
        return _TO_ITSELF if num_replicas == self.topology.world_size else _TO_NODE

    def _add_held(
        self,
        rows_UC: MovedArray,
        placed_U: Sequence[PlacedShard],
        peak_UE: MsArray,
        block_U: NDArray[np.int64],
        is_scattered_U: NDArray[np.bool_],
    ) -> None:
        """Adds the bytes that a batch at its 99th percentile needs to rows of what is moved.

        Outputs of a rank's own copies are used where they are, and held once. One sum of all owners comes back.
        """
        num_served = np.array([self.topology.world_size, self.topology.local_world_size, 1])
        lengths_U, ids_U, forward_U, _ = peak_UE.T
        num_owners_U = [len(placed.replicas[0]) for placed in placed_U]
        held_ids_U = ids_U * (HELD_ID_BYTES / self._id_bytes)
        synced_U = rows_UC[:, SYNC].sum(axis=1) / num_owners_U
        rows_UC[:, _INPUTS] = num_served[block_U] * (lengths_U + held_ids_U) + synced_U
        is_own_U = (block_U == _TO_ITSELF) & ~is_scattered_U
        rows_UC[:, _OUTPUTS] = np.where(is_own_U, 0.0, num_served[block_U] * forward_U)
        back_U = np.where(
            is_scattered_U, _BACK_TO_ITSELF, np.array([_BACK_TO_ALL, _BACK_TO_NODE, _BACK_TO_ITSELF])[block_U]
        )
        rows_UC[np.arange(len(placed_U)), back_U] = forward_U

    def step_ms(self, sums: StepSums) -> MsArray:
        """Step times, shape (B,): equal to what `evaluate` says of the plans, but for rounding."""
        return self.compose(self.parts_ms(sums).max(axis=2), sums.moved_BRC[:, 0, SYNC])

    def parts_ms(self, sums: StepSums) -> MsArray:
        """Times of `PARTS` on every rank, shape (P, B, R)."""
        parts_PBR = self.moving_ms(sums.moved_BRC)
        for part, ms_BR in zip(KERNEL_PARTS, self.kernels_ms(sums.codes_BRH), strict=True):
            parts_PBR[PARTS.index(part)] += ms_BR
        return parts_PBR

    def kernels_ms(self, codes_BRH: CodeArray) -> tuple[MsArray, MsArray]:
        """What the kernel model's milliseconds add to forward and backward, shapes (B, R)."""
        parts = self.costs.kernel.predict_parts(codes_BRH.reshape(-1, codes_BRH.shape[-1]))
        shape = codes_BRH.shape[:-1]
        forward, backward = self.kernel_weights
        return forward * parts.forward_ms_S.reshape(shape), backward * parts.backward_ms_S.reshape(shape)

    def moving_ms(self, moved_BRC: MovedArray) -> MsArray:
        """All of the parts but the kernel model's milliseconds, shape (P, B, R)."""
        moved_BRC = self._in_messages(moved_BRC)
        links, served_EBR, asked_EBR = self._streams(moved_BRC)
        exchange_XBR = self.costs.comm.links_ms(links, self.topology)
        exchange_XBR[1:] += np.stack(self._scattered_ms(moved_BRC[:, 0, _SCATTERED]))[..., None]
        num_features_BR = moved_BRC[..., FEATURES]
        work = embedding_columns(
            model_ms={
                **dict(zip(_EXCHANGES, exchange_XBR, strict=True)),
                **dict.fromkeys(KERNEL_PARTS, np.zeros_like(num_features_BR)),
            },
            handled_bytes=dict(zip(Stream, served_EBR + asked_EBR, strict=True)),
            served_length_bytes=served_EBR[list(Stream).index(Stream.LENGTHS)],
            num_kernels=(moved_BRC[..., _FIRST_KERNEL:] > 0).sum(axis=2),
            num_features=num_features_BR,
        )
        parts_PBR = np.stack(
            [sum(weight * of for weight, of in zip(self._weights[part], work[part], strict=True)) for part in PARTS]
        )
        parts_PBR[_READER_INDICES] += np.moveaxis(self._read_ms(moved_BRC), -1, 0)
        return parts_PBR

    def _read_ms(self, moved_BRC: MovedArray) -> MsArray:
        """What ranks work on what they read, by `READER_PARTS`; shape (B, R, 3)."""
        by_all_B13 = moved_BRC[..., READ_BY_ALL].sum(axis=1, keepdims=True)
        in_node_BR3 = self._summed_in_nodes(moved_BRC[..., READ_BY_NODE])
        read_BR3 = by_all_B13 + in_node_BR3 + moved_BRC[..., READ_BY_ITSELF]
        return np.asarray(self._batch_ms + read_BR3 / _NS_PER_MS)

    def _summed_in_nodes(self, values_BRX: MovedArray) -> MovedArray:
        """For each rank the sum over its node, of the shape of the values."""
        starts, num_R = self._groups[0]
        return np.repeat(np.add.reduceat(values_BRX, starts, axis=1), num_R[starts], axis=1)

    def choices_ms(self, sums: StepSums, codes_WBH: CodeArray, moved_WBC: MovedArray) -> MsArray:
        """Step times after one more item per placement, for every choice; shape (B, A).

        Args:
            sums: What ranks hold so far.
            codes_WBH: Codes that the items add to every rank that holds them: on a rank alone, then by shared tier.
            moved_WBC: What they move then.
        """
        num_placements, num_ranks, width = sums.codes_BRH.shape
        num_tiers = len(codes_WBH) - 1
        holds_AR = np.concatenate([np.eye(num_ranks), np.ones((num_tiers, num_ranks))])
        way_A = np.repeat(np.arange(1 + num_tiers), [num_ranks] + [1] * num_tiers)
        moved_BARC = sums.moved_BRC[:, None] + holds_AR[None, :, :, None] * moved_WBC[way_A].swapaxes(0, 1)[:, :, None]
        moved = moved_BARC.reshape(-1, *moved_BARC.shape[2:])
        parts_PBAR = self.moving_ms(moved).reshape(len(PARTS), num_placements, -1, num_ranks)
        now = self.kernels_ms(sums.codes_BRH)
        alone = self.kernels_ms(sums.codes_BRH + codes_WBH[0][:, None])
        shared_BKRH = sums.codes_BRH[:, None] + codes_WBH[1:].swapaxes(0, 1)[:, :, None]
        shared = self.kernels_ms(shared_BKRH.reshape(-1, num_ranks, width))
        is_new_AR = holds_AR[:num_ranks].astype(np.bool_)
        for part, now_BR, alone_BR, shared_BR in zip(KERNEL_PARTS, now, alone, shared, strict=True):
            of_part_BAR = parts_PBAR[PARTS.index(part)]
            of_part_BAR[:, :num_ranks] += np.where(is_new_AR, alone_BR[:, None], now_BR[:, None])
            of_part_BAR[:, num_ranks:] += shared_BR.reshape(num_placements, -1, num_ranks)
        slowest_PBA = parts_PBAR.max(axis=3)
        step_ms = self.compose(slowest_PBA.reshape(len(PARTS), -1), moved[:, 0, SYNC])
        return step_ms.reshape(num_placements, -1)

    def activation_bytes(self, moved_BRC: MovedArray) -> MsArray:
        """What a batch needs beside the tables, as `evaluation.activation_bytes` counts it, shape (B, R)."""
        moved_BRC = self._in_messages(moved_BRC)
        return np.asarray(moved_BRC[..., _INPUTS] + moved_BRC[..., _OUTPUTS] + self._back_bytes(moved_BRC))

    def training_bytes(self, moved_BRC: MovedArray) -> MsArray:
        """What training needs beside the tables, as `evaluation.training_bytes` counts it, shape (B, R)."""
        moved_BRC = self._in_messages(moved_BRC)
        outputs_BR, back_BR = moved_BRC[..., _OUTPUTS], self._back_bytes(moved_BRC)
        # In the backward pass, gradients of outputs and of what came back; the outputs themselves are gone.
        gradients_BR = gradient_ratio(self.payload) * (outputs_BR + back_BR)
        held_BR = moved_BRC[..., _INPUTS] + back_BR + np.maximum(gradients_BR, outputs_BR)
        return np.asarray(held_BR + self._dense_bytes)

    def training_rates(self, moved_RC: MovedArray) -> MovedArray:
        """Bytes of a rank that training needs more for one more of each column there, shape (C,).

        Args:
            moved_RC: What ranks have.
        """
        moved_BRC = np.repeat(moved_RC[None], 1 + self.num_columns, axis=0)
        columns = np.arange(self.num_columns)
        moved_BRC[1 + columns, 0, columns] += _BUMP_BYTES
        bytes_B = self.training_bytes(moved_BRC)[:, 0]
        return np.asarray((bytes_B[1:] - bytes_B[0]) / _BUMP_BYTES)

    def _back_bytes(self, moved_BRC: MovedArray) -> MsArray:
        """Embeddings that ranks get back, shape (B, R)."""
        from_node_BR = self._summed_in_nodes(moved_BRC[..., _BACK_TO_NODE])
        from_all_B1 = moved_BRC[..., _BACK_TO_ALL].sum(axis=1, keepdims=True)
        return np.asarray(moved_BRC[..., _BACK_TO_ITSELF] + from_all_B1 + from_node_BR)

    @staticmethod
    def fused_kernels(moved_VC: MovedArray) -> MovedArray:
        """Of what is moved, how many shards of each fused kernel there are, shape (V, K)."""
        return moved_VC[:, _FIRST_KERNEL:]

    @staticmethod
    def is_scattered(moved_VC: MovedArray) -> NDArray[np.bool_]:
        """Whether anything of what is moved is reduce-scattered, shape (V,)."""
        return np.asarray(moved_VC[:, _SCATTERED].any(axis=1))

    def with_and_without_kernels(self, moved_RC: MovedArray) -> MovedArray:
        """What is moved with no shard of each fused kernel on the first rank, then with one; shape (2 K, R, C)."""
        num_kernels = len(self._kernels)
        moved_BRC = np.repeat(moved_RC[None], 2 * num_kernels, axis=0)
        kernels = np.arange(num_kernels)
        moved_BRC[kernels, 0, _FIRST_KERNEL + kernels] = 0.0
        moved_BRC[num_kernels + kernels, 0, _FIRST_KERNEL + kernels] = 1.0
        return moved_BRC

    def scatter_latencies_ms(self) -> tuple[float, float]:
        """What a reduce-scatter and an all-gather take however little is in them."""
        once, twice = (self._scattered_ms(np.full((1, 2), size)) for size in (_BUMP_BYTES, 2 * _BUMP_BYTES))
        forward, backward = (max(0.0, float(2 * one[0] - two[0])) for one, two in zip(once, twice, strict=True))
        return forward, backward

    def sync_latency_ms(self) -> float:
        """What the synchronisation of gradients adds to the step however little of them there is."""
        slowest_PB, bytes_B2 = np.zeros((len(PARTS), 3)), np.zeros((3, 2))
        bytes_B2[1:, 0] = _BUMP_BYTES, 2 * _BUMP_BYTES
        none_ms, once_ms, twice_ms = self.compose(slowest_PB, bytes_B2).tolist()
        return max(0.0, float(2 * once_ms - twice_ms - none_ms))

    def compose(self, slowest_PB: MsArray, sync_B2: MsArray) -> MsArray:
        """Steps of parts at their slowest ranks and of bytes that are all-reduced and all-gathered, shape (B,)."""
        sync_ms_B = syncs_ms(sync_B2, self.costs.comm, self.topology)
        if self.tables.dense is not None:
            _, all_reduce, *_, row_sums = self._weights[StepPart.DENSE]
            sync_ms_B = all_reduce * sync_ms_B + row_sums * (sync_ms_B > 0)
        base = self._rest.times
        if self._rest.overlap is Overlap.NONE:
            fixed_ms = base.step_ms(Overlap.NONE) - sum(getattr(base, part.value) for part in PARTS)
            return np.asarray(fixed_ms + slowest_PB.sum(axis=0) + sync_ms_B)
        steps = (
            replace(
                base,
                **dict(zip(map(str, PARTS), parts, strict=True)),
                all_reduce=base.all_reduce + sync_ms,
                row_reduce=base.row_reduce + sync_ms,
            )
            for *parts, sync_ms in zip(*slowest_PB.tolist(), sync_ms_B.tolist(), strict=True)
        )
        return np.array([times.step_ms(self._rest.overlap) for times in steps])

    def _scattered_ms(self, scattered_BC: MovedArray) -> tuple[MsArray, MsArray]:
        """Times of reduce-scatters and of all-gathers of so many bytes for each rank, shapes (B,)."""
        collectives = (self.costs.comm.reduce_scatter_ms, self.costs.comm.all_gather_ms)
        times = []
        for collective_ms, scattered_B in zip(collectives, scattered_BC.T, strict=True):
            sizes = (scattered_B * self.topology.world_size).tolist()
            times_ms = {size: collective_ms(size, self.topology) for size in dict.fromkeys(sizes)}
            times.append(np.array([times_ms[size] for size in sizes]))
        return times[0], times[1]

    def _in_messages(self, moved_BRC: MovedArray) -> MovedArray:
        """What is moved with what fills up the last blocks of messages, as `plan_traffic` counts it."""
        payload = self.payload
        if DType.INT8 not in (payload.forward, payload.backward):
            return moved_BRC
        moved_BRC = moved_BRC.copy()
        served = (
            (_TO_ALL, _BACK_TO_ALL, self.topology.world_size),
            (_TO_NODE, _BACK_TO_NODE, self.topology.local_world_size),
        )
        for block, back, num_served in served:
            for stream, dtype in ((Stream.FORWARD, payload.forward), (Stream.BACKWARD, payload.backward)):
                column = _NUM_STREAMS * block + list(Stream).index(stream)
                moved_BRC[..., column] = message_bytes(moved_BRC[..., column], dtype)
            whole_BR = message_bytes(moved_BRC[..., back], payload.forward)
            moved_BRC[..., _OUTPUTS] += num_served * (whole_BR - moved_BRC[..., back])
            moved_BRC[..., back] = whole_BR
        return moved_BRC

    def _streams(self, moved_BRC: MovedArray) -> tuple[LinkBytes, MsArray, MsArray]:
        """Bytes of all exchanges by level, and all that ranks serve and ask for by stream, their own included."""
        blocks_CBR = np.moveaxis(moved_BRC[..., : _SCATTERED.stop], -1, 0)
        to_all_EBR, to_node_EBR, to_itself_EBR = (
            blocks_CBR[_NUM_STREAMS * block : _NUM_STREAMS * (block + 1)].copy()
            for block in (_TO_ALL, _TO_NODE, _TO_ITSELF)
        )
        served_LEBR, asked_LEBR = [], []
        inner_EBR, num_inner_R = to_all_EBR, np.ones(moved_BRC.shape[1], dtype=np.int64)
        for level, (starts, num_R) in enumerate(self._groups):
            sums_EBR = np.repeat(np.add.reduceat(to_all_EBR, starts, axis=2), num_R[starts], axis=2)
            in_node_EBR = to_node_EBR if level == 0 else 0.0
            served_LEBR.append((num_R - num_inner_R) * (to_all_EBR + in_node_EBR))
            asked_LEBR.append(sums_EBR - inner_EBR + (num_R - num_inner_R) * in_node_EBR)
            inner_EBR, num_inner_R = sums_EBR, num_R
        kept_EBR = to_all_EBR + to_node_EBR + to_itself_EBR
        served_EBR, asked_EBR = sum(served_LEBR) + kept_EBR, sum(asked_LEBR) + kept_EBR
        served_EBR[_SCATTERED_INDICES] += blocks_CBR[_SCATTERED] * self.topology.world_size
        asked_EBR[_SCATTERED_INDICES] += blocks_CBR[_SCATTERED]
        asks_E11 = np.array([stream.asks for stream in Stream])[:, None, None]
        served, asked = np.stack(served_LEBR), np.stack(asked_LEBR)
        leaving, arriving = np.where(asks_E11, asked, served), np.where(asks_E11, served, asked)
        links = LinkBytes(
            leaving_LR=np.add.reduceat(leaving, _FIRST_STREAMS, axis=1),
            arriving_LR=np.add.reduceat(arriving, _FIRST_STREAMS, axis=1),
        )
        return links, served_EBR, asked_EBR


class StepCost(StepPrices):
    """Prices the steps of placements of one problem.

    Args:
        problem: The problem.
        costs: Models of all parts; `costs.kernel` is the problem's model.

    Attributes:
        moved_WNC: What an item adds to the sums of every rank that holds it: on a rank alone, then by shared tier.

    Raises:
        InvalidPlanError: If the dense layers make no model.
    """

    def __init__(self, problem: PlacementProblem, costs: CostModels) -> None:
        self.problem, topology = problem, problem.topology
        held = [[placed_shard(shard, tier, topology) for shard in problem.shards] for tier in problem.ways]
        kernels = {fused_kernel(one.shard.table, one.update) for of_way in held for one in of_way}
        super().__init__(problem.tables, topology, costs, kernels, problem.payload)
        moved_WUC = [self.moved(of_way) for of_way in held]
        self.moved_WNC = np.stack([summed_members(moved_UC, problem.members) for moved_UC in moved_WUC])

    def sums(self, ranks_N: RankArray) -> StepSums:
        """What each rank holds in one placement; B is 1."""
        moved_RC = rank_sums(self.moved_WNC, ranks_N, self.problem.num_ranks)
        return StepSums(codes_BRH=self.problem.rank_codes(ranks_N)[None], moved_BRC=moved_RC[None])


def _links(topology: Topology) -> tuple[object, ...]:
    """What collectives are priced by; memory is none of it."""
    return (topology.world_size, topology.device, topology.levels)
