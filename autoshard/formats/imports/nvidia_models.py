"""NVIDIA's lists of synthetic models: `config_v3.py` and its like of NVIDIA-Merlin/distributed-embeddings.

Such a file is Python. It is parsed, not run: only calls of `ModelConfig` and `EmbeddingConfig` with plain values are
read.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from autoshard.core import TableSet
from autoshard.core.accepted import MAX_EMBEDDING_DIM, MAX_POOLING_FACTOR, MAX_ROWS, MAX_TABLES
from autoshard.core.errors import FormatError, UnknownNameError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.fields import at_path, check_flag, items, whole
from autoshard.formats.documents.tables_json import DEFAULT_BATCH_SIZE, tables_from_json
from autoshard.formats.files import read_bytes

_log = logging.getLogger(__name__)

_SUFFIX: Final = ".py"
_MODEL, _EMBEDDING = "ModelConfig", "EmbeddingConfig"
_MODEL_FIELDS: Final = ("name", "embedding_configs", "mlp_sizes", "num_numerical_features", "interact_stride")
_EMBEDDING_FIELDS: Final = ("num_tables", "nnz", "num_rows", "width", "shared")
#: Access and optimizer of the published benchmark, which its lists do not say.
_ACCESS: Final = {"kind": "zipf", "alpha": 1.05}
_OPTIMIZER: Final = "adagrad"


def is_nvidia_models(source: str) -> bool:
    """Whether a source is a Python file, or a model of one."""
    return source.rpartition(":")[0].endswith(_SUFFIX) or source.endswith(_SUFFIX)


def read_nvidia_models(source: str | Path, *, batch_size: int | None = None) -> TableSet:
    """Tables of one of NVIDIA's synthetic models.

    Each number of `nnz` is a feature with so many ids per sample. Features of a shared configuration look up one table,
    others have a table each.

    Args:
        source: `FILE.py:MODEL` with the model's variable, or its key in the file's dictionary of models; `FILE.py`
            where the file holds one model.
        batch_size: Global batch; None for 65,536.

    Raises:
        UnknownNameError: If the file holds no such model, or several and none is named.
        FormatError: If the file is no Python, or a configuration is not accepted.
    """
    path, separator, name = str(source).rpartition(":")
    if not separator or str(source).endswith(_SUFFIX):
        path, name = str(source), ""
    tree = _parsed(path)
    if _imports_hugectr(tree):
        raise FormatError(
            "is a script of HugeCTR, which is not run; have it call Model.graph_to_json, and import that JSON file"
        )
    model = _chosen(_models(tree), name)
    tables = at_path(shortened(name) or _MODEL, lambda: _tables(model))
    if batch_size is None:
        batch_size = DEFAULT_BATCH_SIZE
        _log.warning("batch_size: taken for %d, as the file does not say it", batch_size)
    _log.warning(
        "dtype, optimizer, access: taken for fp32, %s and zipf with alpha %s, as in the published benchmark",
        *(_OPTIMIZER, _ACCESS["alpha"]),
    )
    _log.warning("mlp_sizes: the dense layers are left out of the import")
    return tables_from_json({"schema": "autoshard.tables/1", "batch_size": batch_size, "tables": tables})


def _parsed(path: str) -> ast.Module:
    try:
        with warnings.catch_warnings():  # of escapes in texts
            warnings.simplefilter("ignore")
            return ast.parse(read_bytes(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"is no Python file: {shortened(str(error)) or 'it is nested too deep'}") from None


def _imports_hugectr(tree: ast.Module) -> bool:
    imported = [one for one in ast.walk(tree) if isinstance(one, ast.Import)]
    modules = [one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    return "hugectr" in {
        name.split(".")[0] for name in [*modules, *(part.name for one in imported for part in one.names)]
    }


def _models(tree: ast.Module) -> dict[str, ast.Call]:
    """Models by variable, and by key in a dictionary of variables."""
    found: dict[str, ast.Call] = {}
    for statement in tree.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        value = statement.value
        if isinstance(value, ast.Call) and _called(value) == _MODEL:
            found[statement.targets[0].id] = value
        elif isinstance(value, ast.Dict):
            found |= {
                key.value: found[one.id]
                for key, one in zip(value.keys, value.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
                if isinstance(one, ast.Name) and one.id in found
            }
    return found


def _chosen(models: Mapping[str, ast.Call], name: str) -> ast.Call:
    if name in models:
        return models[name]
    different = list(dict.fromkeys(models.values()))
    if not name and len(different) == 1:
        return different[0]
    if not models:
        raise FormatError(f"must assign a {_MODEL} to a name")
    asked = f"holds no model {shown(name)}" if name else "holds several models"
    raise UnknownNameError(f"{asked}; name one of {', '.join(map(shortened, models))} as FILE{_SUFFIX}:MODEL")


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _arguments(call: ast.Call, fields: tuple[str, ...]) -> dict[str, ast.expr]:
    """Arguments of a call of a named tuple by field."""
    given = dict(zip(fields, call.args, strict=False))
    given.update({one.arg: one.value for one in call.keywords if one.arg is not None})
    return given


def _tables(model: ast.Call) -> list[dict[str, Any]]:
    """All tables of a model, as objects of tables.json."""
    listed = _arguments(model, _MODEL_FIELDS).get("embedding_configs")
    if not isinstance(listed, ast.List) or not listed.elts:
        raise FormatError(f"must be a list of {_EMBEDDING}", field="embedding_configs")
    tables: list[dict[str, Any]] = []
    features = 0
    for number, config in enumerate(listed.elts):
        path = f"embedding_configs[{number}]"
        for rows, dim, factors in at_path(path, partial(_shapes, config)):
            if len(tables) == MAX_TABLES:
                raise FormatError(f"must have at most {MAX_TABLES:,} tables", field="embedding_configs")
            named = [{"name": f"f{features + n}", "pooling_factor": float(factor)} for n, factor in enumerate(factors)]
            features += len(factors)
            tables.append(_table(f"t{len(tables)}", rows, dim, named))
    return tables


def _table(name: str, rows: int, dim: int, features: list[dict[str, Any]]) -> dict[str, Any]:
    sizes = {"name": name, "num_embeddings": rows, "embedding_dim": dim, "features": features}
    return {**sizes, "dtype": "fp32", "pooling": "sum", "optimizer": _OPTIMIZER, "access": _ACCESS}


def _shapes(config: ast.expr) -> list[tuple[int, int, list[int]]]:
    """Rows, dimension, and ids per sample of each feature, of the tables of one configuration."""
    if not isinstance(config, ast.Call) or _called(config) != _EMBEDDING:
        raise FormatError(f"must be a call of {_EMBEDDING}")
    given = {name: _plain(value, name) for name, value in _arguments(config, _EMBEDDING_FIELDS).items()}
    for name in _EMBEDDING_FIELDS:
        if name not in given:
            raise FormatError("is missing", field=name)
    num_tables = whole(given["num_tables"], "num_tables", minimum=1, maximum=MAX_TABLES)
    rows = whole(given["num_rows"], "num_rows", minimum=1, maximum=MAX_ROWS)
    dim = whole(given["width"], "width", minimum=1, maximum=MAX_EMBEDDING_DIM)
    listed = enumerate(items(given["nnz"], "nnz", maximum=MAX_TABLES))
    factors = [whole(one, f"nnz[{n}]", maximum=int(MAX_POOLING_FACTOR)) for n, one in listed]
    groups = [factors] if check_flag(given["shared"], "shared") else [[factor] for factor in factors]
    return [(rows, dim, group) for _ in range(num_tables) for group in groups]


def _plain(value: ast.expr, name: str) -> object:
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise FormatError("must be a plain value", field=name) from None
