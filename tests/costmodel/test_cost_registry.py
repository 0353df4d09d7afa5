import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from autoshard.core.errors import ModelError
from autoshard.formats.documents.machine_json import MACHINE
from autoshard.hardware import this_processor
from costmodel.registry.aliases import Action, AliasLog
from costmodel.registry.listing import listed_versions
from costmodel.registry.objects import RegistryObjects
from costmodel.registry.versions import (
    PRODUCTION,
    REGISTRY_VARIABLE,
    SHIPPED_VARIABLE,
    Registry,
    default_registry,
    find_model,
    find_registry,
    models_in_use,
    shipped_models,
)

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2], dtype=np.int64)}
CARD = {"schema": "test/1", "text": "größer", "number": 0.1}
_HERE = this_processor()
OTHER_MACHINE = MACHINE.write(replace(_HERE, cache_bytes=_HERE.cache_bytes + 2**20))


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
    assert {item.id: item.aliases for item in registry.list()} == {old: (), new: ("production",)}
    registry.publish("cost", "cpu", TENSORS, CARD)
    assert registry.production_id("cost", "cpu") == old


def test_only_whole_versions_are_left_behind(registry):
    version = registry.publish("cost", "cpu", TENSORS, CARD)
    registry.publish("cost", "cpu", TENSORS, CARD)
    folder = registry.root / "cost" / "cpu"
    assert sorted(path.name for path in folder.iterdir()) == sorted([version, "production"])
    assert sorted(path.name for path in (folder / version).iterdir()) == ["card.json", "weights.safetensors"]
    assert [path.name for path in (folder / "production").iterdir()] == ["00000001"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("weights.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("weights.safetensors", lambda content: content[: len(content) // 2]),
        ("weights.safetensors", lambda _: b""),
        ("card.json", lambda content: content.replace(b"0.1", b"0.2")),
        ("card.json", lambda _: b"{"),
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
    alias = registry.root / "cost" / "cpu" / "production" / "00000001"
    entry = json.loads(alias.read_text(encoding="utf-8"))
    alias.write_text(json.dumps({**entry, "id": "../../policy/x"}), encoding="utf-8")
    with pytest.raises(ModelError, match="production/00000001: damaged: a version is 16 hexadecimal digits"):
        registry.load("cost", "cpu")


def test_a_card_holds_finite_numbers_only(registry):
    version = registry.publish("cost", "cpu", TENSORS, CARD)
    folder = registry.root / "cost" / "cpu" / version
    text = (folder / "card.json").read_bytes().replace(b"{", b'{"metrics_of_others": [NaN],', 1)
    folder = folder.rename(folder.with_name(hashlib.sha256(text).hexdigest()[:16]))
    (folder / "card.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"card.json: metrics_of_others\[0\]: must be a .*number"):
        registry.list()


def test_errors_of_an_alias_are_short(registry):
    registry.publish("cost", "cpu", TENSORS, CARD)
    alias = registry.root / "cost" / "cpu" / "production" / "00000001"
    entry = json.loads(alias.read_text(encoding="utf-8"))
    for change in ({"id": "a" * 5000}, {"action": "a" * 5000}):
        alias.write_text(json.dumps(entry | change), encoding="utf-8")
        with pytest.raises(ModelError, match="damaged") as caught:
            registry.list()
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["", "\n", "{", "[]", '{"id": 1}', "0123456789abcdef", '{"id": "0123456789abcdef"}'])
def test_a_damaged_alias_is_named_and_can_be_mended(registry, text):
    version = registry.publish("cost", "cpu", TENSORS, CARD)
    alias = registry.root / "cost" / "cpu" / "production" / "00000001"
    alias.write_text(text, encoding="utf-8")
    for read in (registry.list, lambda: registry.load("cost", "cpu"), lambda: registry.production_id("cost", "cpu")):
        with pytest.raises(ModelError, match=r"production/00000001: damaged: .*`autoshard models promote`"):
            read()
    assert registry.promote("cost", "cpu", version) == version
    assert registry.load("cost", "cpu").id == version


def test_what_was_never_published(registry):
    assert registry.list() == ()
    assert registry.production_id("cost", "cpu") is None
    with pytest.raises(ModelError, match="no cost model named cpu"):
        registry.load("cost", "cpu")
    registry.publish("cost", "cpu", TENSORS, CARD)
    with pytest.raises(ModelError, match="0123456789abcdef"):
        registry.load("cost", "cpu", "0123456789abcdef")
    with pytest.raises(ModelError, match="no cost model named cpu is the candidate"):
        registry.load("cost", "cpu", "candidate")


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
    with pytest.raises(ModelError, match="cannot be written: not a directory"):
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


class TestAliases:
    @pytest.fixture
    def versions(self, registry):
        """Three versions; the last is in production."""
        return [registry.publish("cost", "cpu", TENSORS, {**CARD, "number": number}) for number in range(3)]

    def test_a_candidate_leaves_production_alone(self, registry, versions):
        tried = registry.publish("cost", "cpu", TENSORS, {**CARD, "number": 9}, alias="candidate")
        assert registry.production_id("cost", "cpu") == versions[2]
        assert registry.load("cost", "cpu", "candidate").id == tried
        assert {item.id: item.aliases for item in registry.list() if item.aliases} == {
            versions[2]: ("production",),
            tried: ("candidate",),
        }
        assert registry.promote("cost", "cpu", "candidate") == tried == registry.production_id("cost", "cpu")

    def test_without_an_alias_nothing_is_used(self, registry):
        version = registry.publish("cost", "cpu", TENSORS, CARD, alias=None)
        assert registry.production_id("cost", "cpu") is None
        assert registry.load("cost", "cpu", version).id == version

    def test_roll_back_goes_back_step_by_step(self, registry, versions):
        first, second, third = versions
        assert registry.roll_back("cost", "cpu") == second
        assert registry.load("cost", "cpu").id == second
        assert registry.roll_back("cost", "cpu") == first
        with pytest.raises(ModelError, match="production has named no other version before"):
            registry.roll_back("cost", "cpu")
        assert registry.promote("cost", "cpu", third) == third
        assert registry.roll_back("cost", "cpu") == first == registry.production_id("cost", "cpu")

    def test_history_says_who_named_which_version_when(self, registry, versions):
        started = datetime.now(UTC)
        author = Registry(registry.root, author="someone")
        author.promote("cost", "cpu", versions[0])
        author.promote("cost", "cpu", versions[0])  # changes nothing, so it is no entry
        registry.roll_back("cost", "cpu")
        history = registry.history("cost", "cpu")
        assert [(entry.action, entry.id) for entry in history] == [
            *(("publish", version) for version in versions),
            ("promote", versions[0]),
            ("roll-back", versions[2]),
        ]
        assert history[3].by == "someone"
        assert "@" in history[4].by
        times = [datetime.fromisoformat(entry.at) for entry in history]
        assert times == sorted(times)
        # Times are cut to milliseconds.
        assert started.timestamp() - 0.001 <= times[3].timestamp() <= datetime.now(UTC).timestamp()
        assert registry.history("cost", "cpu", "candidate") == ()

    def test_what_another_host_published_is_used_once_it_is_promoted_or_published_here(self, registry):
        elsewhere = Registry(registry.root, author="ann@other")
        cards = [{**CARD, "number": number, "measured_on": OTHER_MACHINE} for number in range(3)]
        own = registry.publish("cost", "cpu", TENSORS, CARD)
        first, second, _ = versions = [elsewhere.publish("cost", "cpu", TENSORS, card) for card in cards]
        assert registry.production_id("cost", "cpu") == own
        registry.publish("cost", "cpu", TENSORS, cards[2])
        assert registry.production_id("cost", "cpu") == versions[2]
        elsewhere.publish("cost", "cpu", TENSORS, cards[1])
        registry.promote("cost", "cpu", second)
        assert registry.production_id("cost", "cpu") == second
        assert [entry.action for entry in registry.history("cost", "cpu")][-2:] == ["publish", "promote"]
        assert registry.roll_back("cost", "cpu") == versions[2] == registry.production_id("cost", "cpu")
        registry.promote("cost", "cpu", versions[2])  # changes nothing: it is used on all machines already
        assert registry.roll_back("cost", "cpu") == second
        assert registry.roll_back("cost", "cpu") == first

    def test_a_request_that_is_sent_again_within_a_day_changes_an_alias_once(self, registry, versions, monkeypatch):
        first, second, _ = versions
        asked = Registry(registry.root, request="a request")
        assert not asked.has_changed("cost", "cpu", PRODUCTION)
        assert [asked.roll_back("cost", "cpu") for _ in range(2)] == [second, second]
        assert asked.has_changed("cost", "cpu", PRODUCTION)
        assert not Registry(registry.root).has_changed("cost", "cpu", PRODUCTION)
        assert len(registry.history("cost", "cpu")) == 4
        monkeypatch.setattr("costmodel.registry.aliases._SAME_REQUEST", timedelta(0))
        time.sleep(0.01)
        assert asked.roll_back("cost", "cpu") == first

    def test_only_whole_versions_are_promoted(self, registry, versions):
        (registry.root / "cost" / "cpu" / versions[0] / "weights.safetensors").write_bytes(b"")
        for version, said in ((versions[0], "weights.safetensors"), ("0123456789abcdef", "0123456789abcdef")):
            with pytest.raises(ModelError, match=said):
                registry.promote("cost", "cpu", version)
        assert registry.production_id("cost", "cpu") == versions[2]
        assert len(registry.history("cost", "cpu")) == 3

    def test_there_are_no_other_aliases(self, registry, versions):
        with pytest.raises(ModelError, match='alias: must be one of production, candidate, got "latest"'):
            registry.promote("cost", "cpu", versions[0], "latest")
        with pytest.raises(ModelError, match="alias"):
            registry.publish("cost", "new", TENSORS, CARD, alias="latest")
        assert {item.name for item in registry.list()} == {"cpu"}
        with pytest.raises(ModelError, match="a version is production, candidate or 16 hexadecimal digits"):
            registry.load("cost", "cpu", "latest")


def test_models_of_another_device_are_refused(registry):
    version = registry.publish("cost", "a100", TENSORS, {**CARD, "device": "a100"})
    folder = registry.root / "cost"
    (folder / "a100").rename(folder / "cpu")
    for wanted in ("production", version):
        with pytest.raises(ModelError, match=r'card\.json: device: was trained for "a100", not for "cpu"'):
            registry.load("cost", "cpu", wanted)
    with pytest.raises(ModelError, match='was trained for "a100", not for "h100"'):
        registry.publish("cost", "h100", TENSORS, {**CARD, "device": "a100"})


class TestShippedModels:
    @pytest.fixture
    def shipped(self, tmp_path, monkeypatch):
        monkeypatch.setenv(SHIPPED_VARIABLE, str(tmp_path / "shipped"))
        return shipped_models()

    def test_they_are_in_this_package_unless_told_otherwise(self, monkeypatch):
        monkeypatch.delenv(SHIPPED_VARIABLE, raising=False)
        assert shipped_models().root == Path(sys.modules["costmodel"].__file__).parent / "shipped"

    def test_errors_of_the_cost_model_of_this_package_are_on_record(self, monkeypatch):
        monkeypatch.delenv(SHIPPED_VARIABLE, raising=False)
        assert shipped_models().load("cost", "cpu").card["errors"].keys() == {"table", "kind", "company"}

    def test_a_version_is_held_here_or_shipped(self, shipped, registry):
        came = shipped.publish("cost", "cpu", TENSORS, CARD)
        own = registry.publish("cost", "cpu", TENSORS, {**CARD, "number": 2})
        assert [registry.holds("cost", "cpu", version) for version in (came, own, "0" * 16)] == [True, True, False]
        assert [shipped.holds("cost", "cpu", version) for version in (came, own)] == [True, False]

    def test_the_users_own_model_goes_first(self, shipped, registry):
        assert find_registry("cost", "cpu", registry.root) is None
        published = shipped.publish("cost", "cpu", TENSORS, CARD)
        found = find_registry("cost", "cpu", registry.root)
        assert (found.root, found.load("cost", "cpu").id) == (shipped.root, published)
        registry.publish("cost", "cpu", TENSORS, {**CARD, "number": 2}, alias="candidate")
        assert find_registry("cost", "cpu", registry.root).root == shipped.root
        registry.promote("cost", "cpu", "candidate")
        assert find_registry("cost", "cpu", registry.root).root == registry.root
        assert find_registry("cost", "a100", registry.root) is None

    def test_a_device_without_a_model_takes_that_of_its_family(self, shipped, registry):
        assert find_model("cost", "cpu:amd-epyc", registry.root) is None
        came = shipped.publish("cost", "cpu", TENSORS, CARD)
        found, name, version = find_model("cost", "cpu:amd-epyc", registry.root)
        assert (found.root, name, version) == (shipped.root, "cpu", came)
        own = registry.publish("cost", "cpu:amd-epyc", TENSORS, {**CARD, "device": "cpu:amd-epyc"})
        found, name, version = find_model("cost", "cpu:amd-epyc", registry.root)
        assert (found.root, name, version) == (registry.root, "cpu:amd-epyc", own)

    def test_machines_that_share_a_registry_keep_their_own_versions(self, shipped, registry):
        """Two that differ in the last cache alone."""
        came = shipped.publish("cost", "cpu", TENSORS, CARD)
        here = this_processor()
        other = replace(here, cache_bytes=here.cache_bytes + 2**20, device_name=here.device_name)
        cards = [{**CARD, "measured_on": MACHINE.write(machine)} for machine in (other, here, other)]
        elsewhere = Registry(registry.root, author="ann@other")
        first = elsewhere.publish("cost", "cpu", TENSORS, cards[0])
        assert registry.production_id("cost", "cpu") == registry.load("cost", "cpu").id == first
        own = elsewhere.publish("cost", "cpu", TENSORS, cards[1])
        last = elsewhere.publish("cost", "cpu", TENSORS, {**cards[2], "number": 3})
        assert registry.production_id("cost", "cpu") == registry.load("cost", "cpu").id == own
        assert find_model("cost", "cpu", registry.root)[2] == own
        assert find_model("cost", other.key_in("cpu"), registry.root)[1:] == ("cpu", last)
        assert [item.id for item in listed_versions(registry) if item.used] == [own]
        # What is promoted by hand is so for all machines.
        registry.promote("cost", "cpu", came)
        assert {find_model("cost", key, registry.root)[2] for key in ("cpu", other.key_in("cpu"))} == {came}
        again = elsewhere.publish("cost", "cpu", TENSORS, {**cards[2], "number": 4})
        assert registry.production_id("cost", "cpu") == came
        assert find_model("cost", other.key_in("cpu"), registry.root)[2] == again
        # What was made here is meant for here, wherever it was measured.
        meant = registry.publish("cost", "cpu", TENSORS, {**cards[2], "number": 5})
        assert registry.production_id("cost", "cpu") == meant

    def test_what_is_loaded_says_whether_it_was_shipped(self, shipped, registry):
        came, own = (models.publish("cost", "cpu", TENSORS, CARD) for models in (shipped, registry))
        assert came == own
        assert (shipped.is_shipped, registry.is_shipped) == (True, False)
        assert shipped.load("cost", "cpu").label == f"{came} (shipped)"
        assert registry.load("cost", "cpu").label == own

    def test_models_in_use_are_the_users_own_and_what_else_was_shipped(self, shipped, registry):
        assert models_in_use(registry.root) == ()
        for kind, name in (("cost", "cpu"), ("cost", "a100"), ("policy", "cpu")):
            shipped.publish(kind, name, TENSORS, CARD)
        registry.publish("cost", "cpu", TENSORS, CARD)
        registry.publish("cost", "h100", TENSORS, CARD, alias="candidate")
        used = {(kind, name): models.root for kind, name, models in models_in_use(registry.root)}
        assert used == {
            ("cost", "a100"): shipped.root,
            ("cost", "cpu"): registry.root,
            ("policy", "cpu"): shipped.root,
        }


#: Publishes versions numbered from `first` on until it is killed or has published `count`.
PUBLISHER = """
import sys
from pathlib import Path
import numpy as np
from costmodel.registry.versions import Registry
registry, first, count = Registry(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
for number in range(first, first + count):
    registry.publish("cost", "cpu", {"a": np.full(20_000, number, dtype=np.float32)}, {"number": number})
"""


def publisher(root, first, count):
    process = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(root), str(first), str(count)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def check_whole(registry):
    """Every version loads, with its own number in card and weights; the alias names one of them."""
    versions = registry.list()
    for item in versions:
        stored = registry.load("cost", "cpu", item.id)
        assert (stored.tensors["a"] == stored.card["number"]).all()
    assert sum("production" in item.aliases for item in versions) == 1
    assert {entry.id for entry in registry.history("cost", "cpu")} <= {item.id for item in versions}
    return versions


@pytest.mark.slow
def test_publishers_at_once_lose_nothing(registry):
    # Numbers overlap, so that some versions are published by two at once.
    processes = [publisher(registry.root, first, 12) for first in (0, 6, 12)]
    for process in processes:
        assert process.wait(timeout=60) == 0
        process.stdout.close()
    versions = check_whole(registry)
    assert sorted(item.card["number"] for item in versions) == list(range(24))
    history = registry.history("cost", "cpu")
    assert {entry.id for entry in history} == {item.id for item in versions}
    assert registry.production_id("cost", "cpu") == history[-1].id


@pytest.mark.slow
def test_killed_publishers_leave_whole_versions_and_aliases(registry):
    rng = random.Random(0)
    registry.publish("cost", "cpu", {"a": np.zeros(3)}, {"number": 0})
    num_versions = 1
    for attempt in range(6):
        process = publisher(registry.root, (attempt + 1) * 10_000, 10_000)
        time.sleep(rng.uniform(0.02, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        process.stdout.close()
        num_versions = len(check_whole(registry))
    assert num_versions > 6
    # Nobody is locked out, and what was killed an hour ago is cleared away.
    folder = registry.root / "cost" / "cpu"
    (folder / f".{'0' * 16}.tmp").touch()
    for path in folder.glob(".*"):
        os.utime(path, (time.time() - 7200,) * 2)
    version = registry.publish("cost", "cpu", {"a": np.zeros(3)}, {"number": 0})
    assert registry.production_id("cost", "cpu") == version
    assert list(folder.glob(".*")) == []


@pytest.mark.parametrize("file", ["weights.safetensors", "card.json"])
def test_files_are_sized_before_they_are_read(registry, file):
    version = registry.publish("cost", "cpu", TENSORS, CARD)
    with (registry.root / "cost" / "cpu" / version / file).open("r+b") as opened:
        opened.truncate(3 << 30)
    with pytest.raises(ModelError, match=rf"{file}: must be at most [0-9,]+ bytes, got 3,221,225,472"):
        registry.load("cost", "cpu")


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch])
def test_an_alias_that_is_no_folder_is_named(registry, make):
    version = registry.publish("cost", "cpu", TENSORS, CARD, alias=None)
    make(registry.root / "cost" / "cpu" / "production")
    with pytest.raises(ModelError, match="production: cannot be read: not a directory; remove it, and name a version"):
        registry.load("cost", "cpu")
    with pytest.raises(ModelError, match="production: cannot be read: not a directory"):
        registry.promote("cost", "cpu", version)


def test_a_pipe_in_place_of_an_alias_is_not_waited_for(registry):
    registry.publish("cost", "cpu", TENSORS, CARD)
    alias = registry.root / "cost" / "cpu" / "production" / "00000001"
    alias.unlink()
    os.mkfifo(alias)
    with pytest.raises(ModelError, match="production/00000001: must be a regular file, got a pipe"):
        registry.load("cost", "cpu")


@pytest.mark.parametrize("file", ["card.json", "production/00000001"])
def test_json_that_nests_too_deep_is_one_line(registry, file):
    version = registry.publish("cost", "cpu", TENSORS, CARD)
    deep = b'{"weights_sha256": ' + b"[" * 100_000
    folder = registry.root / "cost" / "cpu"
    if file == "card.json":
        identity = hashlib.sha256(deep).hexdigest()[:16]
        (folder / version).rename(folder / identity)
        (folder / identity / file).write_bytes(deep)
        objects = RegistryObjects.of(registry.root)
        AliasLog(objects, "cost/cpu", PRODUCTION).point(identity, Action.PROMOTE)
    else:
        (folder / file).write_bytes(deep)
    with pytest.raises(ModelError, match="nested too deep") as caught:
        registry.load("cost", "cpu")
    assert "\n" not in str(caught.value)
