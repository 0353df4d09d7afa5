"""How the ids of a batch reach the processes that hold their rows.

Shape suffixes: F features, P processes, B samples of a local batch, L lookups, N jagged rows (a feature's bags for one
destination).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice

import fbgemm_gpu  # noqa: F401 - registers the operators of torch.ops.fbgemm
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from autoshard.core.errors import InputError
from autoshard.evaluation.traffic import LENGTH_BYTES, Stream
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.engine.groups import JoinedGroups, WeakGroup
from autoshard.runtime.engine.holdings import Asked, Ownership
from autoshard.runtime.engine.ids.addresses import AddressMap, Bucketized, CutFeature, RowOrder
from autoshard.runtime.engine.ids.faults import fault_of_all
from autoshard.runtime.engine.ids.messages import (
    Flag,
    Message,
    Received,
    Rooms,
    Wire,
    header_size,
    id_dtype,
    message_size,
    packed,
)


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """Ids of several slots, slot by slot.

    Attributes:
        lengths_NB: Bag lengths of slots whose sums are asked for.
        counts_N: Ids of each slot, on the host.
        ids_L: The ids: places of rows.
    """

    lengths_NB: torch.Tensor
    counts_N: tuple[int, ...]
    ids_L: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What one process asks another for.

    Attributes:
        sums: Of slots whose sums it wants.
        counts: Rows of each holding whose rows it wants.
        ids_L: Their places, holding by holding.
    """

    sums: Jagged
    counts: tuple[int, ...]
    ids_L: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowLookups:
    """Lookups whose rows a process asked for, in the order in which the rows come.

    Attributes:
        lookups_L: Lookup of the batch that each is.
        arrival_L: Row that answers it, counted over all holdings in their order.
        counts: For each process and holding, the lookups of every feature of its table.
        num_rows: For each process and holding, the rows that come.
    """

    lookups_L: torch.Tensor
    arrival_L: torch.Tensor
    counts: tuple[tuple[tuple[int, ...], ...], ...]
    num_rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Distributed:
    """A batch whose ids are where they are looked up.

    Attributes:
        batch_size: B, the same on all processes.
        num_samples: Samples of this process's batch, at most B; the others have no ids.
        lengths_FB: Bag lengths of this process's batch.
        counts_F: Its ids of each feature.
        served: What each process asks this one for.
        local: What this process reads from its own replicas.
        rows: Lookups whose rows come from other processes, or from this one's kernels, process by process; and last
            those that are read from replicas here. None if there are none.
        bucketized: Lookups of features that are cut, by destination; None if there are none.
    """

    batch_size: int
    num_samples: int
    lengths_FB: torch.Tensor
    counts_F: tuple[int, ...]
    served: tuple[Request, ...]
    local: Request
    rows: RowLookups | None
    bucketized: Bucketized | None


class InputExchange:
    """Sends every process the ids that it looks up: one all-to-all of lengths and ids for the whole plan.

    A bag's length travels only where its sum is asked for; where rows are, their number does. Ids travel with the
    lengths; where there are many more of them than in the last batches, the rest follows in a second all-to-all.
    Whether a batch can be looked up travels with the lengths, so that all processes refuse a bad one together.
    Messages are those of a full batch: a smaller one is filled up with samples without ids.

    Args:
        ownership: Who holds what.
        orders: Row orders of tables that are cut by access rank, by name.
        local_batch_size: B, the most samples of a process's batch.
        groups: The processes; those of other replica groups refuse a bad batch, too.
        device: Where batches are.
    """

    _group = WeakGroup[dist.ProcessGroup]()
    _peers = WeakGroup[dist.ProcessGroup | None]()

    def __init__(
        self,
        ownership: Ownership,
        orders: Mapping[str, RowOrder],
        local_batch_size: int,
        groups: JoinedGroups,
        device: torch.device,
    ) -> None:
        self._ownership, self._batch_size, self._device = ownership, local_batch_size, device
        self._group, self._peers = groups.own, groups.peers
        self._reader = reader = groups.own.rank()
        self._num_processes = ownership.num_processes
        self._asked = [ownership.asked(reader, owner) for owner in range(self._num_processes)]
        self._local = ownership.local(reader)
        self._served = [ownership.asked(other, reader) for other in range(self._num_processes)]
        tables = ownership.tables.tables
        self._rows_F = torch.tensor([table.num_embeddings for table in tables for _ in table.features], device=device)
        self._num_features = len(self._rows_F)
        self._id_dtype = id_dtype(table.num_embeddings for table in tables)
        cut = _cut_features(ownership, reader, orders)
        self.addresses = AddressMap(cut, ownership.holdings, reader, orders, device) if cut else None
        cut = self.addresses.features if self.addresses else []
        self.cut_index = {(one.feature, ownership.holdings[one.holdings[0]].columns): n for n, one in enumerate(cut)}
        self._cut_order = _permutation([one.feature for one in cut], self._num_features, device)
        self._cut_features = [one.feature for one in cut]
        by_owner = [self._sources(asked, owner) for owner, asked in enumerate(self._asked)]
        by_owner.append(self._sources(self._local, reader))
        rows_only = [source for _, rows in by_owner for of in rows for source in of]
        wire = [source for sums, rows in by_owner for source in (*sums, *(one for of in rows for one in of))]
        # Where all features are cut, messages are made of what is bucketized alone.
        self._has_whole = self.addresses is None or any(source < self._num_features for source in wire)
        num_sources = self.addresses.num_buckets * len(cut) if self.addresses else 0
        if self._has_whole:
            num_sources += self._num_features
        else:
            wire = [source - self._num_features for source in wire]
            rows_only = [source - self._num_features for source in rows_only]
        self._wire_order = _permutation(wire, num_sources, device)
        self._rows_order = torch.tensor(rows_only, dtype=torch.int32, device=device) if rows_only else None
        self._needs_counts = bool(rows_only) or (self.addresses is not None and self.addresses.needs_counts)
        self._num_slots = [(len(sums), [len(of) for of in rows]) for sums, rows in by_owner]
        self._rooms = Rooms(self._num_processes)
        #: Bytes of lengths and ids that this process has sent to each process.
        self.sent_bytes = {stream: [0.0] * self._num_processes for stream in (Stream.LENGTHS, Stream.IDS)}

    def over(self, groups: JoinedGroups) -> InputExchange:
        """The same exchange over other process groups of the same processes, with counters and rooms of its own."""
        twin = copy(self)
        twin._group, twin._peers, twin._rooms = groups.own, groups.peers, Rooms(self._num_processes)
        twin.sent_bytes = {stream: [0.0] * self._num_processes for stream in self.sent_bytes}
        return twin

    def _sources(self, asked: Asked, owner: int) -> tuple[list[int], list[list[int]]]:
        """Jagged rows of sums, and those of every holding whose rows are asked for."""
        sums = [self._source(slot.holding, slot.feature, owner) for slot in asked.sums]
        features_of, holdings = self._ownership.features_of, self._ownership.holdings
        rows = [
            [self._source(index, feature, owner) for feature in features_of[holdings[index].table]]
            for index in asked.rows
        ]
        return sums, rows

    def _source(self, holding: int, feature: int, owner: int) -> int:
        number = self.cut_index.get((feature, self._ownership.holdings[holding].columns))
        if number is None or self.addresses is None:
            return feature
        bucket = self.addresses.destinations[number].index((owner, holding))
        return self._num_features + bucket * len(self.cut_index) + number

    def __call__(self, batch: BatchOfIds | InputError) -> Distributed:
        """Exchanges one batch; every process calls it.

        Args:
            batch: The batch, or why this process has none.

        Raises:
            InputError: If a process has none, or one that cannot be looked up: the same on all processes.
        """
        fault = batch if isinstance(batch, InputError) else self._fault(batch)
        if fault is not None or isinstance(batch, InputError):
            nothing = torch.zeros(self._num_features, 0, dtype=torch.int32, device=self._device)
            batch = BatchOfIds(nothing, nothing.view(-1))
        lengths_FB, ids_L = batch.lengths_FB.to(torch.int32).contiguous(), batch.ids_L.long().contiguous()
        if batch.batch_size < self._batch_size:
            lengths_FB = pad(lengths_FB, (0, self._batch_size - batch.batch_size))
        counts_F = tuple(lengths_FB.sum(1).tolist()) if self._needs_counts else ()
        bucketized, lengths_NB, source_L = self._sources_of(lengths_FB, ids_L, counts_F)
        wire = Wire(*_permuted(self._wire_order, lengths_NB, source_L), self._num_slots)
        rows = self._row_lookups(wire, lengths_NB, bucketized, counts_F) if self._rows_order is not None else None
        served = self._exchanged(wire, fault)
        return Distributed(
            batch_size=self._batch_size,
            num_samples=batch.batch_size,
            lengths_FB=lengths_FB,
            counts_F=counts_F,
            served=served,
            local=self._request_here(wire),
            rows=rows,
            bucketized=bucketized,
        )

    def _fault(self, batch: BatchOfIds) -> InputError | None:
        """What is wrong with the batch, if anything is."""
        fault = batch.fault(self._num_features, self._device)
        if fault is not None:
            return fault
        if batch.batch_size > self._batch_size:
            return InputError(
                f"every process takes up to {self._batch_size} samples a step, got {batch.batch_size}",
                field="batch_size",
            )
        total = len(batch.ids_L)
        bounds_L = torch.repeat_interleave(self._rows_F, batch.lengths_FB.sum(1), output_size=total)
        is_bad_L = (batch.ids_L < 0) | (batch.ids_L >= bounds_L)
        if not bool(is_bad_L.any()):
            return None
        first = int(is_bad_L.nonzero()[0])
        feature = int(torch.searchsorted(batch.lengths_FB.sum(1).cumsum(0), first, right=True))
        table, name = self._named(feature)
        return InputError(
            f"table {table!r} has rows 0 to {int(self._rows_F[feature]) - 1}, got id {int(batch.ids_L[first])}",
            field=f"feature {name!r}",
        )

    def _named(self, feature: int) -> tuple[str, str]:
        names = [(table.name, one.name) for table in self._ownership.tables.tables for one in table.features]
        return names[feature]

    def _sources_of(
        self, lengths_FB: torch.Tensor, ids_L: torch.Tensor, counts_F: Sequence[int]
    ) -> tuple[Bucketized | None, torch.Tensor, torch.Tensor]:
        """Jagged rows that messages are made of: the batch's features, and those that are cut by destination."""
        if self.addresses is None:
            return None, lengths_FB, ids_L
        cut_FB, cut_L = _permuted(self._cut_order, lengths_FB, ids_L)
        counts = [counts_F[feature] for feature in self._cut_features] if self.addresses.needs_counts else []
        bucketized = self.addresses(cut_FB, cut_L, counts, with_lookups=self._rows_order is not None)
        by_destination = bucketized.lengths_DFB.view(-1, lengths_FB.shape[1])
        if not self._has_whole:
            return bucketized, by_destination, bucketized.offsets_L
        return bucketized, torch.cat([lengths_FB, by_destination]), torch.cat([ids_L, bucketized.offsets_L])

    def _row_lookups(
        self, wire: Wire, lengths_NB: torch.Tensor, bucketized: Bucketized | None, counts_F: Sequence[int]
    ) -> RowLookups:
        """Which lookup each row answers; asks for each row once where that is wanted."""
        assert self._rows_order is not None, "there are rows"
        lookups_L = torch.arange(sum(counts_F), device=self._device)
        if bucketized is not None:
            assert bucketized.lookups_L is not None, "rows are asked for"
            cut_L = lookups_L
            if self._cut_order is not None:
                one_FB = torch.tensor([counts_F], dtype=torch.int32, device=self._device).view(-1, 1)
                cut_L = _permuted(self._cut_order, one_FB, lookups_L)[1]
            cut_L = cut_L.index_select(0, bucketized.lookups_L.long())
            lookups_L = torch.cat([lookups_L, cut_L]) if self._has_whole else cut_L
        _, lookups_L = _permuted(self._rows_order, lengths_NB, lookups_L)
        arrivals, counts, num_rows, start = [], [], [], 0
        for owner, asked in enumerate([*self._asked, self._local]):
            counts.append(wire.row_counts(owner))
            uniques, sizes = [], []
            for holding, of_features, ids_L in zip(asked.rows, counts[-1], wire.row_ids(owner), strict=True):
                if self._ownership.holdings[holding].deduplicate:
                    ids_L, inverse_L = torch.unique(ids_L, return_inverse=True)
                    arrivals.append(inverse_L + start)
                else:
                    arrivals.append(torch.arange(start, start + sum(of_features), device=self._device))
                uniques.append(ids_L)
                sizes.append(len(ids_L))
                start += len(ids_L)
            wire.ask_for(owner, uniques)
            num_rows.append(tuple(sizes))
        arrival_L = torch.cat(arrivals) if arrivals else lookups_L
        return RowLookups(lookups_L, arrival_L, tuple(counts), tuple(num_rows))

    def _exchanged(self, wire: Wire, fault: InputError | None) -> tuple[Request, ...]:
        """Sends lengths and ids; what all processes ask this one for."""
        messages = [wire.message(owner, self._id_dtype) for owner in range(self._num_processes)]
        flag = Flag.BAD if fault is not None else self._rooms.flag(messages)
        came = self._sent(messages, flag)
        bad = [process for process, one in enumerate(came) if one.flag is Flag.BAD]
        refusal = fault_of_all(fault, bad, self._group, self._peers, self._device)
        if refusal is not None:
            raise refusal from (None if fault is None else fault.__cause__)
        ids = [one.ids_L for one in came]
        if any(one.flag is Flag.MORE for one in came):
            ids = self._with_rest(messages, came)
        self._rooms.adapt([one.num_ids for one in messages], [one.num_ids for one in came])
        for owner, message in enumerate(messages):
            self.sent_bytes[Stream.LENGTHS][owner] += message.num_numbers * LENGTH_BYTES
            self.sent_bytes[Stream.IDS][owner] += message.num_ids * self._id_dtype.itemsize
        return tuple(_request(one, ids_L.long()) for one, ids_L in zip(came, ids, strict=True))

    def _sent(self, messages: Sequence[Message], flag: Flag) -> list[Received]:
        """Sends messages to all processes; those that come from them."""
        B = self._batch_size
        sent, sent_sizes = packed(messages, self._rooms.sent, flag)
        headers = [header_size(len(asked.sums) * B + len(asked.rows)) for asked in self._served]
        sizes = [message_size(*pair, self._id_dtype) for pair in zip(headers, self._rooms.received, strict=True)]
        received = torch.empty(sum(sizes), dtype=torch.int32, device=self._device)
        dist.all_to_all_single(received, sent, sizes, sent_sizes, self._group)
        came = torch.split(received, sizes)
        lengths = [one[: len(of.sums) * B].view(-1, B) for one, of in zip(came, self._served, strict=True)]
        known: list[torch.Tensor] = []
        for one, lengths_NB, asked in zip(came, lengths, self._served, strict=True):
            first = lengths_NB.numel()
            known += [lengths_NB.sum(1), one[first : first + len(asked.rows) + 1]]
        # The host waits for the device: it has to know how many ids there are.
        numbers = iter(torch.cat(known).tolist())
        counts = [tuple(islice(numbers, len(of.sums) + len(of.rows) + 1)) for of in self._served]
        return [
            Received(lengths_NB, of[:-1], Flag(of[-1]), one[header:].view(self._id_dtype))
            for one, header, lengths_NB, of in zip(came, headers, lengths, counts, strict=True)
        ]

    def _request_here(self, wire: Wire) -> Request:
        """What this process reads from its own replicas."""
        lengths_NB, counts_N, ids_L = wire.sums(self._num_processes)
        rows = wire.rows(self._num_processes)
        return Request(
            sums=Jagged(lengths_NB, counts_N, ids_L),
            counts=tuple(len(one) for one in rows),
            ids_L=torch.cat(rows) if rows else ids_L[:0],
        )

    def _with_rest(self, messages: Sequence[Message], came: Sequence[Received]) -> list[torch.Tensor]:
        """Sends the ids that found no room; all of each process together."""
        rests = [message.rest(room) for message, room in zip(messages, self._rooms.sent, strict=True)]
        sizes = [one.num_ids - len(one.ids_L) for one in came]
        received_L = torch.empty(sum(sizes), dtype=self._id_dtype, device=self._device)
        dist.all_to_all_single(received_L, torch.cat(rests), sizes, [len(one) for one in rests], self._group)
        return [torch.cat([one.ids_L, rest]) for one, rest in zip(came, torch.split(received_L, sizes), strict=True)]


def _request(message: Received, ids_L: torch.Tensor) -> Request:
    num_sums = len(message.lengths_NB)
    counts_N, row_counts = message.counts[:num_sums], message.counts[num_sums:]
    summed = sum(counts_N)
    return Request(sums=Jagged(message.lengths_NB, counts_N, ids_L[:summed]), counts=row_counts, ids_L=ids_L[summed:])


def _cut_features(ownership: Ownership, reader: int, orders: Mapping[str, RowOrder]) -> list[CutFeature]:
    """Features that a process reads from several places, once for each range of columns."""
    by_columns: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for index, holding in enumerate(ownership.holdings):
        by_columns.setdefault((holding.table, holding.columns), []).append(index)
    cut = []
    for (table, _), indices in by_columns.items():
        one = ownership.holdings[indices[0]]
        is_plain = len(indices) == 1 and one.is_whole and len(one.owners(reader)) == 1
        if is_plain and one.of.name not in orders and all(held.num_parts == 1 for held in one.ranges):
            continue
        cut += [CutFeature(feature, tuple(indices)) for feature in ownership.features_of[table]]
    return cut


def _permutation(order: Sequence[int], num_rows: int, device: torch.device) -> torch.Tensor | None:
    """The order as FBGEMM takes it; None if it changes nothing."""
    if list(order) == list(range(num_rows)):
        return None
    return torch.tensor(order, dtype=torch.int32, device=device)


def _permuted(
    order: torch.Tensor | None, lengths_NB: torch.Tensor, ids_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if order is None:
        return lengths_NB, ids_L
    lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths_NB, ids_L, None, None)
    return lengths, ids
