import json

import pytest


@pytest.mark.smoke
@pytest.mark.parametrize("memory", ["1.1", "1000"])
def test_both_environments_are_timed(tmp_path, run_study, capsys, memory):
    sizes = ["--tasks", "3", "--tables", "6", "--ranks", "2", "--runs", "2"]
    assert run_study("env-speed", "--cost", "analytic", *sizes, "--memory", memory, "-o", tmp_path) == 0
    assert "tables/s with 3 tasks at once" in capsys.readouterr().out
    document = json.loads((tmp_path / "env-speed.json").read_text())
    assert document["schema"] == "autoshard.env_speed/1"
    assert document["num_tasks"] == 3
    assert document["single_tables_per_s"] > 0
    assert document["batch_tables_per_s"] > 0


def test_a_registry_without_a_model_leaves_the_one_that_ships(tmp_path, run_study, capsys, monkeypatch):
    monkeypatch.delenv("AUTOSHARD_SHIPPED_MODELS")
    sizes = ["--tasks", "2", "--tables", "6", "--ranks", "2", "--runs", "1"]
    assert run_study("env-speed", "--registry", tmp_path, *sizes) == 0
    assert "learned:cpu@" in capsys.readouterr().out
