"""Registries on object storage: what one machine publishes others read, at once and after faults."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from autoshard.core.errors import InvalidOptionError, ModelError
from autoshard.formats.stores.remote_folders import CACHE_VARIABLE, address_of, folder_of
from costmodel.registry.objects import BASELINES, RegistryObjects
from costmodel.registry.versions import REGISTRY_VARIABLE, AliasChangedError, Registry

WEIGHTS = {"w": np.arange(3.0)}


@pytest.fixture
def address():
    """An address in this process's memory, which fsspec's file system of that name keeps for good."""
    return f"memory://{uuid.uuid4().hex}/models"


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Turns this process into another machine: one with its own copies."""

    def become(name):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / name))

    become("a")
    return become


def registry_at(address):
    """The registry of an address as this machine finds it now."""
    folder = folder_of(address)
    if (stamp := folder / ".tried").exists():
        os.utime(stamp, (0, 0))
    return Registry(folder)


def test_other_machines_read_what_one_published(address, machine):
    first = registry_at(address)
    version = first.publish("cost", "cpu", WEIGHTS, {"device": "cpu"})
    machine("b")
    other = registry_at(address)
    assert other.root != first.root
    assert other.place == first.place == address
    found = other.load("cost", "cpu")
    assert (found.id, found.tensors["w"].tolist()) == (version, [0, 1, 2])
    assert other.history("cost", "cpu") == first.history("cost", "cpu")
    assert abs(other.list()[0].published_s - first.list()[0].published_s) < 5


def test_aliases_are_changed_by_one_at_a_time(address, machine):
    first = registry_at(address)
    versions = [first.publish("cost", "cpu", WEIGHTS, {"n": n}, alias=None) for n in range(3)]
    first.promote("cost", "cpu", versions[0])
    machine("b")
    other = registry_at(address)
    seen = other.history("cost", "cpu")
    other.promote("cost", "cpu", versions[1])
    # The first machine has not looked since, and is told at once.
    with pytest.raises(AliasChangedError, match="was changed meanwhile"):
        first.promote("cost", "cpu", versions[2], seen=seen)
    with pytest.raises(AliasChangedError, match="was changed meanwhile"):
        first.roll_back("cost", "cpu", seen=seen)
    assert first.production_id("cost", "cpu") == versions[1]
    assert first.roll_back("cost", "cpu") == versions[0]
    assert registry_at(address).production_id("cost", "cpu") == versions[0]
    assert [entry.action for entry in other.history("cost", "cpu")] == ["promote", "promote", "roll-back"]


def test_who_loses_the_race_for_a_change_adds_the_next_one(address, machine, monkeypatch):
    first = registry_at(address)
    one, two = (first.publish("cost", "cpu", WEIGHTS, {"n": n}, alias=None) for n in range(2))
    machine("b")
    other = registry_at(address)
    pull = RegistryObjects.pull

    def pull_and_lose(objects, below):
        number = pull(objects, below)
        monkeypatch.setattr(RegistryObjects, "pull", pull)
        other.promote("cost", "cpu", two)
        return number

    monkeypatch.setattr(RegistryObjects, "pull", pull_and_lose)
    first.promote("cost", "cpu", one)
    assert [entry.id for entry in first.history("cost", "cpu")] == [two, one]
    assert registry_at(address).history("cost", "cpu") == first.history("cost", "cpu")


def test_a_change_of_which_the_storage_was_not_heard_is_made_once(address, monkeypatch):
    models = registry_at(address)
    versions = [models.publish("cost", "cpu", WEIGHTS, {"n": n}) for n in range(3)]
    create = RegistryObjects.create

    def create_unheard(objects, name, data):
        create(objects, name, data)
        monkeypatch.setattr(RegistryObjects, "create", create)
        return False  # sent again by the storage's client, it is there already

    for change, made in ((models.roll_back, versions[1]), (models.promote, versions[0])):
        monkeypatch.setattr(RegistryObjects, "create", create_unheard)
        wanted = () if change == models.roll_back else (made,)
        assert change("cost", "cpu", *wanted, seen=models.history("cost", "cpu")) == made
    assert [entry.action for entry in models.history("cost", "cpu")][3:] == ["roll-back", "promote"]


def test_a_version_whose_card_is_missing_is_not_there_yet(address, machine):
    first = registry_at(address)
    version = first.publish("cost", "cpu", WEIGHTS, {})
    storage, root = fsspec.core.url_to_fs(address)
    card = storage.cat_file(f"{root}/cost/cpu/{version}/card.json")
    storage.rm_file(f"{root}/cost/cpu/{version}/card.json")
    machine("b")
    assert registry_at(address).list() == ()
    storage.pipe_file(f"{root}/cost/cpu/{version}/card.json", card)
    assert [item.id for item in registry_at(address).list()] == [version]


def test_other_machines_know_in_which_comparison_a_version_was_worse(address, machine):
    first = registry_at(address)
    production, worse = (first.publish("cost", "cpu", WEIGHTS, {"n": n}) for n in range(2))
    for reason in ("by 5%", "by 6%"):  # the first note stays
        first.note_worse("cost", "cpu", worse, production, reason)
    first.note_worse("cost", "cpu", worse, BASELINES, "than cost-greedy")
    machine("b")
    other = registry_at(address)
    assert other.worse_than("cost", "cpu", worse, production) == "by 5%"
    assert other.worse_than("cost", "cpu", worse, BASELINES) == "than cost-greedy"
    assert other.worse_than("cost", "cpu", production, worse) is None
    assert {item.id for item in other.list()} == {production, worse}


def test_objects_that_are_no_models_are_left_where_they_are(address):
    storage, root = fsspec.core.url_to_fs(address)
    for name in ("readme", "cost/../../x/card.json", "cost/cpu/zz/card.json", "cost/cpu/production/1", "a/b/c/d/e"):
        storage.pipe_file(f"{root}/{name}", b"x")
    models = registry_at(address)
    assert models.list() == ()
    assert {path.name for path in models.root.rglob("*")} == {".address", ".pulled", ".tried"}


def test_a_copy_is_used_while_the_storage_does_not_answer(address, machine, monkeypatch):
    version = registry_at(address).publish("cost", "cpu", WEIGHTS, {})

    tries = []

    def gone(*_, **__):
        tries.append(1)
        raise OSError("Connection refused")

    monkeypatch.setattr(MemoryFileSystem, "find", gone)
    models = registry_at(address)
    assert models.load("cost", "cpu").id == version
    assert Registry(models.root).load("cost", "cpu").id == version
    assert len(tries) == 1
    with pytest.raises(ModelError, match="does not answer as it should: Connection refused"):
        models.promote("cost", "cpu", version)
    machine("b")
    with pytest.raises(ModelError, match=address):
        registry_at(address)


@pytest.mark.parametrize("name", ["http://x/y", "s3://", "file:///x", "s3://a b", "s3://a?versionId=1"])
def test_other_addresses_are_refused(name, run):
    with pytest.raises(InvalidOptionError, match="must be a folder, or an address that begins with s3://"):
        folder_of(name)
    assert "s3://" in run("models", "--registry", name, code=2)[1]


def test_commands_take_addresses(address, monkeypatch, run):
    version = registry_at(address).publish("cost", "cpu", WEIGHTS, {})
    monkeypatch.setenv(REGISTRY_VARIABLE, address)
    for arguments in (["--registry", address], []):
        found = json.loads(run("models", *arguments, "--json")[0])
        assert found["registry"] == address
        assert version in {item["id"] for item in found["models"]}


def test_a_storage_whose_package_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ModelError, match=r"gs://bucket: needs a package: .*gcsfs"):
        Registry(folder_of("gs://bucket"))


def test_the_copy_of_an_address_is_its_own():
    folder = folder_of("s3://bucket/models/")
    assert folder == folder_of("s3://bucket/models") != folder_of("s3://bucket/other")
    assert address_of(folder) == "s3://bucket/models"
    assert folder_of("models") == Path("models")


SCRIPT = """
import sys
import numpy as np
from costmodel.registry.versions import Registry
from autoshard.formats.stores.remote_folders import folder_of

models, who = Registry(folder_of(sys.argv[1])), sys.argv[2]
for number in range(int(sys.argv[3])):
    models.publish("cost", "cpu", {"w": np.arange(1e4)}, {"who": who, "n": number})
    print(number, flush=True)
"""


@pytest.fixture
def bucket():
    """A bucket of a server that speaks S3."""
    pytest.importorskip("s3fs", reason="needs s3fs, the extra `s3`")
    server = shutil.which("moto_server") or pytest.skip("needs a server that speaks S3: pip install 'moto[server]'")
    with subprocess.Popen([server, "-p", "0"], stderr=subprocess.PIPE, text=True) as process:
        url = next(line.split()[-1] for line in process.stderr if "Running on" in line)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (
                ("AWS_ENDPOINT_URL", url),
                ("AWS_ACCESS_KEY_ID", "key"),
                ("AWS_SECRET_ACCESS_KEY", "secret"),
                ("AWS_DEFAULT_REGION", "us-east-1"),
            ):
                patch.setenv(name, value)
            fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another test's server
            fsspec.filesystem("s3").mkdir("models")
            yield "s3://models/prefix"
        process.kill()


@pytest.mark.slow
def test_publishers_at_once_lose_nothing_on_s3_whoever_is_killed(bucket, tmp_path):
    def publisher(who, number, output):
        environment = {**os.environ, CACHE_VARIABLE: str(tmp_path / who)}
        command = [sys.executable, "-c", SCRIPT, bucket, who, str(number)]
        return subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment, stdout=output, text=True)

    lasting = [publisher(who, 10, subprocess.DEVNULL) for who in ("x", "y")]
    killed = publisher("z", 1000, subprocess.PIPE)
    for _ in range(3):
        killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    acknowledged = 3 + len(killed.communicate()[0].splitlines())
    assert [process.wait(120) for process in lasting] == [0, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path / "reader"))
        models = Registry(folder_of(bucket))
        entries = models.history("cost", "cpu")
        by_publisher = {who: [] for who in "xyz"}
        for entry in entries:
            card = models.load("cost", "cpu", entry.id).card
            by_publisher[card["who"]].append(card["n"])
    assert by_publisher["x"] == by_publisher["y"] == list(range(10))
    assert by_publisher["z"] == list(range(len(by_publisher["z"])))
    assert acknowledged <= len(by_publisher["z"]) <= acknowledged + 1


@pytest.mark.slow
def test_a_service_follows_a_bucket(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "publisher"))
    models = Registry(folder_of(bucket))
    first = models.publish("other", "cpu", WEIGHTS, {"n": 1})
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "service"))
    environment = {**os.environ, "AUTOSHARD_DATABASE_URL": f"sqlite:///{tmp_path}/service.sqlite"}
    program = Path(sys.executable).with_name("autoshard")
    command = [program, "serve", "--port", "0", "--workers", "1", "--registry", bucket]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        url = next(found["url"] for found in map(json.loads, process.stderr) if found["event"] == "starting")
        http = fsspec.filesystem("http")

        def production():
            try:
                found = json.loads(http.cat_file(f"{url}/v1/models?kind=other"))["models"]
            except (OSError, FileNotFoundError):
                return None
            return next((item["id"] for item in found if "production" in item["aliases"]), None)

        wait_for(lambda: production() == first)
        second = models.publish("other", "cpu", WEIGHTS, {"n": 2})
        published_s = time.monotonic()
        wait_for(lambda: production() == second)
        assert time.monotonic() - published_s < 30
        assert b"autoshard_registry_age_seconds" in http.cat_file(f"{url}/metrics")
        process.send_signal(signal.SIGTERM)


def wait_for(condition):
    while not condition():  # pytest's own timeout ends this
        time.sleep(0.2)
