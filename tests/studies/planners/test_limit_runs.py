"""The study of time limits: its topologies, its gaps, its parts, and what it refuses."""

import pytest

from autoshard.formats import load_topology
from studies.__main__ import main
from studies.planners import limit_runs
from studies.planners.limit_runs import LimitRun, LimitTask, TaskGaps, limits_table, of_ranks


def test_topologies_keep_their_nodes():
    wide = of_ranks(load_topology("a100-32"), 80)
    assert (wide.world_size, wide.local_world_size, wide.num_nodes) == (80, 8, 10)
    assert of_ranks(load_topology("cpu-8"), 80).local_world_size == 80


@pytest.mark.parametrize("name", limit_runs.TASKS)
def test_every_task_has_its_tables_and_ranks(name):
    task = limit_runs.TASKS[name]
    assert task.topology().world_size == task.num_ranks
    assert len(task.tables(9001).tables) == task.num_tables


def test_gaps_are_over_the_best_known():
    found = [
        TaskGaps(
            run=LimitRun(
                task="80-cpu",
                seed=seed,
                limits_s=(0.1, 1.0),
                steps_ms=(2.0 + seed, 1.1),
                took_s=(0.2, 1.0 + seed),
                searches=("", ""),
            ),
            searched_ms=(1.2, 1.0),
        )
        for seed in (0, 1)
    ]
    assert found[0].gaps == pytest.approx((1.0, 0.1))
    assert "0.1 s 100.00% (0.20 s), 1 s 10.00% (1.00 s) above 1 ms, the best of 2 searches" in found[0].line
    assert limits_table(found).lines == (
        ("80-cpu", "0.1", "2", "150.00%", "200.00%", "1.50%", "0.20", "0.20"),
        ("80-cpu", "1", "2", "10.00%", "10.00%", "0.30%", "1.50", "2.00"),
    )


def test_the_best_known_is_searched_apart(tmp_path, monkeypatch, capsys):
    tiny = LimitTask(num_tables=4, num_ranks=2, base="cpu-8", goals={0.1: 0.015})
    monkeypatch.setattr(limit_runs, "TASKS", {"80-cpu": tiny})
    best, parts = tmp_path / "best", tmp_path / "parts"
    options = ["--tasks", "80-cpu", "--seeds", "1", "--best-s", "0.1", "--searches", "2", "--best", str(best)]
    assert main(["limits", *options, "--searches", "1", "--only", "searches"]) == 0
    searches = sorted(path.name for path in (best / "parts").iterdir())
    assert searches == ["80-cpu-9001-search-1.json"]
    assert main(["limits", *options, "--only", "commands", "--parts", str(parts)]) == 0
    assert [path.name for path in (parts / "parts").iterdir()] == ["80-cpu-9001.json"]
    assert sorted(path.name for path in (best / "parts").iterdir()) == searches
    assert "the best of 1 searches" in capsys.readouterr().err
