"""Bytes that a plan sends between ranks in one step.

Shards that are held and read alike send alike, so that bytes are added up by layout, and no layout is looked at pair by
pair of ranks: a plan for thousands of ranks is priced in seconds.

Shape suffixes: R ranks, L levels, E exchanges (`Stream`), M messages, N shards, K kinds of shards, G shards that travel
alike, O ranks that hold rows, replica after replica.
Where a matrix has (R, R), entry [i, j] travels from rank i to rank j, and the diagonal is what stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    Collective,
    DType,
    EmbeddingTable,
    Exchange,
    GradSync,
    PlacedShard,
    Pooling,
    Shard,
    ShardingPlan,
    Topology,
)
from autoshard.core.access import ProfileBatch
from autoshard.core.costs import LinkBytes, MsArray
from autoshard.core.plan import Payload
from autoshard.core.replica_groups import part_of
from autoshard.core.shard import Replicas

LENGTH_BYTES = 4
#: An id travels as int32; as int64 in plans with a table of more rows than int32 can number, and with its weight where
#: lookups are weighted.
ID_BYTES = 4
#: With a float32 beside it.
WEIGHTED_ID_BYTES = 8
#: Where rows are looked up, their numbers are held as int64, however they travelled, and weights as float32.
HELD_ID_BYTES, HELD_WEIGHT_BYTES = 8, 4
_MOST_ROWS_OF_INT32 = 1 << 31
#: Gradients are reduced in fp32, whatever the weights are.
REDUCED_BYTES = 4

#: Values that share a scale and an offset, fp32 each, where they travel as int8.
INT8_BLOCK = 64

_RankArray = NDArray[np.int64]
#: Of a table and a rank's samples: lookups of a batch over those of the mean batch.
LookupsFactor: TypeAlias = Callable[[EmbeddingTable, float], float]


def id_bytes(tables: Iterable[EmbeddingTable]) -> int:
    """Bytes that the number of a row takes on the wire, in plans for these tables."""
    listed = list(tables)
    return WEIGHTED_ID_BYTES if is_weighted(listed) else id_width(table.num_embeddings for table in listed)


def held_id_bytes(tables: Iterable[EmbeddingTable]) -> int:
    """Bytes that a lookup takes where its row is, in plans for these tables."""
    return HELD_ID_BYTES + HELD_WEIGHT_BYTES * is_weighted(tables)


def is_weighted(tables: Iterable[EmbeddingTable]) -> bool:
    """Whether lookups have weights in plans for these tables: all have, if those of any table have."""
    return any(table.weighted for table in tables)


def id_width(num_rows: Iterable[float]) -> int:
    """Bytes of an id on the wire where there are so many rows in each place: 4, or 8 where one has over 2^31."""
    return ID_BYTES if max(num_rows, default=0) <= _MOST_ROWS_OF_INT32 else 2 * ID_BYTES


class Stream(StrEnum):
    """An exchange of a step."""

    LENGTHS = "lengths"
    IDS = "ids"
    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def asks(self) -> bool:
        """Whether it goes from the ranks that read to those that own rows."""
        return self is not Stream.FORWARD


_STREAMS = tuple(Stream)
#: Streams that a reduce-scatter, or its all-gather, can carry.
_IS_SCATTERED_E = np.array([stream in (Stream.FORWARD, Stream.BACKWARD) for stream in _STREAMS])


def _pair_counts(placed: PlacedShard, local_batch: float, lookups_factor: float) -> tuple[float, float, float]:
    """Lengths and ids that a reader sends to each owner, and numbers that it gets back."""
    table = placed.shard.table
    profile, share = placed.shard.access()
    num_owners = len(placed.replicas[0])
    num_lookups = local_batch * table.pooling_factor * share * lookups_factor / num_owners
    if placed.exchange is Exchange.PARTIAL_SUMS:
        num_lengths = num_vectors = local_batch * len(table.features)
    else:
        # Owners need no bags to answer with rows, only the number of rows.
        num_lengths = 1.0
        if placed.deduplicate:
            num_lookups = profile.expected_distinct(num_lookups * num_owners) / num_owners
        num_vectors = num_lookups
    return num_lengths, num_lookups, num_vectors * placed.shard.embedding_dim


def pair_bytes(
    placed_N: Sequence[PlacedShard],
    local_batch: float,
    payload: Payload,
    *,
    id_bytes: int,
    lookups_factor_N: Sequence[float],
) -> MsArray:
    """Bytes per step between a reader of a placed shard and each owner in the replica that it reads, shape (N, E).

    Lengths, ids and gradients go from reader to owner, embeddings from owner to reader. Where sums travel by
    reduce-scatter, `forward` and `backward` are what each owner puts in and takes out for a rank.

    Args:
        placed_N: The shards.
        local_batch: Samples of each reader.
        payload: Number formats on the wire.
        id_bytes: Of an id, as `id_bytes` says for the plan's tables.
        lookups_factor_N: Lookups of the batch over those of the mean batch.
    """
    counts = [
        _pair_counts(placed, local_batch, factor) for placed, factor in zip(placed_N, lookups_factor_N, strict=True)
    ]
    lengths_N, lookups_N, values_N = np.array(counts, dtype=np.float64).reshape(-1, 3).T
    return np.column_stack([lengths_N, lookups_N, values_N, values_N]) * _unit_bytes(payload, id_bytes)


def _unit_bytes(payload: Payload, id_bytes: int) -> tuple[float, float, float, float]:
    """Bytes of a length, an id, and a number on the way forward and back: by stream."""
    return LENGTH_BYTES, id_bytes, wire_bytes(payload.forward), wire_bytes(payload.backward)


def wire_bytes(dtype: DType) -> float:
    """Bytes that a number takes on the wire, scales of int8's blocks included."""
    return dtype.num_bytes + (2 * REDUCED_BYTES / INT8_BLOCK if dtype is DType.INT8 else 0.0)


def message_bytes(bytes_M: MsArray, dtype: DType) -> MsArray:
    """Bytes of messages with what fills their last blocks up; only int8 has blocks. Shape (M,) or any other.

    Args:
        bytes_M: By the width of their numbers, `wire_bytes`.
        dtype: Number format on the wire.
    """
    if dtype is not DType.INT8:
        return bytes_M
    block_bytes = INT8_BLOCK * wire_bytes(dtype)
    return np.asarray(np.ceil(bytes_M / block_bytes) * block_bytes)


def cheaper_exchange(shard: Shard, num_owners: int) -> Exchange:
    """What owners send back with fewer bytes, by `pair_bytes`: a vector per bag, or a row per lookup.

    Each owner of a part of the rows sends a vector for every bag, also for bags without any of its rows: bags x owners
    in all, against the lookups. Sequence tables send rows. A pooled table whose rows one rank holds whole sends sums,
    as every runtime does.

    Args:
        shard: Rows and columns of a table.
        num_owners: Ranks over which one replica of its rows is split.
    """
    table = shard.table
    if table.pooling is Pooling.SEQUENCE:
        return Exchange.ROWS
    if num_owners == 1 and shard.num_embeddings == table.num_embeddings:
        return Exchange.PARTIAL_SUMS
    num_lookups, num_bags = table.pooling_factor * shard.access()[1], len(table.features)
    return Exchange.ROWS if num_lookups < num_bags * num_owners else Exchange.PARTIAL_SUMS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTraffic:
    """Bytes between each rank and each owner in the replica that it reads, for all shards that are held alike.

    Attributes:
        replicas: Ranks that hold the rows.
        read_by_R: For each rank, the index of the replica that it reads.
        pair_bytes_E: Bytes of a pair of reader and owner, by stream.
        gradient_bytes: Of gradients that each holder collects before they are summed over replicas.
    """

    replicas: Replicas
    read_by_R: _RankArray
    pair_bytes_E: MsArray
    gradient_bytes: float
    owners_O: _RankArray = field(init=False)
    """Ranks that hold rows, replica after replica."""
    replica_O: _RankArray = field(init=False)
    """The replica of each of them."""

    def __post_init__(self) -> None:
        owners_O, replica_O = _flat(self.replicas)
        object.__setattr__(self, "owners_O", owners_O)
        object.__setattr__(self, "replica_O", replica_O)

    @property
    def stays(self) -> bool:
        """Whether every rank reads a copy of its own, so that nothing is exchanged."""
        if any(len(replica) > 1 for replica in self.replicas):
            return False
        return bool((self.owners_O[self.read_by_R] == np.arange(len(self.read_by_R))).all())

    def counts_R(self) -> tuple[MsArray, MsArray]:  # noqa: N802 - a shape suffix
        """Owners that each rank asks, and ranks that each rank serves, itself included; shapes (R,)."""
        num_owners = np.bincount(self.replica_O, minlength=len(self.replicas))
        num_readers = np.bincount(self.read_by_R, minlength=len(self.replicas))
        served_R = np.bincount(self.owners_O, num_readers[self.replica_O], minlength=len(self.read_by_R))
        return num_owners[self.read_by_R].astype(np.float64), served_R.astype(np.float64)

    def counts_LR(self, topology: Topology) -> tuple[MsArray, MsArray]:  # noqa: N802 - a shape suffix
        """As `counts_R`, by the innermost level that holds both; ranks themselves left out. Shapes (L, R)."""
        num_ranks = len(self.read_by_R)
        ranks_R = np.arange(num_ranks)
        asked, served = [], []
        for size in (1, *(level.size for level in topology.levels)):
            readers_R = self.read_by_R * num_ranks + ranks_R // size
            owners_O = self.replica_O * num_ranks + self.owners_O // size
            asked.append(_how_often(readers_R, owners_O))
            served.append(np.bincount(self.owners_O, _how_often(owners_O, readers_R), minlength=num_ranks))
        return np.diff(np.stack(asked), axis=0), np.diff(np.stack(served), axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes per step: requests to owners, embeddings back, gradients to owners, and sums over replicas.

    Attributes:
        layouts: What is exchanged, a layout for all shards of several replicas that are held and read alike.
        single_ER: As `layouts`, for all shards of one replica together: bytes between each rank and owner [r], shape
            (E, R).
        scattered_E: Of sums that travel by reduce-scatter, and of their gradients: bytes of a rank's own samples. The
            collectives' buffers have as much for each rank. Their lengths and ids are among `single_ER`.
        reduced_R: Bytes of gradients that each rank's all-reduces sum, as those of an all-reduce over all ranks.
        gathered_R: Bytes that its all-gathers of ids and gradients bring, as those of an all-gather over all ranks.
    """

    layouts: tuple[LayoutTraffic, ...]
    single_ER: MsArray
    scattered_E: MsArray
    reduced_R: MsArray
    gathered_R: MsArray

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica group."""
        return int(self.single_ER.shape[1])

    def sent_R(self, stream: Stream) -> MsArray:  # noqa: N802 - a shape suffix
        """Bytes that each rank sends, to itself included; shape (R,)."""
        asked_R, served_R = self._moved_R(stream)
        return asked_R if stream.asks else served_R

    def received_R(self, stream: Stream) -> MsArray:  # noqa: N802 - a shape suffix
        """Bytes that each rank receives, from itself included; shape (R,)."""
        asked_R, served_R = self._moved_R(stream)
        return served_R if stream.asks else asked_R

    def links(self, topology: Topology) -> Mapping[Stream, LinkBytes]:
        """What leaves and reaches ranks by level in the all-to-all of every stream.

        Args:
            topology: Of the ranks that the plan numbers: the world, or a replica group.
        """
        asked_ELR, served_ELR = self._single_ELR(topology)
        for layout in self.layouts:
            asked_LR, served_LR = layout.counts_LR(topology)
            asked_ELR += layout.pair_bytes_E[:, None, None] * asked_LR
            served_ELR += layout.pair_bytes_E[:, None, None] * served_LR
        links = {}
        for index, stream in enumerate(_STREAMS):
            asked_LR, served_LR = asked_ELR[index], served_ELR[index]
            leaving_LR, arriving_LR = (asked_LR, served_LR) if stream.asks else (served_LR, asked_LR)
            links[stream] = LinkBytes(leaving_LR=leaving_LR, arriving_LR=arriving_LR)
        return links

    def scattered_bytes(self, stream: Stream) -> float:
        """Bytes of the larger buffer of the stream's reduce-scatter or all-gather; 0 for none."""
        return float(self.scattered_E[_STREAMS.index(stream)]) * self.num_ranks

    def pairs_RR(self, stream: Stream) -> MsArray:  # noqa: N802 - a shape suffix
        """Bytes of the all-to-all pair by pair, from the row's rank to the column's; for small worlds."""
        index = _STREAMS.index(stream)
        asked_RR = np.tile(self.single_ER[index], (self.num_ranks, 1))
        for layout in self.layouts:
            for number, owners in enumerate(layout.replicas):
                readers = np.flatnonzero(layout.read_by_R == number)
                asked_RR[np.ix_(readers, np.array(owners))] += layout.pair_bytes_E[index]
        return asked_RR if stream.asks else asked_RR.T

    def _moved_R(self, stream: Stream) -> tuple[MsArray, MsArray]:  # noqa: N802 - a shape suffix
        """Bytes between each rank and the owners that it reads, and between it and the ranks that it serves."""
        index = _STREAMS.index(stream)
        single_R = self.single_ER[index]
        reduced = self.scattered_E[index]
        asked_R = np.full(self.num_ranks, single_R.sum() + reduced)
        served_R = (single_R + reduced) * self.num_ranks
        for layout in self.layouts:
            asks_R, serves_R = layout.counts_R()
            asked_R += layout.pair_bytes_E[index] * asks_R
            served_R += layout.pair_bytes_E[index] * serves_R
        return asked_R, served_R

    def _single_ELR(self, topology: Topology) -> tuple[MsArray, MsArray]:  # noqa: N802 - a shape suffix
        """Asked and served of shards of one replica, which all ranks read, by level."""
        ranks_R = np.arange(self.num_ranks)
        asked, sizes = [], (1, *(level.size for level in topology.levels))
        for size in sizes:
            group_R = ranks_R // size
            sums = np.stack([np.bincount(group_R, one_R) for one_R in self.single_ER])
            asked.append(sums[:, group_R])
        # What two large sums differ by may miss 0 by a little.
        asked_ELR = np.maximum(np.diff(np.stack(asked, axis=1), axis=1), 0.0)
        asked_ELR[asked_ELR < 1e-9 * asked[-1][:, None]] = 0.0
        return asked_ELR, self.single_ER[:, None] * np.diff(sizes)[None, :, None]


def whole_share(replicas: Replicas, topology: Topology) -> float:
    """Bytes of an all-reduce over all ranks that takes as long as one byte of rows which are held so.

    The holders of each part of the rows sum it among themselves, all parts at the same time.

    Args:
        replicas: Ranks that hold the rows, as many in each replica.
        topology: Of the ranks.
    """
    num_parts = len(replicas[0])
    if len(replicas) == 1 or (num_parts == 1 and len(replicas) == topology.world_size):
        return 1.0
    slowest = min(_reduced_bytes_per_s(topology, ranks) for ranks in zip(*replicas, strict=True))
    return topology.levels[-1].all_reduce.bytes_per_s / (num_parts * slowest)


@lru_cache(maxsize=256)
def _reduced_bytes_per_s(topology: Topology, ranks: tuple[int, ...]) -> float:
    """Rate of an all-reduce over some ranks: plans have few such sets, and tables many."""
    return part_of(topology, ranks).levels[-1].all_reduce.bytes_per_s


def sync_bytes(placed_N: Sequence[PlacedShard], group_batch_size: int, width: int | None = None) -> MsArray:
    """Bytes of gradients that replicas of shards sum in one step, as they sum them: reduced and gathered, shape (N, 2).

    Nothing for one replica. Over all ranks, collectives first meet within nodes, so that each rank's port carries its
    share of them. Where rows are split over a node's ranks already, ranks put in a share each, but the ports carry as
    much (FlexShard's Table 6: 86 GB/s over all ranks, 11 GB/s across nodes, with 8 ranks a node), or as much as
    `whole_share` says.

    Args:
        placed_N: The shards.
        group_batch_size: Samples per step of the replica group.
        width: Bytes of a row's number in plans of theirs; None for what each table needs by itself.
    """
    bytes_N2 = np.zeros((len(placed_N), 2))
    synced = [index for index, placed in enumerate(placed_N) if placed.grad_sync is not GradSync.NONE]
    by_way = sync_bytes_by_way([placed_N[index] for index in synced], group_batch_size, width)
    for position, index in enumerate(synced):
        bytes_N2[index] = by_way[placed_N[index].grad_sync][position]
    return bytes_N2


def sync_bytes_by_way(
    placed_N: Sequence[PlacedShard], group_batch_size: int, width: int | None = None
) -> dict[GradSync, MsArray]:
    """Bytes that are reduced and gathered, shape (N, 2), by each way in which replicas of shards may sum gradients.

    Reduced are the buffers of all-reduces: gradients of all rows (dense), or of those that any replica's batch hits
    (sparse). Gathered are the outputs of all-gathers: ids of the rows that each replica's batch hits, as many as the
    largest has, and their gradients where no all-reduce follows.

    Args:
        placed_N: The shards.
        group_batch_size: Samples per step of the replica group.
        width: As `sync_bytes` takes it.
    """
    cut = [placed.shard.access() for placed in placed_N]
    tables = [placed.shard.table for placed in placed_N]
    profiles = ProfileBatch.of([profile for profile, _ in cut])
    lookups_N = np.array(
        [group_batch_size * table.pooling_factor * share for table, (_, share) in zip(tables, cut, strict=True)]
    )
    own_N = profiles.expected_distinct(lookups_N * [_largest_share(placed) for placed in placed_N])
    gathered_N = own_N * [len(placed.replicas) for placed in placed_N]
    row_bytes_N = np.array([placed.shard.embedding_dim * REDUCED_BYTES for placed in placed_N])
    # Where rows that are looked up move without a gradient, a number of each row tells which were.
    counts_N = np.array([REDUCED_BYTES * table.optimizer.has_decaying_moments for table in tables])
    all_bytes_N = (row_bytes_N + counts_N) * [float(placed.shard.num_embeddings) for placed in placed_N]
    hit_bytes_N = profiles.expected_distinct(lookups_N) * row_bytes_N
    id_bytes_N = np.array([width or id_bytes([table]) for table in tables])
    nothing_N = np.zeros(len(placed_N))
    return {
        GradSync.DENSE: np.column_stack([all_bytes_N, nothing_N]),
        GradSync.SPARSE: np.column_stack([hit_bytes_N, gathered_N * id_bytes_N]),
        GradSync.ALL_GATHER: np.column_stack([nothing_N, gathered_N * (row_bytes_N + id_bytes_N)]),
    }


def _largest_share(placed: PlacedShard) -> float:
    """Share of the group's samples that the replica serves which serves most of them."""
    if placed.fetch is None:
        return 1 / len(placed.replicas)
    return max(map(placed.fetch.count, range(len(placed.replicas)))) / len(placed.fetch)


def plan_traffic(plan: ShardingPlan, lookups_factor: LookupsFactor | None = None) -> Traffic:
    """Adds up what every placed shard sends.

    Each rank asks, for its local batch, every owner in the replica that it reads: lengths and ids (int32; int64
    in plans for a table of over 2^31 rows, or of weighted lookups). Owners
    answer with one vector per bag (`partial_sums`), or with one row per lookup (`rows`; per distinct row with
    `deduplicate`), in the payload's formats; sums may be added up on the way (`reduce_scatter`). Lookups are taken to
    spread evenly over the owners of a replica.

    What two ranks exchange is one message each way. Its blocks of int8 are whole; where shards of several replicas are
    exchanged beside others, the last blocks of both count.

    Args:
        plan: The plan, or that of one replica group.
        lookups_factor: How much longer than the mean the tables' batches are; left out, they are the mean.
    """
    local_batch = plan.group_batch_size / plan.group_size
    arrays, group_topology = plan.arrays, plan.replica_groups.group_topology(plan.topology)
    factors = [
        1.0 if lookups_factor is None else lookups_factor(one.shard.table, local_batch) for one in arrays.first_K
    ]
    bytes_KE = pair_bytes(
        arrays.first_K,
        local_batch,
        plan.payload,
        id_bytes=id_bytes(plan.tables.tables),
        lookups_factor_N=factors,
    )
    synced_K2 = sync_bytes(arrays.first_K, plan.group_batch_size, id_bytes(plan.tables.tables))
    scattered_K = np.array([one.collective is Collective.REDUCE_SCATTER for one in arrays.first_K])
    num_layouts = len(arrays.first_L)
    # Those of a layout together, and apart from them those whose sums travel by reduce-scatter.
    group_N = arrays.layout_N + num_layouts * scattered_K[arrays.kind_N]
    bytes_GE, synced_G2 = np.zeros((2 * num_layouts, len(_STREAMS))), np.zeros((2 * num_layouts, 2))
    np.add.at(bytes_GE, group_N, bytes_KE[arrays.kind_N])
    np.add.at(synced_G2, group_N, synced_K2[arrays.kind_N])
    single_ER = np.zeros((len(_STREAMS), plan.group_size))
    scattered_E = np.zeros(len(_STREAMS))
    reduced_R, gathered_R = np.zeros(plan.group_size), np.zeros(plan.group_size)

    layouts = []
    for group in dict.fromkeys(group_N.tolist()):
        is_scattered, index = divmod(group, num_layouts)
        first, pair_bytes_E = arrays.first_L[index], bytes_GE[group]
        if is_scattered:
            scattered_E += np.where(_IS_SCATTERED_E, pair_bytes_E, 0.0)
            pair_bytes_E = np.where(_IS_SCATTERED_E, 0.0, pair_bytes_E)
        if len(first.replicas) == 1:
            single_ER[:, arrays.ranks_L[index]] += pair_bytes_E[:, None]
            continue
        reduced, gathered = synced_G2[group].tolist()
        layout = LayoutTraffic(
            replicas=first.replicas,
            read_by_R=replicas_read(plan, first),
            pair_bytes_E=pair_bytes_E,
            gradient_bytes=(reduced + gathered) / len(first.replicas[0]),
        )
        layouts.append(layout)
        share = whole_share(first.replicas, group_topology)
        reduced_R[layout.owners_O] += share * reduced
        gathered_R[layout.owners_O] += share * gathered
    layouts = [one if one.stays else replace(one, pair_bytes_E=_messages(one.pair_bytes_E, plan)) for one in layouts]
    return Traffic(
        layouts=tuple(layouts),
        single_ER=_messages(single_ER, plan),
        scattered_E=scattered_E,
        reduced_R=reduced_R,
        gathered_R=gathered_R,
    )


def _messages(bytes_E: MsArray, plan: ShardingPlan) -> MsArray:
    """Bytes of messages by stream, shape (E,) or (E, R), with what fills up their last blocks."""
    dtypes = {Stream.FORWARD: plan.payload.forward, Stream.BACKWARD: plan.payload.backward}
    return np.stack(
        [
            message_bytes(of, dtypes[stream]) if stream in dtypes else of
            for stream, of in zip(_STREAMS, bytes_E, strict=True)
        ]
    )


def replicas_read(plan: ShardingPlan, placed: PlacedShard) -> _RankArray:
    """For each rank, the index of the replica that it reads, shape (R,).

    Without `fetch` that is the replica which the rank belongs to, else one of its own node, else they take turns.
    """
    if placed.fetch is not None:
        return np.array(placed.fetch, dtype=np.int64)
    owners_O, replica_O = _flat(placed.replicas)
    node_R = np.arange(plan.group_size) // plan.topology.local_world_size
    of_node = np.full(node_R[-1] + 1, -1, dtype=np.int64)
    of_node[node_R[owners_O][::-1]] = replica_O[::-1]  # the first replica on a node is written last
    turns_R = np.arange(plan.group_size, dtype=np.int64) % len(placed.replicas)
    read_by_R = np.where(of_node[node_R] >= 0, of_node[node_R], turns_R)
    read_by_R[owners_O] = replica_O
    return read_by_R


def _flat(replicas: Replicas) -> tuple[_RankArray, _RankArray]:
    """Ranks of all replicas one after the other, and the replica of each."""
    owners = [rank for replica in replicas for rank in replica]
    sizes = [len(replica) for replica in replicas]
    return np.array(owners, dtype=np.int64), np.repeat(np.arange(len(replicas)), sizes)


def _how_often(keys: _RankArray, among: _RankArray) -> MsArray:
    """For each key, how often it is among others."""
    known, counts = np.unique(among, return_counts=True)
    found = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[found] == keys, counts[found], 0).astype(np.float64)
