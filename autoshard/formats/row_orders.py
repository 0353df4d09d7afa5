"""Files of row orders: ids of a table's rows in falling access frequency, in Parquet.

Shape suffixes: N ordered rows.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoshard.core import RowOrder, ShardingPlan
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


def _read(path: Path, order: RowOrder, name: str, num_rows: int) -> NDArray[np.int64]:
    import pyarrow as pa
    import pyarrow.parquet

    field = f"row_orders.{name}"
    try:
        content = read_bytes(path, max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        raise FormatError("is not there; it lies beside the plan", source=str(path), field=field) from None
    if _digest(content) != order.digest:
        raise FormatError(
            f"is another file than the plan was made with: {_digest(content)}, not {order.digest}",
            source=str(path),
            field=field,
        )
    try:
        ids_N = pa.parquet.read_table(io.BytesIO(content), columns=[COLUMN])[COLUMN].to_numpy()
    except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise FormatError(
            f"is no Parquet file with a column {COLUMN!r}: {shortened(str(error))}", source=str(path), field=field
        ) from None
    is_order = len(ids_N) == order.num_ordered and ids_N.dtype.kind in "iu" and len(np.unique(ids_N)) == len(ids_N)
    if not is_order or ids_N.min() < 0 or ids_N.max() >= num_rows:
        raise FormatError(
            f"must hold {order.num_ordered} different rows from 0 to {num_rows - 1}", source=str(path), field=field
        )
    return np.asarray(ids_N, dtype=np.int64)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
