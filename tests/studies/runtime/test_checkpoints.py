"""The studies of checkpoints."""

import json

import pytest

from autoshard.validator import validate_plan
from studies.runtime import checkpoint_pairs
from studies.runtime.checkpoint_cost import CheckpointCostOptions, plans


@pytest.mark.smoke
def test_plans_hold_the_same_tables():
    saved, loaded = plans(CheckpointCostOptions(mib=8, processes=2))
    assert saved.tables == loaded.tables
    assert sum(4 * one.num_embeddings * one.embedding_dim for one in saved.tables.tables) == 8 * 2**20
    of_pairs = checkpoint_pairs.plans(2)
    assert set(checkpoint_pairs.OF_TORCHREC) < of_pairs.keys()
    for plan in (saved, loaded, *of_pairs.values()):
        validate_plan(plan)


def test_costs_are_measured(run_study, tmp_path):
    assert run_study("checkpoint-cost", "--mib", "8", "--repeats", "1", "-o", tmp_path) == 0
    cost = json.loads((tmp_path / "checkpoint-cost.json").read_text())["cost"]
    # Weights of 64 columns and a moment a row.
    assert cost["share_bytes"] == 4 * 2**20 * 65 // 64
    assert cost["checkpoint_bytes"] >= 2 * cost["share_bytes"]
    assert min(cost[name] for name in ("disk_write_s", "disk_read_s", "stall_s", "save_s", "load_s", "step_s")) > 0


def test_every_pair_is_exact_and_torchrec_keeps_fewer(run_study, tmp_path):
    assert run_study("checkpoint-pairs", "-o", tmp_path) == 0
    pairs = json.loads((tmp_path / "checkpoint-pairs.json").read_text())["pairs"]
    assert len(pairs["autoshard"]) == 36
    assert set(pairs["autoshard"].values()) == {"exact"}
    assert len(pairs["TorchRec"]) == 16
    assert pairs["TorchRec"]["row-wise / data-parallel"] == "moments lost"
    assert pairs["TorchRec"]["table-wise / row-wise"] == "exact"
