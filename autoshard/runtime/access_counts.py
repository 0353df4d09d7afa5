"""Which rows a job looks up how often, counted from a sample of its batches in bounded memory.

Shape suffixes: F features, T tables, B batches, L sampled lookups, N rows that are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Final

import numpy as np
import torch

from autoshard.core import AccessProfile, Feature, RowOrder, TableSet
from autoshard.core.accepted import FINITE_ABOVE_0, MAX_POOLING_FACTOR, SEED, WHOLE_AT_LEAST_1, Range
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.access.counted import CountedRows, profile_of_known
from autoshard.core.errors import InputError
from autoshard.formats import write_tables
from autoshard.formats.row_orders import copied_row_order, write_counted_rows

#: Bytes for each row that is held: its key, its lookups, and what finding a threshold takes besides.
_ROW_BYTES: Final = 46
#: Sampled ids that wait to be merged: many, so that what is held is seldom gone through.
_NUM_WAITING: Final = 1 << 18
#: Rows of which few are left after a threshold, so that the next one is some merges away.
_KEPT_SHARE: Final = 0.8
#: Hits in the sample from which on a row counts as known: its frequency is then within 25% (one standard deviation).
_LEAST_HITS: Final = 16
#: And thresholds: below, much of a row's lookups may be those of others.
_LEAST_THRESHOLDS: Final = 4
#: Over that share, a row would be known for sure: of 32 expected hits, fewer than 16 come in one of 1,000 cases.
_SURELY_KNOWN: Final = 2.0
#: Hits of a table from which on its curve is taken from the sample.
_LEAST_TABLE_HITS: Final = 1_000
MAX_BYTES: Final = 64 << 20
SAMPLED_IDS: Final = 2_048
#: Batches after which a lookup counts half.
HALF_LIFE: Final = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AccessCounts:
    """Estimated lookups of rows: a threshold sample, whose sums over any rows are unbiased.

    Attributes:
        keys_N: Rows that are held, rising: row ids, each table's behind those of the tables before it.
        lookups_N: Their estimated lookups.
        lookups_F: Lookups of each feature, all of them counted.
        num_samples: Samples of the batches.
        num_hits: Lookups that were sampled.
        threshold: Lookups below which rows are held with a probability alone.
    """

    keys_N: IntArray
    lookups_N: FloatArray
    lookups_F: FloatArray
    num_samples: float
    num_hits: float
    threshold: float

    @classmethod
    def nothing(cls, num_features: int) -> AccessCounts:
        """No lookups."""
        return cls(
            keys_N=np.zeros(0, dtype=np.int64),
            lookups_N=np.zeros(0),
            lookups_F=np.zeros(num_features),
            num_samples=0.0,
            num_hits=0.0,
            threshold=0.0,
        )

    @classmethod
    def merged(cls, counts: Sequence[AccessCounts]) -> AccessCounts:
        """Lookups of several processes together; at least one."""
        keys_N, lookups_N = counts[0].keys_N, counts[0].lookups_N
        for other in counts[1:]:
            keys_N, lookups_N = _added(keys_N, lookups_N, other.keys_N, other.lookups_N)
        return cls(
            keys_N=keys_N,
            lookups_N=lookups_N,
            lookups_F=np.sum([one.lookups_F for one in counts], axis=0),
            num_samples=sum(one.num_samples for one in counts),
            num_hits=sum(one.num_hits for one in counts),
            threshold=max(one.threshold for one in counts),
        )

    def aged(self, share: float) -> AccessCounts:
        """The same lookups, each counted as a share of one."""
        return replace(
            self,
            lookups_N=self.lookups_N * share,
            lookups_F=self.lookups_F * share,
            num_samples=self.num_samples * share,
            num_hits=self.num_hits * share,
            threshold=self.threshold * share,
        )

    def within(self, max_rows: int, rng: np.random.Generator) -> AccessCounts:
        """Rows few enough: those below a threshold are dropped, or stand for others and have as many lookups as it is.

        Args:
            max_rows: Most rows that are kept, expected.
            rng: Decides which.

        Source:
            Duffield, Lund and Thorup, Learn more, sample less, IEEE Trans. Information Theory 51(5), 2005: sizes below
            z are kept with probability size / z, and count as z then. Sums are unbiased, and repeated thresholds keep
            them so (Ting, Data sketches for disaggregated subset sum and frequent item estimation, SIGMOD 2018).
        """
        threshold = _threshold(self.lookups_N, max_rows)
        kept_N = self.lookups_N >= threshold * rng.random(len(self.lookups_N))
        lookups_N = np.maximum(self.lookups_N[kept_N], threshold)
        return replace(self, keys_N=self.keys_N[kept_N], lookups_N=lookups_N, threshold=max(self.threshold, threshold))

    def tables(self, tables: TableSet) -> tuple[TableSet, Mapping[str, CountedRows]]:
        """The tables as they are looked up, and the rows that were counted.

        Rows that were hit often enough are known one by one. All others share what is left of their table's lookups,
        as a power law that goes on from the last row that is known. A table that was hit too seldom stays as it is. One
        of which no row is known keeps its access and its row order, too, unless some rows would be known by that
        access: then all of its rows are alike.

        Args:
            tables: Those that were counted.
        """
        firsts_T = _first_keys(tables)
        of_features = np.split(self.lookups_F, np.cumsum([len(one.features) for one in tables.tables])[:-1])
        counted, rows = [], {}
        for table, first, lookups_F in zip(tables.tables, firsts_T.tolist(), of_features, strict=True):
            part = slice(*np.searchsorted(self.keys_N, [first, first + table.num_embeddings]).tolist())
            held = self._rows(self.keys_N[part] - first, self.lookups_N[part], table.num_embeddings)
            if held is not None:
                factors_F = (lookups_F / self.num_samples).tolist()
                features = tuple(map(_with_mean, table.features, factors_F))
                table = replace(table, features=features)
                if held.num_known or _is_flatter(held, table.access):
                    rows[table.name] = held
                    known_S = held.shares_N[: held.num_known]
                    table = replace(table, access=profile_of_known(known_S, 1.0, table.num_embeddings))
            counted.append(table)
        return replace(tables, tables=tuple(counted)), rows

    def _rows(self, ids_N: IntArray, lookups_N: FloatArray, num_rows: int) -> CountedRows | None:
        """A table's rows; None if they were hit too seldom."""
        per_hit = float(self.lookups_F.sum()) / self.num_hits if self.num_hits else 0.0
        total = float(lookups_N.sum())
        if not total or total < _LEAST_TABLE_HITS * per_hit:
            return None
        falling_N = np.argsort(-lookups_N, kind="stable")
        lookups_N = lookups_N[falling_N]
        least = max(_LEAST_THRESHOLDS * self.threshold, _LEAST_HITS * per_hit)
        return CountedRows(
            order_N=ids_N[falling_N],
            ids_N=ids_N[falling_N],
            shares_N=lookups_N / total,
            num_known=int(np.count_nonzero(lookups_N >= least)),
            num_rows=num_rows,
            least_share=least / total,
        )

    def write(self, path: Path, tables: TableSet, folder: Path | None = None) -> TableSet:
        """Writes the tables as they are looked up as a tables.json, and beside it the rows that were counted.

        Args:
            path: The file; row orders are named after it.
            tables: Those that were counted.
            folder: Where files of their own row orders lie, of which those of tables that keep theirs are copied; None
                to leave these out.

        Returns:
            What the file says.

        Raises:
            InputError: If nothing was counted, or a file cannot be written.
        """
        if not self.num_hits:
            raise InputError("no lookup was counted: train at least one batch", field="access")
        now, rows = self.tables(tables)
        written = []
        for number, table in enumerate(now.tables):
            order, file = table.row_order, path.parent / f"{path.stem}.rows-{number}.parquet"
            if table.name in rows:
                order = write_counted_rows(file, rows[table.name])
            elif isinstance(order, RowOrder):
                order = None if folder is None else copied_row_order(order, folder, file)
            written.append(replace(table, row_order=order))
        now = replace(now, tables=tuple(written))
        write_tables(now, path)
        return now


@dataclass(frozen=True, slots=True, eq=False)
class _Sampled:
    """Ids of one batch that were sampled.

    Attributes:
        ids_L: The ids; on a GPU, on their way to the host.
        first: Place of the first of them in the batch.
        every: Lookups from one of them to the next.
        counts_F: Lookups of each feature.
        num_samples: Samples of the batch.
        there: When the ids are on the host; None if they are.
    """

    ids_L: torch.Tensor
    first: int
    every: int
    counts_F: Sequence[int]
    num_samples: int
    there: torch.cuda.Event | None


class AccessCounter:
    """Counts the lookups of one process's batches: each batch's sample is copied, and merged on a thread.

    A batch of L lookups gives every (L / `sampled_ids`)-th of them from a random first one on, each for as many
    lookups as it stands for. The rows that are held are a threshold sample of at most `max_bytes`: frequent rows have
    what the sample says, others are unbiased in sum. Lookups count half after `half_life` batches. The same seed and
    batches give the same counts.

    Args:
        tables: The plan's tables.
        sampled_ids: Lookups of a batch that are sampled, about.
        max_bytes: Most memory.
        half_life: Batches after which a lookup counts half.
        seed: Decides which lookups are sampled; and the number of the process.

    Raises:
        InputError: If a number is out of range.
    """

    def __init__(
        self,
        tables: TableSet,
        *,
        sampled_ids: int = SAMPLED_IDS,
        max_bytes: int = MAX_BYTES,
        half_life: float = HALF_LIFE,
        seed: tuple[int, int] = (0, 0),
    ) -> None:
        WHOLE_AT_LEAST_1.check(sampled_ids, "sampled_ids")
        Range(at_least=2 * _ROW_BYTES * _NUM_WAITING).check(max_bytes, "max_bytes")
        FINITE_ABOVE_0.check(half_life, "half_life")
        for number in seed:
            SEED.check(number, "seed")
        self._sampled_ids, self._half_life = sampled_ids, half_life
        # As many may be new before there are fewer again.
        self._max_rows = max_bytes // _ROW_BYTES - _NUM_WAITING
        # One for the thread, and one for whoever asks: they draw at times that do not depend on each other.
        self._rng, self._rng_of_thread, self._rng_sent = (np.random.default_rng([*seed, number]) for number in range(3))
        num_features = [len(table.features) for table in tables.tables]
        self._first_F = np.repeat(_first_keys(tables), num_features)
        self._counts = AccessCounts.nothing(sum(num_features))
        self._waiting: list[_Sampled] = []
        self._num_waiting = 0
        self._thread = ThreadPoolExecutor(1, "autoshard-access")
        self._merging: Future[None] | None = None
        # Batches are observed on the thread that prefetches them, and read on that which trains.
        self._lock = Lock()

    def observe(self, ids_L: torch.Tensor, counts_F: Sequence[int], num_samples: int) -> None:
        """Takes the sample of a batch; the host waits for no device.

        Args:
            ids_L: Its ids, feature by feature.
            counts_F: How many each feature has.
            num_samples: Its samples.
        """
        every = max(1, -(-len(ids_L) // self._sampled_ids))
        first = int(self._rng.integers(every))
        sample_L, there = ids_L[first::every], None
        if ids_L.is_cuda:
            on_host_L = torch.empty(len(sample_L), dtype=ids_L.dtype, pin_memory=True)
            on_host_L.copy_(sample_L, non_blocking=True)
            sample_L, there = on_host_L, torch.cuda.current_stream(ids_L.device).record_event()
        else:
            sample_L = sample_L.clone()
        with self._lock:
            self._waiting.append(_Sampled(sample_L, first, every, counts_F, num_samples, there))
            self._num_waiting += len(sample_L)
            if self._num_waiting >= _NUM_WAITING:
                self._merge()

    def counted(self) -> AccessCounts:
        """All lookups so far."""
        with self._lock:
            self._merge()
            self._wait()
            return self._counts

    def counted_within(self, max_rows: int) -> AccessCounts:
        """All lookups so far, by a sample of so many rows as `AccessCounts.within` takes it."""
        return self.counted().within(max_rows, self._rng_sent)

    def close(self) -> None:
        """Ends the thread; what was counted stays."""
        self.counted()
        self._thread.shutdown()

    def _merge(self) -> None:
        """Lets the thread merge what waits, behind what it merges."""
        self._wait()
        if self._waiting:
            self._merging = self._thread.submit(self._merged, self._waiting)
            self._waiting, self._num_waiting = [], 0

    def _wait(self) -> None:
        if self._merging is not None:
            self._merging.result()
            self._merging = None

    def _merged(self, batches: Sequence[_Sampled]) -> None:
        counts_BF = np.array([batch.counts_F for batch in batches], dtype=np.int64)
        parts = [self._keys(batch, counts_F) for batch, counts_F in zip(batches, counts_BF, strict=True)]
        keys_L = np.concatenate(parts)
        lookups_L = np.repeat([float(batch.every) for batch in batches], [len(part) for part in parts])
        keys_N, inverse_L = np.unique(keys_L, return_inverse=True)
        came = AccessCounts(
            keys_N=keys_N,
            lookups_N=np.asarray(np.bincount(inverse_L, lookups_L, len(keys_N)), dtype=np.float64),
            lookups_F=counts_BF.sum(axis=0).astype(np.float64),
            num_samples=float(sum(batch.num_samples for batch in batches)),
            num_hits=float(len(keys_L)),
            threshold=0.0,
        )
        del parts, keys_L, lookups_L, inverse_L
        self._counts = self._counts.aged(0.5 ** (len(batches) / self._half_life))
        self._counts = AccessCounts.merged([self._counts, came])
        del came, keys_N
        if len(self._counts.keys_N) > self._max_rows:
            self._counts = self._counts.within(int(_KEPT_SHARE * self._max_rows), self._rng_of_thread)

    def _keys(self, batch: _Sampled, counts_F: IntArray) -> IntArray:
        if batch.there is not None:
            batch.there.synchronize()
        ids_L = batch.ids_L.numpy().astype(np.int64)
        places_L = batch.first + batch.every * np.arange(len(ids_L))
        feature_L = np.searchsorted(np.cumsum(counts_F), places_L, side="right")
        return np.asarray(self._first_F[feature_L] + ids_L)


def _is_flatter(rows: CountedRows, access: AccessProfile) -> bool:
    """Whether rows of which none is known are more alike than an access has it, by which some would be."""
    return float(access.probability_at(np.zeros(1))[0]) >= _SURELY_KNOWN * rows.known_from


def _with_mean(feature: Feature, pooling_factor: float) -> Feature:
    """The feature with another mean, and lengths that are spread around it as they were around its own."""
    ratio = pooling_factor / feature.pooling_factor if feature.pooling_factor else 1.0
    p99 = feature.pooling_p99
    return replace(
        feature,
        pooling_factor=pooling_factor,
        pooling_variance=min(feature.pooling_variance * ratio**2, MAX_POOLING_FACTOR**2),
        pooling_p99=None if p99 is None else min(p99 * ratio, MAX_POOLING_FACTOR),
    )


def _first_keys(tables: TableSet) -> IntArray:
    """Key of each table's first row, shape (T,)."""
    rows_T = np.array([table.num_embeddings for table in tables.tables], dtype=np.int64)
    return np.asarray(np.cumsum(rows_T) - rows_T)


def _added(
    keys_N: IntArray, lookups_N: FloatArray, more_keys_L: IntArray, more_L: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Rising keys and their lookups, with those of other rising keys added."""
    places_L = np.searchsorted(keys_N, more_keys_L)
    is_held_L = np.zeros(len(more_keys_L), dtype=np.bool_)
    if len(keys_N):
        is_held_L = keys_N[np.minimum(places_L, len(keys_N) - 1)] == more_keys_L
    lookups_N = lookups_N.copy()
    lookups_N[places_L[is_held_L]] += more_L[is_held_L]
    new_L = places_L[~is_held_L]
    # One after the other: room for both twice would not fit.
    lookups_N = np.insert(lookups_N, new_L, more_L[~is_held_L])
    return np.insert(keys_N, new_L, more_keys_L[~is_held_L]), lookups_N


def _threshold(sizes_N: FloatArray, max_kept: int) -> float:
    """The threshold z at which so many of the sizes are kept: the sum of min(1, size / z); 0 if all may be."""
    N = len(sizes_N)
    if max_kept >= N:
        return 0.0
    rising_N = np.sort(sizes_N)
    sums_N = np.cumsum(rising_N)
    # With z at one of the sizes, it and larger ones are kept for sure; the fewer, the larger it is.
    falling_N = sums_N / rising_N
    falling_N += np.arange(N - 1, -1, -1)
    num_below = int(np.searchsorted(np.negative(falling_N, out=falling_N), -max_kept))
    return float(sums_N[num_below - 1] / (max_kept - (N - num_below)))
