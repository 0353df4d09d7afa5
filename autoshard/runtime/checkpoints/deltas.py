"""Rows of tables that were updated since the checkpoint before: their files, and how they are put upon what it holds.

A file of a process has, for each table and range of its columns that it holds, tensors `NAME.FIRST-LAST.PART` (columns
from FIRST to before LAST): `ids`, int64, `weights`, and the moments by name. These are what an inference server reads,
too: it writes the weights of the ids to these columns of its table.

Shape suffixes: N rows of this process, L updated rows, D columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from autoshard.core import EmbeddingTable
from autoshard.core.errors import FormatError
from autoshard.runtime.checkpoints.contents import JobTable
from autoshard.runtime.engine.rows.updates import UpdatedRows
from autoshard.runtime.state import MOMENT_COLUMNS, TableState

_PREFIX, _SUFFIX = "rows_", ".safetensors"


def write_updates(folder: Path, rank: int, updates: Sequence[UpdatedRows]) -> list[Path]:
    """Writes what a process has of updated rows.

    Returns:
        The file; none where there are no rows.

    Raises:
        OSError: If it cannot be written.
    """
    pieces: dict[str, list[torch.Tensor]] = {}
    for one in updates:
        first, last = one.columns
        for name, tensor in {"ids": one.ids_L, "weights": one.weights_LD, **one.moments}.items():
            pieces.setdefault(f"{one.table}.{first}-{last}.{name}", []).append(tensor)
    if not pieces:
        return []
    path = folder / f"{_PREFIX}{rank}{_SUFFIX}"
    try:
        save_file({key: torch.cat(tensors) for key, tensors in pieces.items()}, path)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    return [path]


def is_update_file(name: str) -> bool:
    """Whether a file of a checkpoint has updated rows."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def read_updates(path: Path) -> Iterator[UpdatedRows]:
    """The rows of a file of `write_updates`.

    Raises:
        FormatError: If it is none.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            file: Any = opened
            found: dict[str, set[str]] = {}
            for key in list(file.keys()):
                place, _, part = key.rpartition(".")
                found.setdefault(place, set()).add(part)
            for place, parts in found.items():
                table, _, columns = place.rpartition(".")
                first, _, last = columns.partition("-")
                moments = {part: file.get_tensor(f"{place}.{part}") for part in parts - {"ids", "weights"}}
                ids_L, weights_LD = file.get_tensor(f"{place}.ids"), file.get_tensor(f"{place}.weights")
                yield UpdatedRows(table, (int(first), int(last)), ids_L, weights_LD, moments)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"is no file of updated rows: {error}", source=str(path)) from error


def apply_updates(flat: Mapping[str, Any], tables: Sequence[JobTable], updates: Iterator[UpdatedRows]) -> None:
    """Puts updated rows upon the state of tables that was read: on each process those of its share.

    Args:
        flat: The state; its tensors are changed.
        tables: The tables.
        updates: The rows, of any process.
    """
    by_name = {one.table.name: one for one in tables}
    for update in updates:
        one = by_name.get(update.table)
        if one is None:
            continue
        weights_ND = _local(flat[f"{one.key}.weights"])
        start = _first_row(one.table, one.group)
        is_own_L = (update.ids_L >= start) & (update.ids_L < start + len(weights_ND))
        rows_L = update.ids_L[is_own_L] - start
        if not len(rows_L):
            continue
        first, last = update.columns
        weights_ND[rows_L, first:last] = update.weights_LD[is_own_L]
        columns = flat.get(f"{one.key}.{MOMENT_COLUMNS}")
        moments = {name: _local(flat[f"{one.key}.{name}"]) for name in update.moments}
        state = TableState(weights_ND, moments, None if columns is None else tuple(columns.tolist()))
        bounds = state.bounds(one.table.embedding_dim)
        for name, moments_L in update.moments.items():
            parts = [k for k, bound in enumerate(bounds[name][:-1]) if first <= bound < last]
            values_LK = moments_L[is_own_L].view(len(rows_L), -1)
            moments[name].view(len(weights_ND), -1)[rows_L, parts[0] : parts[-1] + 1] = values_LK


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first_row(table: EmbeddingTable, group: dist.ProcessGroup) -> int:
    """First row of this process's share, as `torch.distributed.tensor.Shard(0)` deals them."""
    return min(table.num_embeddings, group.rank() * -(-table.num_embeddings // group.size()))
