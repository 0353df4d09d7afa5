"""The evaluation as one page, an image per figure, a file of numbers, and tables in Markdown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import autoshard
from autoshard.formats.documents.json_document import format_json
from autoshard.formats.files import atomic_write
from autoshard.report.images import FigureReport, Section, figure_page, write_png
from studies.policies.catalogue import FIGURES
from studies.policies.lab import Lab
from studies.policies.parts import SCHEMA

_WIDTH: Final = 1100
_TITLE: Final = "The sharding policy, evaluated"


def sections(lab: Lab) -> dict[str, Section]:
    """Sections of all figures that are finished, by name."""
    found = {name: figure.section(lab) for name, figure in FIGURES.items()}
    return {name: section for name, section in found.items() if section is not None}


def write_results(lab: Lab, folder: Path, markdown: Path, command: str, *, images: bool = True) -> tuple[Path, ...]:
    """Writes what is finished.

    Args:
        lab: Has the parts.
        folder: Gets `policy-evaluation.json`, `policy-evaluation.html`, and `<figure>.png` for each figure.
        markdown: The file of tables, with links to the images.
        command: What was typed, for the record.
        images: Whether images are drawn.

    Returns:
        The files in their order of writing: numbers, page, tables, then the images.

    Raises:
        FormatError: If a file cannot be written.
        ImageError: If an image cannot be drawn; all else is written by then.
    """
    shown = sections(lab)
    about = _about(lab, command)
    files = [folder / "policy-evaluation.json", folder / "policy-evaluation.html", markdown]
    atomic_write(files[0], format_json(_document(lab, shown, about)))
    atomic_write(files[1], figure_page(_report(lab, shown, about)))
    atomic_write(markdown, as_markdown(shown, about, os.path.relpath(folder, markdown.parent) if images else None))
    for name, section in shown.items() if images else ():
        image = folder / f"{name}.png"
        write_png(section.figure, image, width=_WIDTH, height=int(section.figure.layout.height))
        files.append(image)
    return tuple(files)


def _about(lab: Lab, command: str) -> tuple[tuple[str, str], ...]:
    settings = lab.settings
    return (
        ("Command", command),
        ("Tables", f"{settings.tables}, rows and batch divided by {settings.scale}"),
        ("Costs", lab.model.name),
        ("Seeds", f"{settings.num_seeds}"),
        ("Version", f"autoshard {autoshard.__version__}"),
    )


def _document(lab: Lab, shown: Mapping[str, Section], about: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    figures = {}
    for name, section in shown.items():
        figure = FIGURES[name]
        figures[name] = {
            "title": section.title,
            "caption": section.caption,
            "parts": {part.name: lab.parts.read(figure.part_name(part)) for part in figure.parts(lab.settings)},
            "tables": [
                {"caption": table.caption, "columns": table.columns, "lines": table.lines} for table in section.tables
            ],
        }
    return {"schema": SCHEMA, "about": dict(about), "settings": lab.settings.identity(), "figures": figures}


def _report(lab: Lab, shown: Mapping[str, Section], about: tuple[tuple[str, str], ...]) -> FigureReport:
    return FigureReport(
        title=_TITLE,
        subtitle=f"AutoShard's figures, from models of {lab.settings.device}",
        sections=tuple(shown.values()),
        image=None,
        image_size=(0, 0),
        document={},
        provenance=about,
    )


def as_markdown(shown: Mapping[str, Section], about: tuple[tuple[str, str], ...], images: str | None) -> str:
    """The report for documentation; `images` is the folder that links to images name, None for no links."""
    blocks = [f"# {_TITLE}", "\n".join(f"- {name}: {_code(name, value)}" for name, value in about)]
    for name, section in shown.items():
        blocks += [f"## {section.title}", section.caption]
        if images is not None:
            blocks.append(f"![{section.title}]({(Path(images) / name).as_posix()}.png)")
        for table in section.tables:
            blocks += [f"**{table.caption}**", table.to_markdown()]
    return "\n\n".join(blocks) + "\n"


def _code(name: str, value: str) -> str:
    return f"`{value}`" if name == "Command" else value
