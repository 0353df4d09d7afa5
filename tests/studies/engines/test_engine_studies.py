import json

import pytest

from studies.engines import side_by_side
from studies.engines.layouts import Layout


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


@pytest.mark.slow
@pytest.mark.smoke
def test_processor_time_of_a_step_is_measured(tmp_path, run_study, capsys):
    assert run_study("host-time", "--features", "5", "--nproc", "2", "--steps", "2", "-o", tmp_path) == 0
    assert "5 features on 2 processes, table-wise" in capsys.readouterr().out
    document = json.loads((tmp_path / "host-time.json").read_text())
    assert document["slowest_ms"] >= document["median_ms"] > 0


@pytest.mark.smoke
def test_finished_batch_sizes_are_kept(tmp_path, run_study, monkeypatch, capsys):
    """A second run takes no batch size again, and one with more sizes takes those alone."""
    taken = []

    def measure(plans, batch_size, **_settings):
        taken.append(batch_size)
        ratio = side_by_side.Ratio.of([1.5, 2.5])
        times = {"thin_ms": 2.0, "torchrec_ms": 4.0, "thin_embedding_ms": 1.0, "torchrec_embedding_ms": 2.0}
        return [
            side_by_side.EngineSteps(layout=layout, batch_size=batch_size, ratio=ratio, embedding_ratio=ratio, **times)
            for layout in plans
        ]

    monkeypatch.setattr(side_by_side, "measure", measure)
    options = ["--num-tables", "4", "--nproc", "2", "--scale", "4096", "--parts", tmp_path / "parts", "--json"]
    for sizes in ("8,16", "8, 16", "8,32"):
        assert run_study("engines", *options, "--batch-sizes", sizes) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        assert [(run["layout"], run["batch_size"]) for run in runs] == [
            (layout, int(size)) for size in sizes.split(",") for layout in Layout
        ]
    assert taken == [8, 16, 32]
    assert run_study("engines", *options, "--rounds", "1") == 2
    assert "parts whose rounds is 7, not 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.smoke
def test_splitting_of_ids_is_measured_beside_its_price(run_study, capsys):
    assert run_study("input-work", "--nproc", "2", "--runs", "1", "--json") == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert len(plans) == 18
    assert all(plan["measured_ms"] > 0 and plan["priced_ms"] > 0 for plan in plans)
