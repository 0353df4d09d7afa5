"""Tables as the tools of AutoShard, DreamShard, NeuroShard and SurCo write them (`table_configs.json`)."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, Final

from autoshard.core import NUM_REUSE_BINS, TableSet
from autoshard.core.accepted import MAX_EMBEDDING_DIM, MAX_POOLING_FACTOR, MAX_ROWS, MAX_TABLES
from autoshard.core.errors import FormatError
from autoshard.formats.documents.fields import at_path, check_names, items, number, whole
from autoshard.formats.documents.json_document import read_json
from autoshard.formats.documents.tables_json import DEFAULT_BATCH_SIZE, tables_from_json

_log = logging.getLogger(__name__)

_TABLES: Final = "tables"
_NEEDED: Final = ("row", "dim", "pooling_factor")
_BINS: Final = tuple(f"bin_{n}" for n in range(NUM_REUSE_BINS))
_KNOWN: Final = ("index", *_NEEDED, *_BINS)
#: Precision and optimizer of these tools' benchmarks, which the files do not say.
_DTYPE, _OPTIMIZER = "fp32", "sgd"


def is_dreamshard(document: object) -> bool:
    """Whether a JSON document lists tables of `row`, `dim`, `pooling_factor`, and nothing but these and bins."""
    tables = document.get(_TABLES) if isinstance(document, dict) and "schema" not in document else document
    first = tables[0] if isinstance(tables, list) and tables else None
    return isinstance(first, dict) and set(_NEEDED) <= first.keys() <= set(_KNOWN)


def read_dreamshard(path: str | Path, *, batch_size: int | None = None) -> TableSet:
    """Tables of a `table_configs.json`: an object with a list of tables, or the list itself.

    A table has `row`, `dim`, `pooling_factor`, and may have an `index` and all of `bin_0` to `bin_16`, the shares of
    the rows that a batch hit by how often it hit them. Without bins, or where all are 0, rows are taken to be looked up
    alike. Weights are fp32, and there is no optimizer state, as in NeuroShard's benchmarks.

    Args:
        path: The file.
        batch_size: Global batch, and that of the bins; None for 65,536, that of the data sets which the tools are for.

    Raises:
        FormatError: If the file is none, or a value is not accepted.

    Source:
        AutoShard B.2 (bins); tools/gen_dlrm_data.py of daochenzha/dreamshard and daochenzha/neuroshard.
    """
    document = read_json(path)
    field = _TABLES if isinstance(document, dict) else ""
    listed = document
    if isinstance(document, dict):
        listed = check_names(document, "", [_TABLES], [])[_TABLES]
    if batch_size is None:
        batch_size = DEFAULT_BATCH_SIZE
        _log.warning("batch_size: taken for %d, also for the bins, as the file does not say it", batch_size)
    _log.warning("dtype, optimizer: taken for %s and %s, as in NeuroShard's benchmarks", _DTYPE, _OPTIMIZER)
    tables = [
        at_path(f"{field}[{n}]", partial(_table, n, one, batch_size))
        for n, one in enumerate(items(listed, field, maximum=MAX_TABLES))
    ]
    return tables_from_json({"schema": "autoshard.tables/1", "batch_size": batch_size, "tables": tables})


def _table(position: int, value: object, batch_size: int) -> dict[str, Any]:
    """An object of tables.json."""
    given = check_names(value, "", _NEEDED, _KNOWN)
    index = whole(given.get("index", position), "index")
    pooling_factor = number(given["pooling_factor"], "pooling_factor", maximum=MAX_POOLING_FACTOR)
    found = [name for name in _BINS if name in given]
    if found and len(found) < len(_BINS):
        missing = next(name for name in _BINS if name not in given)
        raise FormatError(f"is missing, although there is a {found[0]}", field=missing)
    bins = [number(given[name], name, maximum=1e100) for name in found]
    access: dict[str, object] = {"kind": "uniform"}
    if any(bins) and pooling_factor > 0:
        access = {"kind": "reuse_bins", "of": "rows", "batch_size": batch_size, "bins": bins}
    return {
        "name": f"table_{index}",
        "num_embeddings": whole(given["row"], "row", minimum=1, maximum=MAX_ROWS),
        "embedding_dim": whole(given["dim"], "dim", minimum=1, maximum=MAX_EMBEDDING_DIM),
        "dtype": _DTYPE,
        "pooling": "sum",
        "optimizer": _OPTIMIZER,
        "features": [{"name": f"feature_{index}", "pooling_factor": pooling_factor}],
        "access": access,
    }
