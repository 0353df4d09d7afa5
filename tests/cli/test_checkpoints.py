"""`autoshard checkpoint` on a checkpoint that it imported."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from autoshard.core import Optimizer, PlacedShard, Shard
from autoshard.formats import write_plan
from tests import builders as make


def plan_of(rows=100, cuts=((0, 16),), **fields):
    a = make.table("a", rows, 16, optimizer=Optimizer.ROWWISE_ADAGRAD)
    b = make.table("b", 7, 8, optimizer=Optimizer.SGD)
    parts = [PlacedShard.table_wise(replace(Shard.whole(a), columns=cut), rank % 2) for rank, cut in enumerate(cuts)]
    return make.plan(*parts, PlacedShard.table_wise(Shard.whole(b), 1), topology=make.topology(2), **fields)


@pytest.fixture
def folder(tmp_path, run):
    """A folder with a checkpoint, its plan, and what it was imported from."""
    torch.save(
        {
            "embedding_bags.a.weight": torch.arange(1600.0).view(100, 16),
            "state.embedding_bags.a.weight.a.momentum1": torch.arange(200.0),  # of two column shards
            "embedding_bags.b.weight": torch.ones(7, 8),
        },
        tmp_path / "model.pt",
    )
    write_plan(plan_of(cuts=((0, 8), (8, 16))), tmp_path / "plan.json")
    line = ("checkpoint", "import", tmp_path / "model.pt", "--plan", tmp_path / "plan.json", "-o", tmp_path / "kept")
    out, _ = run(*line, "--step", 30, "--json")
    assert json.loads(out) == {
        "schema": "autoshard.imported-checkpoint/1",
        "folder": str(tmp_path / "kept" / "step-000000000030"),
        "step": 30,
        "num_tables": 2,
    }
    return tmp_path


def test_a_checkpoint_is_shown(folder, run):
    found = json.loads(run("checkpoint", "show", folder / "kept", "--json")[0])
    assert (found["schema"], found["step"], found["states"]) == ("autoshard.checkpoint/1", 30, ["embeddings"])
    assert found["tables"] == [
        {"name": "a", "key": "embeddings.tables.a", "tensors": {"weights": [100, 16], "moments": [100, 2]}},
        {"name": "b", "key": "embeddings.tables.b", "tensors": {"weights": [7, 8]}},
    ]
    text, _ = run("checkpoint", "show", folder / "kept" / "step-000000000030")
    for word in ("rowwise_adagrad", "weights [100, 16], moments [100, 2]", "plan.json", found["plan_digest"]):
        assert word in text
    assert "hashed blocks" in text
    for file in found["files"]:
        assert file["name"] in text
        assert len(file["sha256"]) == -(-file["num_bytes"] // 2**24)


def test_damaged_files_are_named_and_the_exit_code_says_so(folder, run):
    assert re.match(
        r"3 files of .*step-000000000030 are as they were saved, ", run("checkpoint", "verify", folder / "kept")[0]
    )
    data = folder / "kept" / "step-000000000030" / "__0_0.distcp"
    content = data.read_bytes()
    for damage, told in (
        (content[:-1], f"__0_0.distcp: has {len(content) - 1:,} bytes, {len(content):,} were saved"),
        (content[:-1] + b"x", "__0_0.distcp: is altered, its hash is another than when it was saved"),
    ):
        data.write_bytes(damage)
        found = json.loads(run("checkpoint", "verify", folder / "kept", "--json", code=1)[0])
        assert found["damaged"] == [told]
        assert told in run("checkpoint", "verify", folder / "kept", code=1)[0]


def test_what_another_plan_loads_is_told(folder, run):
    write_plan(plan_of(), folder / "other.json")
    line = ("checkpoint", "reshard", folder / "kept", "--plan")
    found = json.loads(run(*line, folder / "other.json", "--json")[0])
    # Half of the rows of each table: 50 of 16 columns and two moments, and 4 or 3 of 8 columns.
    assert [rank["read_bytes"] for rank in found["ranks"]] == [50 * 18 * 4 + 4 * 32, 50 * 18 * 4 + 3 * 32]
    # Table a with a moment a row on rank 0, table b on rank 1.
    assert [rank["held_bytes"] for rank in found["ranks"]] == [100 * 17 * 4, 7 * 32]
    assert found["averaged"] == ["a"]
    assert "means over parts of the columns: a" in run(*line, folder / "other.json")[0]
    assert json.loads(run(*line, folder / "plan.json", "--json")[0])["averaged"] == []
    write_plan(plan_of(rows=90), folder / "fewer.json")
    out, err = run(*line, folder / "fewer.json", code=2)
    assert (out, err) == ("", "error: a.num_embeddings: must be 100, as in the checkpoint, got 90\n")


def test_weights_are_exported_with_the_keys_of_torchrec(folder, run):
    out, _ = run("checkpoint", "export", folder / "kept", "-o", folder / "out.safetensors", "--prefix", "sparse.")
    assert out.startswith(f"Wrote {folder / 'out.safetensors'}: ")
    written = load_file(folder / "out.safetensors")
    assert written.keys() == {"sparse.embedding_bags.a.weight", "sparse.embedding_bags.b.weight"}
    assert torch.equal(written["sparse.embedding_bags.a.weight"], torch.arange(1600.0).view(100, 16))


def test_a_second_checkpoint_of_a_step_is_refused(folder, run):
    line = ("checkpoint", "import", folder / "model.pt", "--plan", folder / "plan.json", "-o", folder / "kept")
    _, err = run(*line, "--step", 30, code=2)
    assert err == f"error: step: must be one without a checkpoint in {folder / 'kept'}, got 30\n"
    # A folder that cannot be made.
    _, err = run(*line[:-1], folder / "plan.json", code=1)
    assert re.match(r"error: checkpoint of step 0 was not written: (not a directory|file exists): ", err)
