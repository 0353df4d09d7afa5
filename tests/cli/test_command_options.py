"""Options of commands: one dataclass states them for the command line and for callers in Python."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from enum import StrEnum
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated

import pytest
import typer

from autoshard.cli import run_commands
from autoshard.commands.arguments import positive_option, share_option
from autoshard.commands.options import Needs, as_typer_function, command_options
from autoshard.console import JsonOption
from autoshard.core.errors import InvalidOptionError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@command_options(panel="Paint")
class PaintOptions:
    colour: Annotated[Colour, typer.Option(help="Its colour.")] = Colour.RED
    share: Annotated[float | None, share_option("How much of it.")] = None
    coats: Annotated[int, typer.Option("--coats-of-paint", min=1, max=9, rich_help_panel="Work")] = 2
    varnish: Annotated[bool, typer.Option("--varnish")] = False
    gloss: Annotated[
        float,
        positive_option("How shiny."),
        Needs("--varnish or --colour blue", lambda options: options.varnish or options.colour is Colour.BLUE),
    ] = 0.5


@command_options()
class HouseOptions:
    plan: Annotated[Path, typer.Argument(help="What to build.", metavar="PLAN")]
    rooms: Annotated[list[str] | None, typer.Option("--room", "-r", envvar="ROOM")] = None
    paint: PaintOptions
    garden: Annotated[bool, typer.Option("--garden/--no-garden")] = True
    workers: int = 4

    def __post_init__(self) -> None:
        if self.paint.colour is Colour.BLUE and not self.garden:
            raise InvalidOptionError("must be red without a garden", field="colour")


asked = []


def build(options: HouseOptions, as_json: JsonOption = False) -> None:
    """Builds a house."""
    asked.append((options, as_json))


def command(*arguments):
    asked.clear()
    point = EntryPoint(name="build", value=f"{__name__}:build", group="x")
    return run_commands({"build": point}, ["build", *arguments], program="builder", about="Builds.")


def test_the_command_line_makes_the_dataclass():
    assert command("a.plan") == 0
    assert asked == [(HouseOptions(plan=Path("a.plan"), paint=PaintOptions()), False)]
    words = "a.plan -r hall --room attic --colour blue --share 0.5 --coats-of-paint 3 --varnish --gloss 1 --json"
    assert command(*words.split()) == 0
    paint = PaintOptions(colour=Colour.BLUE, share=0.5, coats=3, varnish=True, gloss=1.0)
    assert asked == [(HouseOptions(plan=Path("a.plan"), rooms=["hall", "attic"], paint=paint), True)]


def test_options_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("ROOM", "cellar")
    assert command("a.plan", "--no-garden") == 0
    assert (asked[0][0].rooms, asked[0][0].garden) == (["cellar"], False)


def test_help_has_the_order_of_the_fields_under_their_panels(capsys):
    assert command("--help") == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[:2] == ["Usage:", "Builds"]
    assert lines[2:] == [
        *("Arguments:", "PLAN", "Options:", "-r,", "--garden", "--json", "--help"),
        *("Paint:", "--colour", "--share", "--varnish", "--gloss", "Work:", "--coats-of-paint"),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"coats": 0}, r"coats: must be in \[1, 9\], got 0"),
        ({"coats": 10}, r"coats: must be in \[1, 9\], got 10"),
        ({"coats": float("nan")}, r"coats: must be in \[1, 9\], got nan"),
        ({"share": 1.5}, "share: must be a number above 0 and up to 1, got 1.5"),
        ({"gloss": float("inf")}, "gloss: must be a number above 0, got inf"),
    ],
)
def test_ranges_hold_for_callers_in_python(values, message):
    with pytest.raises(InvalidOptionError, match=message):
        PaintOptions(**values)
    with pytest.raises(InvalidOptionError, match=message):
        replace(PaintOptions(), **values)


def test_ranges_and_checks_hold_on_the_command_line(capsys):
    assert command("a.plan", "--coats-of-paint", "0") == 2
    assert "'--coats-of-paint': Input should be greater than or equal to 1" in capsys.readouterr().err
    assert command("a.plan", "--colour", "blue", "--no-garden") == 2
    assert capsys.readouterr().err == "error: colour: must be red without a garden\n"
    assert asked == []


def test_an_option_that_needs_another_one_is_refused_without_it(capsys):
    assert command("a.plan", "--gloss", "0.5") == 2
    assert capsys.readouterr().err == "error: --gloss: needs --varnish or --colour blue\n"
    assert asked == []
    assert command("a.plan", "--gloss", "0.5", "--colour", "blue") == 0


def test_options_are_frozen_keyword_only_and_have_no_others():
    with pytest.raises(FrozenInstanceError):
        PaintOptions().coats = 3
    with pytest.raises(TypeError):
        PaintOptions(Colour.RED)
    assert not hasattr(PaintOptions(), "__dict__")


def test_functions_without_such_options_stay_as_they_are():
    def plain(name: Annotated[str, typer.Option()] = "x") -> None:
        pass

    assert as_typer_function(plain) is plain
