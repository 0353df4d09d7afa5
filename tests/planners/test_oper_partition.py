"""Row groups: they tile the tables, and none holds more than the threshold of lookups or bytes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    Constraints,
    Feature,
    Optimizer,
    RowsBy,
    Shard,
)
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.oper import lookup_bytes, row_groups
from autoshard.planners.oper.partition import row_range
from tests import builders as make


def read(shard):
    """Bytes that lookups of a sample read from one shard."""
    return float(lookup_bytes([shard])[0])


@st.composite
def table_sets(draw):
    tables = []
    for index in range(draw(st.integers(1, 5))):
        num_rows = draw(st.integers(1, 10**7))
        profile = draw(
            st.sampled_from(
                [
                    AccessProfile.uniform(num_rows),
                    AccessProfile.uniform(num_rows, 0.3),
                    AccessProfile.zipf(num_rows, 0.8),
                    AccessProfile.zipf(num_rows, 1.6),
                ]
            )
        )
        feature = Feature(name=f"f{index}", pooling_factor=draw(st.sampled_from([0.0, 0.5, 1.0, 40.0])))
        dim = draw(st.sampled_from([1, 16, 128]))
        tables.append(make.table(f"t{index}", num_rows, embedding_dim=dim, features=(feature,), access=profile))
    return make.tables(*tables)


def assert_tiles(tables, shards):
    for one in tables.tables:
        parts = [shard for shard in shards if shard.table == one]
        bounds = [(shard.rows.start, shard.rows.stop) for shard in parts]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == one.num_embeddings
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        assert {shard.columns for shard in parts} == {(0, one.embedding_dim)}
        assert len({shard.rows.by for shard in parts}) == 1


@given(tables=table_sets(), threshold=st.sampled_from([1.0, 0.3, 0.05, 0.01]))
def test_groups_tile_the_tables_and_keep_to_the_threshold(tables, threshold):
    shards = row_groups(tables, threshold)
    assert_tiles(tables, shards)
    all_bytes = tables.storage_bytes
    all_lookups = sum(read(Shard.whole(one)) for one in tables.tables)
    assert sum(read(shard) for shard in shards) == pytest.approx(all_lookups)
    for shard in shards:
        if shard.num_embeddings > 1:
            assert shard.storage_bytes <= threshold * all_bytes * (1 + 1e-9)
            assert read(shard) <= threshold * all_lookups * (1 + 1e-6) + 1e-12
    assert len(shards) <= 3 / threshold + 2 * len(tables.tables)


@given(tables=table_sets())
def test_no_group_stops_before_it_reaches_the_threshold(tables):
    threshold = 0.02
    all_bytes = tables.storage_bytes
    all_lookups = sum(read(Shard.whole(one)) for one in tables.tables)
    for shard in row_groups(tables, threshold):
        if shard.rows.stop < shard.table.num_embeddings:
            longer = replace(
                shard, rows=replace(shard.rows, start=shard.rows.start, stop=shard.rows.stop + 1, by=RowsBy.ACCESS_RANK)
            )
            over_bytes = longer.storage_bytes > threshold * all_bytes * (1 - 1e-9)
            assert over_bytes or read(longer) > threshold * all_lookups * (1 - 1e-6)


def test_wide_rows_count_for_what_they_read():
    # Tables of as many lookups and as many bytes, one of them twice as wide: it gets 2/3 of the bytes of lookups.
    wide = make.table("wide", 10**6, embedding_dim=128, optimizer=Optimizer.SGD, access=AccessProfile.uniform(10**6))
    slim = make.table(
        "slim", 2 * 10**6, embedding_dim=64, optimizer=Optimizer.SGD, access=AccessProfile.uniform(2 * 10**6)
    )
    shards = row_groups(make.tables(wide, slim, batch_size=1), 0.01)
    names = [shard.table.name for shard in shards]
    # Lookups bind the wide table (2/3 of them in half of the bytes), bytes the slim one.
    assert names.count("wide") == pytest.approx(67, abs=1)
    assert names.count("slim") == pytest.approx(50, abs=1)


def test_hot_rows_come_in_small_groups():
    shards = row_groups(make.tables(make.table(num_embeddings=10**6, alpha=1.2), batch_size=1), 0.01)
    sizes = [shard.num_embeddings for shard in shards]
    assert sizes[0] == 1
    assert max(sizes) <= 10**4
    # Paper, Sec. 4.2: groups bound by access have most lookups and few bytes (there over 90% in less than 5%).
    bound = [shard for shard in shards if shard.num_embeddings < 10**4 and shard.rows.stop < 10**6]
    lookups = sum(read(shard) for shard in bound) / read(Shard.whole(bound[0].table))
    rows = sum(shard.num_embeddings for shard in bound) / 10**6
    assert lookups > 0.9
    assert rows < 0.05


def test_tables_that_are_not_cut_need_no_row_order():
    tables = make.tables(make.table("big", 10**5), make.table("small", 3, alpha=0.0), batch_size=1)
    (small,) = [shard for shard in row_groups(tables, 0.6) if shard.table.name == "small"]
    assert small == Shard.whole(tables["small"])


def test_co_located_tables_stay_whole():
    together = make.table("a", constraints=Constraints(colocate_with=("b",)))
    tables = make.tables(together, make.table("b"), make.table("c"), batch_size=1)
    num_parts = [sum(shard.table.name == name for shard in row_groups(tables, 0.001)) for name in "abc"]
    assert num_parts[:2] == [1, 1]
    assert num_parts[2] > 1


@given(tables=table_sets(), threshold=st.sampled_from([1.0, 0.3, 0.05, 0.01]))
def test_rows_of_unknown_order_are_cut_into_equal_ranges_of_ids(tables, threshold):
    tables = replace(tables, tables=tuple(replace(one, row_order=None) for one in tables.tables))
    shards = row_groups(tables, threshold)
    assert_tiles(tables, shards)
    assert {shard.rows.by for shard in shards} == {RowsBy.INDEX}
    for one in tables.tables:
        sizes = [shard.num_embeddings for shard in shards if shard.table == one]
        assert max(sizes) - min(sizes) <= 1


def test_ranges_of_row_ids_get_equal_shares_and_those_of_access_ranks_do_not():
    def read_of_quarters(table):
        ends = [table.num_embeddings * quarter // 4 for quarter in range(5)]
        return [read(row_range(table, start, stop)) for start, stop in pairwise(ends)]

    table = make.table()
    by_id, by_rank = read_of_quarters(replace(table, row_order=None)), read_of_quarters(table)
    np.testing.assert_allclose(by_id, read(Shard.whole(table)) / 4)
    assert by_rank == sorted(by_rank, reverse=True)
    assert by_rank[0] > 4 * by_rank[1]


def test_refuses_what_makes_no_partition():
    tables = make.tables(make.table(), batch_size=1)
    for threshold in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(InvalidOptionError, match=r"threshold: must be in \(0, 1\]"):
            row_groups(tables, threshold)
