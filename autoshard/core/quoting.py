"""How messages show values that users gave: shortened, on one line, nothing in them that a terminal obeys."""

from __future__ import annotations

import json

#: Characters of a value that a message has room for.
_ROOM = 60
_KEPT = "\n\t"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    r"""The text with all but line breaks and tabs of its control, format and other invisible characters escaped.

    Terminals obey such characters: `\x1b[2J` clears the screen, U+202E turns the rest of the line around.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode("ascii") for c in text)


def write_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit: `1.50 GiB`."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def shortened(value: str, room: int = _ROOM) -> str:
    """A text cut to a length that fits an error line, without line breaks."""
    line = printable(value[: room + 1]).replace("\n", r"\n").replace("\t", r"\t")
    return line if len(line) <= room else line[: room - 1] + "…"


def shown(value: object) -> str:
    """A value as an error shows it: as JSON, shortened, on one line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    start = value[: _ROOM + 1] if isinstance(value, str) else value
    return shortened(json.dumps(start, ensure_ascii=False, default=str))
