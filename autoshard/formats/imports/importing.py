"""Formats that tables can be imported from, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoshard.core import TableSet
from autoshard.core.accepted import MAX_BATCH_SIZE, MAX_EMBEDDING_DIM, MAX_POOLING_FACTOR, MAX_ROWS
from autoshard.core.errors import FormatError, InvalidOptionError, UnknownNameError
from autoshard.core.quoting import shown
from autoshard.formats.archives.torch_archive import read_tensors
from autoshard.formats.bundled import bundled_table_sets, bundled_tables, check_file
from autoshard.formats.documents.fields import from_source
from autoshard.formats.documents.json_document import YAML_SUFFIXES, read_json
from autoshard.formats.documents.tables_json import DEFAULT_BATCH_SIZE, TABLES, read_tables
from autoshard.formats.files import open_file, reason_of
from autoshard.formats.imports.count_tables import read_count_tables
from autoshard.formats.imports.dlrm_command import is_dlrm_command, read_dlrm_command
from autoshard.formats.imports.dlrm_datasets import Advance, read_dlrm_datasets
from autoshard.formats.imports.dreamshard import is_dreamshard, read_dreamshard
from autoshard.formats.imports.hugectr import is_hugectr, read_hugectr
from autoshard.formats.imports.id_batches import DEFAULT_EMBEDDING_DIM, read_id_batches
from autoshard.formats.imports.nvidia_models import is_nvidia_models, read_nvidia_models
from autoshard.formats.imports.table_lists import (
    LIST_SUFFIXES,
    Told,
    is_parquet_list,
    is_table_list,
    log_list,
    read_table_list,
)
from autoshard.formats.imports.tbe_data_config import is_tbe_data_config, read_tbe_data_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFormat:
    """A format that tables can be imported from.

    Attributes:
        name: What the user calls it.
        description: One line about it.
        read: Reads a source; takes `advance` and the options as keywords.
        options: The format's own options, whole numbers all, by name: what they mean, and the values accepted.
        has_columns: Whether `read` also takes `columns` and `told`, as `import_tables` does.
    """

    name: str
    description: str
    read: Callable[..., TableSet]
    options: Mapping[str, tuple[str, range]] = field(default_factory=dict)
    has_columns: bool = False


def load_tables(name_or_path: str | Path, *, told: Told = log_list) -> TableSet:
    """Tables by the name of a bundled set, from a `tables.json`, or from a table list (CSV, JSON, Parquet and others).

    Args:
        name_or_path: The name or the file.
        told: Is told how the columns of a table list were read; left out, that is logged.

    Raises:
        UnknownNameError: If it is neither the name of a bundled set nor a file.
        InputError: If the file does not hold tables; the text names file and field.
    """
    known, path = bundled_table_sets(), str(name_or_path)
    if path in known:
        return bundled_tables(path)
    check_file(path, known, "tables")
    if path.endswith((*LIST_SUFFIXES, ".parquet")):
        return import_tables(path, "table-list", told=told)
    document = read_json(path)
    # What is of no format is refused by the reader of tables.json, which names the field.
    format = (_format_of(document) if path.endswith((".json", *YAML_SUFFIXES)) else None) or "tables-json"
    if format == "table-list":
        return import_tables(path, format, told=told)
    if format != "tables-json":
        raise FormatError(
            f"holds tables in the format {format}: make a tables.json with `autoshard import`", source=path
        )
    return TABLES.of_file(document, path)


def import_tables(
    source: str | Path,
    format: str | None = None,
    *,
    advance: Advance = lambda _: None,
    columns: Mapping[str, str] | None = None,
    told: Told = log_list,
    **options: object,
) -> TableSet:
    """Tables from a file, a folder or a name, in one of `FORMATS`.

    Args:
        source: File, folder, or name of a bundled table set.
        format: Name of the format; None tells it from the source.
        advance: Is told of progress where a format takes long, in shares that add up to 1.
        columns: Of a table list: fields by column, for columns whose names do not say it; empty to ignore a column.
        told: Is told how the columns of a table list were read.
        options: The format's own options.

    Raises:
        UnknownNameError: If there is no such format, or it cannot be told.
        InvalidOptionError: If the format has no such option, or does not accept its value.
        InputError: If the source does not follow its format.
    """
    chosen = FORMATS.get(format or _told_from(str(source), has_columns=bool(columns)))
    if chosen is None:
        raise UnknownNameError(
            f"no import format is named {shown(format)}; there are {', '.join(FORMATS)}", field="format"
        )
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
    if chosen.has_columns:
        options |= {"columns": columns, "told": told}
    elif columns:
        raise InvalidOptionError(f"format {chosen.name} has no columns to map; table-list has", field="columns")
    return from_source(str(source), lambda: chosen.read(source, advance=advance, **options))


def _told_from(source: str, *, has_columns: bool) -> str:
    if source in bundled_table_sets():
        return "bundled"
    if is_dlrm_command(source):
        return "dlrm-command"
    if os.path.isdir(source):
        return _told_from_folder(source)
    if is_nvidia_models(source):
        return "nvidia-models"
    if source.endswith((".json", *YAML_SUFFIXES)):
        return _told_from_document(source)
    if source.endswith(".sh"):
        return "dlrm-command"
    if source.endswith(LIST_SUFFIXES):
        return "table-list"
    if source.endswith(".parquet"):
        return "table-list" if has_columns or is_parquet_list(source) else "id-batches"
    if source.endswith((".pt", ".pt.gz")):
        return "id-batches" if _is_values_and_lengths(source) else "dlrm-datasets"
    raise UnknownNameError(
        f"is neither a bundled table set ({', '.join(bundled_table_sets())}) nor a .json, .yaml, .csv, .tsv, .jsonl, "
        f".parquet, .pt or .pt.gz file; name its format: {', '.join(FORMATS)}",
        source=source,
    )


def _told_from_folder(source: str) -> str:
    try:
        suffixes = {os.path.splitext(name)[1] for name in os.listdir(source) if not name.startswith(".")}
    except OSError as error:
        raise FormatError(f"cannot be read: {reason_of(error)}", source=source) from error
    by_suffix = {".json": "tbe-data-config", ".parquet": "id-batches", ".pt": "id-batches"}
    formats = {by_suffix[suffix] for suffix in suffixes if suffix in by_suffix}
    if len(formats) == 1:
        return formats.pop()
    found = f"both {' and '.join(sorted(suffixes & by_suffix.keys()))}" if formats else "no .json, .parquet or .pt"
    raise UnknownNameError(f"is a folder with {found} files; name its format: {', '.join(FORMATS)}", source=source)


def _format_of(document: object) -> str | None:
    """The format of a parsed file; None if it is none that can be told."""
    if is_tbe_data_config(document):
        return "tbe-data-config"
    if is_dreamshard(document):
        return "dreamshard"
    if is_hugectr(document):
        return "hugectr"
    if is_table_list(document):
        return "table-list"
    return "tables-json" if isinstance(document, dict) and "schema" in document else None


def _told_from_document(source: str) -> str:
    try:
        document = read_json(source)
    except FormatError:  # the reader says it, with all that it knows of the format
        return "tables-json"
    if (format := _format_of(document)) is not None:
        return format
    raise UnknownNameError(
        "must be of a format that can be told from it: tables-json has a schema, table-list is a list of objects or "
        "has tables, hugectr has layers, dreamshard has tables with row, dim and pooling_factor, tbe-data-config has "
        f"pooling_params; or name its format: {', '.join(FORMATS)}",
        source=source,
    )


def _is_values_and_lengths(source: str) -> bool:
    try:
        with open_file(source) as file:
            return len(read_tensors(file)) == 2
    except (FormatError, OSError):
        return False


def _at_once(read: Callable[..., TableSet]) -> Callable[..., TableSet]:
    """A reader that tells of no progress until it is done."""

    def read_all(source: str | Path, advance: Advance, **options: object) -> TableSet:
        tables = read(source, **options)
        advance(1.0)
        return tables

    return read_all


def _read_torchrec(source: str | Path, **settings: Any) -> TableSet:
    """Reads the tables of a TorchRec model; torch is not needed by the other formats."""
    from autoshard.formats.torchrec.child import read_factory_tables

    return read_factory_tables(source, **settings)


_POOLING_FACTORS = range(int(MAX_POOLING_FACTOR) + 1)
_DIMS, _BATCH_SIZES = range(1, MAX_EMBEDDING_DIM + 1), range(1, MAX_BATCH_SIZE + 1)
_NUM_ROWS, _SEEDS = range(1, MAX_ROWS + 1), range(2**32)
_SAME_DIM = (f"Dimension of all tables; left out, {DEFAULT_EMBEDDING_DIM}", _DIMS)

#: Formats by name.
FORMATS: Mapping[str, ImportFormat] = {
    item.name: item
    for item in (
        ImportFormat(
            name="bundled", description="Name of a table set that comes with autoshard", read=_at_once(load_tables)
        ),
        ImportFormat(
            name="tables-json",
            description="autoshard's own tables.json, or the same as tables.yaml",
            read=_at_once(read_tables),
        ),
        ImportFormat(
            name="table-list",
            description="A list with a row per table and columns by any usual names: CSV, TSV, JSON, YAML, Parquet",
            read=_at_once(read_table_list),
            has_columns=True,
            options={"batch_size": (f"Global batch; left out, {DEFAULT_BATCH_SIZE:,}", _BATCH_SIZES)},
        ),
        ImportFormat(
            name="torchrec",
            description="MODULE:FACTORY of a TorchRec model, made in a process of its own on the meta device",
            read=_read_torchrec,
            options={
                "batch_size": (f"Global batch; left out, {DEFAULT_BATCH_SIZE:,}", _BATCH_SIZES),
                "pooling_factor": ("Ids per sample where constraints do not say it; left out, 1", _POOLING_FACTORS),
            },
        ),
        ImportFormat(
            name="hugectr",
            description="A model of HugeCTR: .json, as its samples have it and Model.graph_to_json writes it",
            read=_at_once(read_hugectr),
            options={"batch_size": ("Global batch; left out, the solver's", _BATCH_SIZES)},
        ),
        ImportFormat(
            name="dreamshard",
            description="Tables as AutoShard's, DreamShard's and NeuroShard's tools write them: table_configs.json",
            read=_at_once(read_dreamshard),
            options={
                "batch_size": (f"Global batch, and that of the bins; left out, {DEFAULT_BATCH_SIZE:,}", _BATCH_SIZES)
            },
        ),
        ImportFormat(
            name="nvidia-models",
            description="FILE.py:MODEL of NVIDIA's synthetic models, as config_v3.py lists them; parsed, not run",
            read=_at_once(read_nvidia_models),
            options={"batch_size": (f"Global batch; left out, {DEFAULT_BATCH_SIZE:,}", _BATCH_SIZES)},
        ),
        ImportFormat(
            name="dlrm-command",
            description="facebookresearch/dlrm's command line of dlrm_s_pytorch.py or dlrm_main.py, or its script",
            read=_at_once(read_dlrm_command),
            options={"batch_size": ("Global batch; left out, the command's", _BATCH_SIZES)},
        ),
        ImportFormat(
            name="dlrm-datasets",
            description="One batch of ids as in facebookresearch/dlrm_datasets: .pt or .pt.gz",
            read=read_dlrm_datasets,
            options={
                "embedding_dim": ("Dimension of all tables; left out, each draws from 16 and 32", _DIMS),
                "seed": ("Of that draw", _SEEDS),
            },
        ),
        ImportFormat(
            name="tbe-data-config",
            description="FBGEMM's TBEDataConfig .json, as its parameter reporter writes it; or a folder of them",
            read=read_tbe_data_config,
            options={
                "batch_size": ("Global batch; left out, the files say it and must agree", _BATCH_SIZES),
                "seed": ("Of the draw of dimensions where a file has mixed ones and no list", _SEEDS),
            },
        ),
        ImportFormat(
            name="id-batches",
            description="Raw ids: .parquet with a column per feature, or .pt of (values, lengths); or a folder of them",
            read=read_id_batches,
            options={
                "embedding_dim": _SAME_DIM,
                "batch_size": (
                    "Global batch; left out, the samples of the largest .pt, or of Parquet at most 65,536",
                    _BATCH_SIZES,
                ),
                "num_embeddings": ("Rows of every table; left out, one more than its largest id", _NUM_ROWS),
            },
        ),
        ImportFormat(
            name="row-counts",
            description="Lookups per row: .parquet with a column count; or a folder of them, a table each",
            read=read_count_tables,
            options={
                "num_samples": ("Samples over which lookups were counted; needed", range(1, 2**53)),
                "embedding_dim": _SAME_DIM,
                "batch_size": (f"Global batch; left out, {DEFAULT_BATCH_SIZE:,}", _BATCH_SIZES),
            },
        ),
    )
}
