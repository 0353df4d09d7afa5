"""Checkpoints of others: read from TorchRec's and PyTorch's, written for whoever reads safetensors.

Shape suffixes: N rows, L rows of a piece, D embedding dim, K parts that a table's columns are cut into.
"""

from __future__ import annotations

import io
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import WriteItem
from typing_extensions import override

from autoshard.core import EmbeddingTable, Pooling, ShardingPlan, TableSet
from autoshard.core.errors import FormatError, InputError
from autoshard.core.optimizers import Moment
from autoshard.core.quoting import shown
from autoshard.runtime.checkpoints.checkpoint import Checkpoint
from autoshard.runtime.checkpoints.contents import PIECE_BYTES, PiecePlanner, StoredTensor
from autoshard.runtime.checkpoints.manifest import SavedTable, committed_name
from autoshard.runtime.checkpoints.sources import TensorInFiles, rows_of, stored_tensors
from autoshard.runtime.checkpoints.writing import StagedState, write_checkpoint
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.state import MOMENT_COLUMNS

#: What the sharded embeddings of an imported checkpoint are called.
EMBEDDINGS = "embeddings"
#: Ends of keys of weights, by whom they are written: TorchRec's collections, this project's modules.
_WEIGHTS = ("embedding_bags.{}.weight", "embeddings.{}.weight", "tables.{}.weights")
#: Ends of keys of an optimizer's moments: TorchRec's fused optimizers have `momentum1` or, of two, other names.
_MOMENTS: Mapping[str, tuple[str, ...]] = {
    "moments": ("{0}.weight.{0}.momentum1", "{0}.weight.{0}.exp_avg", "tables.{0}.moments"),
    "second_moments": ("{0}.weight.{0}.exp_avg_sq", "tables.{0}.second_moments"),
}
#: safetensors' names of numbers.
_SAFETENSORS_DTYPES = {torch.int64: "I64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def import_checkpoint(
    source: str | Path, plan: ShardingPlan, folder: str | Path, *, step: int | None = None, fresh_moments: bool = False
) -> Checkpoint:
    """Makes a checkpoint of tables that TorchRec, PyTorch or this project saved; reads and writes it in pieces.

    Weights are found by the ends of their keys, `embedding_bags.NAME.weight` (`embeddings.NAME.weight` of sequences),
    moments by those of TorchRec's fused optimizers, `NAME.weight.NAME.momentum1`. A table that TorchRec cut by columns
    keeps a row-wise moment for each of its parts.

    Args:
        source: A folder that `torch.distributed.checkpoint` wrote, a file of `torch.save`, or one of safetensors.
        plan: A plan of the tables; keys of other tables or layers are left alone.
        folder: Folder of checkpoints that it is written into.
        step: Steps that were made; None for those that this project's modules tell in the source, or 0.
        fresh_moments: Whether moments that are missing begin at 0; else they are refused.

    Returns:
        The checkpoint, of one state, `embeddings`.

    Raises:
        InputError: If there is a checkpoint of the step, files cannot be read, or a table is missing, there twice, of
            another shape or dtype, or without moments; the field is the table. If there are moments that Adam or LAMB
            correct by the number of steps, and the source tells none or another than is given; the field is `step`.
        ExecutionError: If it cannot be written.
    """
    stored = stored_tensors(Path(source))
    step = _num_steps(plan.tables, stored, step)
    if (Path(folder) / committed_name(step)).exists():
        raise InputError(f"must be one without a checkpoint in {folder}, got {step}", field="step")
    imported = {table.name: _imported(table, stored, fresh_moments=fresh_moments) for table in plan.tables.tables}
    structure: OrderedDict[str, object] = OrderedDict(num_steps=StoredTensor(f"{EMBEDDINGS}.num_steps"))
    flat: dict[str, object] = {EMBEDDINGS: structure, f"{EMBEDDINGS}.num_steps": torch.tensor(step)}
    rows: dict[str, TensorInFiles] = {}
    saved = []
    for table, tensors in imported.items():
        key = f"{EMBEDDINGS}.tables.{table}"
        saved.append(SavedTable(name=table, key=key, tensors={name: of.shape for name, of in tensors.items()}))
        for name, of in tensors.items():
            structure[f"tables.{table}.{name}"] = StoredTensor(f"{key}.{name}")
            flat[f"{key}.{name}"] = torch.empty(of.shape, dtype=of.dtype, device="meta")
            rows[f"{key}.{name}"] = of
    job = StagedState(step=step, flat=flat, states=(EMBEDDINGS,), tables=tuple(saved), plan=plan)
    return Checkpoint(write_checkpoint(Path(folder), job, planner=_ReadingPlanner(rows)))


class _ReadingPlanner(PiecePlanner):
    """Writes tensors that lie in other files: each piece is read when it is its turn."""

    def __init__(self, rows: Mapping[str, TensorInFiles]) -> None:
        super().__init__()
        self._rows = rows

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What is written."""
        of, data = self._rows.get(write_item.index.fqn), write_item.tensor_data
        if of is None or data is None:
            return super().resolve_data(write_item)
        start = data.chunk.offsets[0]
        return of.read(start, start + data.chunk.sizes[0]).contiguous()


def _imported(
    table: EmbeddingTable, stored: Mapping[str, TensorInFiles], *, fresh_moments: bool
) -> dict[str, TensorInFiles]:
    """Weights, moments and, where files tell them, the columns that these are of, in this project's shapes."""
    weights = _found(table.name, [end.format(table.name) for end in _WEIGHTS], stored)
    if weights is None:
        ends = " or ".join(end.format(table.name) for end in _WEIGHTS)
        raise InputError(f"has no weights in it: must have a key that ends with {ends}", field=table.name)
    shape = (table.num_embeddings, table.embedding_dim)
    if weights.shape != shape:
        raise InputError(f"must be weights of shape {shape}, got {weights.shape}", field=table.name)
    if weights.dtype is not TORCH_DTYPES[table.dtype]:
        raise InputError(f"must be weights of {table.dtype}, got {weights.dtype}", field=table.name)
    tensors = {"weights": weights}
    columns = _found(table.name, [f"tables.{table.name}.{MOMENT_COLUMNS}"], stored)
    if columns is not None:
        tensors[MOMENT_COLUMNS] = columns
    for moment in table.optimizer.moments:
        found = _found(table.name, [end.format(table.name) for end in _MOMENTS[moment.name]], stored)
        if found is None and not fresh_moments:
            raise InputError(
                f"has no {moment.name} in it, and is trained with {table.optimizer}: must have a key that ends with "
                f"{_MOMENTS[moment.name][0].format(table.name)}, or let them begin at 0",
                field=table.name,
            )
        parts = None if columns is None else columns.shape[0] - 1
        tensors[moment.name] = _zeros(table, moment) if found is None else _by_rows(table, moment, found, parts)
    return tensors


def _num_steps(tables: TableSet, stored: Mapping[str, TensorInFiles], step: int | None) -> int:
    """Steps after which tables were saved.

    Args:
        tables: The tables.
        stored: What the source has.
        step: The number that is given, if it is.

    Raises:
        InputError: If moments are corrected by it, and it is neither given nor told, or told otherwise.
    """
    keys = {
        key.removesuffix(end) + "num_steps"
        for end in (f"tables.{table.name}.weights" for table in tables.tables)
        for key in stored
        if f".{key}".endswith(f".{end}")
    }
    told = sorted({int(stored[key].read(0, 1)) for key in keys & stored.keys()})
    if step is None and len(told) > 1:
        raise InputError(f"must be given (--step): the source tells {' and '.join(map(str, told))}", field="step")
    number = told[0] if step is None and told else step or 0
    if number in told or (number and not told):
        return number
    for table in tables.tables:
        ends = [end.format(table.name) for moment in table.optimizer.moments for end in _MOMENTS[moment.name]]
        has_moments = any(f".{key}".endswith(f".{end}") for key in stored for end in ends)
        if table.optimizer.has_decaying_moments and has_moments:
            accepted = f"{told[0]}, as in the source" if told else "given (--step), and above 0"
            raise InputError(
                f"must be {accepted}: {table.optimizer} corrects the moments of table {shown(table.name)} by it",
                field="step",
            )
    return number


def _found(name: str, ends: list[str], stored: Mapping[str, TensorInFiles]) -> TensorInFiles | None:
    """The tensor whose key is, or ends after a dot with, one of these."""
    keys = [key for key in stored if any(f".{key}".endswith(f".{end}") for end in ends)]
    if len(keys) > 1:
        raise InputError(f"is there {len(keys)} times: {', '.join(sorted(keys)[:3])}", field=name)
    return stored[keys[0]] if keys else None


def _zeros(table: EmbeddingTable, moment: Moment) -> TensorInFiles:
    inner = () if moment.is_per_row else (table.embedding_dim,)
    return TensorInFiles(
        (table.num_embeddings, *inner),
        torch.float32,
        lambda start, stop: torch.zeros(stop - start, *inner, dtype=torch.float32),
    )


def _by_rows(table: EmbeddingTable, moment: Moment, found: TensorInFiles, told_parts: int | None) -> TensorInFiles:
    """Moments in this project's shapes.

    TorchRec lays the row-wise moments of K equal column shards one after the other, (K x N,): here they are (N, K).

    Args:
        table: The table.
        moment: The moment.
        found: Its numbers.
        told_parts: Parts of any width whose columns are told; None where they are of one width.
    """
    num_rows, dim = table.num_embeddings, table.embedding_dim
    parts, rest = divmod(math.prod(found.shape), num_rows)
    shapes = [(num_rows,), (num_rows, parts)] if moment.is_per_row else [(num_rows, dim)]
    is_even = parts > 0 and not rest and dim % parts == 0
    if found.shape in shapes and (is_even or parts == told_parts):
        return found
    if not is_even or not moment.is_per_row or len(found.shape) != 1:
        raise InputError(f"must be {moment.name} of shape {shapes[0]}, got {found.shape}", field=table.name)

    def read(start: int, stop: int) -> torch.Tensor:
        firsts = range(0, parts * num_rows, num_rows)
        return torch.stack([found.read(first + start, first + stop) for first in firsts], dim=1)

    return TensorInFiles((num_rows, parts), found.dtype, read)


def export_weights(checkpoint: Checkpoint, path: str | Path, *, prefix: str = "") -> int:
    """Writes the weights of a checkpoint's tables as a plain state dict, in a file of safetensors, piece by piece.

    Keys are those of TorchRec's collections, `embedding_bags.NAME.weight` and, of sequences, `embeddings.NAME.weight`.
    Of a delta, the file has the rows that were updated since the checkpoint before: `NAME.FIRST-LAST.ids` (int64), and
    `NAME.FIRST-LAST.weight` with the columns from FIRST to before LAST of these rows.

    Args:
        checkpoint: The checkpoint.
        path: The file.
        prefix: What keys begin with, as `sparse_arch.`: the path of the collection in the model that reads them.

    Returns:
        Bytes that were written.

    Raises:
        InputError: If two tables have one name.
        FormatError: If files of the checkpoint cannot be read, or the file cannot be written.
    """
    checkpoint.check_told_apart()
    tables = checkpoint.plan.tables
    if checkpoint.manifest.base is not None:
        return write_safetensors(Path(path), _updated(checkpoint, prefix))
    stored = stored_tensors(checkpoint.folder)
    weights = {
        f"{prefix}{_collection(tables[one.name])}.{one.name}.weight": stored[f"{one.key}.weights"]
        for one in checkpoint.manifest.tables
    }
    return write_safetensors(Path(path), weights)


def _updated(checkpoint: Checkpoint, prefix: str) -> dict[str, TensorInFiles]:
    pieces: dict[str, list[torch.Tensor]] = {}
    for update in checkpoint.updates():
        first, last = update.columns
        place = f"{prefix}{_collection(checkpoint.plan.tables[update.table])}.{update.table}.{first}-{last}"
        pieces.setdefault(f"{place}.ids", []).append(update.ids_L)
        pieces.setdefault(f"{place}.weight", []).append(update.weights_LD)
    found = {key: torch.cat(tensors) for key, tensors in pieces.items()}
    return {key: TensorInFiles(tuple(one.shape), one.dtype, partial(rows_of, one)) for key, one in found.items()}


def _collection(table: EmbeddingTable) -> str:
    return "embeddings" if table.pooling is Pooling.SEQUENCE else "embedding_bags"


def write_safetensors(path: Path, tensors: Mapping[str, TensorInFiles]) -> int:
    """Writes a file of safetensors piece by piece; returns its bytes.

    Raises:
        FormatError: If it cannot be written; there is none then.

    Source:
        The format's description in the documentation of safetensors: the length of the header, a JSON object of dtypes,
        shapes and places, and the numbers.
    """
    header: dict[str, object] = {}
    end = 0
    for key, one in tensors.items():
        start, end = end, end + math.prod(one.shape) * one.dtype.itemsize
        dtype = _SAFETENSORS_DTYPES[one.dtype]
        header[key] = {"dtype": dtype, "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    staging = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for one in tensors.values():
                for piece in _pieces(one):
                    file.write(memoryview(piece.contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]
        staging.rename(path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise FormatError(f"cannot be written: {(error.strerror or str(error)).lower()}", source=str(path)) from error
    return 8 + len(text) + end


def _pieces(one: TensorInFiles) -> Iterator[torch.Tensor]:
    num_rows = max(1, PIECE_BYTES // (math.prod(one.shape[1:]) * one.dtype.itemsize))
    for start in range(0, one.shape[0], num_rows):
        yield one.read(start, min(start + num_rows, one.shape[0]))
