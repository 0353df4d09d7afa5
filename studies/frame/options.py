"""Options that several studies take."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable, Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core.accepted import Range
from autoshard.core.errors import InvalidOptionError
from studies.frame.results import StudyResult, write_result

RegistryOption = Annotated[
    Path | None, typer.Option(help="Folder of trained models.", show_default="the default registry")
]
PartsOption = Annotated[
    Path | None,
    typer.Option("--parts", help="Folder of finished parts: a study that was stopped continues from them."),
]
FromOption = Annotated[Path | None, typer.Option("--from", help="Report the numbers of this file; measure nothing.")]

_Number = TypeVar("_Number", int, float)


@command_options()
class OutputOptions:
    """Destinations of results: standard output, and files of a folder."""

    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Folder for numbers, page and images.")
    ] = None
    images: Annotated[bool, typer.Option(help="Draw the images, which takes a browser.")] = True
    as_json: console.JsonOption = False

    def write(self, result: StudyResult) -> None:
        """Prints a result, as Markdown or JSON, and writes its files.

        Raises:
            FormatError: If a file cannot be written.
            ImageError: If an image cannot be drawn; all else is written by then.
        """
        console.emit(result.document, result.to_markdown(), as_json=self.as_json)
        if self.output_dir is not None:
            drawn = result if self.images else replace(result, images={})
            files = write_result(drawn, self.output_dir)
            console.log(f"Wrote {', '.join(map(str, files))}.")


def command_line(study: str, options: object) -> str:
    """Command that runs a study with these options, without those at their defaults and folders of this machine."""
    return shlex.join(["python", "-m", "studies", study, *_words(options)])


def _words(options: Any) -> Iterator[str]:
    hints = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value, marks = getattr(options, field.name), getattr(hints[field.name], "__metadata__", ())
        if is_dataclass(value):
            yield from _words(value)
        for option in (mark for mark in marks if isinstance(mark, OptionInfo)):
            if field.default is MISSING or value != field.default:
                # Typer takes the first name for the default until it makes the command.
                names = (name for name in (option.default, *(option.param_decls or ())) if isinstance(name, str))
                yield next((name for name in names if name.startswith("--")), f"--{field.name.replace('_', '-')}")
                if value is not True:
                    yield _word(value)


def _word(value: object) -> str:
    if isinstance(value, Path) and value.is_absolute():
        return value.name
    return f"{value:g}" if isinstance(value, float) else str(value)


def options_without(options: Any, names: Container[str]) -> dict[str, object]:
    """Values of options by name, without those that finished parts do not depend on."""
    return {name: value for name, value in asdict(options).items() if name not in names}


def names_in(text: str, field: str = "", accepted: Iterable[str] | None = None) -> tuple[str, ...]:
    """Names with commas between them.

    Args:
        text: The names; spaces around them do not count.
        field: Option that has them, for the error.
        accepted: Names that are taken, of which there has to be one; None to take any, and none at all.

    Raises:
        InvalidOptionError: If there is no name, or one that is not accepted.
    """
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if accepted is not None:
        known = tuple(accepted)
        if not found or not set(found) <= set(known):
            raise InvalidOptionError(f"must be any of {', '.join(known)}, got {text!r}", field=field)
    return found


def numbers_in(text: str, field: str, kind: type[_Number], accepted: Range) -> tuple[_Number, ...]:
    """Numbers with commas between them, at least one.

    Args:
        text: The numbers; spaces around them do not count.
        field: Option that has them, for the error.
        kind: `int` or `float`.
        accepted: What each of them may be.

    Raises:
        InvalidOptionError: If there is none, or one that is not accepted.
    """
    try:
        found = tuple(map(kind, names_in(text)))
    except ValueError:
        found = ()
    if not found or any(number not in accepted for number in found):
        raise InvalidOptionError(f"each must be {accepted}, with commas between them, got {text!r}", field=field)
    return found
