"""Digests of JSON values, by their canonical text."""

from __future__ import annotations

import hashlib
import json


def canonical_json(document: object) -> str:
    """The text that equal JSON values have in common.

    Keys are sorted, nothing is spaced out, and whole numbers are written without a point, so that 3.0 and 3, which
    JSON does not tell apart, give one text.

    Raises:
        ValueError: If a number is not finite.
        TypeError: If the value is not JSON.
    """
    return json.dumps(_plain(document), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(document: object) -> str:
    """SHA-256 of the canonical text, as `sha256:` and 64 hexadecimal digits.

    Raises:
        ValueError: If a number is not finite.
        TypeError: If the value is not JSON.
    """
    return "sha256:" + hashlib.sha256(canonical_json(document).encode("utf-8")).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
