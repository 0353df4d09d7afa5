"""Options that several studies take."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from autoshard import console
from autoshard.commands.options import command_options
from studies.frame.results import StudyResult, write_result

RegistryOption = Annotated[
    Path | None, typer.Option(help="Folder of trained models.", show_default="the default registry")
]
PartsOption = Annotated[
    Path | None,
    typer.Option("--parts", help="Folder of finished parts: a study that was stopped continues from them."),
]
FromOption = Annotated[Path | None, typer.Option("--from", help="Report the numbers of this file; measure nothing.")]


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


def names_in(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
