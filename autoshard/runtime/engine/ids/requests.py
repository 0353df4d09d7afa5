"""How the ids of a batch reach the processes that hold their rows.

Shape suffixes: F features, P processes, B samples of a local batch, L lookups, N jagged rows (a feature's bags for one
destination).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TypeAlias

import fbgemm_gpu  # noqa: F401 - registers the operators of torch.ops.fbgemm
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from autoshard.core.errors import InputError
from autoshard.evaluation.traffic import LENGTH_BYTES, Stream
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.engine.groups import JoinedGroups, WeakGroup
from autoshard.runtime.engine.holdings import OwnerRequest, Ownership
from autoshard.runtime.engine.ids.addresses import AddressMap, Bucketized, CutFeature, RowOrderMap
from autoshard.runtime.engine.ids.distinct import Distinct
from autoshard.runtime.engine.ids.faults import fault_of_all
from autoshard.runtime.engine.ids.hits import HitExchange, HitRows
from autoshard.runtime.engine.ids.messages import (
    BufferSizes,
    Flag,
    Jagged,
    Message,
    OrderedRows,
    Received,
    Request,
    header_size,
    id_dtype,
    message_size,
    packed,
)
from autoshard.runtime.engine.ids.turns import AT_ONCE, Turn

#: Bag lengths and ids of jagged rows, and how many ids each row has, on the host.
JaggedRows: TypeAlias = tuple[torch.Tensor, torch.Tensor, Sequence[int]]


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
class DistributedBatch:
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
        hits: Rows of this process's replicas whose gradients meet, kernel by kernel.
        ownership: That of the plan it was distributed under.
    """

    batch_size: int
    num_samples: int
    lengths_FB: torch.Tensor
    counts_F: tuple[int, ...]
    served: tuple[Request, ...]
    local: Request
    rows: RowLookups | None
    bucketized: Bucketized | None
    hits: tuple[HitRows, ...] = ()
    ownership: Ownership | None = None


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
        orders: Mapping[str, RowOrderMap],
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
        self._is_first_F = torch.arange(self._num_features, device=device) == 0
        self._id_dtype = id_dtype([*(table.num_embeddings for table in tables), ownership.most_replicated_rows])
        cut = _cut_features(ownership, reader, orders)
        self.addresses = AddressMap(cut, ownership.holdings, reader, orders, device) if cut else None
        cut = self.addresses.features if self.addresses else []
        self.cut_index = {(one.feature, ownership.holdings[one.holdings[0]].columns): n for n, one in enumerate(cut)}
        self._cut_order = _Order([one.feature for one in cut], self._num_features, device)
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
        self._wire_order = _Order(wire, num_sources, device)
        self._rows_order = _Order(rows_only, num_sources, device) if rows_only else None
        self._once = self._asked_once(device)
        self._num_slots = [(len(sums), [len(of) for of in rows]) for sums, rows in by_owner]
        self._hits = HitExchange(ownership, reader, device)
        self._rooms = BufferSizes(self._num_processes)
        #: Bytes of rows of replicas that this process has told the others that it hits.
        self.hit_bytes = 0
        #: Bytes of lengths and ids that this process has sent to each process.
        self.sent_bytes = {stream: [0.0] * self._num_processes for stream in (Stream.LENGTHS, Stream.IDS)}

    def over(self, groups: JoinedGroups) -> InputExchange:
        """The same exchange over other process groups of the same processes, with counters and rooms of its own."""
        twin = copy(self)
        twin._group, twin._peers, twin._rooms = groups.own, groups.peers, BufferSizes(self._num_processes)
        twin.hit_bytes, twin.sent_bytes = 0, {stream: [0.0] * self._num_processes for stream in self.sent_bytes}
        return twin

    def _sources(self, asked: OwnerRequest, owner: int) -> tuple[list[int], list[list[int]]]:
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

    def __call__(self, batch: BatchOfIds | InputError, turn: Turn = AT_ONCE) -> DistributedBatch:
        """Exchanges one batch; every process calls it.

        Args:
            batch: The batch, or why this process has none.
            turn: When to launch collectives.

        Raises:
            InputError: If a process has none, or one that cannot be looked up: the same on all processes.
        """
        fault, counts_F = self._checked(batch)
        if fault is not None or isinstance(batch, InputError):
            nothing = torch.zeros(self._num_features, 0, dtype=torch.int32, device=self._device)
            batch, counts_F = BatchOfIds(nothing, nothing.view(-1)), (0,) * self._num_features
        lengths_FB, ids_L = batch.lengths_FB.to(torch.int32).contiguous(), batch.ids_L.long().contiguous()
        if batch.batch_size < self._batch_size:
            lengths_FB = pad(lengths_FB, (0, self._batch_size - batch.batch_size))
        bucketized, sources = self._sources_of(lengths_FB, ids_L, counts_F)
        wire = OrderedRows(*self._wire_order(*sources), self._num_slots)
        rows = None
        if self._rows_order is not None:
            rows = self._row_lookups(wire, self._rows_order, sources, lengths_FB, bucketized, counts_F)
        requests = [wire.request(owner) for owner in range(self._num_processes + 1)]
        served, hits = self._exchanged(wire, self._hits.of(requests), fault, turn)
        return DistributedBatch(
            batch_size=self._batch_size,
            num_samples=batch.batch_size,
            lengths_FB=lengths_FB,
            counts_F=counts_F,
            served=served,
            local=requests[-1],
            rows=rows,
            bucketized=bucketized,
            hits=hits,
            ownership=self._ownership,
        )

    def _checked(self, batch: BatchOfIds | InputError) -> tuple[InputError | None, tuple[int, ...]]:
        """What is wrong with the batch, if anything is, and its ids of each feature; the host waits once for both."""
        if isinstance(batch, InputError):
            return batch, ()
        fault = batch.fault(self._num_features, self._device)
        if fault is not None:
            return fault, ()
        total, counts = len(batch.ids_L), batch.lengths_FB.sum(1)
        has_negative = (batch.lengths_FB < 0).any()
        # Where lengths are wrong, which is said first, all ids count as those of feature 0.
        is_right = (counts.sum() == total) & ~has_negative
        bounds_L = torch.repeat_interleave(
            self._rows_F, torch.where(is_right, counts, total * self._is_first_F), output_size=total
        )
        is_bad_L = (batch.ids_L < 0) | (batch.ids_L >= bounds_L)
        negative, bad, *counts_F = torch.cat([has_negative.view(1), is_bad_L.any().view(1), counts]).tolist()
        return self._fault(batch, counts_F, is_bad_L, has_negative=bool(negative), has_bad=bool(bad)), tuple(counts_F)

    def _fault(
        self, batch: BatchOfIds, counts_F: Sequence[int], is_bad_L: torch.Tensor, *, has_negative: bool, has_bad: bool
    ) -> InputError | None:
        fault = batch.lengths_fault(counts_F, has_negative=has_negative)
        if fault is not None:
            return fault
        if batch.batch_size > self._batch_size:
            return InputError(
                f"every process takes up to {self._batch_size} samples a step, got {batch.batch_size}",
                field="batch_size",
            )
        if not has_bad:
            return None
        first = int(is_bad_L.nonzero()[0])
        feature = bisect_right(list(accumulate(counts_F)), first)
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
    ) -> tuple[Bucketized | None, JaggedRows]:
        """Jagged rows that messages are made of: the batch's features, and those that are cut by destination.

        The host waits for how many ids go to each destination.
        """
        if self.addresses is None:
            return None, (lengths_FB, ids_L, counts_F)
        cut = self._cut_order(lengths_FB, ids_L, counts_F)
        bucketized = self.addresses(*cut, with_lookups=self._rows_order is not None)
        by_destination = bucketized.lengths_DFB.view(-1, lengths_FB.shape[1])
        counts: list[int] = by_destination.sum(1).tolist()
        if not self._has_whole:
            return bucketized, (by_destination, bucketized.offsets_L, counts)
        lengths_NB, source_L = torch.cat([lengths_FB, by_destination]), torch.cat([ids_L, bucketized.offsets_L])
        return bucketized, (lengths_NB, source_L, [*counts_F, *counts])

    def _row_lookups(
        self,
        wire: OrderedRows,
        order: _Order,
        sources: JaggedRows,
        lengths_FB: torch.Tensor,
        bucketized: Bucketized | None,
        counts_F: Sequence[int],
    ) -> RowLookups:
        """Which lookup each row answers; asks for each row once where that is wanted."""
        lengths_NB, _, counts_N = sources
        lookups_L = torch.arange(sum(counts_F), device=self._device)
        if bucketized is not None:
            assert bucketized.lookups_L is not None, "rows are asked for"
            _, cut_L, _ = self._cut_order(lengths_FB.sum(1, keepdim=True, dtype=torch.int32), lookups_L, counts_F)
            cut_L = cut_L.index_select(0, bucketized.lookups_L.long())
            lookups_L = torch.cat([lookups_L, cut_L]) if self._has_whole else cut_L
        _, lookups_L, _ = order(lengths_NB, lookups_L, counts_N)
        owners = range(self._num_processes + 1)
        ids, arrival_L = self._distinct([ids_L for owner in owners for ids_L in wire.row_ids(owner)])
        pieces, num_rows = iter(ids), []
        for owner, asked in enumerate([*self._asked, self._local]):
            wire.ask_for(owner, list(islice(pieces, len(asked.rows))))
            num_rows.append(tuple(len(one) for one in wire.rows(owner)))
        return RowLookups(lookups_L, arrival_L, tuple(wire.row_counts(owner) for owner in owners), tuple(num_rows))

    def _asked_once(self, device: torch.device) -> _Once:
        holdings = self._ownership.holdings
        own = [(owner, index) for owner, asked in enumerate(self._asked) for index in asked.rows]
        own += [(self._reader, index) for index in self._local.rows]
        places = [place for place, (_, index) in enumerate(own) if holdings[index].deduplicate]
        num_rows = [holdings[own[place][1]].num_rows(own[place][0]) for place in places]
        return _Once(places, Distinct(num_rows, device))

    def _distinct(self, ids: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Ids of every owner's holdings, where it is wanted each once; and the one that answers each, over all."""
        places, distinct, inverse = self._once.places, list(ids), {}
        if places:
            found, hit = self._once.distinct([ids[place] for place in places])
            inverse = dict(zip(places, hit(), strict=True))
            for place, one in zip(places, found, strict=True):
                distinct[place] = one
        return distinct, _arrivals(distinct, inverse, self._device)

    def _exchanged(
        self, wire: OrderedRows, hits: Sequence[Sequence[torch.Tensor]], fault: InputError | None, turn: Turn
    ) -> tuple[tuple[Request, ...], tuple[HitRows, ...]]:
        """Sends lengths and ids; what all processes ask this one for, and rows of its replicas that they hit."""
        messages = [wire.message(owner, hits[owner], self._id_dtype) for owner in range(self._num_processes)]
        flag = Flag.BAD if fault is not None else self._rooms.flag(messages)
        came = self._sent(messages, flag, turn)
        bad = [process for process, one in enumerate(came) if one.flag is Flag.BAD]
        follows = any(one.flag is Flag.MORE for one in came)
        if bad or follows or self._peers is not None:
            turn.ending()
        refusal = fault_of_all(fault, bad, self._group, self._peers, self._device)
        if refusal is not None:
            raise refusal from (None if fault is None else fault.__cause__)
        ids = [one.ids_L for one in came]
        if follows:
            ids = self._with_rest(messages, came)
        self._rooms.adapt([one.num_ids for one in messages], [one.num_ids for one in came])
        for owner, message in enumerate(messages):
            self.sent_bytes[Stream.LENGTHS][owner] += len(message.lengths_Z) * LENGTH_BYTES
            self.sent_bytes[Stream.LENGTHS][owner] += len(message.row_counts) * LENGTH_BYTES
            self.sent_bytes[Stream.IDS][owner] += message.num_asked * self._id_dtype.itemsize
        self.hit_bytes += self._hits.num_told(hits) * self._id_dtype.itemsize
        read = [
            self._read(one, ids_L.long(), len(of.sums), len(of.rows))
            for one, ids_L, of in zip(came, ids, self._served, strict=True)
        ]
        return tuple(request for request, _ in read), self._hits.met([heard for _, heard in read])

    @staticmethod
    def _read(
        message: Received, ids_L: torch.Tensor, num_sums: int, num_rows: int
    ) -> tuple[Request, Sequence[torch.Tensor]]:
        """What a process asks for, and the rows that it tells of."""
        counts = message.counts
        of_sums, of_rows = counts[:num_sums], counts[num_sums : num_sums + num_rows]
        summed_L, rows_L, *hits = torch.split(ids_L, [sum(of_sums), sum(of_rows), *counts[num_sums + num_rows :]])
        return Request(Jagged(message.lengths_NB, of_sums, summed_L), of_rows, rows_L), hits

    def _sent(self, messages: Sequence[Message], flag: Flag, turn: Turn) -> list[Received]:
        """Sends messages to all processes; those that come from them."""
        B = self._batch_size
        sent, sent_sizes = packed(messages, self._rooms.sent, flag)
        num_rows = [len(of.rows) + len(hits) for of, hits in zip(self._served, self._hits.heard, strict=True)]
        headers = [header_size(len(of.sums) * B + rows) for of, rows in zip(self._served, num_rows, strict=True)]
        sizes = [message_size(*pair, self._id_dtype) for pair in zip(headers, self._rooms.received, strict=True)]
        received = torch.empty(sum(sizes), dtype=torch.int32, device=self._device)
        with turn.sending():
            work = dist.all_to_all_single(received, sent, sizes, sent_sizes, self._group, async_op=True)
        assert work is not None, "this process is in the group"
        work.wait()
        came = torch.split(received, sizes)
        lengths = [one[: len(of.sums) * B].view(-1, B) for one, of in zip(came, self._served, strict=True)]
        known: list[torch.Tensor] = []
        for one, lengths_NB, rows in zip(came, lengths, num_rows, strict=True):
            first = lengths_NB.numel()
            known += [lengths_NB.sum(1), one[first : first + rows + 1]]
        # The host waits for the device: it has to know how many ids there are.
        numbers = iter(torch.cat(known).tolist())
        counts = [
            tuple(islice(numbers, len(of.sums) + rows + 1)) for of, rows in zip(self._served, num_rows, strict=True)
        ]
        return [
            Received(lengths_NB, of[:-1], Flag(of[-1]), one[header:].view(self._id_dtype))
            for one, header, lengths_NB, of in zip(came, headers, lengths, counts, strict=True)
        ]

    def _with_rest(self, messages: Sequence[Message], came: Sequence[Received]) -> list[torch.Tensor]:
        """Sends the ids that found no room; all of each process together."""
        rests = [message.rest(room) for message, room in zip(messages, self._rooms.sent, strict=True)]
        sizes = [one.num_ids - len(one.ids_L) for one in came]
        received_L = torch.empty(sum(sizes), dtype=self._id_dtype, device=self._device)
        dist.all_to_all_single(received_L, torch.cat(rests), sizes, [len(one) for one in rests], self._group)
        return [torch.cat([one.ids_L, rest]) for one, rest in zip(came, torch.split(received_L, sizes), strict=True)]


def _cut_features(ownership: Ownership, reader: int, orders: Mapping[str, RowOrderMap]) -> list[CutFeature]:
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


@dataclass(frozen=True, slots=True, eq=False)
class _Once:
    """What a process asks for with each row once.

    Attributes:
        places: Their numbers among all owners' holdings whose rows it asks for.
        distinct: Finds the distinct rows of each.
    """

    places: list[int]
    distinct: Distinct


class _Order:
    """Puts jagged rows in an order, in which some may be missing and others be there twice.

    Args:
        order: Their numbers.
        num_rows: How many there are to choose from.
        device: Where they are.
    """

    def __init__(self, order: Sequence[int], num_rows: int, device: torch.device) -> None:
        self._order = tuple(order)
        self._changes = self._order != tuple(range(num_rows))
        self._order_N = torch.tensor(order, dtype=torch.int32, device=device)

    def __call__(self, lengths_NB: torch.Tensor, ids_L: torch.Tensor, counts_N: Sequence[int]) -> JaggedRows:
        """The rows in their order."""
        if not self._changes:
            return lengths_NB, ids_L, counts_N
        counts = [counts_N[row] for row in self._order]
        lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(self._order_N, lengths_NB, ids_L, None, sum(counts))
        return lengths, ids, counts


def _arrivals(ids: Sequence[torch.Tensor], inverse: Mapping[int, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Which of all ids answers each lookup.

    Args:
        ids: As they are asked for, owner by owner and holding by holding.
        inverse: For those that are asked for once, by their number, the one of all these that answers each lookup.
        device: Where they are.
    """
    arrivals, start, start_once = [], 0, 0
    for place, of_holding in enumerate(ids):
        if place in inverse:
            shift = start - start_once
            arrivals.append(inverse[place] + shift if shift else inverse[place])
            start_once += len(of_holding)
        else:
            arrivals.append(torch.arange(start, start + len(of_holding), device=device))
        start += len(of_holding)
    return torch.cat(arrivals)
