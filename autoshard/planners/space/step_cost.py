"""Whole steps from sums over what ranks hold.

Shape suffixes: B placements, R ranks, H width of a code, C columns of what is moved, L levels, P `EMBEDDING_PARTS`, U
shards, V kinds of shards, E streams, X `EXCHANGE_PARTS`, W `Readers`, K fused kernels and what is `needed_once`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    Collective,
    CostModels,
    DType,
    Payload,
    PlacedShard,
    RowsBy,
    TableSet,
    Topology,
)
from autoshard.core.costs import CodeArray, LinkBytes, MsArray
from autoshard.core.shard import FusedKernel, fused_kernel
from autoshard.core.step import EMBEDDING_PARTS, EXCHANGE_PARTS, KERNEL_PARTS, PART_INDEX, Overlap, StepPart
from autoshard.evaluation.batch_memory import BatchMemory, dense_bytes, listed_order_bytes, peak_factor
from autoshard.evaluation.rank_work import EXCHANGED, SCATTERED, RankWork
from autoshard.evaluation.reader_work import needed_once, reader_ms
from autoshard.evaluation.stages import scatters_ms
from autoshard.evaluation.step_price import StepPricer
from autoshard.evaluation.traffic import (
    Stream,
    held_id_bytes,
    id_bytes,
    message_bytes,
    pair_bytes,
    sync_bytes,
    whole_share,
)
from autoshard.planners.space.columns import Columns, MovedArray, Readers

_NS_PER_MS = 1e6
_STREAMS = list(Stream)
_SCATTERED_INDICES = [_STREAMS.index(stream) for stream in SCATTERED]
#: The first stream of each all-to-all.
_FIRST_STREAMS = [_STREAMS.index(EXCHANGED[part][0]) for part in EXCHANGE_PARTS]
_ASKS_E11 = np.array([stream.asks for stream in Stream])[:, None, None]
#: By how much sums are changed to see what that does: a share, and bytes where there are none.
BUMP_SHARE, BUMP_BYTES = 0.05, 1e4


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
    of them. So a step is a function of two sums per rank: they are brought into `RankWork`, which `StepPricer` prices.
    Where all ranks hold alike, sums of one of them say it all: R may be 1.

    Args:
        tables: The task's tables.
        topology: The task's topology.
        costs: Models of all parts.
        kernels: Kinds of kernels that shards may run in, by `fused_kernel`.
        payload: Number formats of what is sent.
        by_kernels: Whether a step is the kernels of its slowest rank, forward and backward together, and nothing else.

    Attributes:
        pricer: Prices what ranks do.
        columns: What is moved, by name.

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
        *,
        by_kernels: bool = False,
    ) -> None:
        self.tables, self.topology, self.costs, self.payload = tables, topology, costs, payload
        self.by_kernels = by_kernels
        self.pricer = StepPricer(tables, topology, costs)
        self._id_bytes, self._held_id_bytes = id_bytes(tables.tables), held_id_bytes(tables.tables)
        self._local_batch = tables.batch_size / topology.world_size
        self._kernels = {kernel: index for index, kernel in enumerate(sorted(set(kernels)))}
        self.columns = Columns(len(self._kernels))
        self._dense_bytes = dense_bytes(tables, self._local_batch)
        # By their ranks the last rates, and around what: around nothing they are asked for again and again.
        self._rates: dict[int, tuple[MovedArray, MsArray]] = {}
        # Of each level the first rank of each group, and for each rank the size of its group.
        group_LR = [np.arange(topology.world_size) // level.size for level in topology.levels]
        self._groups = [
            (np.flatnonzero(np.diff(group_R, prepend=-1)), np.bincount(group_R)[group_R]) for group_R in group_LR
        ]

    def prices_alike(self, other: StepPrices) -> bool:
        """Whether both make the same step of the same sums, so that their placements can be priced together."""
        return (
            _links(self.topology) == _links(other.topology)
            and self._kernels == other._kernels
            and self.payload == other.payload
            and self.by_kernels == other.by_kernels
            and self.pricer.prices_alike(other.pricer)
        )

    @property
    def overlap(self) -> Overlap:
        """Which parts hide behind each other."""
        return self.pricer.overlap

    @property
    def kernel_weights(self) -> tuple[float, float]:
        """What the kernel model's milliseconds count for in forward and backward."""
        forward, backward = (self.pricer.weights[part][0] for part in KERNEL_PARTS)
        return forward, backward

    @property
    def has_rising_weights(self) -> bool:
        """Whether no part of the step gets shorter with more work."""
        return all(weight >= 0 for part in StepPart for weight in self.pricer.weights[part])

    def on(self, topology: Topology) -> StepPrices:
        """Prices of the same task on other links."""
        return StepPrices(self.tables, topology, self.costs, self._kernels, self.payload, by_kernels=self.by_kernels)

    def moved(self, placed_U: Sequence[PlacedShard]) -> MovedArray:
        """What shards add to the sums of each rank that holds some of them, shape (U, C).

        Args:
            placed_U: Each on one replica, or on one for each node or each rank, from which that node or rank reads.
        """
        rows_UC = np.zeros((len(placed_U), len(self.columns)))
        row_U, all_U = self.columns.of(rows_UC), np.arange(len(placed_U))
        tables = [placed.shard.table for placed in placed_U]
        readers_U = np.array([self._readers(len(placed.replicas)) for placed in placed_U], dtype=np.int64)
        row_U["num_features"] = [len(table.features) for table in tables]
        row_U["num_shards"][all_U, self._kernel_of(placed_U)] = 1.0
        row_U["num_shards"][:, len(self._kernels) :] = needed_once(placed_U, self.topology.world_size)
        is_scattered_U = np.array(
            [placed.collective is Collective.REDUCE_SCATTER for placed in placed_U], dtype=np.bool_
        )
        mean_UE = self._pair_bytes(placed_U, [1.0] * len(placed_U))
        row_U["scattered_bytes"] = mean_UE[:, _SCATTERED_INDICES] * is_scattered_U[:, None]
        row_U["pair_bytes"][all_U, readers_U] = mean_UE
        row_U["pair_bytes"][..., _SCATTERED_INDICES] *= ~is_scattered_U[:, None, None]
        row_U["synced_bytes"] = sync_bytes(placed_U, self.tables.batch_size, self._id_bytes)
        row_U["reading_ns"][all_U, readers_U] = self._reading_ns(placed_U)
        peaks = [peak_factor(table, self._local_batch) for table in tables]
        peak_UE = self._pair_bytes(placed_U, peaks) if any(peak != 1.0 for peak in peaks) else mean_UE
        self._add_held(row_U, placed_U, peak_UE, readers_U, is_scattered_U)
        row_U["synced_bytes"] *= self._whole_shares(placed_U)[:, None]
        return rows_UC

    def _whole_shares(self, placed_U: Sequence[PlacedShard]) -> MsArray:
        held_U = [(len(placed.replicas), len(placed.replicas[0])) for placed in placed_U]
        first = dict(zip(held_U, placed_U, strict=True))
        shares = {held: whole_share(placed.replicas, self.topology) for held, placed in first.items()}
        return np.array([shares[held] for held in held_U])

    def _kernel_of(self, placed_U: Sequence[PlacedShard]) -> NDArray[np.int64]:
        kernels = [self._kernels[fused_kernel(placed.shard.table, placed.update)] for placed in placed_U]
        return np.array(kernels, dtype=np.int64)

    def _pair_bytes(self, placed_U: Sequence[PlacedShard], lookups_factor_U: Sequence[float]) -> MsArray:
        return pair_bytes(
            placed_U, self._local_batch, self.payload, id_bytes=self._id_bytes, lookups_factor_N=lookups_factor_U
        )

    def _reading_ns(self, placed_U: Sequence[PlacedShard]) -> MsArray:
        """What a reader works on what it reads of one of a shard's owners, shape (U, X)."""
        num_owners_U = np.array([len(placed.replicas[0]) for placed in placed_U], dtype=np.float64)
        return np.asarray(_NS_PER_MS * reader_ms(placed_U, self._local_batch, self.topology) / num_owners_U[:, None])

    def _readers(self, num_replicas: int) -> Readers:
        """Whether rows are read by all ranks, by those of their node, or by their own rank alone."""
        if num_replicas == 1:
            return Readers.ALL
        return Readers.ITSELF if num_replicas == self.topology.world_size else Readers.NODE

    def _add_held(
        self,
        row_U: NDArray[Any],
        placed_U: Sequence[PlacedShard],
        peak_UE: MsArray,
        readers_U: NDArray[np.int64],
        is_scattered_U: NDArray[np.bool_],
    ) -> None:
        """Adds the bytes that a batch at its 99th percentile needs to rows of what is moved, and those of row orders.

        Outputs of a rank's own copies are used where they are, and held once. One sum of all owners comes back.
        """
        lengths_U, ids_U, forward_U, _ = peak_UE.T
        num_served_U = np.array([self.topology.world_size, self.topology.local_world_size, 1])[readers_U]
        num_owners_U = [len(placed.replicas[0]) for placed in placed_U]
        held_ids_U = ids_U * (self._held_id_bytes / self._id_bytes)
        synced_U = row_U["synced_bytes"].sum(axis=1) / num_owners_U
        row_U["input_bytes"] = num_served_U * (lengths_U + held_ids_U) + synced_U
        is_own_U = (readers_U == Readers.ITSELF) & ~is_scattered_U
        row_U["output_bytes"] = np.where(is_own_U, 0.0, num_served_U * forward_U)
        returned_to_U = np.where(is_scattered_U, Readers.ITSELF, readers_U)
        row_U["returned_bytes"][np.arange(len(placed_U)), returned_to_U] = forward_U
        row_U["row_order_bytes"] = [_order_share(placed) for placed in placed_U]

    def step_ms(self, sums: StepSums) -> MsArray:
        """Step times, shape (B,): equal to what `evaluate` says of the plans, but for rounding."""
        return self.compose(self.parts_ms(sums).max(axis=2), sums.moved_BRC)

    def parts_ms(self, sums: StepSums) -> MsArray:
        """Times of `EMBEDDING_PARTS` on every rank, shape (P, B, R)."""
        parts_PBR = self.moving_ms(sums.moved_BRC)
        for part, ms_BR in zip(KERNEL_PARTS, self.kernels_ms(sums.codes_BRH), strict=True):
            parts_PBR[PART_INDEX[part]] += ms_BR
        return parts_PBR

    def kernels_ms(self, codes_BRH: CodeArray) -> tuple[MsArray, MsArray]:
        """What the kernel model's milliseconds add to forward and backward, shapes (B, R)."""
        parts = self.costs.kernel.predict_parts(codes_BRH.reshape(-1, codes_BRH.shape[-1]))
        shape = codes_BRH.shape[:-1]
        return self.of_kernels(parts.forward_ms_S.reshape(shape), parts.backward_ms_S.reshape(shape))

    def of_kernels(self, forward_ms: MsArray, backward_ms: MsArray) -> tuple[MsArray, MsArray]:
        """What the kernel model's milliseconds add to `KERNEL_PARTS`; by kernels alone, both count in the first."""
        if self.by_kernels:
            return forward_ms + backward_ms, 0 * backward_ms
        forward, backward = self.kernel_weights
        return forward * forward_ms, backward * backward_ms

    def moving_ms(self, moved_BRC: MovedArray) -> MsArray:
        """All of `EMBEDDING_PARTS` but the kernel model's milliseconds, shape (P, B, R)."""
        if self.by_kernels:
            return np.zeros((len(EMBEDDING_PARTS), *moved_BRC.shape[:2]))
        work = self.work(moved_BRC)
        return self.pricer.parts_ms(self.pricer.features(work, self.pricer.stages(work)))

    def work(self, moved_BRC: MovedArray) -> RankWork:
        """What ranks do, from the sums of what they move."""
        rows_BR = self.columns.of(self._in_messages(moved_BRC))
        links, handled_EBR, served_lengths_BR = self._exchanged(rows_BR)
        reading_ns_BRX = self._read(rows_BR["reading_ns"])
        is_used_BRK, num_kernels = (rows_BR["num_shards"] > 0).astype(np.float64), len(self._kernels)
        once_BR2 = is_used_BRK[..., num_kernels:].max(axis=1, keepdims=True)
        return RankWork(
            links=links,
            handled_EBR=handled_EBR,
            served_lengths_BR=served_lengths_BR,
            scattered_2B=np.moveaxis(rows_BR["scattered_bytes"][:, 0], -1, 0) * self.topology.world_size,
            synced_BR2=rows_BR["synced_bytes"][:, :1],
            reading_ms_XBR=np.moveaxis(reading_ns_BRX, -1, 0) / _NS_PER_MS,
            once_2BR=np.moveaxis(once_BR2, -1, 0),
            num_kernels_BR=is_used_BRK[..., :num_kernels].sum(axis=2),
            num_features_BR=rows_BR["num_features"],
        )

    def training_bytes(self, moved_BRC: MovedArray) -> MsArray:
        """What training needs beside the tables, as `evaluation.training_bytes` counts it, shape (B, R)."""
        rows_BR = self.columns.of(self._in_messages(moved_BRC))
        kept_B1 = self._dense_bytes + self._total(rows_BR["row_order_bytes"])
        returned_BR = self._read(rows_BR["returned_bytes"][..., None])[..., 0]
        inputs_BR, outputs_BR = rows_BR["input_bytes"], rows_BR["output_bytes"]
        return BatchMemory.of_batch(inputs_BR, outputs_BR, returned_BR, kept_B1, self.payload).training_R

    def moving_rates(self, mean_C: MovedArray, num_ranks: int) -> MsArray:
        """Milliseconds of a part per unit of each column, shape (P, C): on one rank that has it, the others as before.

        Args:
            mean_C: What every rank has.
            num_ranks: All ranks; or 1, for what all of them have, alike.
        """
        known_C, rates_PC = self._rates.get(num_ranks, (None, None))
        if known_C is None or rates_PC is None or not np.array_equal(known_C, mean_C):
            rates_PC = self._moving_rates(mean_C, num_ranks)
            self._rates[num_ranks] = mean_C.copy(), rates_PC
        return rates_PC

    def _moving_rates(self, mean_C: MovedArray, num_ranks: int) -> MsArray:
        width = len(mean_C)
        is_sent_C = self.columns.are("pair_bytes", "scattered_bytes")
        bump_C = np.where(is_sent_C, np.maximum(BUMP_SHARE * mean_C, BUMP_BYTES), 1.0)
        base_RC = np.repeat(np.where(is_sent_C, np.maximum(mean_C, 1.0), mean_C)[None], num_ranks, axis=0)
        moved_BRC = np.repeat(base_RC[None], width + 1, axis=0)
        columns = np.arange(width)
        moved_BRC[columns + 1, 0, columns] += bump_C
        # Kernels are counted once however many shards run in them; their launches are no rate.
        is_rate_C = ~self.columns.are("num_shards")
        parts_PB = self.moving_ms(moved_BRC)[:, :, 0]
        return np.asarray(np.maximum(parts_PB[:, 1:] - parts_PB[:, :1], 0.0) / bump_C * is_rate_C)

    def training_rates(self, moved_RC: MovedArray) -> MovedArray:
        """Bytes of a rank that training needs more for one more of each column there, shape (C,).

        Args:
            moved_RC: What ranks have.
        """
        moved_BRC = np.repeat(moved_RC[None], 1 + len(self.columns), axis=0)
        columns = np.arange(len(self.columns))
        moved_BRC[1 + columns, 0, columns] += BUMP_BYTES
        bytes_B = self.training_bytes(moved_BRC)[:, 0]
        return np.asarray((bytes_B[1:] - bytes_B[0]) / BUMP_BYTES)

    def counted(self, moved_VC: MovedArray) -> MovedArray:
        """Of what is moved, how many shards there are of what is paid once: `num_shards` of the columns."""
        return np.asarray(self.columns.of(moved_VC)["num_shards"])

    def is_scattered(self, moved_VC: MovedArray) -> NDArray[np.bool_]:
        """Whether anything of what is moved is reduce-scattered, shape (V,)."""
        return np.asarray(self.columns.of(moved_VC)["scattered_bytes"].any(axis=1))

    def synced_bytes(self, moved_BRC: MovedArray) -> MovedArray:
        """Of what is moved, bytes of gradients that are all-reduced and all-gathered, shape (..., 2)."""
        return np.asarray(self.columns.of(moved_BRC)["synced_bytes"])

    def with_and_without_counted(self, moved_RC: MovedArray) -> MovedArray:
        """What is moved with no shard of each that is `counted`, then with one on the first rank; shape (2 K, R, C)."""
        num_counted = self.counted(moved_RC).shape[-1]
        moved_BRC = np.repeat(moved_RC[None], 2 * num_counted, axis=0)
        each, num_shards_BRK = np.arange(num_counted), self.columns.of(moved_BRC)["num_shards"]
        num_shards_BRK[each, :, each] = num_shards_BRK[num_counted + each, :, each] = 0.0
        num_shards_BRK[num_counted + each, 0, each] = 1.0
        return moved_BRC

    def scatter_latencies_ms(self) -> tuple[float, float]:
        """What a reduce-scatter and an all-gather take however little is in them."""
        if self.by_kernels:
            return 0.0, 0.0
        sizes_2B = np.array([[1.0, 2.0], [1.0, 2.0]]) * BUMP_BYTES * self.topology.world_size
        once_2, twice_2 = scatters_ms(sizes_2B, self.costs.comm, self.topology).T
        forward, backward = np.maximum(2 * once_2 - twice_2, 0.0).tolist()
        return forward, backward

    def sync_latency_ms(self) -> float:
        """What the synchronisation of gradients adds to the step however little of them there is."""
        bytes_B2 = np.array([[0.0, 0.0], [BUMP_BYTES, 0.0], [2 * BUMP_BYTES, 0.0]])
        none_ms, once_ms, twice_ms = self.synced_ms(bytes_B2).tolist()
        return max(0.0, float(2 * once_ms - twice_ms - none_ms))

    def synced_ms(self, bytes_B2: MsArray) -> MsArray:
        """Steps without any work but the synchronisation of so many bytes, shape (B,)."""
        return self._steps_ms(np.zeros((len(EMBEDDING_PARTS), len(bytes_B2))), bytes_B2)

    def compose(self, slowest_PB: MsArray, moved_BRC: MovedArray) -> MsArray:
        """Steps of parts at their slowest ranks, shape (B,).

        Args:
            slowest_PB: Times of `EMBEDDING_PARTS`.
            moved_BRC: What is moved, of which the gradients that are summed count; of one rank, since ranks are alike.
        """
        return self._steps_ms(slowest_PB, self.synced_bytes(moved_BRC)[:, 0])

    def _steps_ms(self, slowest_PB: MsArray, bytes_B2: MsArray) -> MsArray:
        if self.by_kernels:
            return np.asarray(slowest_PB.sum(axis=0))
        return self.pricer.steps_ms(slowest_PB, bytes_B2)

    def _read(self, by_readers_BRWX: MovedArray) -> MovedArray:
        """What reaches readers: of all ranks, of those of their node, and of themselves; shape (B, R, X)."""
        by_all, by_node, by_itself = np.moveaxis(by_readers_BRWX, 2, 0)
        return np.asarray(by_itself + self._total(by_all) + self._by_group(by_node, 0, axis=1))

    def _total(self, values_BR: MovedArray) -> MovedArray:
        """Sums over all ranks, of which there may be one for all, shape (B, 1, ...)."""
        return np.asarray(values_BR.sum(axis=1, keepdims=True) * (self.topology.world_size // values_BR.shape[1]))

    def _by_group(self, values: MovedArray, level: int, axis: int) -> MovedArray:
        """Sums over the ranks of each rank's group at a level, of the same shape; one rank may stand for all."""
        starts, num_R = self._groups[level]
        if values.shape[axis] == 1:
            return np.asarray(values * num_R[0])
        return np.repeat(np.add.reduceat(values, starts, axis=axis), num_R[starts], axis=axis)

    def _in_messages(self, moved_BRC: MovedArray) -> MovedArray:
        """What is moved with what fills up the last blocks of messages, as `plan_traffic` counts it."""
        payload = self.payload
        if DType.INT8 not in (payload.forward, payload.backward):
            return moved_BRC
        moved_BRC = moved_BRC.copy()
        rows_BR = self.columns.of(moved_BRC)
        pairs_BRWE, returned_BRW = rows_BR["pair_bytes"], rows_BR["returned_bytes"]
        served = ((Readers.ALL, self.topology.world_size), (Readers.NODE, self.topology.local_world_size))
        for readers, num_served in served:
            for stream, dtype in ((Stream.FORWARD, payload.forward), (Stream.BACKWARD, payload.backward)):
                of_stream_BR = pairs_BRWE[..., readers, _STREAMS.index(stream)]
                of_stream_BR[...] = message_bytes(of_stream_BR, dtype)
            whole_BR = message_bytes(returned_BRW[..., readers], payload.forward)
            rows_BR["output_bytes"] += num_served * (whole_BR - returned_BRW[..., readers])
            returned_BRW[..., readers] = whole_BR
        return moved_BRC

    def _exchanged(self, rows_BR: NDArray[Any]) -> tuple[LinkBytes, MsArray, MsArray]:
        """Bytes of all exchanges by level, what ranks handle of each stream, and lengths that they serve."""
        to_all_EBR, to_node_EBR, to_itself_EBR = np.moveaxis(rows_BR["pair_bytes"], (2, 3), (0, 1))
        served_LEBR, asked_LEBR = [], []
        inner_EBR, num_inner_R = to_all_EBR, np.ones(rows_BR.shape[1], dtype=np.int64)
        for level, (_, num_of_group_R) in enumerate(self._groups):
            sums_EBR, num_R = self._by_group(to_all_EBR, level, axis=2), num_of_group_R[: rows_BR.shape[1]]
            in_node_EBR = to_node_EBR if level == 0 else 0.0
            served_LEBR.append((num_R - num_inner_R) * (to_all_EBR + in_node_EBR))
            asked_LEBR.append(sums_EBR - inner_EBR + (num_R - num_inner_R) * in_node_EBR)
            inner_EBR, num_inner_R = sums_EBR, num_R
        kept_EBR = to_all_EBR + to_node_EBR + to_itself_EBR
        served_EBR = sum(served_LEBR) + kept_EBR
        handled_EBR = served_EBR + (sum(asked_LEBR) + kept_EBR)
        own_samples_2BR = np.moveaxis(rows_BR["scattered_bytes"], -1, 0)
        handled_EBR[_SCATTERED_INDICES] += own_samples_2BR * (self.topology.world_size + 1)
        served, asked = np.stack(served_LEBR), np.stack(asked_LEBR)
        leaving, arriving = np.where(_ASKS_E11, asked, served), np.where(_ASKS_E11, served, asked)
        links = LinkBytes(
            leaving_LR=np.add.reduceat(leaving, _FIRST_STREAMS, axis=1),
            arriving_LR=np.add.reduceat(arriving, _FIRST_STREAMS, axis=1),
        )
        return links, handled_EBR, served_EBR[_STREAMS.index(Stream.LENGTHS)]


def _order_share(placed: PlacedShard) -> float:
    """What each holder of a shard counts of its table's row order, so that the parts of a table make it whole."""
    shard = placed.shard
    if shard.rows.by is not RowsBy.ACCESS_RANK or shard.rows.start > 0:
        return 0.0
    num_holders = sum(map(len, placed.replicas))
    return listed_order_bytes(shard.table) * shard.embedding_dim / shard.table.embedding_dim / num_holders


def _links(topology: Topology) -> tuple[object, ...]:
    """What collectives are priced by; memory is none of it."""
    return (topology.world_size, topology.device, topology.levels)
