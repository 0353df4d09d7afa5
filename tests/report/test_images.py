"""Figures become images and pages."""

import html
import struct
import zlib

import plotly.graph_objects as go
import pytest

from autoshard.report.figures import in_house_style
from autoshard.report.images import (
    FigureReport,
    ImageError,
    Section,
    figure_page,
    find_browser,
    write_image,
    write_images,
)
from autoshard.table import Table

try:
    find_browser()
    NO_BROWSER = ""
except ImageError as error:
    NO_BROWSER = str(error)

needs_browser = pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER)
EVIL = "<img src=x>"


def bars(values=(1, 2, 3)):
    return in_house_style(go.Figure(go.Bar(x=["a", "b", "c"], y=list(values))))


def pixels(image):
    """The bytes of a PNG's lines, as its compressed blocks hold them."""
    blocks, position = b"", 8
    while position < len(image):
        (length,) = struct.unpack(">I", image[position : position + 4])
        if image[position + 4 : position + 8] == b"IDAT":
            blocks += image[position + 8 : position + 8 + length]
        position += 12 + length
    return zlib.decompress(blocks)


@pytest.fixture
def report():
    table = Table(columns=("name", "ms"), rows=((EVIL, "1.25"), ("b", "2.50")), caption="Milliseconds.")
    sections = (
        Section(title="First", caption="It grows.", figure=bars(), tables=(table,)),
        Section(title="Numbers alone", caption=EVIL, tables=(table, table)),
    )
    return FigureReport(
        title=EVIL,
        subtitle="a machine",
        sections=sections,
        facts=(("Slowest", "3 ms", "of three"),),
        provenance=(("Command", "python -m x"),),
    )


def test_a_page_holds_figures_captions_tables_and_where_they_came_from(report):
    page = figure_page(report)
    body = page[page.index("</head>") :]
    assert EVIL not in body
    assert body.count("&lt;img src=x&gt;") == 5  # heading, caption, a line of each of three tables
    assert "<title>&lt;img src=x&gt;</title>" in page
    assert body.count("<table>") == 4
    assert body.count('class="chart"') == 1
    for text in ("It grows.", "a machine", "2.50", "Slowest", "of three", "python -m x"):
        assert text in body
    assert "<script src" not in page


@pytest.mark.slow
@needs_browser
def test_an_image_is_drawn_in_double_size(tmp_path):
    write_image(bars(), tmp_path / "new" / "chart.png", width=300, height=200)
    image = (tmp_path / "new" / "chart.png").read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", image[16:24]) == (600, 400)
    assert len(set(pixels(image))) > 20  # what is drawn, not a blank


@pytest.mark.slow
@needs_browser
def test_several_figures_are_files_side_by_side_as_their_ending_says(tmp_path):
    figures = {"first": bars(), EVIL: in_house_style(go.Figure(go.Bar(x=[html.escape(EVIL)], y=[1])))}
    files = write_images(figures, tmp_path / "chart.svg")
    assert [file.name for file in files] == ["chart.svg", f"chart-{EVIL}.svg"]
    for file in files:
        assert file.read_text(encoding="utf-8").startswith("<svg ")
        assert EVIL not in file.read_text(encoding="utf-8")


def test_where_no_browser_is_installed_the_error_says_what_to_install(tmp_path, monkeypatch):
    from choreographer.browsers.chromium import Chromium

    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setattr(Chromium, "find_browser", lambda **_: None)
    with pytest.raises(ImageError, match=r"without a Chrome or Chromium: install one .*apt-get install chromium"):
        write_image(bars(), tmp_path / "chart.png", width=30, height=20)
    assert list(tmp_path.iterdir()) == []


def test_a_browser_that_dies_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    program = tmp_path / "browser"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(program))
    with pytest.raises(ImageError, match="browser drew no image"):
        write_image(bars(), tmp_path / "chart.png", width=30, height=20)
    assert not (tmp_path / "chart.png").exists()
