import json

import pytest


def test_both_engines_run_the_same_plans(tmp_path, run_study, capsys):
    sizes = ["--batch-sizes", "8", "--rounds", "1", "--steps", "2", "--nproc", "2", "--num-tables", "4"]
    assert run_study("engines", *sizes, "--scale", "4096", "-o", tmp_path) == 0
    assert "4 tables on 2 processes" in capsys.readouterr().out
    document = json.loads((tmp_path / "engines.json").read_text())
    assert document["schema"] == "autoshard.engines/1"
    assert [run["layout"] for run in document["runs"]] == ["table-wise", "row-wise", "mixed"]
    for run in document["runs"]:
        assert run["ratio"]["median"] == pytest.approx(run["torchrec_ms"] / run["thin_ms"])
        assert 0 < run["thin_embedding_ms"] < run["thin_ms"]


@pytest.mark.smoke
def test_processor_time_of_a_step_is_measured(tmp_path, run_study, capsys):
    assert run_study("host-time", "--features", "5", "--nproc", "2", "--steps", "2", "-o", tmp_path) == 0
    assert "5 features on 2 processes, table-wise" in capsys.readouterr().out
    document = json.loads((tmp_path / "host-time.json").read_text())
    assert document["slowest_ms"] >= document["median_ms"] > 0


def test_unknown_layouts_and_sizes_are_refused(run_study, capsys):
    assert run_study("engines", "--layouts", "diagonal") == 2
    assert "must be some of table-wise, row-wise, mixed, got 'diagonal'" in capsys.readouterr().err
    assert run_study("engines", "--batch-sizes", "few") == 2
