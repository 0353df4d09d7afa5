"""Figures as files: SVG and PNG images, and a page that needs no network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.core.errors import AutoshardError
from autoshard.formats.files import atomic_write
from autoshard.report.rendering import chart_markup, render_page
from autoshard.table import Table

#: Endings of the images that can be drawn.
IMAGE_SUFFIXES = (".svg", ".png")
#: Of images that have no width of their own, in pixels of the figure.
_WIDTH = 1180
#: Image pixels per pixel of the figure: texts stay sharp on screens of high density.
_SCALE = 2
#: A browser that starts on a busy machine takes more than half a minute.
_TIMEOUT_S = 240

_INSTALL = "install one (`apt-get install chromium`) or name its program in BROWSER_PATH"


class ImageError(AutoshardError):
    """An image that cannot be drawn: a browser that is missing or failed."""

    kind = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled part of a page: a figure with its caption, and the tables with its numbers."""

    title: str
    caption: str
    figure: Any = None
    """A plotly figure; None for tables alone."""
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureReport:
    """A page of figures.

    Attributes:
        title: Heading of the page.
        subtitle: A line below it, such as the device that was measured.
        sections: The parts of the page.
        facts: Numbers at the top of the page: label, value and a note, which may be empty.
        provenance: Labels and values of how the numbers came about.
    """

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str, str], ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the sections, by their titles in small letters: `parts-of-the-step`."""
        drawn = [section for section in self.sections if section.figure is not None]
        return {section.title.lower().replace(" ", "-"): section.figure for section in drawn}


def figure_page(report: FigureReport) -> str:
    """The report as one HTML page with plotly.js inside."""
    sections: list[dict[str, object]] = []
    for index, section in enumerate(report.sections):
        chart = None if section.figure is None else chart_markup(section.figure, f"chart-{index}")
        sections.append(
            {
                "element": f"section-{index}",
                "title": section.title,
                "caption": section.caption,
                "chart": chart,
                "tables": section.tables,
            }
        )
    return render_page(
        "figures.html.j2",
        title=report.title,
        subtitle=report.subtitle,
        facts=[{"label": label, "value": value, "note": note} for label, value, note in report.facts],
        sections=sections,
        provenance=report.provenance,
    )


def write_images(
    figures: Mapping[str, Any], path: Path, *, on_drawn: Callable[[float], None] = lambda _: None
) -> tuple[Path, ...]:
    """Draws figures as files, the first under the given name, the others beside it: `plan.svg`, `plan-memory.svg`.

    Args:
        figures: Plotly figures by name, as high as their layouts say.
        path: File of the first one; its ending says what all are, see `IMAGE_SUFFIXES`.
        on_drawn: Called with 1 after each figure, for progress bars.

    Returns:
        The files.

    Raises:
        ImageError: If there is no browser to draw with, or it fails.
        FormatError: If a file cannot be written.
    """
    files = [path if index == 0 else path.with_stem(f"{path.stem}-{name}") for index, name in enumerate(figures)]
    for file, figure in zip(files, figures.values(), strict=True):
        write_image(figure, file, width=_WIDTH, height=int(figure.layout.height))
        on_drawn(1)
    return tuple(files)


def write_image(figure: Any, path: Path, *, width: int, height: int) -> None:
    """Draws a plotly figure as a PNG or SVG file, without a network.

    Args:
        figure: The figure.
        path: Where the file goes, with one of `IMAGE_SUFFIXES`; folders that are missing are made.
        width: Pixels of the figure; a PNG has twice as many.
        height: As `width`.

    Raises:
        ImageError: If there is no browser to draw with, or it fails.
        FormatError: If the file cannot be written.
    """
    atomic_write(path, _image_bytes(figure, path.suffix.removeprefix("."), width=width, height=height))


def _image_bytes(figure: Any, kind: str, *, width: int, height: int) -> bytes:
    browser = find_browser()
    try:
        import kaleido
        from kaleido.errors import BrowserClosedError, BrowserFailedError, JavascriptError, KaleidoError
    except ImportError as error:
        raise ImageError("no image can be drawn: the package kaleido is not installed") from error
    options = {"format": kind, "width": width, "height": height, "scale": _SCALE}
    # Without MathJax, which would be fetched from the network. Kaleido turns off the sandbox, which root cannot have.
    settings = {"mathjax": False, "path": str(browser), "timeout": _TIMEOUT_S}
    try:
        image: bytes = kaleido.calc_fig_sync(figure.to_dict(), opts=options, kopts=settings)
    except (BrowserClosedError, BrowserFailedError, JavascriptError, KaleidoError, OSError, TimeoutError) as error:
        raise ImageError(f"{browser} drew no image: {type(error).__name__}: {error}") from error
    return image


def find_browser() -> Path:
    """The browser that images are drawn with: `BROWSER_PATH`, or an installed Chrome or Chromium.

    Raises:
        ImageError: If there is none; the message names ways to get one.
    """
    named = os.environ.get("BROWSER_PATH")
    if named:
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise ImageError(f"BROWSER_PATH must name a Chrome or Chromium to draw images with, got {named!r}")
        return Path(named)
    try:
        from choreographer.browsers.chromium import Chromium
    except ImportError as error:
        raise ImageError("no image can be drawn: the package kaleido is not installed") from error
    found = Chromium.find_browser(skip_local=False)
    if found is None:
        raise ImageError(f"no image can be drawn without a Chrome or Chromium: {_INSTALL}")
    return Path(found)
