"""The coverage of a store's samples as an HTML page."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

from autoshard.report.coverage_page import PairAxis, RegionMap, coverage_figures, coverage_page
from autoshard.report.wording import write_percent
from autoshard.table import Table
from bench.store.coverage import Coverage, Space

_PAIR_AXES = (
    PairAxis(name="dim", is_log=True),
    PairAxis(name="rows", is_log=True),
    PairAxis(name="lookups per bag", is_log=True),
    PairAxis(name="distinct per lookup", is_log=False),
    PairAxis(name="kernel ms", is_log=True),
)
_LISTED = 40


def coverage_pictures(coverage: Coverage) -> dict[str, Any]:
    """The pictures of the page by name: pair plots and samples per region, as plotly figures."""
    return coverage_figures(_PAIR_AXES, _points(coverage), _all_maps(coverage))


def _points(coverage: Coverage) -> dict[str, list[tuple[float, ...]]]:
    """What the pair plots show of every sample, by the strategy that chose it."""
    points: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    for point in coverage.points:
        if point.kernel_ms > 0:
            points[point.source].append(
                (
                    point.embedding_dim,
                    point.num_embeddings,
                    point.pooling_factor,
                    point.distinct_share,
                    point.kernel_ms,
                )
            )
    return dict(sorted(points.items()))


def _all_maps(coverage: Coverage) -> list[RegionMap]:
    return [*_maps("Shards", coverage.shards), *_maps("Sets", coverage.sets)]


def coverage_html(coverage: Coverage, *, title: str = "What the samples cover") -> str:
    """The HTML page: what is missing, samples per region, pair plots, ways of choosing and kinds."""
    missing = [_missing("shards", coverage.shards), _missing("sets", coverage.sets)] if coverage.has_pool else []
    listings = [
        Table(
            title="Ways of choosing",
            caption="Samples by the strategy that chose their set.",
            columns=("strategy", "samples"),
            rows=tuple((name, f"{number:,}") for name, number in coverage.sources.items()),
        ),
        Table(
            title="Kinds",
            caption="Samples with at least one shard of a kind: number format, pooling, optimizer, memory, update, "
            "output.",
            columns=("kind", "samples"),
            rows=tuple((name, f"{number:,}") for name, number in coverage.kinds.items()),
        ),
    ]
    return coverage_page(
        title=title,
        subtitle=f"{coverage.num_samples:,} samples of {coverage.device}",
        facts=_facts(coverage),
        axes=_PAIR_AXES,
        points=_points(coverage),
        maps=_all_maps(coverage),
        missing=missing,
        listings=listings,
    )


def _facts(coverage: Coverage) -> list[tuple[str, str, str]]:
    facts = [
        ("Samples", f"{coverage.num_samples:,}", f"of {coverage.num_shards:,} different shards"),
        ("Regions of shards", f"{len(coverage.shards.samples):,}", "with samples"),
        ("Regions of sets", f"{len(coverage.sets.samples):,}", "with samples"),
    ]
    if coverage.has_pool:
        for label, space in (("shards", coverage.shards), ("sets", coverage.sets)):
            note = f"{len(space.missing):,} of its {len(space.wanted):,} regions are empty"
            facts.append((f"Pool covered, {label}", write_percent(space.covered_share), note))
    return facts


def _missing(label: str, space: Space) -> Table:
    rows = tuple((*space.labels(place), f"{number:,}") for place, number in space.missing[:_LISTED])
    more = f" The first {_LISTED} of {len(space.missing):,}." if len(space.missing) > _LISTED else ""
    caption = f"Regions that sets of the pool are in and no sample is, the most wanted first.{more}"
    return Table(
        title=f"Missing regions of {label}",
        caption=caption if rows else "None: every region that sets of the pool are in has samples.",
        columns=(*(axis.name for axis in space.axes), "sets of the pool"),
        rows=rows,
    )


def _maps(label: str, space: Space) -> list[RegionMap]:
    found = []
    for first, second in combinations(range(len(space.axes)), 2):
        x_axis, y_axis = space.axes[first], space.axes[second]
        samples, wanted = space.pairs[first, second]
        found.append(
            RegionMap(
                title=f"{label}: {x_axis.name} and {y_axis.name}",
                x_name=x_axis.name,
                y_name=y_axis.name,
                x_labels=x_axis.labels,
                y_labels=y_axis.labels,
                samples=samples,
                wanted=wanted,
            )
        )
    return found
