"""The state of tables: read from all processes, and written back to what each of them holds.

Shape suffixes: N rows, D embedding dim, K parts of the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autoshard.core import EmbeddingTable, Split, TableSet
from autoshard.core.errors import DeviceError, InputError
from autoshard.core.quoting import write_bytes
from autoshard.core.shard import Replicas
from autoshard.hardware import free_host_bytes
from autoshard.runtime.engine.agreement import on_all
from autoshard.runtime.engine.holdings import HeldRange, Ownership
from autoshard.runtime.engine.ids.addresses import RowOrderMap
from autoshard.runtime.engine.rows.averaging import UPDATED, RowStates
from autoshard.runtime.engine.rows.moving import TableMove, move
from autoshard.runtime.engine.rows.places import RowBlock, TableLayout, held_chunks
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.participation import Participation

#: What a process has of holdings, one row per place, by number of the holding.
Held = Mapping[int, RowStates]

#: Name of `TableState.columns` in states by name; the same on all processes.
MOMENT_COLUMNS = "moment_columns"
#: Name of the marks of rows among the tensors of a layout.
_MARKS = "marks"


@dataclass(frozen=True, slots=True, eq=False)
class TableState:
    """Weights of a table, or of some of its rows, and the optimizer's moments.

    Attributes:
        weights_ND: The weights.
        moments: The moments by name (`Optimizer.moments`): (N, D) where each weight has one; where a row has one, (N,),
            or (N, K) if the plan cuts its columns into K parts, each of which has its own. To load, (N, 1) and (N, D)
            will do for these, too.
        columns: Of moments of shape (N, K), the K + 1 bounds of the parts, from 0 to D; else None. To load, None will
            do for parts of one width.
    """

    weights_ND: torch.Tensor
    moments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    columns: tuple[int, ...] | None = None

    def bounds(self, dim: int) -> dict[str, tuple[int, ...]]:
        """By name, bounds of the columns that each number of a row is of (`RowBlock`).

        Args:
            dim: D.
        """
        found = {"weights": tuple(range(dim + 1))}
        for name, tensor in self.moments.items():
            parts = 1 if tensor.dim() == 1 else tensor.shape[1]
            told = self.columns is not None and parts == len(self.columns) - 1
            found[name] = self.columns if told and self.columns else tuple(range(0, dim + 1, dim // parts))
        return found

    def expanded(self, name: str = "moments") -> torch.Tensor:
        """The moment of each weight, (N, D): a view where there is one of the whole row, or one of each weight."""
        moments, dim = self.moments[name], self.weights_ND.shape[1]
        bounds = self.bounds(dim)[name]
        if len(bounds) in (2, dim + 1):
            return moments.view(len(moments), -1).expand(-1, dim)
        widths_K = torch.tensor([stop - start for start, stop in pairwise(bounds)], device=moments.device)
        return moments.repeat_interleave(widths_K, dim=1)


class HeldTables:
    """Tables as the processes of a replica group hold them: read and written in any rows, or in even shares of them.

    Args:
        part: The processes, and which of them holds what.
        held: What this one has.
        orders: Row orders, by table.
    """

    def __init__(self, part: Participation, held: Held, orders: Mapping[str, RowOrderMap]) -> None:
        self._part, self._held, self._orders = part, held, orders
        self._num_processes = part.group.size()

    def read(self, table: EmbeddingTable, rows: range | None = None) -> TableState:
        """The state of some rows of a table, None for all, on every process; all of them have to call it."""
        ids = _checked_rows(table, rows)
        empty = partial(torch.empty, device=self._part.device)
        state = self._empty(table, len(ids), lambda shape, dtype: empty(shape, dtype=dtype))
        target = _state_layout(table, state, ids, self._copies)
        self._move([table_move(table, ids, self._layout(table), target, state.moments)])
        return state

    def read_shares(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state of all tables in the memory of the hosts, each process an even share of their rows.

        Returns:
            By table, `weights`, (N, D), and the moments by name, shaped as `TableState` has them, with its `columns` as
            `moment_columns`, (K + 1,), if there are some. On several processes weights and moments are `DTensor`s that
            are sharded by rows, which `torch.distributed.checkpoint` writes and reads.
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        moves = []
        for table in self._part.owners.tables.tables:
            ids, shares = range(table.num_embeddings), partial(empty_shares, group=self._part.group)
            state = self._empty(table, len(ids), shares)
            target = _state_layout(table, _local(state), ids, self._shares)
            moves.append(table_move(table, ids, self._layout(table), target, state.moments))
            found[table.name] = _tensors(state)
            if state.columns is not None:
                found[table.name][MOMENT_COLUMNS] = torch.tensor(state.columns)
        self._move(moves)
        return found

    def write(self, states: Mapping[str, TableState], rows: range | None = None) -> None:
        """Writes the state of tables, and marks their rows for replica groups; moments that are not there stay.

        Args:
            states: By table. Of tensors sharded by rows, each process gives its share, and all have to call it.
            rows: Row ids that they are of; None for all.
        """
        moves = []
        for name, state in states.items():
            table, replicas = self._part.owners.tables[name], self._copies
            ids = _checked_rows(table, rows)
            if isinstance(state.weights_ND, DTensor):
                state, replicas = _local(state), self._shares
            source = _state_layout(table, state, ids, replicas)
            moves.append(table_move(table, ids, source, self._layout(table), state.moments))
        self._move(moves)
        for name in states:
            table = self._part.owners.tables[name]
            self._mark(table, _checked_rows(table, rows))

    def _move(self, moves: Sequence[TableMove]) -> None:
        move(moves, self._part.group, self._part.device, self._part.nodes_of(self._part.group))

    @property
    def _shares(self) -> Replicas:
        """A block of rows for each process."""
        return (tuple(range(self._num_processes)),)

    @property
    def _copies(self) -> Replicas:
        """All rows for each process."""
        return tuple((process,) for process in range(self._num_processes))

    def _layout(self, table: EmbeddingTable) -> TableLayout:
        """As the plan has it."""
        order = self._orders.get(table.name)
        return held_layout(table, self._part.owners, self._held, order, [range(self._num_processes)])

    def _empty(self, table: EmbeddingTable, num_rows: int, empty: Callable[..., torch.Tensor]) -> TableState:
        """The state of some rows, in memory that `empty` gives for a shape and a dtype."""
        dim, columns, moments = table.embedding_dim, None, {}
        holdings = [one for one in self._part.owners.holdings if one.of.name == table.name]
        bounds = sorted({bound for one in holdings for bound in one.columns})
        for one in table.optimizer.moments:
            shape: tuple[int, ...] = (num_rows, dim)
            if one.is_per_row:
                shape = (num_rows,) if len(bounds) == 2 else (num_rows, len(bounds) - 1)
                columns = None if len(bounds) == 2 else tuple(bounds)
            moments[one.name] = empty(shape, torch.float32)
        return TableState(empty((num_rows, dim), TORCH_DTYPES[table.dtype]), moments, columns)

    def _mark(self, table: EmbeddingTable, ids: range) -> None:
        """Marks rows of a table here as updated, where rows are marked."""
        order = self._orders.get(table.name)
        for index, state in self._held.items():
            holding = self._part.owners.holdings[index]
            if holding.of.name == table.name and state.marks_N is not None:
                for _, _, places_L in held_chunks(holding, self._part.process, order, ids):
                    state.marks_N[places_L.to(state.marks_N.device)] = UPDATED


def held_layout(
    table: EmbeddingTable, owners: Ownership, held: Held, order: RowOrderMap | None, groups: Sequence[Sequence[int]]
) -> TableLayout:
    """Where the rows of a table are under a plan.

    Args:
        table: The table.
        owners: Who holds what in a replica group.
        held: What this process has.
        order: The table's row order; None for that of the ids.
        groups: The processes of each replica group, all of which hold the same.
    """
    blocks = []
    for index, holding in enumerate(owners.holdings):
        if holding.of.name != table.name:
            continue
        first, last = holding.columns
        each = tuple(range(first, last + 1))
        bounds = {one.name: (first, last) if one.is_per_row else each for one in table.optimizer.moments}
        bounds |= {"weights": each, _MARKS: (first, last)}
        for number, rows in enumerate(holding.ranges):
            replicas = (tuple(group[process] for process in one) for group in groups for one in rows.replicas)
            places = {
                (own.part, group[process]): own.offset
                for process in range(owners.num_processes)
                for own in holding.parts_of(process)
                if own.range == number
                for group in groups
            }
            block = RowBlock(
                columns=holding.columns,
                rows=replace(rows, replicas=tuple(replicas)),
                first=places,
                bounds=bounds,
                tensors=_tensors(held[index]) if index in held else {},
            )
            blocks.append(block)
    return TableLayout(tuple(blocks), order)


def table_move(
    table: EmbeddingTable,
    ids: range,
    source: TableLayout,
    target: TableLayout,
    moments: Iterable[str],
    *,
    with_marks: bool = False,
) -> TableMove:
    """Rows of a table from one layout to another.

    Args:
        table: The table.
        ids: Which rows.
        source: Where they are.
        target: Where they go.
        moments: Names of the moments that go along.
        with_marks: Whether marks of rows that were updated do, too.
    """
    dtypes = {"weights": TORCH_DTYPES[table.dtype], **dict.fromkeys(moments, torch.float32)}
    if with_marks:
        dtypes[_MARKS] = torch.uint8
    return TableMove(source=source, target=target, ids=ids, dtypes=dtypes)


def _state_layout(table: EmbeddingTable, state: TableState, ids: range, replicas: Replicas) -> TableLayout:
    """Where the rows of a state are: each process of a replica has a block of them."""
    first = {(part, process): 0 for replica in replicas for part, process in enumerate(replica)}
    block = RowBlock(
        columns=(0, table.embedding_dim),
        rows=_rows_of(ids, replicas),
        first=first,
        bounds=state.bounds(table.embedding_dim),
        tensors=_tensors(state),
    )
    return TableLayout((block,))


def _rows_of(ids: range, replicas: Replicas) -> HeldRange:
    """Rows of which each process of a replica has a block, as `torch.distributed.tensor.Shard(0)` deals them."""
    return HeldRange(start=ids.start, stop=ids.stop, split=Split.BLOCK, replicas=replicas, read_by=())


def _tensors(state: RowStates | TableState) -> dict[str, torch.Tensor]:
    marks = {_MARKS: state.marks_N} if isinstance(state, RowStates) and state.marks_N is not None else {}
    return {"weights": state.weights_ND, **state.moments, **marks}


def empty_shares(shape: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor on the host of which each process has an even share of the rows; on one process, an ordinary one.

    Its memory is of ordinary pages: it is gone through once, and large ones took 2.0 s of the system's CPU time a GiB
    when they were first written to, ordinary ones 0.5 s (virtual AMD EPYC, November 2026).

    Args:
        shape: Of the whole tensor.
        dtype: Of its numbers.
        group: The processes.
    """
    size = group.size()
    if size == 1:
        return torch.empty(*shape, dtype=dtype)
    num_own = _rows_of(range(shape[0]), (tuple(range(size)),)).part_rows(group.rank())
    stride = torch.empty(*shape, device="meta").stride()
    mesh = DeviceMesh.from_group(group, "cpu")
    own = torch.empty(num_own, *shape[1:], dtype=dtype)
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)


def _local(state: TableState) -> TableState:
    """What this process has of a state."""
    own = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in _tensors(state).items()}
    return TableState(own.pop("weights"), own, state.columns)


def check_layout(table: EmbeddingTable, state: TableState, part: Participation) -> None:
    """Refuses tensors that are neither whole nor sharded by rows over the processes.

    Raises:
        InputError: If they are sharded in another way; the field is the table.
    """
    tensors = _tensors(state).values()
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
    num_rows, dim = len(_checked_rows(table, rows)), table.embedding_dim
    _check_tensor(table.name, "weights", state.weights_ND, [(num_rows, dim)])
    kept = {one.name: one for one in table.optimizer.moments}
    if unused := sorted(state.moments.keys() - kept.keys()):
        raise InputError(f"must have no {unused[0]}: the table is trained with {table.optimizer}", field=table.name)
    if missing := sorted(kept.keys() - state.moments.keys()):
        raise InputError(
            f"must have {missing[0]}, of {table.optimizer}; load_weights sets weights alone", field=table.name
        )
    for name, one in kept.items():
        shapes: list[tuple[int, ...]] = [(num_rows, dim)]
        if one.is_per_row:
            shapes += [(num_rows,), (num_rows, 1), (num_rows, _num_parts(table, state, name))]
        _check_tensor(table.name, name, state.moments[name], shapes)


def _num_parts(table: EmbeddingTable, state: TableState, name: str) -> int:
    """Parts of the columns that have moments of their own, as bounds have it or, without any, as even as they are.

    Raises:
        InputError: If the bounds are not those of parts of the table's columns.
    """
    dim, columns = table.embedding_dim, state.columns
    if columns is not None:
        if columns[:1] != (0,) or columns[-1:] != (dim,) or any(a >= b for a, b in pairwise(columns)):
            raise InputError(f"must have columns that rise from 0 to {dim}, got {list(columns)}", field=table.name)
        return len(columns) - 1
    shape = state.moments[name].shape if isinstance(state.moments[name], torch.Tensor) else ()
    return shape[1] if len(shape) == 2 and shape[1] and dim % shape[1] == 0 else 1


def check_weights(table: EmbeddingTable, weights_ND: torch.Tensor) -> None:
    """Refuses what are no weights of a table.

    Raises:
        InputError: If shape or dtype is another; the field is the table.
    """
    _check_tensor(table.name, "weights", weights_ND, [(table.num_embeddings, table.embedding_dim)])


def check_host_memory(tables: TableSet, part: Participation) -> None:
    """Refuses to hold an even share of all tables where a host has not that much; all processes have to call it.

    Raises:
        DeviceError: On all of them, if one has too little.
    """
    needed = tables.storage_bytes // part.group.size()

    def check() -> None:
        short = needed - free_host_bytes()
        if short > 0:
            raise DeviceError(
                f"state_dict would hold {write_bytes(needed)} of tables on every process, {write_bytes(short)} more "
                "than a host has free: save tables in pieces with table_state(name, rows)"
            )

    on_all(check, part.group, part.device)


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
