"""The generated pool has the statistics that were published."""

import numpy as np
import pytest

from autoshard.core import NUM_REUSE_BINS
from autoshard.formats import load_tables
from autoshard.formats.metasyn import metasyn

#: 2021/fbgemm_t856_bs65536.pt in facebookresearch/dlrm_datasets, locality_stats.txt: shares per reuse bin.
ROW_SHARES = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001, *[0.0] * 7]
LOOKUP_SHARES = [0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052]
LOOKUP_SHARES += [0.050, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019]
NUM_LOOKUPS = 887_017_990
NUM_DISTINCT_ROWS = 128_435_723


@pytest.fixture(scope="module", params=[0, 7])
def pool(request):
    return metasyn(request.param)


def rows(pool):
    return np.array([table.num_embeddings for table in pool.tables])


def pooling_factors(pool):
    return np.array([table.pooling_factor for table in pool.tables])


def test_rows_and_pooling_factors_are_those_of_table_1(pool):
    """AutoShard Table 1; its mean pooling factor of 15 is 15.81 in the data set's own statistics."""
    assert (len(pool.tables), pool.batch_size) == (856, 65_536)
    assert (rows(pool).max(), round(rows(pool).mean()), rows(pool).min()) == (12_543_670, 4_107_458, 1)
    factors = pooling_factors(pool)
    assert (factors.max(), factors.min()) == (193.0, 0.0)
    assert factors.mean() == pytest.approx(15.8117, abs=5e-4)
    assert factors.sum() * 65_536 == pytest.approx(NUM_LOOKUPS, rel=1e-6)


def test_distributions_are_those_of_figure_13(pool):
    """AutoShard A.2: millions of rows mostly, pooling factors of a power law below 50 mostly, no relation between."""
    assert (rows(pool) > 1e6).mean() > 0.6
    assert 0.05 < (rows(pool) > 1e7).mean() < 0.2
    factors = pooling_factors(pool)
    assert (factors < 50).mean() > 0.85
    assert 3 < np.median(factors) < 8  # far below the mean
    # The density falls as (f + 6) ** -2, so 3.3 times as many are above 20 as above 60 (and below the cut-off, 193).
    assert (factors > 20).mean() / (factors > 60).mean() == pytest.approx(3.3, rel=0.4)
    ranks = np.argsort(np.argsort(rows(pool))), np.argsort(np.argsort(factors))
    assert abs(np.corrcoef(*ranks)[0, 1]) < 0.1


def test_one_batch_reuses_rows_as_measured(pool):
    row_bins, lookup_bins = np.zeros(NUM_REUSE_BINS), np.zeros(NUM_REUSE_BINS)
    for table in pool.tables:
        num_lookups = table.pooling_factor * pool.batch_size
        if num_lookups:
            row_bins += table.access.reuse_bins(num_lookups) * table.access.expected_distinct(num_lookups)
            lookup_bins += table.access.reuse_bins(num_lookups, "lookups") * num_lookups
    # Half the sum of differences: 2.4% and 2.7% of the rows, 1.0% of the lookups are in another bin.
    assert np.abs(row_bins / row_bins.sum() - ROW_SHARES).sum() / 2 < 0.035
    assert np.abs(lookup_bins / lookup_bins.sum() - LOOKUP_SHARES).sum() / 2 < 0.015
    assert row_bins.sum() == pytest.approx(NUM_DISTINCT_ROWS, rel=0.04)


def test_tables_are_held_within_bytes_by_fewer_rows(pool):
    most = 2**20
    held = pool.held_within(most)
    assert max(table.storage_bytes for table in held.tables) <= most
    assert held.batch_size == pool.batch_size
    for table, former in zip(held.tables, pool.tables, strict=True):
        assert table.access.num_rows == table.num_embeddings
        assert (table == former) == (former.storage_bytes <= most)
    assert pool.held_within(1).tables[0].num_embeddings == 1


def test_tables_are_skewed_differently(pool):
    top = [float(table.access.coverage(table.num_embeddings / 1000)) for table in pool.tables if table.pooling_factor]
    flat, skewed = np.percentile(top, [10, 90])
    assert flat < 0.15
    assert skewed > 0.6


def test_dimensions_are_16_or_32_alike_often(pool):
    dims = [table.embedding_dim for table in pool.tables]
    assert set(dims) == {16, 32}
    assert 0.4 < np.mean([dim == 16 for dim in dims]) < 0.6


def test_the_seed_decides():
    assert metasyn(0) == metasyn(0) == load_tables("metasyn")
    assert metasyn(0) != metasyn(1)
