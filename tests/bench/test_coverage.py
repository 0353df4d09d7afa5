from pathlib import Path

import pytest

from autoshard.formats import load_tables
from autoshard.formats.stores.samples import SampleTable, read_samples
from autoshard.report.coverage_page import MOST_POINTS, subsample
from bench.store.coverage import SHARD_AXES, coverage_of
from bench.store.coverage_report import coverage_html
from tests import builders as make

STORE = Path(__file__).parents[1] / "data" / "samples"


@pytest.fixture(scope="module")
def samples():
    return read_samples(STORE, "cpu")


@pytest.fixture(scope="module")
def pool():
    return load_tables("metasyn").scaled(64).sample(120, 0)


@pytest.fixture(scope="module")
def coverage(samples, pool):
    return coverage_of(samples, pool, num_wanted=60)


def test_ranges_start_at_their_edge():
    rows = SHARD_AXES[0]
    assert [rows.labels[rows.place(value)] for value in (99, 100, 999, 1000, 10**9)] == [
        "< 100",
        "100 – 1k",
        "100 – 1k",
        "1k – 10k",
        "≥ 10M",
    ]


def test_a_sample_counts_once_per_region(samples, coverage):
    dims = [
        sum(any(low <= shard.embedding_dim < high for shard in sample.local_shards) for sample in samples.samples)
        for low, high in ((16, 32), (32, 64))
    ]
    along_rows_and_dim = coverage.shards.pairs[0, 1][0]
    assert max(along_rows_and_dim.values()) <= len(samples)
    for place, number in zip((2, 3), dims, strict=True):
        counted = [count for key, count in along_rows_and_dim.items() if key[1] == place]
        assert max(counted) <= number <= sum(counted)
    assert sum(coverage.sets.samples.values()) == coverage.num_samples == len(samples)
    assert sum(coverage.sources.values()) == len(samples)


def test_regions_of_a_pool_without_samples_are_missing(coverage):
    space = coverage.shards
    assert 0 < space.covered_share < 1
    assert space.missing
    assert not {place for place, _ in space.missing} & space.samples.keys()
    numbers = [number for _, number in space.missing]
    assert numbers == sorted(numbers, reverse=True)
    # Slices have narrower columns than the samples, which are whole tables of 16 and 32 columns.
    assert any(space.labels(place)[1] == "< 8" for place, _ in space.missing)


def test_samples_of_all_that_a_pool_wants_leave_nothing_missing(samples):
    names = {shard.table for sample in samples.samples for shard in sample.local_shards}
    tables = tuple(table for table in load_tables("metasyn").scaled(64).tables if table.name in names)
    whole = coverage_of(samples, make.tables(*tables, batch_size=1024), num_wanted=0)
    assert whole.shards.missing == ()
    assert whole.shards.covered_share == 1.0


def test_the_page_says_what_is_missing(coverage):
    place, _ = coverage.shards.missing[0]
    page = coverage_html(coverage)
    assert coverage.shards.labels(place)[0].replace("<", "&lt;") in page
    assert page.count('class="chart"') == 1 + 6 + 3
    assert "Missing regions of sets" in page
    assert "orange cross" in page


def test_without_a_pool_nothing_is_called_missing(samples):
    alone = coverage_of(samples)
    assert alone.shards.wanted == {}
    page = coverage_html(alone)
    assert "Missing regions" not in page
    assert "orange cross" not in page


def test_no_samples_and_no_pool_make_an_empty_page():
    empty = coverage_of(SampleTable(samples=()))
    assert empty.num_samples == 0
    assert "Samples per region" in coverage_html(empty)


def test_large_stores_show_some_of_their_samples():
    points = {"many": [[float(index)] for index in range(4 * MOST_POINTS)], "few": [[1.0]] * 3}
    shown = subsample(points)
    assert 1 <= len(shown["few"]) <= 3
    assert 0.95 * MOST_POINTS <= len(shown["many"]) <= MOST_POINTS
    assert all(point in points["many"] for point in shown["many"][:20])
