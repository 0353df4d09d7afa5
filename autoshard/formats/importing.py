"""Formats that tables can be imported from, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoshard.core import TableSet
from autoshard.core.errors import InvalidOptionError, UnknownNameError
from autoshard.formats.bundled import bundled_table_sets, load_tables
from autoshard.formats.dlrm_datasets import Advance, read_dlrm_datasets
from autoshard.formats.fields import from_source, shown
from autoshard.formats.tables_json import MAX_EMBEDDING_DIM, read_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFormat:
    """A format that tables can be imported from.

    Attributes:
        name: What the user calls it.
        description: One line about it.
        read: Reads a source; takes `advance` and the options as keywords.
        options: The format's own options, whole numbers all, by name: what they mean, and the values accepted.
    """

    name: str
    description: str
    read: Callable[..., TableSet]
    options: Mapping[str, tuple[str, range]] = field(default_factory=dict)


def import_tables(
    source: str | Path, format: str | None = None, *, advance: Advance = lambda share: None, **options: object
) -> TableSet:
    """Tables from a file, or from a name, of one of `FORMATS`.

    Args:
        source: File, or name of a bundled table set.
        format: Name of the format; None tells it from the source.
        advance: Is told of progress where a format takes long, in shares that add up to 1.
        options: The format's own options.

    Raises:
        UnknownNameError: If there is no such format, or it cannot be told.
        InvalidOptionError: If the format has no such option, or does not accept its value.
        InputError: If the source does not follow its format.
    """
    chosen = FORMATS.get(format or _told_from(str(source)))
    if chosen is None:
        raise UnknownNameError(f"no import format is named {format!r}; there are {', '.join(FORMATS)}", field="format")
    for name, value in options.items():
        if name not in chosen.options:
            accepted = ", ".join(chosen.options) or "none"
            raise InvalidOptionError(f"format {chosen.name} takes these options: {accepted}", field=f"options.{name}")
        limits = chosen.options[name][1]
        if type(value) is not int or value not in limits:
            raise InvalidOptionError(
                f"must be a whole number in [{limits.start}, {limits.stop - 1}], got {shown(value)}",
                field=f"options.{name}",
            )
    return from_source(str(source), lambda: chosen.read(source, advance=advance, **options))


def _told_from(source: str) -> str:
    if source in bundled_table_sets():
        return "bundled"
    if source.endswith(".json"):
        return "tables-json"
    if source.endswith((".pt", ".pt.gz")):
        return "dlrm-datasets"
    raise UnknownNameError(
        f"is neither a bundled table set ({', '.join(bundled_table_sets())}) nor a .json, .pt or .pt.gz file; "
        f"name its format: {', '.join(FORMATS)}",
        source=source,
    )


def _read_bundled(source: str | Path, advance: Advance) -> TableSet:
    tables = load_tables(source)
    advance(1.0)
    return tables


def _read_tables_json(source: str | Path, advance: Advance) -> TableSet:
    tables = read_tables(source)
    advance(1.0)
    return tables


#: Formats by name.
FORMATS: Mapping[str, ImportFormat] = {
    item.name: item
    for item in (
        ImportFormat(name="bundled", description="Name of a table set that comes with autoshard", read=_read_bundled),
        ImportFormat(name="tables-json", description="autoshard's own tables.json", read=_read_tables_json),
        ImportFormat(
            name="dlrm-datasets",
            description="One batch of ids as in facebookresearch/dlrm_datasets: .pt or .pt.gz",
            read=read_dlrm_datasets,
            options={
                "embedding_dim": (
                    "Dimension of all tables; left out, each draws from 16 and 32",
                    range(1, MAX_EMBEDDING_DIM + 1),
                ),
                "seed": ("Of that draw", range(2**32)),
            },
        ),
    )
}
