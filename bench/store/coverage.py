"""Which regions of feature space a store of samples covers, and which ones of a pool it leaves empty.

Shape suffixes: S sets, A axes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice, pairwise

import numpy as np

from autoshard.core import LocalShard, TableSet
from autoshard.core.tables import traits_of
from autoshard.formats.stores.samples import Sample, SampleTable
from bench.sampling.stream import SetSource, stream_sets, table_wise_pool

#: What planners ask of a pool: whole tables in placements and at random, and slices.
WANTED_WEIGHTS: Mapping[str, float] = {"random": 0.3, "placements": 0.4, "slices": 0.3}
_NUM_WANTED = 384
_CACHED_SHARDS = 1 << 16

ShardSet = Sequence[LocalShard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One feature, cut into ranges.

    Attributes:
        name: As reports show it.
        edges: Inner ends of the ranges, rising; the first and last range are open.
        labels: Of the ranges, one more than edges.
    """

    name: str
    edges: tuple[float, ...]
    labels: tuple[str, ...]

    def place(self, value: float) -> int:
        """Index of the range that holds a value: from an edge up to the next."""
        return int(np.searchsorted(self.edges, value, side="right"))


def _axis(name: str, edges: Sequence[float], write: Callable[[float], str]) -> Axis:
    texts = [write(edge) for edge in edges]
    between = [f"{low} – {high}" for low, high in pairwise(texts)]
    return Axis(name=name, edges=tuple(edges), labels=(f"< {texts[0]}", *between, f"≥ {texts[-1]}"))


def _short(value: float) -> str:
    """`0.01`, `10`, `10k`, `1M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _binary(value: float) -> str:
    """`64 KiB`, `1 MiB`."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


#: Of single shards. Reuse is told by the expected distinct rows per lookup: 1 when no row is looked up twice.
SHARD_AXES: tuple[Axis, ...] = (
    _axis("rows", (1e2, 1e3, 1e4, 1e5, 1e6, 1e7), _short),
    _axis("dim", (8, 16, 32, 64, 128, 256), _short),
    _axis("lookups per bag", (0.01, 0.1, 1, 10, 100), _short),
    _axis("distinct per lookup", (0.1, 0.25, 0.5, 0.75, 0.95), _short),
)
#: Of whole sets.
SET_AXES: tuple[Axis, ...] = (
    _axis("shards", (2, 4, 8, 16, 32), _short),
    _axis("lookups", (1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8), _short),
    _axis("bytes", tuple(float(2**power) for power in (16, 20, 24, 28, 30, 32, 34, 36)), _binary),
)

Place = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Samples per region of one feature space.

    Attributes:
        axes: The features.
        samples: Samples by region; of shards, samples with at least one shard in it. Regions without are left out.
        wanted: Sets of the pool by region, likewise; empty without a pool.
        pairs: The same two, by the ranges of two axes only, for each pair of axes.
    """

    axes: tuple[Axis, ...]
    samples: Mapping[Place, int]
    wanted: Mapping[Place, int]
    pairs: Mapping[tuple[int, int], tuple[Mapping[Place, int], Mapping[Place, int]]]

    @property
    def missing(self) -> tuple[tuple[Place, int], ...]:
        """Regions that the pool wants and no sample is in, those first that most of its sets are in."""
        empty = [(place, number) for place, number in self.wanted.items() if place not in self.samples]
        return tuple(sorted(empty, key=lambda item: (-item[1], item[0])))

    @property
    def covered_share(self) -> float:
        """Share of what the pool wants, by sets, that lies in regions with samples; 1 if it wants nothing."""
        total = sum(self.wanted.values())
        held = sum(number for place, number in self.wanted.items() if place in self.samples)
        return held / total if total else 1.0

    def labels(self, place: Place) -> tuple[str, ...]:
        """What a region's ranges are called."""
        return tuple(axis.labels[index] for axis, index in zip(self.axes, place, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A sample in the pair plots: means over its shards by lookups, and its latency."""

    source: str
    embedding_dim: float
    num_embeddings: float
    pooling_factor: float
    distinct_share: float
    kernel_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What samples of a device cover.

    Attributes:
        device: Key of the device.
        num_samples: Samples.
        num_shards: Different shards in them.
        sources: Samples by strategy.
        kinds: Samples by number format, pooling, optimizer, memory, update and output of their shards.
        shards: Regions of single shards.
        sets: Regions of whole sets.
        points: One per sample, in the store's order.
        has_pool: Whether a pool was given to compare with.
    """

    device: str
    num_samples: int
    num_shards: int
    sources: Mapping[str, int]
    kinds: Mapping[str, int]
    shards: Space
    sets: Space
    points: tuple[Point, ...]
    has_pool: bool


def coverage_of(samples: SampleTable, pool: TableSet | None = None, *, num_wanted: int = _NUM_WANTED) -> Coverage:
    """Counts samples per region.

    Args:
        samples: Samples of one device.
        pool: Tables that a cost model shall be good for. Its regions are those of its whole tables, and of sets that
            the strategies `random`, `placements` and `slices` draw from it; None to count samples only.
        num_wanted: Sets to draw from the pool.
    """
    sets = [sample.local_shards for sample in samples.samples]
    wanted = _wanted_sets(pool, max(map(len, sets), default=1), num_wanted) if pool is not None else []
    singles = [(shard,) for shard in table_wise_pool(pool)] if pool is not None else []
    return Coverage(
        device=samples.samples[0].device if samples.samples else "",
        num_samples=len(sets),
        num_shards=len({shard for shards in sets for shard in shards}),
        sources=_counted(sample.source for sample in samples.samples),
        kinds=_counted(kind for shards in sets for kind in {_kind(shard) for shard in shards}),
        shards=_space(SHARD_AXES, _shard_places(sets), _shard_places([*wanted, *singles])),
        sets=_space(SET_AXES, _set_places(sets), _set_places(wanted)),
        points=tuple(_point(sample) for sample in samples.samples if sample.shards),
        has_pool=pool is not None,
    )


def _wanted_sets(pool: TableSet, max_tables: int, count: int) -> list[ShardSet]:
    source = SetSource(tables=pool, max_tables=max(1, max_tables))
    stream = stream_sets(source, seed=0, weights=WANTED_WEIGHTS)
    return [chosen.shards for chosen in islice(stream, count)]


def _counted(names: Iterable[str]) -> Mapping[str, int]:
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _kind(shard: LocalShard) -> str:
    return ", ".join(map(str, (*traits_of(shard).values(), shard.level, shard.update, shard.output)))


@lru_cache(maxsize=_CACHED_SHARDS)
def distinct_share(shard: LocalShard) -> float:
    """Expected distinct rows per lookup of a step; 1 when nothing is looked up."""
    lookups = shard.num_lookups
    return shard.access.expected_distinct(lookups) / lookups if lookups > 0 else 1.0


def _space(axes: tuple[Axis, ...], held: Sequence[set[Place]], wanted: Sequence[set[Place]]) -> Space:
    """The space of sets that are in these regions each."""

    def count(regions: Sequence[set[Place]], chosen: Sequence[int]) -> Mapping[Place, int]:
        return dict(Counter(key for places in regions for key in {tuple(place[i] for i in chosen) for place in places}))

    every = range(len(axes))
    pairs = {pair: (count(held, pair), count(wanted, pair)) for pair in combinations(every, 2)}
    return Space(axes=axes, samples=count(held, every), wanted=count(wanted, every), pairs=pairs)


def _shard_places(sets: Sequence[ShardSet]) -> list[set[Place]]:
    return [{_shard_place(shard) for shard in shards} for shards in sets]


def _shard_place(shard: LocalShard) -> Place:
    values = (shard.num_embeddings, shard.embedding_dim, shard.pooling_factor, distinct_share(shard))
    return tuple(axis.place(value) for axis, value in zip(SHARD_AXES, values, strict=True))


def _set_places(sets: Sequence[ShardSet]) -> list[set[Place]]:
    found = []
    for shards in sets:
        amounts = (
            len(shards),
            sum(shard.num_lookups for shard in shards),
            sum(shard.memory_bytes for shard in shards),
        )
        found.append({tuple(axis.place(value) for axis, value in zip(SET_AXES, amounts, strict=True))})
    return found


def _point(sample: Sample) -> Point:
    shards = sample.local_shards
    weight_S = np.array([shard.num_lookups for shard in shards])
    weight_S = weight_S / weight_S.sum() if weight_S.sum() > 0 else np.full(len(shards), 1 / len(shards))
    return Point(
        source=sample.source,
        embedding_dim=float(weight_S @ [shard.embedding_dim for shard in shards]),
        num_embeddings=float(np.exp(weight_S @ [np.log(shard.num_embeddings) for shard in shards])),
        pooling_factor=float(np.exp(weight_S @ [np.log(max(shard.pooling_factor, 1e-4)) for shard in shards])),
        distinct_share=float(weight_S @ [distinct_share(shard) for shard in shards]),
        kernel_ms=sample.kernel_ms,
    )
