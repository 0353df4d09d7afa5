"""The state of tables: gathered from all processes, and written back to what each of them holds.

Shape suffixes: N rows, D embedding dim, L rows of a chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.core import EmbeddingTable, Optimizer, TableSet
from autoshard.core.errors import DeviceError, InputError
from autoshard.core.quoting import write_bytes
from autoshard.runtime.engine.holdings import Holding
from autoshard.runtime.engine.ids.addresses import RowOrderMap
from autoshard.runtime.engine.rows.averaging import RowStates
from autoshard.runtime.engine.rows.places import held_chunks
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.participation import Participation
from autoshard.runtime.weights import CHUNK_ROWS

#: Rows that are gathered at once where a table goes to the host.
_PIECE_ROWS = 16 * CHUNK_ROWS

#: What one process has of a holding, one row per place.
Held = tuple[Holding, RowStates]


@dataclass(frozen=True, slots=True, eq=False)
class TableState:
    """Weights of a table, or of some of its rows, and the optimizer's moments, both of shape (N, D).

    Attributes:
        weights_ND: The weights.
        moments_ND: For each weight the moment that its updates are divided by; None for SGD. Row-wise AdaGrad has one
            for a row, or for each part of its columns that is a shard; where rows are in one piece, one value of memory
            for a row (`expand`). To load, shape (N,) will do.
    """

    weights_ND: torch.Tensor
    moments_ND: torch.Tensor | None


def gathered_state(
    table: EmbeddingTable,
    held: Sequence[Held],
    order: RowOrderMap | None,
    part: Participation,
    rows: range | None = None,
) -> TableState:
    """Gives every process the state of a table; all of them have to call it.

    Args:
        table: The table.
        held: What this process has of it.
        order: Its row order; None for that of the ids.
        part: The processes.
        rows: Row ids; None for all.
    """
    ids = _checked_rows(table, rows)
    weights_ND = torch.zeros(len(ids), table.embedding_dim, dtype=TORCH_DTYPES[table.dtype], device=part.device)
    moments = None
    if table.optimizer is not Optimizer.SGD:
        holdings = [one for one in part.owners.holdings if one.of.name == table.name]
        is_cut = any(one.embedding_dim != table.embedding_dim for one in holdings)
        width = 1 if table.optimizer is Optimizer.ROWWISE_ADAGRAD and not is_cut else table.embedding_dim
        moments = torch.zeros(len(ids), width, dtype=torch.float32, device=part.device)
    for holding, state in held:
        # One of those who have the same rows gives them.
        if any(part.process in of[1:] for of in holding.sync_groups() if len(of) > 1):
            continue
        first, last = holding.columns
        for start, rows_L, places_L in held_chunks(holding, part.process, order, ids):
            rows_L, places_L = (rows_L + (start - ids.start)).to(part.device), places_L.to(part.device)
            weights_ND[rows_L, first:last] = state.weights_ND[places_L].detach()
            if moments is not None and state.moments is not None:
                # A moment of a whole row is that of column 0, where there is but that one.
                moments[rows_L, first:last] = state.moments.view(len(state.weights_ND), -1)[places_L].detach()
    dist.all_reduce(weights_ND, group=part.group)
    if moments is not None:
        dist.all_reduce(moments, group=part.group)
    return TableState(weights_ND, None if moments is None else moments.expand_as(weights_ND))


def state_on_host(table: EmbeddingTable, read: Callable[[range], TableState]) -> dict[str, torch.Tensor]:
    """The whole state of a table in the memory of the host, read a piece at a time.

    Args:
        table: The table.
        read: Gives the state of some rows.

    Returns:
        `weights`, (N, D), and if there are some `moments`, (N,) for one per row, else (N, D).
    """
    found: dict[str, torch.Tensor] = {}
    for start in range(0, table.num_embeddings, _PIECE_ROWS):
        rows = range(start, min(start + _PIECE_ROWS, table.num_embeddings))
        state = read(rows)
        parts = {"weights": state.weights_ND, "moments": state.moments_ND}
        for name, piece in parts.items():
            if piece is None:
                continue
            own = piece if piece.stride(1) else piece[:, 0]
            if name not in found:
                found[name] = torch.empty(table.num_embeddings, *own.shape[1:], dtype=own.dtype)
            found[name][rows.start : rows.stop] = own
    return found


def check_state(table: EmbeddingTable, state: TableState, rows: range | None = None) -> None:
    """Refuses what is no state of a table.

    Args:
        table: The table.
        state: Its weights, and its moments if it has some.
        rows: Row ids that the state is of; None for all.

    Raises:
        InputError: If a shape or a dtype is another, or moments are missing or not used; the field is the table.
    """
    shape = (len(_checked_rows(table, rows)), table.embedding_dim)
    _check_tensor(table.name, "weights", state.weights_ND, [shape])
    if table.optimizer is Optimizer.SGD:
        if state.moments_ND is not None:
            raise InputError("must have no moments: the table is trained with sgd", field=table.name)
        return
    if state.moments_ND is None:
        raise InputError(f"must have moments, of {table.optimizer}; load_weights sets weights alone", field=table.name)
    per_row = [shape[:1], (shape[0], 1)] if table.optimizer is Optimizer.ROWWISE_ADAGRAD else []
    _check_tensor(table.name, "moments", state.moments_ND, [shape, *per_row])


def check_weights(table: EmbeddingTable, weights_ND: torch.Tensor) -> None:
    """Refuses what are no weights of a table.

    Raises:
        InputError: If shape or dtype is another; the field is the table.
    """
    _check_tensor(table.name, "weights", weights_ND, [(table.num_embeddings, table.embedding_dim)])


@torch.no_grad()
def write_state(
    held: Iterable[Held],
    process: int,
    order: RowOrderMap | None,
    weights_ND: torch.Tensor,
    moments: torch.Tensor | None,
    rows: range | None = None,
) -> None:
    """Writes what a process has of a table, a chunk of rows at a time, and marks it for replica groups.

    A moment of several columns is the mean over them: what row-wise AdaGrad adds up is the mean over a row's columns,
    so a coarser cut gets what it would have had, and a finer one the mean of what it is a part of.

    Args:
        held: What the process has of the table.
        process: The process.
        order: The table's row order; None for that of the ids.
        weights_ND: Weights of the rows, of any dtype and device.
        moments: Their moments, (N, D) or one for a row; None to leave them as they are.
        rows: Row ids; None for all.
    """
    for holding, state in held:
        first, last = holding.columns
        ids = range(holding.of.num_embeddings) if rows is None else rows
        for start, rows_L, places_L in held_chunks(holding, process, order, ids):
            piece = slice(start - ids.start, start - ids.start + CHUNK_ROWS)
            places_L = places_L.to(state.weights_ND.device)
            state.weights_ND[places_L] = weights_ND[piece].cpu()[rows_L, first:last].to(state.weights_ND)
            if state.marks_N is not None:
                state.marks_N[places_L] = 1
            if moments is None or state.moments is None:
                continue
            own = moments[piece].cpu()[rows_L].view(len(rows_L), -1)
            own = own if own.shape[1] == 1 else own[:, first:last]
            if state.moments.dim() == 1:
                is_one_L = own.amin(dim=1) == own.amax(dim=1)  # a mean would round it
                own = torch.where(is_one_L, own[:, 0], own.mean(dim=1))
            state.moments[places_L] = own.to(state.moments)


def check_host_memory(tables: TableSet, part: Participation) -> None:
    """Refuses to hold all tables in the memory of a host that has not that much; all processes have to call it.

    Raises:
        DeviceError: On all of them, if one has too little.
    """
    needed = tables.storage_bytes
    short = torch.tensor([max(0, needed - free_host_bytes())], device=part.device)
    dist.all_reduce(short, op=dist.ReduceOp.MAX, group=part.group)
    if short.item():
        raise DeviceError(
            f"state_dict would hold {write_bytes(needed)} of tables on every process, {write_bytes(short.item())} more "
            "than a host has free: save tables in pieces with table_state(name, rows)"
        )


def free_host_bytes() -> int:
    """Memory of this host that nobody uses."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # not Linux: all of the memory, since nothing says what is free
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _checked_rows(table: EmbeddingTable, rows: range | None) -> range:
    whole = range(table.num_embeddings)
    if rows is None:
        return whole
    if rows.step != 1 or not 0 <= rows.start <= rows.stop <= whole.stop:
        raise InputError(f"must be a range in [0, {whole.stop}], got {rows}", field="rows")
    return rows


def _check_tensor(name: str, what: str, tensor: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.is_meta:
        got = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InputError(f"{what} must be a tensor of floating-point numbers, got {got}", field=name)
    if tuple(tensor.shape) not in shapes:
        raise InputError(f"must be {what} of shape {shapes[0]}, got {tuple(tensor.shape)}", field=name)
