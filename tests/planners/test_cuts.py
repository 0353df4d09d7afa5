"""Halves of shards: they tile it, and keep to widths that kernels like."""

import numpy as np
import pytest

from autoshard.core import Constraints, Shard, TableSet
from autoshard.planners.cuts import halves, with_costly_cut


@pytest.mark.parametrize(("dim", "widths"), [(64, (32, 32)), (20, (12, 8)), (8, (4, 4)), (4, None), (1, None)])
def test_columns(make_table, dim, widths):
    both = halves(Shard.whole(make_table("t", embedding_dim=dim)), "columns")
    assert (both and tuple(part.embedding_dim for part in both)) == widths
    if both:
        assert both[0].columns[1] == both[1].columns[0]


@pytest.mark.parametrize(("rows", "sizes"), [(1000, (500, 500)), (3, (1, 2)), (1, None)])
def test_rows(make_table, rows, sizes):
    both = halves(Shard.whole(make_table("t", num_embeddings=rows)), "rows")
    assert (both and tuple(part.num_embeddings for part in both)) == sizes
    if both:
        assert both[0].rows.stop == both[1].rows.start


def test_cuts_until_no_shard_costs_more(make_table, make_problem, make_topology):
    tables = (make_table("wide", embedding_dim=2048, pooling_factor=500.0), *(make_table(f"t{i}") for i in range(4)))
    problem = make_problem((TableSet(batch_size=65536, tables=tables), make_topology(2)))
    limit_ms = problem.kernel_ms_N.max() / 2.5
    finer = with_costly_cut(problem, limit_ms, "columns")
    assert finer.kernel_ms_N.max() <= limit_ms
    assert [shard.columns for shard in finer.shards if shard.table.name == "wide"] == [
        (0, 512), (512, 1024), (1024, 1536), (1536, 2048)
    ]  # fmt: skip
    assert with_costly_cut(problem, np.inf, "columns") is None


def test_does_not_cut_what_is_no_cheaper_for_it(make_table, make_problem, make_topology):
    # A row of 16 floats is a cache line: half of it takes as long.
    problem = make_problem(
        (TableSet(batch_size=65536, tables=(make_table("t", pooling_factor=50.0),)), make_topology(2))
    )
    assert with_costly_cut(problem, 0.0, "columns") is None
    assert with_costly_cut(problem, 0.0, "rows") is not None


def test_shards_that_must_stay_together_stay_whole(make_table, make_problem, make_topology):
    tables = (make_table("a", constraints=Constraints(colocate_with=("b",))), make_table("b"))
    problem = make_problem((TableSet(batch_size=8, tables=tables), make_topology(2)))
    assert with_costly_cut(problem, 0.0, "columns") is None
