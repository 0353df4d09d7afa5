import json
from pathlib import Path

import numpy as np
import pytest

from autoshard.core.errors import ModelError
from costmodel.registry import REGISTRY_VARIABLE, Registry, default_registry

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2], dtype=np.int64)}
CARD = {"schema": "test/1", "text": "größer", "number": 0.1}


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "registry")


def test_what_is_published_is_loaded(registry):
    version = registry.publish("cost", "cpu", TENSORS, CARD)
    for wanted in ("production", version):
        stored = registry.load("cost", "cpu", wanted)
        assert stored.id == version
        assert {name: value.tolist() for name, value in stored.tensors.items()} == {
            name: value.tolist() for name, value in TENSORS.items()
        }
        assert {name: stored.card[name] for name in CARD} == CARD


def test_ids_are_of_the_content(registry, tmp_path):
    first = registry.publish("cost", "cpu", TENSORS, CARD)
    assert registry.publish("cost", "cpu", TENSORS, CARD) == first
    assert Registry(tmp_path / "other").publish("policy", "x", TENSORS, CARD) == first
    assert registry.publish("cost", "cpu", TENSORS, {**CARD, "number": 0.2}) != first
    assert registry.publish("cost", "cpu", {**TENSORS, "b": np.array([1, 3])}, CARD) != first
    assert len(registry.list()) == 3


def test_tensors_that_are_not_contiguous(registry):
    registry.publish("cost", "cpu", {"a": TENSORS["a"].T}, CARD)
    assert registry.load("cost", "cpu").tensors["a"].tolist() == TENSORS["a"].T.tolist()


def test_the_newest_is_the_production_version_and_older_ones_stay(registry):
    old = registry.publish("cost", "cpu", TENSORS, CARD)
    new = registry.publish("cost", "cpu", TENSORS, {**CARD, "number": 2})
    assert registry.production_id("cost", "cpu") == new
    assert registry.load("cost", "cpu", old).card["number"] == 0.1
    assert {item.id: item.is_production for item in registry.list()} == {old: False, new: True}
    registry.publish("cost", "cpu", TENSORS, CARD)
    assert registry.production_id("cost", "cpu") == old


def test_only_whole_versions_are_left_behind(registry):
    version = registry.publish("cost", "cpu", TENSORS, CARD)
    registry.publish("cost", "cpu", TENSORS, CARD)
    folder = registry.root / "cost" / "cpu"
    assert sorted(path.name for path in folder.iterdir()) == sorted([version, "production"])
    assert sorted(path.name for path in (folder / version).iterdir()) == ["card.json", "weights.safetensors"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("weights.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("weights.safetensors", lambda content: content[: len(content) // 2]),
        ("weights.safetensors", lambda content: b""),
        ("card.json", lambda content: content.replace(b"0.1", b"0.2")),
        ("card.json", lambda content: b"{"),
    ],
)
def test_damage_is_found(registry, file, damage):
    version = registry.publish("cost", "cpu", TENSORS, CARD)
    path = registry.root / "cost" / "cpu" / version / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=file):
        registry.load("cost", "cpu")


@pytest.mark.parametrize("file", ["weights.safetensors", "card.json"])
def test_missing_files_are_named(registry, file):
    version = registry.publish("cost", "cpu", TENSORS, CARD)
    (registry.root / "cost" / "cpu" / version / file).unlink()
    with pytest.raises(ModelError, match=file):
        registry.load("cost", "cpu")


def test_the_alias_cannot_point_elsewhere(registry):
    registry.publish("cost", "cpu", TENSORS, CARD)
    (registry.root / "cost" / "cpu" / "production").write_text("../../policy/x", encoding="utf-8")
    with pytest.raises(ModelError, match="16 hexadecimal digits"):
        registry.load("cost", "cpu")


def test_what_was_never_published(registry):
    assert registry.list() == ()
    assert registry.production_id("cost", "cpu") is None
    with pytest.raises(ModelError, match="no cost model named cpu"):
        registry.load("cost", "cpu")
    registry.publish("cost", "cpu", TENSORS, CARD)
    with pytest.raises(ModelError, match="0123456789abcdef"):
        registry.load("cost", "cpu", "0123456789abcdef")


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", ".hidden", "x" * 101, "a b"])
def test_names_are_plain(registry, name):
    for kind, model in (("cost", name), (name, "cpu")):
        with pytest.raises(ModelError, match="must be letters"):
            registry.publish(kind, model, TENSORS, CARD)
        with pytest.raises(ModelError, match="must be letters"):
            registry.load(kind, model)


@pytest.mark.parametrize("value", [float("nan"), object(), np.float32(1)])
def test_cards_are_json(registry, value):
    with pytest.raises(ModelError, match="not JSON"):
        registry.publish("cost", "cpu", TENSORS, {"value": value})
    assert registry.list() == ()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot publish"):
        Registry(tmp_path / "file").publish("cost", "cpu", TENSORS, CARD)


def test_foreign_files_are_no_versions(registry):
    registry.publish("cost", "cpu", TENSORS, CARD)
    stray = registry.root / "cost" / "cpu" / "notes"
    stray.mkdir()
    (stray / "card.json").write_text(json.dumps({}), encoding="utf-8")
    assert len(registry.list()) == 1


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(REGISTRY_VARIABLE, str(tmp_path))
    assert default_registry() == tmp_path == Registry().root
    monkeypatch.delenv(REGISTRY_VARIABLE)
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_registry() == Path("/home/someone/.local/share/autoshard/registry")
