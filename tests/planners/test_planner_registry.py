"""Planners by name, and their options."""

import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint

import pytest

from autoshard.core.errors import AutoshardError, InvalidOptionError, UnknownNameError
from autoshard.planners import registry
from autoshard.planners.auto import AutoPlanner
from autoshard.planners.planner import parse_options
from autoshard.planners.registry import describe_planners, get_planner, planner_names


def test_names_are_those_of_the_entry_points():
    assert set(planner_names()) >= {
        "random", "size-greedy", "dim-greedy", "lookup-greedy", "cost-greedy", "torchrec", "auto", "policy"
    }  # fmt: skip
    assert isinstance(get_planner("auto"), AutoPlanner)


def test_unknown_names_are_answered_with_those_that_are():
    with pytest.raises(UnknownNameError, match=r'planner: no planner is named "magic"; there are: auto, .*torchrec'):
        get_planner("magic")


def test_every_planner_is_described_with_its_options():
    described = {planner.name: planner for planner in describe_planners()}
    assert tuple(described) == planner_names()
    assert [(option.name, option.default) for option in described["auto"].options] == [
        ("objective", "step"),
        ("sharding_types", "all"),
        ("reserved_bytes", 0),
        ("steps", 0),
        ("prefer_whole", True),
        ("policy", True),
        ("count_activations", True),
        ("min_partition", 0),
    ]
    assert all(option.help for planner in described.values() for option in planner.options)


@pytest.fixture(params=["import broken_on_import_\n", "raise RuntimeError('two\\nlines')\n", "", "Planner = 3\n"])
def broken(request, tmp_path, monkeypatch):
    """A plugin beside the others that cannot be loaded: by its imports, its own fault, what it lacks, what it is."""
    (tmp_path / "broken_plugin_module.py").write_text(request.param, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint(name="broken", value="broken_plugin_module:Planner", group=registry.GROUP)
    found = registry.installed
    monkeypatch.setattr(registry, "installed", lambda group: (*found(group), point))
    yield point
    sys.modules.pop("broken_plugin_module", None)


@pytest.mark.usefixtures("broken")
def test_a_plugin_that_cannot_be_loaded_is_told_in_a_line(run):
    with pytest.raises(AutoshardError) as caught:
        get_planner("broken")
    assert str(caught.value).startswith("planner broken: broken_plugin_module:Planner cannot be loaded: ")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None
    _, err = run("plan", "criteo-kaggle", "--topology", "cpu-4", "--planner", "broken", code=1)
    assert err == f"error: {caught.value}\n"


@pytest.mark.usefixtures("broken")
def test_a_plugin_that_cannot_be_loaded_leaves_the_others_alone():
    described = {planner.name: planner for planner in describe_planners()}
    assert described["broken"].summary.startswith("Unavailable: broken_plugin_module:Planner cannot be loaded")
    assert described["auto"].options
    assert isinstance(get_planner("auto"), AutoPlanner)


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeOptions:
    count: int = field(default=3, metadata={"help": "How many."})
    share: float = field(default=0.5, metadata={"help": "How much."})
    eager: bool = field(default=False, metadata={"help": "Whether."})
    label: str = field(default="a", metadata={"help": "What."})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SomeOptions()),
        ({"count": "7", "share": "0.25", "eager": "true"}, SomeOptions(count=7, share=0.25, eager=True)),
        ({"share": 1, "label": "b", "eager": False}, SomeOptions(share=1.0, label="b")),
        ({"count": 4.0}, SomeOptions(count=4)),
    ],
)
def test_options_are_read_from_texts_and_values(given, expected):
    assert parse_options(SomeOptions, given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cuont": 1}, r"options\.cuont: unknown option; this planner takes: count, share, eager, label"),
        ({"count": "many"}, r'options\.count: must be a whole number, got "many"'),
        ({"count": 2.5}, r"options\.count: must be a whole number, got 2\.5"),
        ({"count": True}, r"options\.count: must be a whole number, got true"),
        ({"count": float("inf")}, r"options\.count: must be a whole number, got Infinity"),
        ({"share": "nan"}, r'options\.share: must be a number, got "nan"'),
        ({"share": None}, r"options\.share: must be a number, got null"),
        ({"eager": "yes"}, r'options\.eager: must be true or false, got "yes"'),
        ({"label": 3}, r"options\.label: must be a text, got 3"),
    ],
)
def test_bad_options_are_refused(given, message):
    with pytest.raises(InvalidOptionError, match=message):
        parse_options(SomeOptions, given)
