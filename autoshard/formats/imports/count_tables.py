"""Tables from files of per-row counts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from autoshard.core import EmbeddingTable, Feature, TableSet
from autoshard.core.accepted import MAX_ROWS
from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.formats.documents.fields import from_source
from autoshard.formats.documents.row_counts import SUFFIX, ids_by_count, is_counts_file, read_row_counts
from autoshard.formats.documents.tables_json import DEFAULT_BATCH_SIZE
from autoshard.formats.files import files_of
from autoshard.formats.imports.dlrm_datasets import Advance
from autoshard.formats.imports.id_batches import DEFAULT_EMBEDDING_DIM
from autoshard.formats.row_orders import write_row_order


def read_count_tables(
    path: str | Path,
    *,
    num_samples: int | None = None,
    embedding_dim: int = DEFAULT_EMBEDDING_DIM,
    batch_size: int = DEFAULT_BATCH_SIZE,
    advance: Advance = lambda _: None,
) -> TableSet:
    """Tables from per-row counts: a file is a table, and so is a folder of files within the folder `path`.

    - Name: that of the file or folder, without `.parquet`. Rows: as many as there are counts.
    - Pooling factor: all lookups over `num_samples`. Counts say nothing of how it varies from sample to sample.
    - Access profile: exact at its knots for up to a million different counts, see `CountHistogram`.

    Args:
        path: A file of one table, or a folder of tables.
        num_samples: Samples over which lookups were counted.
        embedding_dim: Dimension of all tables, which counts do not say.
        batch_size: Global batch.
        advance: Is told of progress.

    Raises:
        InvalidOptionError: If `num_samples` is not given.
        InputError: If a file holds no counts; the text names it.
    """
    if num_samples is None:
        raise InvalidOptionError(
            "is missing: counts do not say how many samples they were counted on", field="options.num_samples"
        )
    found = _tables(Path(path))

    def read(one: Path) -> EmbeddingTable:
        return _table(one, num_samples, embedding_dim, lambda share: advance(share / len(found)))

    tables = tuple(from_source(str(one), partial(read, one)) for one in found)
    return TableSet(batch_size=batch_size, tables=tables)


def with_count_orders(tables: TableSet, path: str | Path, target: Path) -> TableSet:
    """The tables with files of row orders beside a file: the rows that were looked up, by falling counts.

    Args:
        tables: Some or all of what `read_count_tables` returned; those that nothing looked up get no order.
        path: What they were read from.
        target: The file that names the row orders, which are named after it.

    Raises:
        FormatError: If a file cannot be written.
    """
    files = {_name(one): one for one in _tables(Path(path))}
    ordered = []
    for index, table in enumerate(tables.tables):
        ids_N = ids_by_count(files[table.name])
        order = write_row_order(target.parent / f"{target.stem}.rows-{index}{SUFFIX}", ids_N) if len(ids_N) else None
        ordered.append(replace(table, row_order=order))
    return replace(tables, tables=tuple(ordered))


def _name(path: Path) -> str:
    """Name of a table: that of its file or folder."""
    return path.name.removesuffix(SUFFIX)


def _table(path: Path, num_samples: int, embedding_dim: int, advance: Advance) -> EmbeddingTable:
    histogram = read_row_counts(path, advance=advance)
    if not 0 < histogram.num_rows <= MAX_ROWS:
        raise FormatError(f"must hold 1 to {MAX_ROWS} rows, got {histogram.num_rows}")
    name = _name(path)
    return EmbeddingTable(
        name=name,
        num_embeddings=histogram.num_rows,
        embedding_dim=embedding_dim,
        features=(Feature(name=name, pooling_factor=histogram.num_lookups / num_samples),),
        access=histogram.profile(),
    )


def _tables(path: Path) -> list[Path]:
    """Files and folders that hold a table each."""
    return files_of(path, lambda one: is_counts_file(one) or _is_counts_folder(one), SUFFIX)


def _is_counts_folder(path: Path) -> bool:
    return path.is_dir() and any(map(is_counts_file, path.iterdir()))
