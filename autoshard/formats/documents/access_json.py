"""The `access` object of a table: uniform, zipf, reuse_bins, curve, or counts in Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from autoshard.core import NUM_REUSE_BINS, AccessProfile
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
from autoshard.formats.documents.fields import at_path, items, number
from autoshard.formats.documents.json_document import join
from autoshard.formats.documents.kinds import (
    TEXT,
    Field,
    Kind,
    list_of,
    named,
    number_in,
    one_of,
    optional,
    record,
    tuple_of,
    whole_number,
)
from autoshard.formats.documents.row_counts import read_row_counts

#: Largest accepted Zipf exponent: beyond it the first row has all lookups, to double precision.
MAX_ALPHA = 64.0
MAX_SHIFT = 1e15
MAX_KNOTS = 100_000
#: Largest accepted share of a reuse bin: shares need not sum to 1, but must have a sum.
MAX_SHARE = 1e100


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessContext:
    """What an `access` object is about.

    Attributes:
        num_embeddings: Rows of the table.
        pooling_factor: Lookups per sample of the table, all features together.
        folder: Where files that the object names lie; None if the object did not come from a file.
        known: Profiles by the bytes of their knots: long lists of tables have the same curves again and again.
    """

    num_embeddings: int
    pooling_factor: float
    folder: Path | None = None
    known: dict[bytes, AccessProfile] = field(default_factory=dict)


_Profile = Callable[[AccessContext], AccessProfile]


def access_from_json(value: object, path: str, context: AccessContext) -> AccessProfile:
    """Reads the access profile at a dotted path.

    Raises:
        FormatError: If the object does not follow the schema, or the file that it names cannot be used.
        InvalidTableError: If its values make no profile.
    """
    known: dict[str, object] = value if isinstance(value, dict) else {}
    if "hot_rows" in known:
        raise FormatError("is no part of it: name the file in the table's row_order", field=join(path, "hot_rows"))
    name = known.get("kind", "uniform")  # without a kind, that of uniform says what is wrong
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FormatError(f"must be one of {', '.join(_KINDS)}, got {shown(name)}", field=join(path, "kind"))
    profile = kind.read(value, path)
    return at_path(path, lambda: profile(context))


def access_to_json(access: AccessProfile, known: dict[int, dict[str, object]] | None = None) -> dict[str, object]:
    """The `access` object of a profile: `uniform` where it is, else the `curve`, which holds any profile exactly.

    Args:
        access: The profile.
        known: Objects of the same document by the `id` of their profiles, which tables that are alike share.
    """
    if known is not None and id(access) in known:
        return known[id(access)]
    knots = [
        [_shortest(rank), _shortest(mass)]
        for rank, mass in zip(access.ranks_K.tolist(), access.cumulative_K.tolist(), strict=True)
    ]
    is_uniform = knots == [[0, 0], [access.num_rows, 1]]
    found: dict[str, object] = {"kind": "uniform"} if is_uniform else {"kind": "curve", "knots": knots}
    if known is not None:
        known[id(access)] = found
    return found


def _uniform(accessed_fraction: float = 1.0) -> _Profile:
    return lambda of: AccessProfile.uniform(of.num_embeddings, accessed_fraction)


def _zipf(alpha: float, shift: float = 0.0) -> _Profile:
    return lambda of: AccessProfile.zipf(of.num_embeddings, alpha, shift)


def _reuse_bins(of: Literal["rows", "lookups"], batch_size: int, bins: Sequence[float]) -> _Profile:
    def profile(table: AccessContext) -> AccessProfile:
        if table.pooling_factor <= 0:
            raise FormatError("needs a table that is looked up; its pooling factors are 0", field="kind")
        num_lookups = batch_size * table.pooling_factor
        return AccessProfile.from_reuse_bins(table.num_embeddings, bins, of=of, num_lookups=num_lookups)

    return profile


def _curve(knots: list[object]) -> _Profile:
    def profile(of: AccessContext) -> AccessProfile:
        try:
            knots_K2 = np.array(knots, dtype=np.float64)
        except OverflowError:
            raise FormatError("holds a number that is too large", field="knots") from None
        if knots_K2[-1, 0] != of.num_embeddings:
            raise FormatError(
                f"must end at access rank {of.num_embeddings}, the table's rows, got {knots_K2[-1, 0]:g}", field="knots"
            )
        if (same := knots_K2.tobytes()) not in of.known:
            of.known[same] = AccessProfile(*knots_K2.T)
        return of.known[same]

    return profile


def _counts(file: str) -> _Profile:
    return lambda of: _counted(file, of)


def _counted(name: str, of: AccessContext) -> AccessProfile:
    if of.folder is None:
        raise FormatError("counts can only be read from a file that lies beside tables.json", field="file")
    if Path(name).name != name or name == ".." or "\\" in name:
        raise FormatError(f"must be the name of a file or folder in the same folder, got {shown(name)}", field="file")
    try:
        return read_row_counts(of.folder / name, num_rows=of.num_embeddings).profile()
    except FileNotFoundError:
        raise FormatError(f"there is no file {name} beside tables.json", field="file") from None
    except FormatError as error:
        raise FormatError(error.message, field="file") from None


def _read_knots(value: object, path: str) -> list[object]:
    knots: list[Any] = items(value, path, minimum=2, maximum=MAX_KNOTS)
    # Sets for all knots: ten times faster than a look at every number, and there are many.
    are_pairs = set(map(type, knots)) == {list} and set(map(len, knots)) == {2}
    if not (are_pairs and set(map(type, chain.from_iterable(knots))) <= {int, float}):
        for index, pair in enumerate(knots):
            for place, one in enumerate(items(pair, f"{path}[{index}]", minimum=2, maximum=2)):
                number(one, f"{path}[{index}][{place}]")
    return knots


def _shortest(value: float) -> float | int:
    """Whole values without their `.0`; they read back as the same double."""
    return int(value) if value.is_integer() else value


ALPHA: Final = number_in(0, MAX_ALPHA)
_PAIR: Final = tuple_of(number_in(), number_in(0, 1.000001))
_KNOTS: Final = Kind({"type": "array", "items": _PAIR.schema, "minItems": 2, "maxItems": MAX_KNOTS}, _read_knots)
_BINS: Final = list_of(number_in(0, MAX_SHARE), NUM_REUSE_BINS, NUM_REUSE_BINS)
_MEANINGS: Final = {
    "accessed_fraction": "Share of the rows that are looked up at all; 1 if left out.",
    "alpha": "The row of access rank r has probability proportional to 1 / (r + 1 + shift)^alpha.",
    "bins": "Shares of rows that one batch looks up (0, 1], (1, 2], (2, 4] ... (32768, inf) times.",
    "knots": "[access rank, cumulative probability] pairs from [0, 0] to [rows, 1], rising and concave.",
    "file": "Parquet file beside this one, with a column count of one number per row; or a folder of such files, which "
    "make up the table in the order of their names.",
}


_KINDS: Final = {
    "uniform": record(
        _uniform,
        Field("kind", "uniform"),
        optional("accessed_fraction", number_in(0, 1, is_open=True), _MEANINGS["accessed_fraction"]),
    ),
    "zipf": record(
        _zipf,
        Field("kind", "zipf"),
        Field("alpha", ALPHA, _MEANINGS["alpha"]),
        optional("shift", number_in(0, MAX_SHIFT), "0 if left out."),
    ),
    "reuse_bins": record(
        _reuse_bins,
        Field("kind", "reuse_bins"),
        Field("of", one_of(("rows", "lookups")), "What the shares are of: rows or lookups."),
        Field("batch_size", whole_number(1), "Samples in the batch that was counted."),
        Field("bins", _BINS, _MEANINGS["bins"]),
    ),
    "curve": record(_curve, Field("kind", "curve"), Field("knots", _KNOTS, _MEANINGS["knots"])),
    "counts": record(_counts, Field("kind", "counts"), Field("file", TEXT, _MEANINGS["file"])),
}
_OBJECT: Final[Kind[Any]] = Kind(
    {"oneOf": [kind.schema for kind in _KINDS.values()]}, lambda value, _: value, access_to_json
)
#: What `access_from_json` reads.
ACCESS: Final = named("tables", "access", _OBJECT, "How often rows are looked up.")
