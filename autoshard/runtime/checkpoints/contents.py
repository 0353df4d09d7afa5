"""The state of a job as `torch.distributed.checkpoint` writes and reads it: one flat dict of tensors and structures.

Tensors are written one by one. What is around them in a state dict (dicts, lists, tuples, numbers, whatever can be
pickled) is one entry, with a `StoredTensor` in place of each tensor: so it comes back as it was, whatever its keys are.

Shape suffixes: N rows, D embedding dim.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import MappingKey, SequenceKey, tree_map, tree_map_with_path
from typing_extensions import override

from autoshard.core import EmbeddingTable
from autoshard.core.errors import InputError
from autoshard.core.quoting import shown
from autoshard.runtime.checkpoints.manifest import SavedTable
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.state import empty_shares

#: Most bytes of a tensor that are one record of a file, and so are in memory at once when a part of it is read.
PIECE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor was in a state dict.

    Attributes:
        key: Under which it is stored.
    """

    key: str


@dataclass(frozen=True, slots=True, eq=False)
class JobTable:
    """A table among a job's state.

    Attributes:
        module: What the keys of its embeddings begin with: `embeddings.`, `model.sparse.`.
        table: The table.
        embeddings: The embeddings that it is a part of.
        aliases: What they begin with, too, where parts of a model share the embeddings: nothing is stored under those.
    """

    module: str
    table: EmbeddingTable
    embeddings: ShardedEmbeddings
    aliases: tuple[str, ...] = ()

    @property
    def group(self) -> dist.ProcessGroup:
        """Processes that share its rows in a state dict."""
        return self.embeddings.group

    @property
    def key(self) -> str:
        """What the keys of its tensors begin with, up to a dot."""
        return f"{self.module}tables.{self.table.name}"


def check_names(state: Mapping[str, Stateful]) -> None:
    """Refuses what is no state of a job.

    Raises:
        InputError: If a name is empty or has a dot, or an object has no state; the field is the name.
    """
    for name, stateful in state.items():
        if not name or "." in name:
            raise InputError(f"must be names without a dot, got {shown(name)}", field="state")
        if not isinstance(stateful, Stateful):
            raise InputError(f"must have state_dict and load_state_dict, got {type(stateful).__name__}", field=name)


def job_tables(state: Mapping[str, Stateful]) -> list[JobTable]:
    """Tables of all sharded embeddings in a job's state, also of those that are a part of a model."""
    found = []
    for name, stateful in state.items():
        prefixes: dict[ShardedEmbeddings, list[str]] = {}
        modules = stateful.named_modules(remove_duplicate=False) if isinstance(stateful, torch.nn.Module) else ()
        for path, module in modules:
            if isinstance(module, ShardedEmbeddings):
                prefixes.setdefault(module, []).append(f"{name}.{path}." if path else f"{name}.")
        for module, (first, *aliases) in prefixes.items():
            found += [JobTable(first, table, module, tuple(aliases)) for table in module.owners.tables.tables]
    return found


def staged(state: Mapping[str, Stateful], tables: Sequence[JobTable]) -> dict[str, Any]:
    """A copy of a job's state in the memory of the host, flat; training may go on meanwhile.

    All processes call it, since rows of tables go from process to process. Tables are copied once, by `state_dict`.

    Raises:
        InputError: If something else than a table is sharded; the field names it.
    """
    flat: dict[str, Any] = {}
    of_tables = tuple(f"{one.key}." for one in tables)
    aliases = {alias: one.module for one in tables for alias in one.aliases}
    for name, stateful in state.items():

        def stored(path: tuple[Any, ...], leaf: object, name: str = name) -> object:
            if not isinstance(leaf, torch.Tensor):
                return deepcopy(leaf)
            key = f"{name}.{key_of(path)}"
            for alias, module in aliases.items():
                if key.startswith(alias):
                    return StoredTensor(module + key.removeprefix(alias))
            while key in flat:  # names with dots in them
                key += "'"
            if not key.startswith(of_tables):
                if isinstance(leaf, DTensor):
                    raise InputError("is sharded: of sharded tensors, checkpoints hold those of tables", field=key)
                leaf = leaf.detach().to("cpu", copy=True)
            flat[key] = leaf
            return StoredTensor(key)

        flat[name] = tree_map_with_path(stored, stateful.state_dict())
    return flat


def key_of(path: Sequence[object]) -> str:
    """A path within nested dicts and lists, with dots between its parts."""
    parts = (
        part.key if isinstance(part, MappingKey) else part.idx if isinstance(part, SequenceKey) else part
        for part in path
    )
    return ".".join(map(str, parts))


def saved_tables(flat: Mapping[str, Any], tables: Sequence[JobTable]) -> tuple[SavedTable, ...]:
    """What a manifest says of the tables of a staged state."""
    return tuple(
        SavedTable(
            name=one.table.name,
            key=one.key,
            tensors={
                key.removeprefix(f"{one.key}."): tuple(tensor.shape)
                for key, tensor in flat.items()
                if key.startswith(f"{one.key}.") and isinstance(tensor, torch.Tensor)
            },
        )
        for one in tables
    )


class PiecePlanner(DefaultSavePlanner):
    """Writes large tensors in pieces of rows, so that whoever reads a part of one does not read all of it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces: dict[MetadataIndex, torch.Tensor] = {}

    @override
    def create_local_plan(self) -> SavePlan:
        """What this process has, in pieces."""
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in self._cut(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What is written: a view."""
        piece = self._pieces.get(write_item.index)
        return super().resolve_data(write_item) if piece is None else piece

    def _cut(self, item: WriteItem) -> list[WriteItem]:
        of = item.tensor_data
        if of is None or not of.chunk.sizes:
            return [item]
        row_bytes = of.properties.dtype.itemsize * math.prod(of.chunk.sizes[1:])
        num_rows = max(1, PIECE_BYTES // max(1, row_bytes))
        if of.chunk.sizes[0] <= num_rows:
            return [item] if of.chunk.sizes[0] or not of.size[0] else []
        whole = self.lookup_object(item.index)
        pieces = []
        for start in range(0, of.chunk.sizes[0], num_rows):
            view = _alone(whole[start : start + num_rows])
            offsets = torch.Size((of.chunk.offsets[0] + start, *of.chunk.offsets[1:]))
            index = MetadataIndex(item.index.fqn, offsets)
            self._pieces[index] = view
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=view.shape)
            data = dataclasses.replace(of, chunk=chunk)
            pieces.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return pieces


def _alone(rows: torch.Tensor) -> torch.Tensor:
    """The same rows as a tensor that ends where its storage does: torch would copy others before it writes them."""
    if rows.is_meta:
        return rows
    return torch.from_numpy(rows.view(torch.uint8).numpy()).view(rows.dtype)


def template(metadata: Metadata, names: Sequence[str], tables: Sequence[JobTable]) -> dict[str, Any]:
    """Where to read a checkpoint into: tensors of the saved shapes, of tables an even share of the rows.

    Args:
        metadata: Of the checkpoint.
        names: Names of what is read.
        tables: Tables of the job that reads it.
    """
    groups = {
        f"{one.key}.{name}": one.group
        for one in tables
        for name in ("weights", *(moment.name for moment in one.table.optimizer.moments))
    }
    flat: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if key.partition(".")[0] not in names:
            continue
        if not isinstance(stored, TensorStorageMetadata):
            flat[key] = None
        elif key in groups:
            flat[key] = empty_shares(stored.size, stored.properties.dtype, groups[key])
        else:
            flat[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
    return flat


def restored(flat: Mapping[str, Any], name: str, tables: Sequence[JobTable]) -> Any:
    """The state dict of one name, of what was read; its tables are where they are in the job's own.

    Args:
        flat: What was read.
        name: The name.
        tables: The job's tables.
    """
    found = tree_map(lambda leaf: flat[leaf.key] if isinstance(leaf, StoredTensor) else leaf, flat[name])
    for one in tables:
        keys = [key for key in flat if key.startswith(f"{one.key}.")] if one.module.startswith(f"{name}.") else []
        for module in (one.module, *one.aliases):
            found |= {f"{module}{key.removeprefix(one.module)}".removeprefix(f"{name}."): flat[key] for key in keys}
    return found


def check_modules(metadata: Metadata, state: Mapping[str, Stateful], tables: Sequence[JobTable]) -> None:
    """Refuses a checkpoint whose dense layers are others than a model's.

    Raises:
        InputError: If a parameter or buffer is missing, unknown, or of another shape; the field names it.
    """
    of_embeddings = tuple({module for one in tables for module in (one.module, *one.aliases)})
    for name, stateful in state.items():
        if not isinstance(stateful, torch.nn.Module):
            continue
        saved = {
            key: tuple(stored.size)
            for key, stored in metadata.state_dict_metadata.items()
            if key.startswith(f"{name}.") and not key.startswith(of_embeddings) and not key.endswith("._extra_state")
            if isinstance(stored, TensorStorageMetadata)
        }
        required, buffers = (
            {f"{name}.{key}": tuple(one.shape) for key, one in named(remove_duplicate=False)}
            for named in (stateful.named_parameters, stateful.named_buffers)
        )
        known = required | buffers
        for key in sorted(required.keys() - saved.keys()):
            raise InputError("is a parameter of the model, and not in the checkpoint", field=key)
        for key, shape in saved.items():
            if key not in known:
                raise InputError("is in the checkpoint, and no parameter or buffer of the model", field=key)
            if known[key] != shape:
                raise InputError(f"must be of shape {known[key]}, got {shape} in the checkpoint", field=key)
