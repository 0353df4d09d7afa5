"""The study of cost models, from samples to report."""

import json

import pytest

from autoshard.report.images import ImageError, find_browser
from studies.cost_models.compare import CompareOptions


def test_report_of_the_committed_samples(store, tmp_path, run_study, capsys):
    try:
        find_browser()
    except ImageError as error:
        pytest.skip(str(error))
    folder = tmp_path / "report"
    assert run_study("cost-models", "--store", store, "-o", folder, "--quick", "--updates", 1000) == 0
    said = capsys.readouterr()
    for ending in ("-ablation.png", "-coverage.png", "-groups.png", "-tables.png", ".html", ".json", ".png"):
        assert str(folder / f"cost-cpu{ending}") in said.err
    numbers = json.loads((folder / "cost-cpu.json").read_text())
    assert numbers["accuracy"]["random.held_out"]["kernel_model"]["relative_error"]["mean"] < 0.1
    assert "| kernel model |" in said.out
    assert (folder / "cost-cpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.smoke
def test_ablations_may_be_left_out(tmp_path):
    for changes in ({}, {"quick": True}, {"updates": 5}):
        whole = CompareOptions(store=tmp_path, **changes).evaluation()
        assert whole.ablation_seeds > 0
        assert CompareOptions(store=tmp_path, ablation=False, **changes).evaluation().ablation_seeds == 0
    assert (whole.paper_updates, whole.ablation_updates, whole.training.num_updates) == (5, 5, 5)
