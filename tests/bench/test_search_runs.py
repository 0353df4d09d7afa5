"""The benchmark of searches: its tasks, and a short run of the real thing."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from autoshard.formats import load_topology
from autoshard.formats.metasyn import metasyn
from bench.search_runs import SCALE, draw_tables, widened


def test_tables_are_drawn_under_new_names():
    pool = metasyn().scaled(SCALE)
    costs = np.ones(len(pool.tables))
    few = draw_tables(pool, costs, 80, 8, 0, level=False)
    many = draw_tables(pool, costs, 2000, 100, 0, level=False)
    assert len({table.name for table in few.tables}) == 80
    assert len({table.access for table in few.tables}) > 70
    assert len({table.name for table in many.tables}) == 2000
    assert draw_tables(pool, costs, 80, 8, 0, level=False) == few
    assert draw_tables(pool, costs, 80, 8, 1, level=False) != few


def test_level_tasks_have_no_table_that_decides_alone():
    pool = metasyn().scaled(SCALE)
    costs = np.arange(len(pool.tables), dtype=float)
    drawn = draw_tables(pool, costs, 40, 40, 0, level=True)
    kept = {table.num_embeddings for table in pool.tables[: len(pool.tables) // 4 + 1]}
    assert {table.num_embeddings for table in drawn.tables} <= kept


def test_topologies_of_any_size():
    wide = widened(load_topology("cpu-8"), 1024)
    assert (wide.world_size, wide.levels[-1].size) == (1024, 1024)


@pytest.mark.slow
def test_program_reports_gaps(tmp_path):
    command = [sys.executable, "-m", "bench.search_runs", "--tasks", "1", "--sizes", "80", "--best-s", "4", "--json"]
    environment = {**os.environ, "AUTOSHARD_REGISTRY": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    runs = json.loads(done.stdout)["runs"]
    assert [run["level"] for run in runs] == [False, True]
    assert all(run["auto_ms"] >= run["best_ms"] > 0 for run in runs)
    assert all(run["greedy_ms"] >= run["best_ms"] for run in runs)
