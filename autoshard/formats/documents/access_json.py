"""The `access` object of a table: uniform, zipf, reuse_bins, curve, or counts in Parquet files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from autoshard.core import NUM_REUSE_BINS, AccessProfile
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
from autoshard.formats.documents.fields import Fields, items, number
from autoshard.formats.documents.json_document import join
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
    """

    num_embeddings: int
    pooling_factor: float
    folder: Path | None = None


def access_from_json(value: object, path: str, context: AccessContext) -> AccessProfile:
    """Reads the access profile at a dotted path.

    Raises:
        FormatError: If the object does not follow the schema, or the file that it names cannot be used.
        InvalidTableError: If its values make no profile.
    """
    known: dict[str, object] = value if isinstance(value, dict) else {}
    if "hot_rows" in known:
        raise FormatError("is not supported yet: leave it out", field=join(path, "hot_rows"))
    name = known.get("kind")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if "kind" in known and kind is None:
        raise FormatError(f"must be one of {', '.join(_KINDS)}, got {shown(name)}", field=join(path, "kind"))
    required, optional, read = kind or _KINDS["uniform"]  # without a kind, Fields says what is wrong
    fields = Fields(value, path, required=("kind", *required), optional=optional)
    return fields.build(lambda: read(fields, context))


def access_to_json(access: AccessProfile) -> dict[str, object]:
    """The `access` object of a profile: `uniform` where it is, else the `curve`, which holds any profile exactly."""
    knots = [
        [_shortest(rank), _shortest(mass)]
        for rank, mass in zip(access.ranks_K.tolist(), access.cumulative_K.tolist(), strict=True)
    ]
    if knots == [[0, 0], [access.num_rows, 1]]:
        return {"kind": "uniform"}
    return {"kind": "curve", "knots": knots}


def _read_uniform(fields: Fields, context: AccessContext) -> AccessProfile:
    fraction = fields.number("accessed_fraction", maximum=1.0, default=1.0)
    return AccessProfile.uniform(context.num_embeddings, fraction)


def _read_zipf(fields: Fields, context: AccessContext) -> AccessProfile:
    alpha, shift = fields.number("alpha", maximum=MAX_ALPHA), fields.number("shift", maximum=MAX_SHIFT)
    return AccessProfile.zipf(context.num_embeddings, alpha, shift)


def _read_reuse_bins(fields: Fields, context: AccessContext) -> AccessProfile:
    batch_size = fields.whole("batch_size", minimum=1)
    if context.pooling_factor <= 0:
        raise FormatError("needs a table that is looked up; its pooling factors are 0", field=fields.at("kind"))
    path = fields.at("bins")
    bins = [
        number(value, f"{path}[{index}]", maximum=MAX_SHARE)
        for index, value in enumerate(fields.items("bins", minimum=NUM_REUSE_BINS, maximum=NUM_REUSE_BINS))
    ]
    of: Literal["rows", "lookups"] = "rows" if fields.word("of", ("rows", "lookups")) == "rows" else "lookups"
    num_lookups = batch_size * context.pooling_factor
    return AccessProfile.from_reuse_bins(context.num_embeddings, bins, of=of, num_lookups=num_lookups)


def _read_curve(fields: Fields, context: AccessContext) -> AccessProfile:
    path, knots = fields.at("knots"), fields.items("knots", minimum=2, maximum=MAX_KNOTS)
    _check_pairs(knots, path)
    try:
        ranks_K, cumulative_K = np.array(knots, dtype=np.float64).T
    except OverflowError:
        raise FormatError("holds a number that is too large", field=path) from None
    if ranks_K[-1] != context.num_embeddings:
        raise FormatError(
            f"must end at access rank {context.num_embeddings}, the table's rows, got {ranks_K[-1]:g}", field=path
        )
    return AccessProfile(ranks_K, cumulative_K)


def _check_pairs(knots: list[object], path: str) -> None:
    # One set of types for all knots: ten times faster than a look at every number, and there are many.
    types = set(map(type, chain.from_iterable(pair for pair in knots if isinstance(pair, list))))
    if types <= {int, float} and all(isinstance(pair, list) and len(pair) == 2 for pair in knots):
        return
    for index, pair in enumerate(knots):
        for place, value in enumerate(items(pair, f"{path}[{index}]", minimum=2, maximum=2)):
            number(value, f"{path}[{index}][{place}]")


def _read_counts(fields: Fields, context: AccessContext) -> AccessProfile:
    path, name = fields.at("file"), fields.text("file")
    if context.folder is None:
        raise FormatError("counts can only be read from a file that lies beside tables.json", field=path)
    if Path(name).name != name or name == ".." or "\\" in name:
        raise FormatError(f"must be the name of a file or folder in the same folder, got {shown(name)}", field=path)
    file = context.folder / name
    try:
        return read_row_counts(file, num_rows=context.num_embeddings).profile()
    except FileNotFoundError:
        raise FormatError(f"there is no file {name} beside tables.json", field=path) from None
    except FormatError as error:
        raise FormatError(error.message, field=path) from None


def _shortest(value: float) -> float | int:
    """Whole values without their `.0`; they read back as the same double."""
    return int(value) if value.is_integer() else value


_Reader = Callable[[Fields, AccessContext], AccessProfile]

#: Required fields, optional fields and reader of every kind.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], _Reader]] = {
    "uniform": ((), ("accessed_fraction",), _read_uniform),
    "zipf": (("alpha",), ("shift",), _read_zipf),
    "reuse_bins": (("of", "batch_size", "bins"), (), _read_reuse_bins),
    "curve": (("knots",), (), _read_curve),
    "counts": (("file",), (), _read_counts),
}
