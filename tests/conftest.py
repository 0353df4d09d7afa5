"""What all tests share: no trained models but their own; tests marked `gpu` skip themselves without a CUDA device."""

import gc
import json
import os
import sys
import unicodedata
from datetime import timedelta
from pathlib import Path

# Before torch is imported, here and in child processes: the tests run in one process per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that pytest shares its tests among are told a width; what commands print has none unless a test says one.
os.environ.pop("COLUMNS", None)
# Hundreds of processes are started, which would each compile all that they import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

import autoshard
from autoshard import cli
from autoshard.formats import read_json
from costmodel.registry.versions import REGISTRY_VARIABLE, SHIPPED_VARIABLE
from server.storage.location import DATABASE_VARIABLE

sys.dont_write_bytecode = False

# As commands have it (`autoshard.cli`).
gc.set_threshold(50_000)
# What torch, its like and the collected tests are made of stays, and would be looked through for cycles again and
# again: 2.4 of the 12.7 s of CPU time in which all tests are collected (virtual AMD EPYC, November 2026).
gc.disable()

_DEVICES = ("cpu", "cuda")


@pytest.fixture(scope="session", autouse=True)
def only_own_models(tmp_path_factory):
    """Neither the user's models and database nor models that come with this package; tests of these name a folder."""
    folder = tmp_path_factory.mktemp("no-models")
    with pytest.MonkeyPatch.context() as patch:
        for variable in (REGISTRY_VARIABLE, SHIPPED_VARIABLE):
            patch.setenv(variable, str(folder / variable))
        patch.setenv(DATABASE_VARIABLE, f"sqlite:///{folder}/service.sqlite")
        yield


@pytest.fixture(scope="session")
def schemas():
    """The published JSON Schemas that the package holds, by the names that documents give."""
    read = map(read_json, Path(autoshard.__file__).parent.glob("formats/schemas/*.json"))
    return {schema["properties"]["schema"]["const"]: schema for schema in read}


@pytest.fixture(scope="session")
def faults(schemas):
    """What the published schema of a name refuses in a document."""
    registry = Registry().with_resources((one["$id"], Resource.from_contents(one)) for one in schemas.values())

    def faults(name, document):
        return [error.message for error in Draft202012Validator(schemas[name], registry=registry).iter_errors(document)]

    return faults


@pytest.fixture(scope="session")
def published(schemas, faults):
    """Reads what a command printed with `--json`; what has a published schema is checked against it."""

    def published(name, text):
        document = json.loads(text)
        assert document["schema"] == f"autoshard.{name}/1"
        assert document["schema"] not in schemas or faults(document["schema"], document) == []
        return document

    return published


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "Where tests run that are the same on a processor and on a GPU; left out, on both."
    parser.addoption("--device", choices=_DEVICES, help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Draws more examples where slow tests run; nobody times them: other work on the machine would fail them."""
    is_quick = config.getoption("markexpr") == "not slow"
    hypothesis.settings.register_profile(
        "untimed",
        deadline=None,
        max_examples=25 if is_quick else 100,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("untimed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `any_device` run on the processor, and have a twin for a GPU."""
    if "any_device" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--device")
        marks = {"cuda": pytest.mark.gpu, "cpu": ()}
        devices = [pytest.param(name, marks=marks[name]) for name in _DEVICES if chosen in (None, name)]
        metafunc.parametrize("any_device", devices)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU: torch finds no CUDA device on this machine")
        for item in marked:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.fixture
def run(capfd):
    """Runs a command and checks its exit code; returns both streams, which no terminal obeys."""

    def run(*words, code=0, program=cli.main):
        capfd.readouterr()
        assert program([str(word) for word in words]) == code
        out, err = capfd.readouterr()
        assert is_harmless(out), ascii(out)
        assert is_harmless(err), ascii(err)
        return out, err

    return run


def is_harmless(text):
    return all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)


@pytest.fixture
def one_process():
    """A process group of this one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield
    dist.destroy_process_group()
