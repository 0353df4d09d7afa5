"""The study of time limits: its topologies, its gaps, and what it refuses."""

import pytest

from autoshard.formats import load_topology
from studies.__main__ import main
from studies.planners.limit_runs import LimitRun, limits_table, of_ranks


def test_topologies_keep_their_nodes():
    wide = of_ranks(load_topology("a100-32"), 80)
    assert (wide.world_size, wide.local_world_size, wide.num_nodes) == (80, 8, 10)
    assert of_ranks(load_topology("cpu-8"), 80).local_world_size == 80


def test_gaps_are_over_the_best_known():
    runs = [
        LimitRun(
            task="80-cpu",
            seed=seed,
            limits_s=(0.1, 1.0, 10.0),
            steps_ms=(2.0 + seed, 1.1, 1.0),
            took_s=(0.2, 1.0 + seed, 9.0),
            best_ms=1.0,
        )
        for seed in (0, 1)
    ]
    assert runs[0].gaps == pytest.approx((1.0, 0.1, 0.0))
    assert "0.1 s 100.00% (0.20 s), 1 s 10.00% (1.00 s)" in runs[0].line
    assert limits_table(runs).lines[:2] == (
        ("80-cpu", "0.1", "2", "150.00%", "200.00%", "0.20"),
        ("80-cpu", "1", "2", "10.00%", "10.00%", "2.00"),
    )


def test_refuses_unknown_tasks(capsys):
    assert main(["limits", "--tasks", "90-cpu"]) == 2
    assert (
        "--tasks: must be any of 80-cpu, 80-a100, 200-dgx, 800-cpu, 800-a100, got '90-cpu'" in capsys.readouterr().err
    )
