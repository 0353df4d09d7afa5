"""Pages in one file that needs no network: templates, charts as data, and plotly.js."""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from autoshard import __version__
from autoshard.core.quoting import printable, shortened

_TEMPLATES = Path(__file__).parent / "templates"
_STATIC = Path(__file__).parent / "static"
#: The bundle with bars, scatter plots and heat maps: with gzip a seventh of what plotly's package carries.
PLOTLY_JS = _STATIC / "plotly-cartesian.min.js.gz"
#: Charts side by side in one figure run into each other below this width, in rem.
_LEAST_COLUMN_REM = 14
#: Likewise the names of bars that have two lines of them.
_LEAST_NAMES_REM = 44


def chart_markup(figure: Any, element: str) -> Markup:
    """The place of a figure, and its data, which the page's script draws there.

    Args:
        figure: A plotly figure, of bars, scatter plots and heat maps.
        element: The id of its place, unique in the page.
    """
    style = f"height: {figure.layout.height or 450}px; min-width: {_least_width_rem(figure)}rem"
    # An escape of JSON; without any `<`, the script cannot end early.
    data = Markup(figure.to_json().replace("<", "\\u003c"))
    place = Markup('<div class="chart" id="{}" style="{}"></div>').format(element, style)
    return place + Markup('<script type="application/json">{}</script>').format(data)


def render_page(template: str, **values: object) -> str:
    """A page made of a template of this folder; plotly's script is part of it, once."""
    script = (_STATIC / "page.js").read_text(encoding="utf-8")
    return render_template(
        template,
        **values,
        version=__version__,
        script=Markup(script),
        plotly=Markup(_packed_plotly()),
        allowed_scripts=Markup(" ".join((_content_hash(script.encode()), _plotly_hash()))),
    )


def render_template(template: str, **values: object) -> str:
    """A template of this folder, filled in; texts are escaped."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short_markup
    return environment.get_template(template).render(**values)


def short_markup(text: object, limit: int = 60) -> Markup:
    """A text from outside as it fits its place: what is cut is whole in its title.

    Characters that do not print, such as those that turn the direction of what follows, are written as escapes.
    """
    whole, shown = printable(str(text)), shortened(str(text), limit)
    return Markup.escape(shown) if shown == whole else Markup('<span title="{}">{}</span>').format(whole, shown)


def _least_width_rem(figure: Any) -> int:
    """Below this width readers scroll; 0 for a figure that fits any."""
    columns = len({axis.domain for axis in figure.select_xaxes()})
    has_two_lines = any(
        trace.x is not None and len(trace.x) > 0 and isinstance(trace.x[0], list)
        for trace in figure.select_traces({"type": "bar"})
    )
    return max(_LEAST_COLUMN_REM * columns if columns > 1 else 0, _LEAST_NAMES_REM if has_two_lines else 0)


@cache
def _packed_plotly() -> str:
    return base64.b64encode(PLOTLY_JS.read_bytes()).decode()


@cache
def _plotly_hash() -> str:
    return _content_hash(gzip.decompress(PLOTLY_JS.read_bytes()))


def _content_hash(script: bytes) -> str:
    """The name by which the page's Content-Security-Policy lets a script run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
