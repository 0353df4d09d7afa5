"""Tensors of files, read by rows: of checkpoints of torch.distributed.checkpoint, torch.save and safetensors.

Shape suffixes: N rows, L rows of a piece, D embedding dim, K parts that a table's columns are cut into.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.utils._pytree import tree_flatten_with_path
from typing_extensions import override

from autoshard.core.errors import FormatError
from autoshard.runtime.checkpoints.contents import key_of
from autoshard.runtime.checkpoints.together import alone


@dataclass(frozen=True, slots=True, eq=False)
class TensorInFiles:
    """A tensor that lies in files.

    Attributes:
        shape: Its shape.
        dtype: Its numbers.
        read: Gives its rows [start, stop); a number without a shape is row 0.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]


def stored_tensors(path: Path) -> dict[str, TensorInFiles]:
    """All tensors of a file or a folder, by their keys; none of them is read yet.

    Args:
        path: A folder of torch.distributed.checkpoint; else a file of safetensors, by its suffix, or of torch.save.

    Raises:
        FormatError: If it is none of them.
    """
    try:
        if path.is_dir():
            return _of_checkpoint(path)
        if path.suffix == ".safetensors":
            return _of_safetensors(path)
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise FormatError("is not there", source=str(error.filename or path)) from error
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FormatError(
            "must be a folder of torch.distributed.checkpoint, a .safetensors file or a state dict of torch.save: "
            f"{reason}",
            source=str(path),
        ) from error
    leaves, _ = tree_flatten_with_path(state)
    return {
        key_of(place): TensorInFiles(tuple(one.shape), one.dtype, partial(rows_of, one if one.dim() else one[None]))
        for place, one in leaves
        if isinstance(one, torch.Tensor)
    }


def _of_safetensors(path: Path) -> dict[str, TensorInFiles]:
    file: Any = safetensors.safe_open(path, framework="pt")
    found = {}
    for key in list(file.keys()):
        rows = file.get_slice(key)
        shape = tuple(rows.get_shape())
        if not shape:
            rows = file.get_tensor(key)[None]
        found[key] = TensorInFiles(shape, rows[:0].dtype, partial(rows_of, rows))
    return found


def rows_of(rows: Any, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of a tensor, or of what lies in a file and is cut like one."""
    found: torch.Tensor = rows[start:stop]
    return found


def _of_checkpoint(folder: Path) -> dict[str, TensorInFiles]:
    metadata = FileSystemReader(folder).read_metadata()
    return {
        key: TensorInFiles(
            tuple(one.size),
            one.properties.dtype,
            partial(_stored_rows, folder, key, one),
        )
        for key, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }


def _stored_rows(folder: Path, key: str, stored: TensorStorageMetadata, start: int, stop: int) -> torch.Tensor:
    shape = (stop - start, *stored.size[1:]) if stored.size else ()
    rows_LD = torch.empty(shape, dtype=stored.properties.dtype)
    with alone():
        planner = _RowPlanner(key, start, rows_LD)
        load_state({key: rows_LD}, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    return rows_LD if stored.size else rows_LD[None]


class _RowPlanner(DefaultLoadPlanner):
    """Reads some rows of one tensor."""

    def __init__(self, key: str, start: int, rows_LD: torch.Tensor) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._key, self._start, self._rows_LD = key, start, rows_LD

    @override
    def create_local_plan(self) -> LoadPlan:
        metadata: Metadata | None = self.metadata
        assert metadata is not None
        stored = metadata.state_dict_metadata[self._key]
        assert isinstance(stored, TensorStorageMetadata)
        offsets = torch.Size((self._start, *(0 for _ in stored.size[1:]))[: len(stored.size)])
        box = ChunkStorageMetadata(offsets=offsets, sizes=self._rows_LD.shape)
        return LoadPlan(create_read_items_for_chunk_list(self._key, stored, [box]))

    @override
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found = self._rows_LD
        for axis, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(axis, offset, length)
        return found
