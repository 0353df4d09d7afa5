"""Files of row orders: ids of a table's rows in falling access frequency, in Parquet.

Shape suffixes: N ordered rows.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core import ImpliedOrder, RowOrder, ShardingPlan, TableSet
from autoshard.core.access.counted import CountedRows
from autoshard.core.access.orders import BY_ID
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened
from autoshard.formats.files import atomic_write, read_bytes

#: The column of the ids.
COLUMN = "row"
#: The column of their shares of the lookups, and entries of the file's metadata: how many are known, and from which
#: share on.
_SHARES, _NUM_KNOWN, _LEAST_SHARE = "share", "autoshard.num_known", "autoshard.least_share"
#: Of the sum of shares.
_ROUNDING = 1e-6
#: 8 bytes for each of a billion rows.
_MAX_BYTES = 8 << 30


def write_row_order(path: str | Path, ids_N: NDArray[np.int64]) -> RowOrder:
    """Writes a file of row ids, and returns what a plan says of it.

    Args:
        path: The file, beside the plan.
        ids_N: Row ids in falling access frequency.
    """
    return _written(path, {COLUMN: np.asarray(ids_N, dtype=np.int64)})


def write_counted_rows(path: str | Path, rows: CountedRows) -> RowOrder:
    """As `write_row_order`, with the share of the lookups that each row gets in a column, and which are known."""
    metadata = {_NUM_KNOWN: str(rows.num_known)}
    if rows.least_share is not None:
        metadata[_LEAST_SHARE] = repr(rows.least_share)
    return _written(path, {COLUMN: rows.ids_N, _SHARES: rows.shares_N}, metadata)


def _written(
    path: str | Path, columns: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> RowOrder:
    import pyarrow as pa
    import pyarrow.parquet

    content = io.BytesIO()
    pa.parquet.write_table(pa.table(dict(columns), metadata=metadata), content)
    atomic_write(path, content.getvalue())
    num_ordered = len(columns[COLUMN])
    return RowOrder(file=Path(path).name, digest=_digest(content.getvalue()), num_ordered=num_ordered)


def copied_row_order(order: RowOrder, folder: Path, path: Path) -> RowOrder | None:
    """A file of row ids copied, and what is said of the copy; None where the file is not there or is another one.

    Args:
        order: What is said of the file.
        folder: Where it lies.
        path: The copy.

    Raises:
        FormatError: If the copy cannot be written.
    """
    try:
        content = _content(folder / order.file, order, "row_order")
    except FormatError:
        return None
    atomic_write(path, content)
    return replace(order, file=path.name)


def described_row_order(path: Path, num_rows: int) -> RowOrder:
    """What a table says of a file of row ids.

    Args:
        path: The file.
        num_rows: Rows of the table.

    Raises:
        FormatError: If it is not there, or no Parquet file with different rows of the table.
    """
    content = read_bytes(path, max_bytes=_MAX_BYTES)
    return RowOrder(file=path.name, digest=_digest(content), num_ordered=len(_ids(content, num_rows)))


def read_row_orders(plan: ShardingPlan, plan_path: str | Path) -> Mapping[str, NDArray[np.int64]]:
    """Row ids in falling access frequency, of the tables for which a plan names a file; by table.

    Args:
        plan: The plan.
        plan_path: Its file, beside which the orders lie.

    Raises:
        FormatError: If a file is not there, has another digest, or holds other rows than the plan says.
    """
    folder = Path(plan_path).parent
    return {
        name: _read(folder / order.file, order, name, plan.tables[name].num_embeddings)
        for name, order in plan.row_orders.items()
    }


def row_orders_at_hand(
    plan: ShardingPlan, plan_path: str | Path, names: Collection[str]
) -> Mapping[str, NDArray[np.int64]]:
    """As `read_row_orders`, of these tables, without those whose file is not there or is another one.

    Args:
        plan: The plan.
        plan_path: Its file.
        names: Names of tables.
    """
    found = {}
    for name in plan.row_orders.keys() & set(names):
        order = plan.row_orders[name]
        with suppress(FormatError):
            found[name] = _read(Path(plan_path).parent / order.file, order, name, plan.tables[name].num_embeddings)
    return found


def read_counted_rows(tables: TableSet, path: str | Path) -> Mapping[str, CountedRows]:
    """Rows by falling lookups of the tables that name a file, or whose rows are in the order of their ids; by table.

    Without a column of shares, these are those of the table's curve.

    Args:
        tables: The tables.
        path: Their file, beside which the row orders lie.

    Raises:
        FormatError: As `read_row_orders`.
    """
    found = {}
    for table in tables.tables:
        if table.row_order is ImpliedOrder.BY_ID:
            found[table.name] = CountedRows.of_order(table.access, BY_ID)
        elif isinstance(table.row_order, RowOrder):
            file = Path(path).parent / table.row_order.file
            ids_N = _read(file, table.row_order, table.name, table.num_embeddings)
            rows = CountedRows.of_order(table.access, ids_N)
            found[table.name] = _with_shares(rows, file, f"row_orders.{table.name}")
    return found


def _with_shares(rows: CountedRows, file: Path, field: str) -> CountedRows:
    """Rows with the shares of their file, which has been read before, if it has any."""
    import pyarrow as pa
    import pyarrow.parquet

    with pa.parquet.ParquetFile(file) as parquet:
        metadata, number = parquet.schema_arrow.metadata or {}, parquet.schema_arrow.names.count(_SHARES)
        if number == 0:
            return rows
        if number > 1:
            raise FormatError(f"has {number} columns {_SHARES!r}; names must differ", source=str(file), field=field)
        shares_N = parquet.read(columns=[_SHARES])[_SHARES].to_numpy()
    known, least = metadata.get(_NUM_KNOWN.encode(), b""), metadata.get(_LEAST_SHARE.encode())
    is_right = shares_N.dtype.kind == "f" and np.isfinite(shares_N).all() and (np.diff(shares_N) <= 0).all()
    if (
        not is_right
        or shares_N[-1] < 0
        or shares_N.sum() > 1 + _ROUNDING
        or not known.isdigit()
        or not _is_share(least)
    ):
        raise FormatError(
            f"must have falling shares of the lookups in its column {_SHARES}, and how many are known",
            source=str(file),
            field=field,
        )
    return replace(
        rows,
        shares_N=shares_N,
        num_known=min(int(known), len(shares_N)),
        least_share=None if least is None else float(least),
    )


def _is_share(entry: bytes | None) -> bool:
    """Whether an entry of the metadata is a number above 0, or left out."""
    try:
        return entry is None or 0.0 < float(entry) < math.inf
    except ValueError:
        return False


def with_row_orders(plan: ShardingPlan, orders: Mapping[str, NDArray[np.int64]], path: Path) -> ShardingPlan:
    """A plan with its row orders in files beside its own, named after it: of tables that it cuts, what they need of it.

    Args:
        plan: The plan.
        orders: Row ids in falling access frequency, of the tables with an order that lists them.
        path: The plan's file.

    Raises:
        FormatError: If a file cannot be written.
    """
    cuts = plan.ordered_rows()
    named: dict[str, RowOrder | ImpliedOrder | None] = {}
    for number, table in enumerate(plan.tables.tables):
        named[table.name] = ImpliedOrder.BY_ID if table.name in cuts else None
        if table.name in orders and cuts.get(table.name) != 0:
            ids_N = orders[table.name][: cuts.get(table.name)]
            named[table.name] = write_row_order(path.parent / f"{path.stem}.rows-{number}.parquet", ids_N)
        elif table.row_order is ImpliedOrder.BY_ID:
            named[table.name] = table.row_order
    tables = {table.name: replace(table, row_order=named[table.name]) for table in plan.tables.tables}
    shards = (replace(one, shard=replace(one.shard, table=tables[one.shard.table.name])) for one in plan.shards)
    listed = {name: order for name in cuts if isinstance(order := named[name], RowOrder)}
    held = replace(plan.tables, tables=tuple(tables.values()))
    return replace(plan, tables=held, shards=tuple(shards), row_orders=listed)


@dataclass(frozen=True, slots=True)
class MovedOrders:
    """Row orders of tables that a file in another folder is going to name: their files are copied beside it.

    Attributes:
        tables: The tables as they were read.
        folder: Where the files of their row orders lie.
        target: The file that will name the copies, which are named after it; None for no file.
    """

    tables: TableSet
    folder: Path
    target: Path | None

    @property
    def named(self) -> TableSet:
        """The tables with the names of the copies."""
        if self.target is None or not self._moves(self.target):
            return self.tables
        tables = list(self.tables.tables)
        for index, order in _listed(self.tables):
            copy = replace(order, file=f"{self.target.stem}.rows-{index}.parquet")
            tables[index] = replace(tables[index], row_order=copy)
        return replace(self.tables, tables=tuple(tables))

    def copy(self) -> None:
        """Writes the copies.

        Raises:
            FormatError: If a file is not there or has another digest, or a copy cannot be written.
        """
        if self.target is None or not self._moves(self.target):
            return
        for (index, order), (_, copy) in zip(_listed(self.tables), _listed(self.named), strict=True):
            content = _content(self.folder / order.file, order, f"tables[{index}].row_order")
            atomic_write(self.target.parent / copy.file, content)

    def _moves(self, target: Path) -> bool:
        return target.parent.resolve() != self.folder.resolve()


def moved_plan(plan: ShardingPlan, path: Path, target: Path) -> ShardingPlan:
    """A plan that another file is going to hold, beside which the row orders that it needs are copied.

    Args:
        plan: The plan.
        path: Its file.
        target: The other file, which the copies are named after.

    Raises:
        FormatError: As `MovedOrders.copy`.
    """
    if not plan.row_orders:
        return plan
    needed = (replace(table, row_order=plan.row_orders.get(table.name)) for table in plan.tables.tables)
    moved = MovedOrders(replace(plan.tables, tables=tuple(needed)), path.parent, target)
    moved.copy()
    copies = {moved.tables.tables[index].name: order for index, order in _listed(moved.named)}
    tables = {
        table.name: replace(table, row_order=copies.get(table.name, table.row_order)) for table in plan.tables.tables
    }
    shards = (replace(one, shard=replace(one.shard, table=tables[one.shard.table.name])) for one in plan.shards)
    held = replace(plan.tables, tables=tuple(tables.values()))
    return replace(plan, tables=held, shards=tuple(shards), row_orders=copies)


def _listed(tables: TableSet) -> list[tuple[int, RowOrder]]:
    """Numbers of the tables with files of row orders, and what is known of these."""
    orders = ((index, table.row_order) for index, table in enumerate(tables.tables))
    return [(index, order) for index, order in orders if isinstance(order, RowOrder)]


def _read(path: Path, order: RowOrder, name: str, num_rows: int) -> NDArray[np.int64]:
    field = f"row_orders.{name}"
    content = _content(path, order, field)
    try:
        ids_N = _ids(content, num_rows)
    except FormatError as error:
        raise FormatError(error.message, source=str(path), field=field) from None
    if len(ids_N) != order.num_ordered:
        raise FormatError(f"must hold {order.num_ordered} rows, has {len(ids_N)}", source=str(path), field=field)
    return ids_N


def _content(path: Path, order: RowOrder, field: str) -> bytes:
    """A file's content, of the digest that is known of it."""
    try:
        content = read_bytes(path, max_bytes=_MAX_BYTES)
    except FormatError as error:
        raise FormatError(error.message, source=str(path), field=field) from None
    if _digest(content) != order.digest:
        raise FormatError(
            f"is another file than was planned with: {_digest(content)}, not {order.digest}",
            source=str(path),
            field=field,
        )
    return content


def _ids(content: bytes, num_rows: int) -> NDArray[np.int64]:
    """The different rows of a table that a Parquet file lists."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pa.parquet.ParquetFile(io.BytesIO(content)) as parquet:
            if (number := parquet.schema_arrow.names.count(COLUMN)) > 1:
                raise FormatError(f"has {number} columns {COLUMN!r}; names must differ")
            column = parquet.read(columns=[COLUMN])[COLUMN]
    except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise FormatError(f"is no Parquet file with a column {COLUMN!r}: {shortened(str(error))}") from None
    ids_N = column.to_numpy()
    is_listed = ids_N.dtype.kind in "iu" and not column.null_count and len(ids_N) > 0
    if not is_listed or ids_N.min() < 0 or ids_N.max() >= num_rows or len(np.unique(ids_N)) < len(ids_N):
        raise FormatError(f"must hold different rows from 0 to {num_rows - 1}")
    return np.asarray(ids_N, dtype=np.int64)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
