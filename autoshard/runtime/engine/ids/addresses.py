"""The address map: from ids to the processes that hold their rows, and the places of the rows there.

Shape suffixes: F features that are cut, B samples of a local batch, L lookups, D destinations, E ranges of the
features, K parts of the ranges, N ordered rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import fbgemm_gpu  # noqa: F401 - registers the operators of torch.ops.fbgemm
import torch

from autoshard.core import Split
from autoshard.core.batches import coprime_step
from autoshard.core.errors import InputError
from autoshard.runtime.engine.holdings import Holding
from autoshard.runtime.engine.staging import waits

#: A process, and the holding that it is asked for.
Destination: TypeAlias = tuple[int, int]

#: Multiplier of Fibonacci hashing, 2^64 over the golden ratio, as a signed number.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


class RowOrderMap:
    """Access ranks of the rows of one table, from the ids that are listed in falling access frequency.

    A listed id has its place in the list. All others have ranks behind the list in an order of their own, which needs
    no memory: an id that is no rank of the list keeps its number, and those that are take the numbers of listed ids
    beyond the list. Every lookup takes a constant number of steps, and memory is that of the listed rows.

    Args:
        ids_N: Listed ids, each once.
        num_rows: Rows of the table.
        device: Where batches are.

    Raises:
        InputError: If an id is no row, or listed twice.
    """

    def __init__(self, ids_N: torch.Tensor, num_rows: int, device: torch.device) -> None:
        ids_N = ids_N.to(device=device, dtype=torch.int64)
        N = len(ids_N)
        if N and (int(ids_N.min()) < 0 or int(ids_N.max()) >= num_rows):
            raise InputError(f"must be rows 0 to {num_rows - 1}", field="row order")
        if len(torch.unique(ids_N)) < N:
            raise InputError("must list each row once", field="row order")
        ranks_N = torch.arange(N, device=device)
        is_low_N = ids_N < N
        # Ranks of ids below N: their place, or for those that are not listed a number that a listed id has given up.
        self._low_N = torch.full((N,), -1, dtype=torch.int64, device=device)
        self._low_N[ids_N[is_low_N]] = ranks_N[is_low_N]
        high, high_ranks = ids_N[~is_low_N], ranks_N[~is_low_N]
        self._given_up = high.sort().values
        self._taken_low = (self._low_N < 0).nonzero().squeeze(1)
        self._low_N[self._taken_low] = self._given_up
        self._ids_N = ids_N
        self._high = _HashMap(high, high_ranks) if len(high) else None
        #: What an id is as a key of `_high`.
        self._first_key = 0

    @property
    def num_ordered(self) -> int:
        """N."""
        return len(self._low_N)

    @property
    def device(self) -> torch.device:
        """Where it looks ids up."""
        return self._low_N.device

    def ranks(self, ids_L: torch.Tensor) -> torch.Tensor:
        """Access ranks of ids, shape (L,), int64."""
        ids_L = ids_L.long()
        if not self.num_ordered:
            return ids_L
        low_L = self._low_N.index_select(0, ids_L.clamp(max=self.num_ordered - 1))
        high_L = ids_L if self._high is None else self._high.values(ids_L + self._first_key, ids_L)
        return torch.where(ids_L < self.num_ordered, low_L, high_L)

    def ids(self, ranks_L: torch.Tensor) -> torch.Tensor:
        """Ids of access ranks, shape (L,), int64; the reverse of `ranks`."""
        ids_L = ranks_L.long().clone()
        if len(self._given_up):
            place_L = torch.searchsorted(self._given_up, ids_L).clamp(max=len(self._given_up) - 1)
            is_given_up_L = self._given_up[place_L] == ids_L
            ids_L[is_given_up_L] = self._taken_low[place_L[is_given_up_L]]
        is_listed_L = ranks_L < self.num_ordered
        ids_L[is_listed_L] = self._ids_N[ranks_L[is_listed_L].long()]
        return ids_L


class _HashMap:
    """Numbers by key, at most half of whose slots are full.

    Keys are kept in the order of their hashes, each in the first free slot from that of its hash. So none is far from
    it (8 slots of 2 million keys), and a lookup is as many probes as the farthest one needs, none of which the host
    waits for.

    Args:
        keys_K: Keys, each once, at least 0.
        values_K: Their numbers.
    """

    def __init__(self, keys_K: torch.Tensor, values_K: torch.Tensor) -> None:
        bits = (2 * len(keys_K)).bit_length()
        self._shift = 64 - bits
        wanted_K, order_K = _slot(keys_K, self._shift).sort(stable=True)
        number_K = torch.arange(len(keys_K), device=keys_K.device)
        slot_K = (wanted_K - number_K).cummax(0).values + number_K
        self._num_probes = int((slot_K - wanted_K).max()) + 1
        # Behind the last slot, room for keys that are pushed there.
        self._keys = keys_K.new_full(((1 << bits) + self._num_probes,), -1)
        self._values = torch.empty_like(self._keys)
        self._keys[slot_K], self._values[slot_K] = keys_K[order_K], values_K[order_K]

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys, and their numbers."""
        is_full = self._keys >= 0
        return self._keys[is_full], self._values[is_full]

    def values(self, keys_L: torch.Tensor, others_L: torch.Tensor) -> torch.Tensor:
        """Numbers of keys, and of keys that have none those of `others_L`."""
        first_L = slot_L = _slot(keys_L, self._shift)
        for probe in range(1, self._num_probes):
            at_L = first_L + probe
            slot_L = torch.where(self._keys.index_select(0, at_L) == keys_L, at_L, slot_L)
        is_known_L = self._keys.index_select(0, slot_L) == keys_L
        return torch.where(is_known_L, self._values.index_select(0, slot_L), others_L)


class _JoinedOrders:
    """Row orders of several features, whose lookups are ranked together; nothing of them is held twice.

    Args:
        orders: Of each feature; None for those in the order of their ids.
        rows: Rows of its table.
        device: Where batches are.
    """

    def __init__(self, orders: Sequence[RowOrderMap | None], rows: Sequence[int], device: torch.device) -> None:
        own = list(dict.fromkeys(one for one in orders if one is not None))
        rows_of = dict(zip(orders, rows, strict=True))
        first_keys = dict(zip(own, accumulate((rows_of[one] for one in own), initial=0), strict=False))
        starts = dict(zip(own, accumulate((one.num_ordered for one in own), initial=0), strict=False))
        self._low_N = torch.cat([one._low_N for one in own])
        items = [(keys + first_keys[one], values) for one in own if one._high for keys, values in [one._high.items()]]
        self._high = _HashMap(*map(torch.cat, zip(*items, strict=True))) if items else None
        for one in own:
            one._low_N = self._low_N[starts[one] : starts[one] + one.num_ordered]
            one._high, one._first_key = self._high if one._high else None, first_keys[one]
        listed = [0 if one is None else one.num_ordered for one in orders]
        # Ids of tables without an order are keys that nobody has.
        nowhere = sum(rows_of[one] for one in own)
        self._num_ordered, self._start, self._first_key = (
            _Column(numbers, device)
            for numbers in (
                listed,
                [0 if one is None else starts[one] for one in orders],
                [nowhere if one is None else first_keys[one] for one in orders],
            )
        )

    def ranks(self, ids_L: torch.Tensor, feature_L: torch.Tensor) -> torch.Tensor:
        """Access ranks of ids, int64.

        Args:
            ids_L: The ids.
            feature_L: The feature of each.
        """
        num_ordered_L = self._num_ordered.of(feature_L)
        high_L = ids_L if self._high is None else self._high.values(ids_L + self._first_key.of(feature_L), ids_L)
        if not len(self._low_N):
            return high_L
        place_L = (ids_L + self._start.of(feature_L)).clamp_(max=len(self._low_N) - 1)
        return torch.where(ids_L < num_ordered_L, self._low_N.index_select(0, place_L), high_L)


def _slot(ids_L: torch.Tensor, shift: int) -> torch.Tensor:
    mixed = ids_L * _GOLDEN
    # Shifts of signed numbers keep the sign, which a mask takes off.
    return (mixed >> shift) & ((1 << (64 - shift)) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class CutFeature:
    """Where the rows of one feature's table are, for one reader.

    Attributes:
        feature: The feature.
        holdings: Those that have rows of the table, in columns that are cut by rows alike; none where nobody reads what
            is cut.
    """

    feature: int
    holdings: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bucketized:
    """Lookups by destination.

    Attributes:
        lengths_DFB: Bag lengths by destination; of one batch, int32.
        offsets_L: Places of the rows among those that the destination holds of the holding.
        lookups_L: Lookup of the cut features that each is of; None if that is not asked for.
        weights_L: Weight of each; None where lookups are not weighted.
    """

    lengths_DFB: torch.Tensor
    offsets_L: torch.Tensor
    lookups_L: torch.Tensor | None
    weights_L: torch.Tensor | None


class AddressMap:
    """Addresses of one reader, for the features of tables that it reads from several places.

    An id becomes a position (itself, or its access rank), the position a range and a part of it by arithmetic, and
    these a virtual address: the places of all destinations, one destination after the other. FBGEMM's bucketing then
    deals the addresses to the destinations. None of it depends on how many rows there are.

    Of tables that are cut by row id into blocks, each on a process of its own, ids are addresses as they are. Their
    features come first, and no arithmetic is spent on them: on a GPU, where all features are so, since the host does
    not know where those of the others begin.

    Args:
        cut: The features.
        holdings: Of the plan.
        reader: The process that looks up.
        orders: Row orders by table, of tables that are cut by access rank; those without one are in the order of ids.
        device: Where batches are.
    """

    def __init__(
        self,
        cut: Sequence[CutFeature],
        holdings: Sequence[Holding],
        reader: int,
        orders: Mapping[str, RowOrderMap],
        device: torch.device,
    ) -> None:
        layouts = [_Layout.of(one, holdings, reader, orders) for one in cut]
        layouts.sort(key=lambda layout: not layout.is_identity)
        #: The features in the order in which they are dealt out.
        self.features = [layout.cut for layout in layouts]
        #: For each of them, where its rows are, in the order of addresses.
        self.destinations = [layout.destinations for layout in layouts]
        #: Destinations, and one more where some rows go nowhere.
        self.num_buckets = max((len(layout.destinations) + layout.has_unheld for layout in layouts), default=0)
        self._bounds = [_padded(layout.bounds, self.num_buckets, device) for layout in layouts]
        self._blocks_F = torch.ones(len(layouts), dtype=torch.int64, device=device)
        num_identities = sum(layout.is_identity for layout in layouts)
        #: Features on which no arithmetic is spent: all, or on a CPU those that need none.
        self._num_skipped = 0 if waits(device) and num_identities < len(layouts) else num_identities
        mapped = layouts[self._num_skipped :]
        of_features, rows = [layout.order for layout in mapped], [layout.num_rows for layout in mapped]
        self._orders = _JoinedOrders(of_features, rows, device) if any(of_features) else None
        spans = [span for layout in mapped for span in layout.spans]
        before_F = [0, *accumulate(layout.num_rows for layout in mapped)][:-1]
        starts = [before + span.start for before, layout in zip(before_F, mapped, strict=True) for span in layout.spans]
        parts = [address for span in spans for address in span.addresses]
        #: Rows of the mapped features before each, and the first of each range among all of them.
        self._before_F, self._starts_E = (torch.tensor(of, device=device) for of in (before_F, starts))
        self._is_cut_once = len(spans) == len(mapped)
        self._features_F = torch.arange(len(mapped), device=device)
        self._parts_K = torch.tensor(parts, dtype=torch.int64, device=device)
        self._first_part = _Column([0, *accumulate(len(span.addresses) for span in spans)][:-1], device)
        #: Rows of a full part in blocks, parts where rows are dealt in turn.
        self._divisor = _Column([span.block if span.kind == _BLOCK else len(span.addresses) for span in spans], device)
        is_hashed = [span.kind == _HASH for span in spans]
        multipliers = [coprime_step(span.num_rows) if span.kind == _HASH else 1 for span in spans]
        self._multiplier = _Column(multipliers, device) if any(is_hashed) else None
        self._modulus = _Column([span.num_rows for span in spans], device)
        is_block = [span.kind == _BLOCK for span in spans]
        self._is_block_E = torch.tensor(is_block, device=device) if any(is_block) else None

    def __call__(
        self, lengths_FB: torch.Tensor, ids_L: torch.Tensor, weights_L: torch.Tensor | None, *, with_lookups: bool
    ) -> Bucketized:
        """Deals a batch's lookups to their destinations.

        Args:
            lengths_FB: Bag lengths of the cut features, int32.
            ids_L: Their ids, rows of their tables, int64.
            weights_L: Weights of the ids; None where lookups are not weighted.
            with_lookups: Whether to say which lookup each is of.
        """
        lengths, offsets_L, weights_L, _, order_L = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths_FB.reshape(-1),
            self._addresses(lengths_FB, ids_L),
            False,
            with_lookups,
            self._blocks_F,
            self.num_buckets,
            weights_L,
            None,
            -1,
            self._bounds,
        )
        lookups_L = None
        if with_lookups:
            lookup_L = torch.arange(len(order_L), device=order_L.device, dtype=order_L.dtype)
            lookups_L = torch.empty_like(order_L).scatter_(0, order_L, lookup_L)
        return Bucketized(lengths.view(self.num_buckets, *lengths_FB.shape), offsets_L, lookups_L, weights_L)

    def _addresses(self, lengths_FB: torch.Tensor, ids_L: torch.Tensor) -> torch.Tensor:
        """Virtual addresses, shape (L,)."""
        if self._num_skipped == len(self.features):
            return ids_L
        counts_F = lengths_FB.sum(1)
        start = int(counts_F[: self._num_skipped].sum()) if self._num_skipped else 0
        mapped_L = self._mapped(counts_F[self._num_skipped :], ids_L[start:])
        return torch.cat([ids_L[:start], mapped_L]) if start else mapped_L

    def _mapped(self, counts_F: torch.Tensor, ids_L: torch.Tensor) -> torch.Tensor:
        """Virtual addresses of the features on which arithmetic is spent."""
        L, position_L, range_L = len(ids_L), ids_L, None
        if self._is_cut_once or self._orders is not None:
            range_L = torch.repeat_interleave(self._features_F, counts_F, output_size=L)
        if self._orders is not None:
            assert range_L is not None, "the feature of each lookup is known"
            position_L = self._orders.ranks(ids_L, range_L)
        inner_L = position_L
        if not self._is_cut_once:
            position_L = torch.repeat_interleave(self._before_F, counts_F, output_size=L).add_(position_L)
            range_L = torch.searchsorted(self._starts_E, position_L, right=True).sub_(1)
            inner_L = position_L.sub_(self._starts_E.index_select(0, range_L))
        assert range_L is not None, "the range of each lookup is known"
        if self._multiplier is not None:
            # A permutation of the range's rows; 1 times the position elsewhere.
            inner_L = inner_L * self._multiplier.of(range_L) % self._modulus.of(range_L)
        divisor_L = self._divisor.of(range_L)
        quotient_L = torch.div(inner_L, divisor_L, rounding_mode="floor")
        rest_L = inner_L - quotient_L * divisor_L
        part_L, place_L = rest_L, quotient_L
        if self._is_block_E is not None:
            is_block_L = self._is_block_E.index_select(0, range_L)
            part_L = torch.where(is_block_L, quotient_L, rest_L)
            place_L = torch.where(is_block_L, rest_L, quotient_L)
        return self._parts_K.index_select(0, part_L + self._first_part.of(range_L)).add_(place_L)


class _Column:
    """A number of each range, looked up by the range; one number where all are alike, which takes no lookup.

    Args:
        numbers: Of the ranges.
        device: Where lookups are.
    """

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        self._numbers_E = torch.tensor(numbers, dtype=torch.int64, device=device)
        self._alike = numbers[0] if len(set(numbers)) == 1 else None

    def of(self, range_L: torch.Tensor) -> torch.Tensor | int:
        """Numbers of ranges."""
        return self._numbers_E.index_select(0, range_L) if self._alike is None else self._alike


#: Kinds of spans: full blocks of rows to each part, rows in turn, or rows in turn after a permutation.
_BLOCK, _CYCLIC, _HASH = range(3)
#: More rows than a table has.
_ANY_ROWS = 1 << 40
_KINDS = {Split.BLOCK: _BLOCK, Split.CYCLIC: _CYCLIC, Split.HASH: _HASH}


@dataclass(frozen=True, slots=True)
class _Span:
    """Adjacent positions of a table: one of its ranges, or rows of other column shards, which go nowhere."""

    start: int
    stop: int
    kind: int
    addresses: tuple[int, ...]
    """First address of each part."""

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return self.stop - self.start

    @property
    def block(self) -> int:
        """Rows of a full part, where each is a block."""
        return -(-self.num_rows // len(self.addresses))

    @property
    def is_identity(self) -> bool:
        """Whether every position is its address."""
        starts = range(self.start, self.stop, self.block)  # of parts with rows
        return self.kind == _BLOCK and list(self.addresses[: len(starts)]) == list(starts)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Addresses of one cut feature."""

    cut: CutFeature
    order: RowOrderMap | None
    destinations: list[Destination]
    bounds: list[int]
    """First address of every destination, and the one after the last."""
    spans: list[_Span]
    num_rows: int
    """Of the table."""
    has_unheld: bool
    """Whether there are rows that no destination has."""
    is_identity: bool
    """Whether every id is its address."""

    @classmethod
    def of(
        cls, cut: CutFeature, holdings: Sequence[Holding], reader: int, orders: Mapping[str, RowOrderMap]
    ) -> _Layout:
        if not cut.holdings:
            nowhere = _Span(0, _ANY_ROWS, _BLOCK, (0,))
            return cls(cut, None, [], [0], [nowhere], _ANY_ROWS, has_unheld=False, is_identity=True)
        table = holdings[cut.holdings[0]].of
        ranges = sorted(
            ((held, number, index) for index in cut.holdings for number, held in enumerate(holdings[index].ranges)),
            key=lambda one: one[0].start,
        )
        # In the order of positions, so that blocks of rows have their positions for addresses.
        pairs = dict.fromkeys(
            (process, index)
            for held, _, index in ranges
            for part, process in enumerate(held.replicas[held.read_by[reader]])
            if held.part_rows(part)
        )
        bounds = [0, *accumulate(holdings[index].num_rows(process) for process, index in pairs)]
        base = dict(zip(pairs, bounds, strict=False))
        spans: list[_Span] = []
        for held, number, index in ranges:
            spans += _unheld(spans, held.start, bounds[-1])
            addresses = [
                base.get((process, index), 0) + _offset(holdings[index], process, number, part)
                for part, process in enumerate(held.replicas[held.read_by[reader]])
            ]
            spans.append(_Span(held.start, held.stop, _KINDS[held.split], tuple(addresses)))
        spans += _unheld(spans, table.num_embeddings, bounds[-1])
        has_unheld = bounds[-1] < table.num_embeddings
        is_identity = table.name not in orders and all(span.is_identity for span in spans)
        num_rows = table.num_embeddings
        return cls(cut, orders.get(table.name), list(pairs), bounds, spans, num_rows, has_unheld, is_identity)


def _unheld(spans: Sequence[_Span], stop: int, nowhere: int) -> list[_Span]:
    """The span of rows that no holding has, between the last one and `stop`; none if there are none."""
    start = spans[-1].stop if spans else 0
    return [_Span(start, stop, _BLOCK, (nowhere,))] if stop > start else []


def _offset(holding: Holding, process: int, number: int, part: int) -> int:
    """First of a part's rows among those of the holding on a process; 0 if the part has none."""
    mine = (own.offset for own in holding.parts_of(process) if (own.range, own.part) == (number, part))
    return next(mine, 0)


def _padded(bounds: Sequence[int], num_buckets: int, device: torch.device) -> torch.Tensor:
    last = torch.iinfo(torch.int64).max
    return torch.tensor([*bounds, *[last] * (num_buckets + 1 - len(bounds))], dtype=torch.int64, device=device)
