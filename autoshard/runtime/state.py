"""The state of tables: gathered from all processes, and written back to what each of them holds.

Shape suffixes: N rows, D embedding dim, L rows of a chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autoshard.core import EmbeddingTable, TableSet
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
    """Weights of a table, or of some of its rows, and the optimizer's moments, all of shape (N, D).

    Attributes:
        weights_ND: The weights.
        moments_ND: For each weight a moment: what AdaGrad's updates are divided by, Adam's mean gradient; None for SGD.
            Those that a row has one of, as row-wise AdaGrad's, have one for each part of its columns that is a shard;
            where rows are in one piece, one value of memory for a row (`expand`). To load, shape (N,) will do.
        second_moments_ND: The same of Adam's and LAMB's mean squared gradients; None for others.
    """

    weights_ND: torch.Tensor
    moments_ND: torch.Tensor | None
    second_moments_ND: torch.Tensor | None = None

    @classmethod
    def of(cls, weights_ND: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> TableState:
        """The state of weights, and of moments by name."""
        return cls(weights_ND, moments.get("moments"), moments.get("second_moments"))

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """Moments that are there, by name (`Optimizer.moments`)."""
        named = {"moments": self.moments_ND, "second_moments": self.second_moments_ND}
        return {name: one for name, one in named.items() if one is not None}


def gathered_state(
    table: EmbeddingTable,
    held: Sequence[Held],
    order: RowOrderMap | None,
    part: Participation,
    rows: range | None = None,
    to: int | None = None,
) -> TableState:
    """Gives every process, or one of them, the state of a table; all of them have to call it.

    Args:
        table: The table.
        held: What this process has of it.
        order: Its row order; None for that of the ids.
        part: The processes.
        rows: Row ids; None for all.
        to: The process that gets it, what others get is of no use; None for all.
    """
    ids = _checked_rows(table, rows)
    weights_ND = torch.zeros(len(ids), table.embedding_dim, dtype=TORCH_DTYPES[table.dtype], device=part.device)
    moments = {
        name: torch.zeros(len(ids), width, dtype=torch.float32, device=part.device)
        for name, width in _moment_widths(table, part).items()
    }
    for holding, state in held:
        # One of those who have the same rows gives them.
        if any(part.process in of[1:] for of in holding.sync_groups() if len(of) > 1):
            continue
        first, last = holding.columns
        for start, rows_L, places_L in held_chunks(holding, part.process, order, ids):
            rows_L, places_L = (rows_L + (start - ids.start)).to(part.device), places_L.to(part.device)
            weights_ND[rows_L, first:last] = state.weights_ND[places_L].detach()
            for name, moments_NW in moments.items():
                # A moment of a whole row is that of column 0, where there is but that one.
                moments_NW[rows_L, first:last] = state.moments[name].view(len(state.weights_ND), -1)[places_L].detach()
    for tensor in (weights_ND, *moments.values()):
        if to is None:
            dist.all_reduce(tensor, group=part.group)
        else:
            dist.reduce(tensor, group_dst=to, group=part.group)
    return TableState.of(weights_ND, {name: one.expand_as(weights_ND) for name, one in moments.items()})


def _moment_widths(table: EmbeddingTable, part: Participation) -> dict[str, int]:
    """Moments that a row of a table has under the plan, by name, told as numbers a row."""
    holdings = [one for one in part.owners.holdings if one.of.name == table.name]
    is_cut = any(one.embedding_dim != table.embedding_dim for one in holdings)
    dim = table.embedding_dim
    return {one.name: dim if is_cut else one.width(dim) for one in table.optimizer.moments}


def even_rows(num_rows: int, num_processes: int) -> list[range]:
    """Rows of each process, as `torch.distributed.tensor.Shard(0)` deals them: alike many but for the last ones."""
    size = -(-num_rows // num_processes)
    return [
        range(min(process * size, num_rows), min((process + 1) * size, num_rows)) for process in range(num_processes)
    ]


def state_by_rows(
    table: EmbeddingTable, read: Callable[[range, int], TableState], part: Participation
) -> dict[str, torch.Tensor]:
    """The state of a table in the memory of the hosts, each process an even share of its rows, whatever the plan.

    Args:
        table: The table.
        read: Gives a process the state of some rows; all of them call it.
        part: The processes.

    Returns:
        `weights`, (N, D), and the optimizer's moments by name, (N,) for one per row, else (N, D): on several processes
        `DTensor`s that are sharded by rows, which `torch.distributed.checkpoint` writes and reads.
    """
    num_processes, widths = part.group.size(), _moment_widths(table, part)
    rows_P = even_rows(table.num_embeddings, num_processes)
    num_own = len(rows_P[part.process])
    own = {"weights": torch.empty(num_own, table.embedding_dim, dtype=TORCH_DTYPES[table.dtype])}
    own |= {name: torch.empty((num_own,) if width == 1 else (num_own, width)) for name, width in widths.items()}
    for process, rows in _pieces(rows_P):
        state = read(rows, process)
        if process != part.process:
            continue
        at = slice(rows.start - rows_P[process].start, rows.stop - rows_P[process].start)
        own["weights"][at] = state.weights_ND
        for name, one in state.moments.items():
            own[name][at] = one[:, 0] if widths[name] == 1 else one
    if num_processes == 1:
        return own
    return {name: by_rows(tensor, table.num_embeddings, part.group) for name, tensor in own.items()}


def _pieces(rows_P: Sequence[range]) -> Iterator[tuple[int, range]]:
    """Processes and rows of theirs, few enough to go to the host at once."""
    for process, rows in enumerate(rows_P):
        for start in range(rows.start, rows.stop, _PIECE_ROWS):
            yield process, range(start, min(start + _PIECE_ROWS, rows.stop))


def by_rows(own: torch.Tensor, num_rows: int, group: dist.ProcessGroup) -> DTensor:
    """A tensor on the host of which each process has an even share of the rows (`even_rows`).

    Args:
        own: Those of this process.
        num_rows: Those of all.
        group: The processes.
    """
    shape = torch.Size([num_rows, *own.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    mesh = DeviceMesh.from_group(group, "cpu")
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def rows_from_all(state: TableState, part: Participation) -> Iterator[tuple[range, TableState]]:
    """A table's state on every process, a piece at a time, of tensors that are whole or sharded by rows.

    Args:
        state: Its weights, and moments if it has some; those of one table are alike.
        part: The processes; all of them go through it.
    """
    if not isinstance(state.weights_ND, DTensor):
        yield range(len(state.weights_ND)), state
        return
    tensors = (state.weights_ND, state.moments_ND, state.second_moments_ND)
    rows_P = even_rows(len(state.weights_ND), part.group.size())
    for process, rows in _pieces(rows_P):
        first = rows_P[process].start if process == part.process else None
        weights_ND, *moments = (_broadcast(tensor, rows, first, process, part) for tensor in tensors)
        assert weights_ND is not None
        yield rows, TableState(weights_ND, *moments)


def _broadcast(
    tensor: torch.Tensor | None, rows: range, first: int | None, process: int, part: Participation
) -> torch.Tensor | None:
    """Some rows of a process on all of them; `first` is the first row that it has, None on the others."""
    if tensor is None:
        return None
    piece = torch.empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype, device=part.device)
    if first is not None:
        assert isinstance(tensor, DTensor)
        piece.copy_(tensor.to_local()[rows.start - first : rows.stop - first])
    dist.broadcast(piece, group_src=process, group=part.group)
    return piece


def check_layout(table: EmbeddingTable, state: TableState, part: Participation) -> None:
    """Refuses tensors that are neither whole nor sharded by rows over the processes.

    Raises:
        InputError: If they are sharded in another way; the field is the table.
    """
    tensors = [state.weights_ND, *state.moments.values()]
    if len({isinstance(tensor, DTensor) for tensor in tensors}) > 1:
        raise InputError("weights and moments must both be whole, or both be sharded by rows", field=table.name)
    for tensor in tensors:
        if isinstance(tensor, DTensor) and (
            tensor.placements != (Shard(0),) or tensor.device_mesh.size() != part.group.size()
        ):
            raise InputError(
                f"must be whole, or sharded by rows over {part.group.size()} processes, got {tensor.placements} over "
                f"{tensor.device_mesh.size()}; torch.distributed.checkpoint reads what any number of them saved",
                field=table.name,
            )


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
    expected = {one.name: one for one in table.optimizer.moments}
    for name in state.moments.keys() - expected.keys():
        what = name.replace("_", " ")
        raise InputError(f"must have no {what}: the table is trained with {table.optimizer}", field=table.name)
    for name, one in expected.items():
        what = name.replace("_", " ")
        if name not in state.moments:
            raise InputError(
                f"must have {what}, of {table.optimizer}; load_weights sets weights alone", field=table.name
            )
        per_row = [shape[:1], (shape[0], 1)] if one.is_per_row else []
        _check_tensor(table.name, what, state.moments[name], [shape, *per_row])


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
    written: TableState,
    rows: range | None = None,
) -> None:
    """Writes what a process has of a table, a chunk of rows at a time, and marks it for replica groups.

    A moment of several columns is the mean over them: what row-wise optimizers add up is the mean over a row's columns,
    so a coarser cut gets what it would have had, and a finer one the mean of what it is a part of.

    Args:
        held: What the process has of the table.
        process: The process.
        order: The table's row order; None for that of the ids.
        written: Of the rows, of any dtype and device; moments that it lacks are left as they are.
        rows: Row ids; None for all.
    """
    for holding, state in held:
        first, last = holding.columns
        ids = range(holding.of.num_embeddings) if rows is None else rows
        for start, rows_L, places_L in held_chunks(holding, process, order, ids):
            piece = slice(start - ids.start, start - ids.start + CHUNK_ROWS)
            places_L = places_L.to(state.weights_ND.device)
            state.weights_ND[places_L] = written.weights_ND[piece].cpu()[rows_L, first:last].to(state.weights_ND)
            if state.marks_N is not None:
                state.marks_N[places_L] = 1
            for name, moments in written.moments.items():
                kept = state.moments[name]
                own = moments[piece].cpu()[rows_L].view(len(rows_L), -1)
                own = own if own.shape[1] == 1 else own[:, first:last]
                if kept.dim() == 1:
                    is_one_L = own.amin(dim=1) == own.amax(dim=1)  # a mean would round it
                    own = torch.where(is_one_L, own[:, 0], own.mean(dim=1))
                kept[places_L] = own.to(kept)


def check_host_memory(tables: TableSet, part: Participation) -> None:
    """Refuses to hold an even share of all tables where a host has not that much; all processes have to call it.

    Raises:
        DeviceError: On all of them, if one has too little.
    """
    needed = tables.storage_bytes // part.group.size()
    short = torch.tensor([max(0, needed - free_host_bytes())], device=part.device)
    dist.all_reduce(short, op=dist.ReduceOp.MAX, group=part.group)
    if short.item():
        raise DeviceError(
            f"state_dict would hold {write_bytes(needed)} of tables on every process, {write_bytes(int(short.item()))} "
            "more than a host has free: save tables in pieces with table_state(name, rows)"
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
