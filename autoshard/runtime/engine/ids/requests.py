"""How the ids of a batch reach the processes that hold their rows.

Shape suffixes: F features, P processes, B samples of a local batch, L lookups, N jagged rows (a feature's bags for one
destination), X bounds of runs of ids, Z numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from operator import itemgetter

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from autoshard.core.errors import InputError
from autoshard.evaluation.traffic import LENGTH_BYTES, Stream, is_weighted
from autoshard.runtime.access_counts import AccessCounter
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.engine.groups import JoinedGroups, WeakGroup
from autoshard.runtime.engine.holdings import OwnerRequest, Ownership
from autoshard.runtime.engine.ids.addresses import AddressMap, Bucketized, CutFeature, RowOrderMap
from autoshard.runtime.engine.ids.distinct import Distinct, DistinctRows
from autoshard.runtime.engine.ids.faults import fault_of_all, first_group
from autoshard.runtime.engine.ids.hits import HitExchange, HitRows, ToldRows
from autoshard.runtime.engine.ids.jagged import JaggedOrder, Runs
from autoshard.runtime.engine.ids.messages import (
    BufferSizes,
    Flag,
    Request,
    id_dtype,
    with_weights,
    without_weights,
)
from autoshard.runtime.engine.ids.turns import AT_ONCE, Turn
from autoshard.runtime.engine.staging import staged, waits


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
        batch: This process's batch.
        batch_size: B, the same on all processes.
        num_samples: Samples of this process's batch, at most B; the others have no ids.
        lengths_FB: Bag lengths of this process's batch.
        counts_F: Its ids of each feature.
        served: What each process asks this one for.
        local: What this process reads from its own replicas.
        rows: Lookups whose rows come from other processes, or from this one's kernels, process by process; and last
            those that are read from replicas here. None if there are none.
        bucketized: Lookups of features that are cut, by destination; None if there are none.
        weights_L: Weights of this process's ids; None where lookups are not weighted.
        hits: Rows of this process's replicas whose gradients meet, kernel by kernel.
        ownership: That of the plan it was distributed under.
    """

    batch: BatchOfIds
    batch_size: int
    num_samples: int
    lengths_FB: torch.Tensor
    counts_F: tuple[int, ...]
    served: tuple[Request, ...]
    local: Request
    rows: RowLookups | None
    bucketized: Bucketized | None
    weights_L: torch.Tensor | None = None
    hits: tuple[HitRows, ...] = ()
    ownership: Ownership | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What a process asks all others for, on its device: the host does not know yet how many ids of what there are.

    Attributes:
        is_good: Whether the batch can be looked up; None for one that is known not to be.
        num_samples: Samples of the batch.
        lengths_FB: Its bag lengths, filled up with samples without ids; none of them where they are wrong.
        counts_F: Its ids of each feature, int64.
        given_L: Its ids, feature by feature.
        weights_L: Their weights; None where lookups are not weighted.
        bucketized: Lookups of features that are cut, by destination; None if there are none.
        lengths_SB: Bag lengths of the jagged rows that messages are made of.
        lengths_NB: Those of messages, in the order in which they travel.
        counts_N: Their ids.
        ids_L: Their ids, with weights where lookups are weighted, and last those of rows that are asked for once.
        once: Rows that are asked for once; None for none.
        bounds_X: Bounds of the runs of ids that make up messages.
        told: Rows of replicas that the batch hits; None for none.
    """

    is_good: torch.Tensor | None
    num_samples: int
    lengths_FB: torch.Tensor
    counts_F: torch.Tensor
    given_L: torch.Tensor
    weights_L: torch.Tensor | None
    bucketized: Bucketized | None
    lengths_SB: torch.Tensor
    lengths_NB: torch.Tensor
    counts_N: torch.Tensor
    ids_L: torch.Tensor
    once: DistinctRows | None
    bounds_X: torch.Tensor
    told: ToldRows | None


@dataclass(frozen=True, slots=True, eq=False)
class _Came:
    """What came from all processes, and all numbers of a batch that the host has to know.

    Attributes:
        lengths_P: Bag lengths of the sums that each process asks for.
        ids_P: Its ids, and what lies behind them in their room.
        numbers_P: Of each process: ids of each slot of sums, rows of each holding, rows of each kernel that it hits.
        flags_P: Its flag.
        samples_P: Samples of its batch.
        own: Numbers of this process's batch: ids of each jagged row, rows of each holding, rows of each kernel that
            processes are told of, the flag, the samples.
        counts_F: Its ids of each feature.
        meeting: Rows whose gradients meet here, and where those of each kernel end.
        first_bad: The first replica group that has a bad batch; None where there is one group.
    """

    lengths_P: list[torch.Tensor]
    ids_P: list[torch.Tensor]
    numbers_P: list[tuple[int, ...]]
    flags_P: list[Flag]
    samples_P: list[int]
    own: list[int]
    counts_F: tuple[int, ...]
    meeting: tuple[DistinctRows | None, list[int]]
    first_bad: int | None


class InputExchange:
    """Sends every process the ids that it looks up: one all-to-all of lengths and ids for the whole plan.

    A bag's length travels only where its sum is asked for; where rows are, their number does. Ids travel with the
    lengths; where there are many more of them than in the last batches, all is sent once more. Whether a batch can be
    looked up travels with the lengths, so that all processes refuse a bad one together, before any row is looked up.

    Messages are made on the device. On a GPU the host waits once, when they have come: for the numbers of ids in them,
    whether batches are bad, and how many ids of its own batch went where.

    Messages have room for `local_batch_size` samples, or for as many as the largest of the last batches had if these
    were more; a smaller batch is filled up with samples without ids.

    Args:
        ownership: Who holds what.
        orders: Row orders of tables that are cut by access rank, by name.
        local_batch_size: The usual number of samples of a process's batch.
        groups: The processes; those of other replica groups refuse a bad batch, too.
        device: Where batches are.

    Attributes:
        counter: Counts the ids of batches that were exchanged; None to count none.
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
        self._ownership, self._device = ownership, device
        self._is_weighted = is_weighted(ownership.tables.tables)
        self.counter: AccessCounter | None = None
        self._group, self._peers = groups.own, groups.peers
        self._num_groups = len(groups.world_ranks)
        self._reader = reader = groups.own.rank()
        self._num_processes = ownership.num_processes
        self._asked = [ownership.asked(reader, owner) for owner in range(self._num_processes)]
        self._local = ownership.local(reader)
        self._served = [ownership.asked(other, reader) for other in range(self._num_processes)]
        tables = ownership.tables.tables
        self._last_F = torch.tensor(
            [table.num_embeddings - 1 for table in tables for _ in table.features], device=device
        )
        self._num_features = len(self._last_F)
        self._is_first_F = torch.arange(self._num_features, device=device) == 0
        #: 1 for the first bag of a batch, of as many samples as the last one had.
        self._first_bag_FB = self._is_first_F[:, None].int()
        #: The last order of a batch's features that was not the plan's, and what it takes.
        self._last_order: tuple[tuple[int, ...], torch.Tensor, JaggedOrder] | None = None
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)
        self._samples = (0, torch.zeros(1, dtype=torch.int64, device=device))
        most_rows = (*(table.num_embeddings for table in tables), ownership.most_replicated_rows)
        self._id_dtype = torch.int64 if self._is_weighted else id_dtype(most_rows)
        cut = _cut_features(ownership, reader, orders, all_of_them=waits(device))
        self.addresses = AddressMap(cut, ownership.holdings, reader, orders, device) if cut else None
        cut = self.addresses.features if self.addresses else []
        self.cut_index: dict[tuple[int, tuple[int, int]], int] = {}
        for number, one in enumerate(cut):
            if one.holdings:
                self.cut_index[one.feature, ownership.holdings[one.holdings[0]].columns] = number
        self._cut_order = JaggedOrder([one.feature for one in cut], self._num_features, device)
        by_owner = [self._sources(asked, owner) for owner, asked in enumerate(self._asked)]
        by_owner.append(self._sources(self._local, reader))
        rows_only = [source for _, rows in by_owner for of in rows for source in of]
        #: Whether rows of cut features are asked for: else nobody has to know which lookup went where.
        self._has_cut_rows = any(source >= self._num_features for source in rows_only)
        wire = [source for sums, rows in by_owner for source in (*sums, *(one for of in rows for one in of))]
        # Where all features are cut, messages are made of what is bucketized alone.
        self._has_whole = self.addresses is None or any(source < self._num_features for source in wire)
        num_sources = self.addresses.num_buckets * len(cut) if self.addresses else 0
        if self._has_whole:
            num_sources += self._num_features
        else:
            wire = [source - self._num_features for source in wire]
            rows_only = [source - self._num_features for source in rows_only]
        self._wire_order, self._num_wire = JaggedOrder(wire, num_sources, device), len(wire)
        num_rows_sources = num_sources if self._has_cut_rows else self._num_features
        self._rows_order = JaggedOrder(rows_only, num_rows_sources, device) if rows_only else None
        #: For each process, and last for what is read here, the jagged rows of sums, and those of each holding's rows.
        self._slots = _slots(by_owner)
        asked = (*self._asked, self._local)
        self._is_once = [ownership.holdings[index].deduplicate for of in asked for index in of.rows]
        self._once_order, self._once = self._asked_once(device)
        self._hits = HitExchange(ownership, reader, self._slots, len(wire), device)
        self._runs, self._row_runs = self._runs_of()
        self._header_Z = self._header_of()
        self._rooms, self._hit_rooms = BufferSizes(self._num_processes), BufferSizes(self._num_processes)
        self._usual_batch_size = self._batch_size = local_batch_size
        #: Bytes of rows of replicas that this process has told the others that it hits.
        self.hit_bytes = 0
        #: Bytes of lengths and ids that this process has sent to each process.
        self.sent_bytes = {stream: [0.0] * self._num_processes for stream in (Stream.LENGTHS, Stream.IDS)}

    def over(self, groups: JoinedGroups) -> InputExchange:
        """The same exchange over other process groups of the same processes, with counters and rooms of its own."""
        twin = copy(self)
        twin._group, twin._peers, twin._batch_size = groups.own, groups.peers, self._usual_batch_size
        twin._rooms, twin._hit_rooms = BufferSizes(self._num_processes), BufferSizes(self._num_processes)
        twin._runs, twin._hits = self._runs.anew(), self._hits.anew()
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
        return self._num_features + bucket * len(self.addresses.features) + number

    def _asked_once(self, device: torch.device) -> tuple[JaggedOrder, Distinct]:
        """Jagged rows of holdings whose rows are asked for once each, and how the distinct ones are found."""
        holdings = self._ownership.holdings
        own = [(owner, index) for owner, asked in enumerate(self._asked) for index in asked.rows]
        own += [(self._reader, index) for index in self._local.rows]
        of_holdings = [rows for _, of in self._slots for rows in of]
        once = [place for place, is_once in enumerate(self._is_once) if is_once]
        jagged = [(number, row) for number, place in enumerate(once) for row in of_holdings[place]]
        sizes = [holdings[own[place][1]].num_rows(own[place][0]) for place in once]
        return (
            JaggedOrder([row for _, row in jagged], self._num_wire, device),
            Distinct(sizes, [(number, 0) for number, _ in jagged], device),
        )

    def _runs_of(self) -> tuple[Runs, torch.Tensor]:
        """Runs of ids that each process is sent, and those of the rows of each holding, by the numbers of bounds."""
        is_once, once, of_holdings, sent = iter(self._is_once), self._num_wire + 1, [], []
        for sums, of_owner in self._slots:
            runs = [(sums.start, sums.stop)]
            for rows in of_owner:
                if next(is_once):
                    runs.append((once, once + 1))
                    once += 1
                else:
                    runs.append((rows.start, rows.stop))
            of_holdings += runs[1:]
            sent.append(runs)
        ends = torch.tensor(of_holdings, dtype=torch.int64, device=self._device).view(-1, 2)
        return Runs(sent[: self._num_processes], self._device), ends.T.contiguous()

    def _header_of(self) -> torch.Tensor:
        """For each number that messages to all processes hold, which of the batch's numbers it is.

        Those are the ids of each jagged row, the rows of each holding, and of each kernel that processes are told of;
        and last the flag and the samples.
        """
        holding, told = self._num_wire, self._num_wire + len(self._is_once)
        last = told + sum(map(len, self._hits.told))
        numbers: list[int] = []
        for (sums, rows), kernels in zip(self._slots, self._hits.told, strict=False):
            own = [*sums, *range(holding, holding + len(rows)), *range(told, told + len(kernels)), last, last + 1]
            numbers += own
            holding, told = holding + len(rows), told + len(kernels)
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def __call__(self, batch: BatchOfIds | InputError, turn: Turn = AT_ONCE) -> DistributedBatch:
        """Exchanges one batch; every process calls it.

        Args:
            batch: The batch, or why this process has none.
            turn: When to launch collectives.

        Raises:
            InputError: If a process has none, or one that cannot be looked up: the same on all processes.
        """
        if isinstance(batch, InputError):
            fault: InputError | None = batch
        else:
            fault = batch.fault(self._num_features, self._device, is_weighted=self._is_weighted)
        asked = self._asks(batch, fault)
        came = self._sent(asked, turn, agree=self._peers is not None)
        refusal = self._refusal(batch, fault, came, turn)
        if refusal is not None:
            raise refusal from (None if fault is None else fault.__cause__)
        while Flag.MORE in came.flags_P:
            self._adapt(came)
            turn.ending()
            if asked.lengths_FB.shape[1] != self._batch_size:
                asked = self._asks(batch, fault)
            came = self._sent(asked, turn, agree=False)
        batch_size = self._batch_size
        self._adapt(came)
        assert isinstance(batch, BatchOfIds), "else the step was refused"
        if self.counter is not None:
            self.counter.observe(asked.given_L, came.counts_F, batch.batch_size)
        return self._distributed(batch, asked, came, batch_size)

    def _asks(self, batch: BatchOfIds | InputError, fault: InputError | None) -> _Asked:
        """What is asked for, and told, on the device."""
        is_good: torch.Tensor | None = None
        if fault is not None or isinstance(batch, InputError):
            lengths_FB = torch.zeros(self._num_features, 0, dtype=torch.int32, device=self._device)
            ids_L, counts_F, num_samples = lengths_FB.new_empty(0, dtype=torch.int64), lengths_FB.sum(1), 0
        else:
            lengths_FB, ids_L, counts_F, is_good = self._checked(batch)
            if batch.weights_L is not None:
                ids_L = with_weights(ids_L, batch.weights_L)
            if batch.order is not None:
                lengths_FB, ids_L, counts_F = self._in_order(batch.order, lengths_FB, ids_L, counts_F)
            num_samples = batch.batch_size
        if num_samples > self._batch_size:  # which all learn from the message
            lengths_FB, ids_L, counts_F = lengths_FB[:, :0], ids_L[:0], torch.zeros_like(counts_F)
        if lengths_FB.shape[1] < self._batch_size:
            lengths_FB = pad(lengths_FB, (0, self._batch_size - lengths_FB.shape[1]))
        bucketized, source_L, lengths_SB = None, ids_L, lengths_FB
        if self.addresses is not None:
            cut_FB, cut_L = self._cut_order(lengths_FB, ids_L)
            bucketized = self.addresses(cut_FB, *self._apart(cut_L), with_lookups=self._has_cut_rows)
            lengths_SB, source_L = bucketized.lengths_DFB.view(-1, self._batch_size), bucketized.offsets_L
            if bucketized.weights_L is not None:
                source_L = with_weights(source_L, bucketized.weights_L)
            if self._has_whole:
                lengths_SB, source_L = torch.cat([lengths_FB, lengths_SB]), torch.cat([ids_L, source_L])
        lengths_NB, wire_L = self._wire_order(lengths_SB, source_L)
        if isinstance(batch, BatchOfIds) and wire_L is batch.ids_L:
            wire_L = wire_L.clone()  # which may be written to before the rows of copies here are looked up
        counts_N = counts_F if lengths_NB is lengths_FB else lengths_NB.sum(1)
        once, bounds_X = None, torch.ops.fbgemm.asynchronous_complete_cumsum(counts_N)
        plain_L, _ = self._apart(wire_L)
        if any(self._is_once):
            once = self._once(self._once_order(lengths_NB, plain_L)[1], self._once_order.of(counts_N))
            bounds_X = torch.cat([bounds_X, once.ends_K + len(wire_L)])
        told = self._hits.of(lengths_NB, plain_L, counts_N)
        if once is not None:
            wire_L = torch.cat([wire_L, once.rows_U])
        return _Asked(
            is_good,
            num_samples,
            lengths_FB,
            counts_F,
            *self._apart(ids_L),
            bucketized,
            lengths_SB,
            lengths_NB,
            counts_N,
            wire_L,
            once,
            bounds_X,
            told,
        )

    def _apart(self, ids_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ids, and their weights where lookups are weighted."""
        return without_weights(ids_L, is_weighted=self._is_weighted)

    def _checked(self, batch: BatchOfIds) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lengths, ids and ids of each feature, those that are wrong replaced; and whether none is.

        They are in the order of the batch.
        """
        total, counts_F = len(batch.ids_L), batch.lengths_FB.sum(1)
        if not waits(self._device) and self._is_right(batch, counts_F):
            return batch.lengths_FB.to(torch.int32), batch.ids_L.long(), counts_F, torch.tensor(True)
        is_right = (counts_F.sum() == total) & ~(batch.lengths_FB < 0).any()
        # Where lengths are wrong, all ids are those of the first bag, so that nothing is read from elsewhere.
        counts_F = torch.where(is_right, counts_F, total * self._is_first_F)
        if self._first_bag_FB.shape[1] != batch.batch_size:
            self._first_bag_FB = pad(self._is_first_F[:, None].int(), (0, batch.batch_size - 1))
        lengths_FB = torch.where(is_right, batch.lengths_FB.to(torch.int32), total * self._first_bag_FB)
        last_L = torch.repeat_interleave(self._last_of(batch.order), counts_F, output_size=total)
        given_L = batch.ids_L.long()
        ids_L = given_L.clamp(self._zero, last_L)
        is_good = is_right & (ids_L == given_L).all()
        if batch.inverse_FB is not None:
            is_good &= ((batch.inverse_FB >= 0) & (batch.inverse_FB < self._samples_of(batch))).all()
        if batch.weights_L is not None:
            is_good &= batch.weights_L.isfinite().all()
        return lengths_FB, ids_L, counts_F, is_good

    def _is_right(self, batch: BatchOfIds, counts_F: torch.Tensor) -> bool:
        """Whether nothing is wrong with a batch on the host: ids are read once, and nothing is written."""
        counts = counts_F.numpy()
        if counts.sum() != len(batch.ids_L) or batch.inverse_FB is not None or (batch.lengths_FB < 0).any():
            return False
        if batch.weights_L is not None and not batch.weights_L.isfinite().all():
            return False
        with_ids = counts.nonzero()[0]
        if not len(with_ids):
            return True
        firsts = (counts.cumsum() - counts)[with_ids]
        # As numbers without a sign, those below 0 are above all rows.
        ids_L = batch.ids_L.numpy().view(np.uint64 if batch.ids_L.dtype == torch.int64 else np.uint32)
        return bool((np.maximum.reduceat(ids_L, firsts) <= self._last_of(batch.order).numpy()[with_ids]).all())

    def _last_of(self, order: tuple[int, ...] | None) -> torch.Tensor:
        """The last row of the table that each row of the lengths looks up."""
        return self._last_F if order is None else self._known(order)[0]

    def _known(self, order: tuple[int, ...]) -> tuple[torch.Tensor, JaggedOrder]:
        """Last rows of tables in an order of features that is not the plan's, and what puts it in the plan's."""
        if self._last_order is None or self._last_order[0] != order:
            order_F = staged(order, self._device)
            last_F = torch.empty_like(self._last_F).index_copy_(0, order_F, self._last_F)
            self._last_order = (order, last_F, JaggedOrder(order, self._num_features, self._device))
        return self._last_order[1:]

    def _in_order(
        self, order: tuple[int, ...], lengths_FB: torch.Tensor, ids_L: torch.Tensor, counts_F: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lengths, ids and ids of each feature in the plan's order."""
        _, in_order = self._known(order)
        return *in_order(lengths_FB, ids_L, len(ids_L)), in_order.of(counts_F)

    def _samples_of(self, batch: BatchOfIds) -> torch.Tensor | int:
        """Samples of each feature, for each sample of the result."""
        return batch.batch_size if batch.sizes_F is None else staged(batch.sizes_F, self._device)[:, None]

    def _sent(self, asked: _Asked, turn: Turn, *, agree: bool) -> _Came:
        """Sends messages to all processes; those that come from them.

        Args:
            asked: What is asked for.
            turn: When to launch collectives.
            agree: Whether replica groups agree that all have good batches.
        """
        numbers_Z, ends_S = self._numbers(asked)
        sent, sent_sizes = self._messages(asked, numbers_Z.index_select(0, self._header_Z).to(torch.int32), ends_S)
        parts = [
            self._parts(*of)
            for of in zip(self._served, self._hits.heard, self._rooms.received, self._hit_rooms.received, strict=True)
        ]
        sizes = [sum(of) for of in parts]
        received = torch.empty(sum(sizes), dtype=torch.int32, device=self._device)
        with turn.sending():
            work = dist.all_to_all_single(received, sent, sizes, sent_sizes, self._group, async_op=True)
        assert work is not None, "this process is in the group"
        work.wait()
        came = iter(torch.split(received, [size for of in parts for size in of]))
        lengths_P, headers_P, _, ids_P, heard_P = zip(*(tuple(islice(came, 5)) for _ in parts), strict=True)
        known = [*headers_P, numbers_Z, asked.counts_F]
        meeting = self._meeting(headers_P, heard_P)
        if meeting is not None:
            known.append(meeting.ends_K)
        if agree:
            turn.ending()
            is_bad = (torch.stack([one[-2] for one in headers_P]) == Flag.BAD).any()
            assert self._peers is not None, "there are groups to agree"
            known.append(first_group(is_bad, self._peers))
        # The one wait of the host.
        numbers = iter(torch.cat(known).tolist())
        headers = [tuple(islice(numbers, len(one))) for one in headers_P]
        own, counts_F = list(islice(numbers, len(numbers_Z))), tuple(islice(numbers, self._num_features))
        ends = list(islice(numbers, 0 if meeting is None else len(meeting.ends_K)))
        return _Came(
            lengths_P=[one.view(-1, self._batch_size) for one in lengths_P],
            ids_P=[one.view(self._id_dtype) for one in ids_P],
            numbers_P=[one[:-2] for one in headers],
            flags_P=[Flag(one[-2]) for one in headers],
            samples_P=[one[-1] for one in headers],
            own=own,
            counts_F=counts_F,
            meeting=(meeting, ends),
            first_bad=next(numbers, None),
        )

    def _parts(self, asked: OwnerRequest, hits: Sequence[object], room: int, hit_room: int) -> tuple[int, ...]:
        """Int32 numbers of the parts of a message: lengths, numbers, one to make them even, ids, rows that are hit."""
        lengths, numbers = len(asked.sums) * self._batch_size, len(asked.sums) + len(asked.rows) + len(hits) + 2
        wide = self._id_dtype.itemsize // torch.int32.itemsize
        # Ids are read in place.
        return lengths, numbers, (lengths + numbers) % 2, room * wide, hit_room * wide

    def _numbers(self, asked: _Asked) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of the batch, of which headers are made, int64 of shape (Z,); and where runs of ids end."""
        counts_P, ends_S = self._runs.sizes(asked.bounds_X)
        first_H, last_H = (asked.bounds_X.index_select(0, of) for of in self._row_runs)
        if asked.is_good is None:
            flag = self._zero
        elif asked.num_samples > self._batch_size:
            flag = torch.where(asked.is_good, int(Flag.MORE), int(Flag.BAD))
        else:
            is_over = (counts_P > self._runs.rooms(self._rooms.sent)).any()
            if asked.told is not None:
                is_over |= (asked.told.counts_P > self._hits.runs.rooms(self._hit_rooms.sent)).any()
            flag = torch.where(asked.is_good, is_over + int(Flag.WHOLE), int(Flag.BAD))
        if self._samples[0] != asked.num_samples:
            self._samples = (asked.num_samples, staged([asked.num_samples], self._device))
        told = [] if asked.told is None else [asked.told.sizes_X]
        return torch.cat([asked.counts_N, last_H - first_H, *told, flag.view(1), self._samples[1]]), ends_S

    def _messages(self, asked: _Asked, headers_Z: torch.Tensor, ends_S: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Messages for all processes, one after the other, and the numbers of each."""
        parts = [
            self._parts(*of)
            for of in zip(self._asked, self._hits.told, self._rooms.sent, self._hit_rooms.sent, strict=True)
        ]
        lengths_P = _in_turn(asked.lengths_NB, self._slots)
        ids_R = self._runs.laid_out(asked.ids_L, asked.bounds_X, ends_S, self._rooms.sent, self._id_dtype)
        columns = [lengths_P, torch.split(headers_Z, [of[1] for of in parts]), [self._nothing[: of[2]] for of in parts]]
        columns.append(torch.split(ids_R.view(torch.int32), [of[3] for of in parts]))
        if asked.told is not None:
            told_R = self._hits.runs.laid_out(
                asked.told.distinct.rows_U,
                asked.told.distinct.ends_K,
                asked.told.ends_S,
                self._hit_rooms.sent,
                self._id_dtype,
            )
            columns.append(torch.split(told_R.view(torch.int32), [of[4] for of in parts]))
        return torch.cat([piece for of in zip(*columns, strict=True) for piece in of]), [sum(of) for of in parts]

    def _meeting(self, headers_P: Sequence[torch.Tensor], heard_P: Sequence[torch.Tensor]) -> DistinctRows | None:
        """Rows of replicas that processes hit, whose gradients meet here."""
        if self._hits.is_deaf:
            return None
        heard_R = torch.cat(list(heard_P)).view(self._id_dtype)
        sizes = [
            one[len(one) - 2 - len(of) : len(one) - 2] for one, of in zip(headers_P, self._hits.heard, strict=True)
        ]
        # Where some found no room, all come once more.
        is_whole = (torch.stack([one[-2] for one in headers_P]) == Flag.WHOLE).all()
        return self._hits.meeting(heard_R, self._hit_rooms.received, torch.cat(sizes).long() * is_whole)

    def _refusal(
        self, batch: BatchOfIds | InputError, fault: InputError | None, came: _Came, turn: Turn
    ) -> InputError | None:
        """Why this step is none, if any process has a bad batch."""
        bad = [process for process, flag in enumerate(came.flags_P) if flag is Flag.BAD]
        is_refused = bool(bad) if came.first_bad is None else came.first_bad < self._num_groups
        if not is_refused:
            return None
        turn.ending()
        if fault is None and self._reader in bad:
            assert isinstance(batch, BatchOfIds), "its fault is known else"
            fault = self._fault(batch)
        return fault_of_all(fault, bad, came.first_bad, self._group, self._peers, self._device)

    def _fault(self, batch: BatchOfIds) -> InputError:
        """What is wrong with a batch that was found to be bad on the device."""
        counts_F, tables = batch.lengths_FB.sum(1).tolist(), self._ownership.tables
        fault = batch.lengths_fault(counts_F, has_negative=bool((batch.lengths_FB < 0).any()))
        fault = fault or batch.id_fault(tables)
        if fault is not None:
            return fault
        names = [feature.name for table in tables.tables for feature in table.features]
        if batch.weights_L is not None:
            for first in (~batch.weights_L.isfinite()).nonzero().view(-1)[:1].tolist():
                row = bisect_right(list(accumulate(counts_F)), first)
                of = names[row if batch.order is None else batch.order.index(row)]
                return InputError(f"must be finite, got {batch.weights_L[first]:g} of feature {of!r}", field="weights")
        assert batch.inverse_FB is not None, "nothing else is checked"
        is_wrong_FB = (batch.inverse_FB < 0) | (batch.inverse_FB >= self._samples_of(batch))
        feature, sample = is_wrong_FB.nonzero()[0].tolist()
        samples = batch.batch_size if batch.sizes_F is None else batch.sizes_F[feature]
        return InputError(
            f"feature {names[feature]!r} has samples 0 to {samples - 1}, got {int(batch.inverse_FB[feature, sample])}",
            field="inverse_indices",
        )

    def _adapt(self, came: _Came) -> None:
        """Takes in how large a batch was on all processes, for the rooms of the next messages."""
        sent, told = zip(*self._own_numbers(came), strict=True)
        pairs = list(zip(came.numbers_P, self._hits.heard, strict=True))
        heard = [sum(numbers[len(numbers) - len(of) :]) for numbers, of in pairs]
        self._rooms.adapt(
            [sum(of) for of in sent], [sum(of) - more for (of, _), more in zip(pairs, heard, strict=True)]
        )
        self._hit_rooms.adapt([sum(of) for of in told], heard)
        self._batch_size = max(self._usual_batch_size, *came.samples_P)

    def _own_numbers(self, came: _Came) -> Iterator[tuple[list[int], list[int]]]:
        """For each process, the numbers of ids that it was sent, and those of rows of replicas."""
        holding = self._num_wire
        told = holding + len(self._is_once)
        for (sums, rows), kernels in zip(self._slots, self._hits.told, strict=False):
            of_rows = came.own[holding : holding + len(rows)]
            yield came.own[sums.start : sums.stop] + of_rows, came.own[told : told + len(kernels)]
            holding, told = holding + len(rows), told + len(kernels)

    def _distributed(self, batch: BatchOfIds, asked: _Asked, came: _Came, batch_size: int) -> DistributedBatch:
        """The batch where it is looked up, of numbers that the host knows now."""
        for owner, ((numbers, _), of) in enumerate(zip(self._own_numbers(came), self._asked, strict=True)):
            self.sent_bytes[Stream.LENGTHS][owner] += (len(of.sums) * batch_size + len(of.rows)) * LENGTH_BYTES
            self.sent_bytes[Stream.IDS][owner] += sum(numbers) * self._id_dtype.itemsize
        if asked.told is not None:
            num_told = sum(map(len, self._hits.told))
            self.hit_bytes += self._hits.num_told(came.own[-2 - num_told : -2]) * self._id_dtype.itemsize
        rows_H = came.own[self._num_wire : self._num_wire + len(self._is_once)]
        counts_N = came.own[: self._num_wire]
        wire = _Wire(asked, counts_N, rows_H, self._slots, self._is_once, is_weighted=self._is_weighted)
        served = [
            self._request(lengths_NB, ids_L, numbers, of)
            for lengths_NB, ids_L, numbers, of in zip(
                came.lengths_P, came.ids_P, came.numbers_P, self._served, strict=True
            )
        ]
        return DistributedBatch(
            batch=batch,
            batch_size=batch_size,
            num_samples=asked.num_samples,
            lengths_FB=asked.lengths_FB,
            counts_F=came.counts_F,
            weights_L=asked.weights_L,
            served=tuple(served),
            local=wire.local(),
            rows=None if self._rows_order is None else self._row_lookups(self._rows_order, asked, came.counts_F, wire),
            bucketized=asked.bucketized,
            hits=self._hits.met(*came.meeting),
            ownership=self._ownership,
        )

    def _request(
        self, lengths_NB: torch.Tensor, ids_L: torch.Tensor, numbers: Sequence[int], of: OwnerRequest
    ) -> Request:
        """What a process asks for."""
        num_sums = len(of.sums)
        of_sums, of_rows = tuple(numbers[:num_sums]), tuple(numbers[num_sums : num_sums + len(of.rows)])
        first, last = sum(of_sums), sum(of_sums) + sum(of_rows)
        sums_L, rows_L = ids_L[:first], ids_L[first:last]
        return Request.of(lengths_NB, of_sums, sums_L, of_rows, rows_L, is_weighted=self._is_weighted)

    def _row_lookups(self, order: JaggedOrder, asked: _Asked, counts_F: Sequence[int], wire: _Wire) -> RowLookups:
        """Which lookup each row answers."""
        lookups_L, lengths_SB = torch.arange(sum(counts_F), device=self._device), asked.lengths_FB
        if self._has_cut_rows:
            assert asked.bucketized is not None, "a feature is cut"
            assert asked.bucketized.lookups_L is not None, "its rows are asked for"
            lengths_SB = asked.lengths_SB
            lengths_F1 = asked.lengths_FB.sum(1, keepdim=True, dtype=torch.int32)
            _, cut_L = self._cut_order(lengths_F1, lookups_L, len(asked.bucketized.lookups_L))
            cut_L = cut_L.index_select(0, asked.bucketized.lookups_L.long())
            lookups_L = torch.cat([lookups_L, cut_L]) if self._has_whole else cut_L
        counts = [wire.row_counts(owner) for owner in range(self._num_processes + 1)]
        num_rows = [wire.num_rows(owner) for owner in range(self._num_processes + 1)]
        num_lookups = [sum(of) for of_owner in counts for of in of_owner]
        _, lookups_L = order(lengths_SB, lookups_L, sum(num_lookups))
        hit_L = None if asked.once is None else asked.once.hit()
        arrival_L = _arrivals(self._is_once, num_lookups, [one for of in num_rows for one in of], hit_L, self._device)
        return RowLookups(lookups_L, arrival_L, tuple(counts), tuple(num_rows))


def _cut_features(
    ownership: Ownership, reader: int, orders: Mapping[str, RowOrderMap], *, all_of_them: bool
) -> list[CutFeature]:
    """Features that a process reads from several places, once for each range of columns.

    Args:
        ownership: Who holds what.
        reader: The process.
        orders: Row orders, by table.
        all_of_them: Whether the others are among them, if there are any, each feature as often as every other: so many
            times as many lookups are cut as the batch has, a number that the host knows.
    """
    by_columns: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for index, holding in enumerate(ownership.holdings):
        by_columns.setdefault((holding.table, holding.columns), []).append(index)
    cut, whole = [], []
    for (table, _), indices in by_columns.items():
        one = ownership.holdings[indices[0]]
        is_plain = len(indices) == 1 and one.is_whole and len(one.owners(reader)) == 1
        if is_plain and one.of.name not in orders and all(held.num_parts == 1 for held in one.ranges):
            whole += [CutFeature(feature, tuple(indices)) for feature in ownership.features_of[table]]
        else:
            cut += [CutFeature(feature, tuple(indices)) for feature in ownership.features_of[table]]
    if not cut or not all_of_them:
        return cut
    known = Counter(one.feature for one in (*cut, *whole))
    most = max(known.values())
    return [*cut, *whole, *(CutFeature(one, ()) for one, times in known.items() for _ in range(most - times))]


class _Wire:
    """Jagged rows in the order in which they travel, whose sizes the host knows: owner by owner, sums before rows.

    Args:
        asked: What is asked for.
        counts_N: Ids of each jagged row.
        rows_H: Rows of each holding that are asked for.
        slots: Jagged rows of each owner, and last of what is read here.
        is_once: For each holding whose rows are asked for, whether each is once.
        is_weighted: Whether lookups are weighted.
    """

    def __init__(
        self,
        asked: _Asked,
        counts_N: Sequence[int],
        rows_H: Sequence[int],
        slots: Sequence[tuple[range, Sequence[range]]],
        is_once: Sequence[bool],
        *,
        is_weighted: bool,
    ) -> None:
        self._asked, self._counts_N, self._slots, self._is_once = asked, counts_N, slots, is_once
        self._is_weighted = is_weighted
        rows = iter(rows_H)
        self._num_rows = [tuple(islice(rows, len(of))) for _, of in slots]

    def row_counts(self, owner: int) -> tuple[tuple[int, ...], ...]:
        """Lookups of each feature, holding by holding."""
        return tuple(tuple(self._counts_N[rows.start : rows.stop]) for rows in self._slots[owner][1])

    def num_rows(self, owner: int) -> tuple[int, ...]:
        """Rows of each holding that are asked for."""
        return self._num_rows[owner]

    def local(self) -> Request:
        """What is read here."""
        (sums, of_holdings), num_rows = self._slots[-1], self._num_rows[-1]
        starts, ids_L = [0, *accumulate(self._counts_N)], self._asked.ids_L
        counts = tuple(self._counts_N[sums.start : sums.stop])
        first_once = len(ids_L) - (0 if self._asked.once is None else len(self._asked.once.rows_U))
        rows_before = [of for of_owner in self._num_rows[:-1] for of in of_owner]
        first_once += sum(of for of, once in zip(rows_before, self._is_once, strict=False) if once)
        ids: list[torch.Tensor] = []
        for rows, number, once in zip(of_holdings, num_rows, self._is_once[len(rows_before) :], strict=True):
            start = first_once if once else starts[rows.start]
            ids.append(ids_L[start : start + number])
            first_once += number if once else 0
        return Request.of(
            self._asked.lengths_NB[sums.start : sums.stop],
            counts,
            ids_L[starts[sums.start] : starts[sums.stop]],
            num_rows,
            torch.cat(ids) if ids else ids_L[:0],
            is_weighted=self._is_weighted,
        )


def _slots(by_owner: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> list[tuple[range, list[range]]]:
    """Numbers of jagged rows, in the order in which they travel."""
    slots, first = [], 0
    for sums, rows in by_owner:
        of_sums = range(first, first + len(sums))
        starts = [of_sums.stop, *accumulate(map(len, rows), initial=of_sums.stop)][1:]
        slots.append((of_sums, [range(*of) for of in pairwise(starts)]))
        first = starts[-1]
    return slots


def _in_turn(lengths_NB: torch.Tensor, slots: Sequence[tuple[range, Sequence[range]]]) -> list[torch.Tensor]:
    """Bag lengths of the sums that each owner is asked for, (N * B,)."""
    sizes = [size for sums, rows in slots for size in (len(sums), sum(map(len, rows)))]
    return [one.reshape(-1) for one in torch.split(lengths_NB, sizes)[:-2:2]]


def _arrivals(
    is_once: Sequence[bool],
    num_lookups: Sequence[int],
    num_rows: Sequence[int],
    hit_L: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Which of all rows that come answers each lookup.

    Args:
        is_once: For each owner's holdings whose rows are asked for, whether each row is asked for once.
        num_lookups: Lookups of each.
        num_rows: Rows of each.
        hit_L: For lookups of rows that are asked for once, which of all these rows each hits.
        device: Where they are.
    """
    arrivals, row, once_row, once_lookup = [], 0, 0, 0
    for once, alike in groupby(zip(is_once, num_lookups, num_rows, strict=True), key=itemgetter(0)):
        lookups, rows = map(sum, zip(*((lookups, rows) for _, lookups, rows in alike), strict=True))
        if once:
            assert hit_L is not None, "rows are asked for once"
            arrivals.append(hit_L[once_lookup : once_lookup + lookups] + (row - once_row))
            once_row, once_lookup = once_row + rows, once_lookup + lookups
        else:
            arrivals.append(torch.arange(row, row + rows, device=device))
        row += rows
    return torch.cat(arrivals)
