"""Numbers as people write them in lists: `64.0`, `1,234,567`, `120M`, `2.5e7`, `2^20`."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from typing import Final

from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown

#: What may follow a number of rows or ids. A `k` of dimensions or samples may be 1,000 or 1,024: it is refused there.
_SUFFIXES: Final = {
    **dict.fromkeys(("k", "thousand"), 10**3),
    **dict.fromkeys(("m", "mn", "million", "mio"), 10**6),
    **dict.fromkeys(("b", "bn", "g", "billion"), 10**9),
    **dict.fromkeys(("t", "trillion"), 10**12),
    **dict(zip(("ki", "mi", "gi"), (2**10, 2**20, 2**30), strict=True)),
}
_NUMBER: Final = re.compile(
    r"([-+]?)(\d[\d.,_'\u2019 \u00a0\u202f]*|\.\d+)(e[-+]?\d+)?\s*([a-z]*)", re.IGNORECASE | re.ASCII
)
_POWER: Final = re.compile(r"(10|2)\s*(?:\^|\*\*)\s*(\d{1,2})")
#: Groups of three digits: marks that only ever separate groups, or the same comma or point twice or more.
_GROUPS: Final = re.compile(r"[1-9]\d{0,2}([_'\u2019 \u00a0\u202f]\d{3})+([.,]\d+)?|[1-9]\d{0,2}([,.])\d{3}(\3\d{3})+")
_COMMA_GROUP: Final = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
_MIXED_GROUPS: Final = re.compile(r"[1-9]\d{0,2}(\.\d{3})+,\d+")
_UNCLEAR: Final = re.compile(r"[1-9]\d{0,2}[.,]\d{3}")
#: Numbers above this have no place in a list; written out, they would fill the memory.
_MOST_DIGITS: Final = 30


def read_whole(value: object, scale: int = 1, *, may_have_suffix: bool = False) -> int:
    """A whole number.

    Args:
        value: A number, or a text that is one.
        scale: By what it is multiplied.
        may_have_suffix: Whether `K`, `M` and the like may follow.

    Raises:
        FormatError: If it is none, or may be read in two ways.
    """
    number = _decimal(value, is_whole=True, may_have_suffix=may_have_suffix and scale == 1) * scale
    if number != number.to_integral_value():
        raise FormatError(f"must be a whole number, got {shown(value)}")
    return int(number)


def read_number(value: object, scale: int = 1) -> float:
    """A number, alike.

    Raises:
        FormatError: If it is none, or may be read in two ways.
    """
    return float(_decimal(value, is_whole=False, may_have_suffix=scale == 1) * scale)


def _decimal(value: object, *, is_whole: bool, may_have_suffix: bool) -> Decimal:
    kind = "a whole number" if is_whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        raise FormatError(f"must be {kind}, got {shown(value)}")
    if not isinstance(value, str):
        found = Decimal(str(value)) if isinstance(value, float) and math.isfinite(value) else Decimal(value)
        return _bounded(found, kind, value)
    text = value.strip()
    power = _POWER.fullmatch(text)
    if power is not None:
        return _bounded(Decimal(int(power[1]) ** int(power[2])), kind, value)
    parts = _NUMBER.fullmatch(text)
    if parts is None:
        raise FormatError(f"must be {kind}, got {shown(value)}")
    sign, digits, exponent, suffix = parts.groups()
    factor = _SUFFIXES.get(suffix.casefold()) if suffix else 1
    if factor is None or (suffix and not may_have_suffix):
        written = "; write the number out" if factor is not None else ""
        raise FormatError(f"must be {kind}, got {shown(value)}{written}")
    bare = _ungrouped(digits.strip(), value, is_whole=is_whole and not suffix, has_suffix=bool(suffix))
    try:
        found = Decimal(sign + bare + (exponent or ""))
    except InvalidOperation:
        raise FormatError(f"must be {kind}, got {shown(value)}") from None
    return _bounded(found, kind, value) * factor


def _bounded(found: Decimal, kind: str, value: object) -> Decimal:
    if not found.is_finite() or found.adjusted() > _MOST_DIGITS or (found.adjusted() < -_MOST_DIGITS and found):
        raise FormatError(f"must be {kind} of at most {_MOST_DIGITS} digits, got {shown(value)}")
    return found


def _ungrouped(digits: str, value: object, *, is_whole: bool, has_suffix: bool) -> str:
    """The digits as Python reads them; what may be a group of thousands or a fraction is refused."""
    is_point = "." in digits
    # Of a number of rows, 1,234 can only be a group: there are no parts of rows. 40.000 may be forty or forty thousand.
    is_clear = (is_point and (not is_whole or has_suffix)) or (not is_point and is_whole and not has_suffix)
    if _UNCLEAR.fullmatch(digits) and not is_clear:
        group, fraction = re.sub("[.,]", "", digits), digits.replace(",", ".")
        raise FormatError(
            f"may mean {group} or {float(fraction):g}; write it without thousands marks, and fractions with "
            f"a point and no three digits after it, got {shown(value)}"
            if is_whole
            else f"may mean {group} or {fraction}; write it without thousands marks, got {shown(value)}"
        )
    if _MIXED_GROUPS.fullmatch(digits):
        return digits.replace(".", "").replace(",", ".")
    if _COMMA_GROUP.fullmatch(digits):
        return digits.replace(",", "")
    if _GROUPS.fullmatch(digits):
        head, mark, tail = re.fullmatch(r"(.*?)(?:([.,])(\d+))?", digits).groups()  # type: ignore[union-attr]
        if re.fullmatch(r"[1-9]\d{0,2}([.,])\d{3}(\1\d{3})+", digits):
            return re.sub("[.,]", "", digits)
        return re.sub(r"\D", "", head) + (f".{tail}" if mark else "")
    return digits.replace(",", ".") if re.fullmatch(r"\d+,\d+", digits) else digits
