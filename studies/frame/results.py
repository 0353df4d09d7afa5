"""Results of studies, and their files: numbers as JSON, a page, and images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.formats.documents.json_document import format_json
from autoshard.formats.files import atomic_write
from autoshard.report.images import FigureReport, ImageError, figure_page, write_image
from autoshard.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Mean and standard deviation over seeds, which are taken as all there are: squares are divided by their number."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Of at least one value; the deviation of one is 0."""
        return cls(mean=float(np.mean(values)), deviation=float(np.std(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """Numbers of a study, with the tables and figures made of them.

    Attributes:
        name: Start of the names of its files.
        document: The numbers as a JSON object.
        tables: Tables of studies without a page.
        notes: Lines below these tables.
        page: Report that is written as an HTML page; None for no page.
        images: Figures that are drawn as PNG files, by the ends of the files' names.
        width: Width of the images in pixels; figures know their heights.
    """

    name: str
    document: Mapping[str, Any]
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    page: FigureReport | None = None
    images: Mapping[str, Any] = field(default_factory=dict)
    width: int = 1200

    def to_markdown(self) -> str:
        """Page, tables and notes in Markdown."""
        blocks = [] if self.page is None else list(_page_blocks(self.page))
        return "\n\n".join([*blocks, *_table_blocks(self.tables), *self.notes])


def _page_blocks(page: FigureReport) -> Iterator[str]:
    yield f"# {page.title}"
    yield page.subtitle
    lines = [f"- {label}: **{value}**" + f" ({note})" * bool(note) for label, value, note in page.facts]
    lines += [f"- {label}: {value}" for label, value in page.provenance]
    if lines:
        yield "\n".join(lines)
    for section in page.sections:
        yield f"## {section.title}"
        yield section.caption
        yield from _table_blocks(section.tables)


def _table_blocks(tables: tuple[Table, ...]) -> Iterator[str]:
    for table in tables:
        yield f"**{table.caption}**"
        yield table.to_markdown()


def write_result(result: StudyResult, folder: Path) -> tuple[Path, ...]:
    """Writes `NAME.json`, `NAME.html` if there is a page, and `NAME<end>.png` for each image.

    Numbers and page come first: where no image can be drawn, they are there all the same.

    Args:
        result: The result.
        folder: The folder; made when missing.

    Returns:
        The files in the order in which they are written.

    Raises:
        FormatError: If a file cannot be written.
        ImageError: If an image cannot be drawn; the files before it are written.
    """
    files = [folder / f"{result.name}.json"]
    atomic_write(files[0], format_json(result.document))
    if result.page is not None:
        files.append(folder / f"{result.name}.html")
        atomic_write(files[-1], figure_page(result.page))
    for end, figure in result.images.items():
        image = folder / f"{result.name}{end}.png"
        try:
            write_image(figure, image, width=result.width, height=int(figure.layout.height))
        except ImageError as error:
            written = ", ".join(map(str, files))
            raise ImageError(f"{error.message}; {written} are written", source=str(image)) from error
        files.append(image)
    return tuple(files)
