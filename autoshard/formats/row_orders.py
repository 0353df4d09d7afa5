"""Files of row orders: ids of a table's rows in falling access frequency, in Parquet.

Shape suffixes: N ordered rows.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoshard.core import RowOrder, ShardingPlan, TableSet
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened
from autoshard.formats.files import atomic_write, read_bytes

#: The column of the ids.
COLUMN = "row"
#: 8 bytes for each of a billion rows.
_MAX_BYTES = 8 << 30


def write_row_order(path: str | Path, ids_N: NDArray[np.int64]) -> RowOrder:
    """Writes a file of row ids, and returns what a plan says of it.

    Args:
        path: The file, beside the plan.
        ids_N: Row ids in falling access frequency.
    """
    import pyarrow as pa
    import pyarrow.parquet

    content = io.BytesIO()
    pa.parquet.write_table(pa.table({COLUMN: np.asarray(ids_N, dtype=np.int64)}), content)
    atomic_write(path, content.getvalue())
    return RowOrder(file=Path(path).name, digest=_digest(content.getvalue()), num_ordered=len(ids_N))


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
        column = pa.parquet.read_table(io.BytesIO(content), columns=[COLUMN])[COLUMN]
    except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise FormatError(f"is no Parquet file with a column {COLUMN!r}: {shortened(str(error))}") from None
    ids_N = column.to_numpy()
    is_listed = ids_N.dtype.kind in "iu" and not column.null_count and len(ids_N) > 0
    if not is_listed or ids_N.min() < 0 or ids_N.max() >= num_rows or len(np.unique(ids_N)) < len(ids_N):
        raise FormatError(f"must hold different rows from 0 to {num_rows - 1}")
    return np.asarray(ids_N, dtype=np.int64)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
