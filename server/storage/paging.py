"""Positions in lists that are sorted by time and id, as clients get them."""

from __future__ import annotations

import base64
import binascii
import re

from autoshard.core.errors import FormatError


def cursor_of(created_us: int, identity: str) -> str:
    """The position after a row."""
    return base64.urlsafe_b64encode(f"{created_us}:{identity}".encode()).decode().rstrip("=")


def position_of(cursor: str, identities: str) -> tuple[int, str]:
    """The row that a position is after.

    Args:
        cursor: As from `cursor_of`.
        identities: Regular expression of the list's ids.

    Raises:
        FormatError: If it is not one.
    """
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    match = re.fullmatch(rf"([0-9]{{1,18}}):({identities})", text)
    if match is None:
        raise FormatError("must be `next` of a page before", field="cursor")
    return int(match[1]), match[2]
