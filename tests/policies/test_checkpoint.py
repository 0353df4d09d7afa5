import json

import numpy as np
import pytest

from autoshard.core.errors import FormatError
from policies.training.checkpoint import PolicyCheckpoint


@pytest.fixture
def folder(tmp_path):
    PolicyCheckpoint(state={"num_updates": 3}, tensors={"a.b": np.arange(4.0)}).save(tmp_path / "run")
    return tmp_path / "run"


def test_what_was_saved_is_loaded(folder):
    checkpoint = PolicyCheckpoint.load(folder)
    assert checkpoint.state == {"num_updates": 3}
    assert checkpoint.tensors["a.b"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_folder_without_a_checkpoint_has_none(tmp_path):
    assert PolicyCheckpoint.load(tmp_path / "nowhere") is None


def test_a_new_checkpoint_replaces_the_old_one(folder):
    PolicyCheckpoint(state={"num_updates": 4}, tensors={"a.b": np.zeros(2)}).save(folder)
    assert PolicyCheckpoint.load(folder).state == {"num_updates": 4}
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]


def test_a_save_that_dies_halfway_leaves_the_old_checkpoint(folder, monkeypatch):
    def dies(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dumps", dies)  # after nothing, before the description is written
    with pytest.raises(KeyboardInterrupt):
        PolicyCheckpoint(state={"num_updates": 4}, tensors={"a.b": np.zeros(2)}).save(folder)
    assert PolicyCheckpoint.load(folder).state == {"num_updates": 3}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "schema: must be autoshard.policy-training/1"),
        ('{"schema": "autoshard.policy-training/1"}', "state: must be an object"),
        ('{"schema": "autoshard.policy-training/1", "state": {}, "tensors": "../x"}', "x: cannot be read"),
    ],
)
def test_a_file_that_is_something_else_is_refused(folder, text, told):
    (folder / "checkpoint.json").write_text(text)
    with pytest.raises(FormatError, match=told):
        PolicyCheckpoint.load(folder)


def test_damaged_tensors_are_noticed(folder):
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="damaged"):
        PolicyCheckpoint.load(folder)
