"""Kinds of shards, and what a shard of each kind adds to the sums of every rank that holds it.

Shape suffixes: V kinds of shards, U new parts, H width of a code, C columns of what is moved, M memory levels, X = H +
C + M.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.core import CostModel, LocalShard, MemoryLevel, Shard, Tier
from autoshard.core.errors import ModelError
from autoshard.planners.space.options import ShardingOption, UnplacedShard, locals_of
from autoshard.planners.space.step_cost import StepPrices

FloatArray = NDArray[np.float64]

LEVELS = tuple(MemoryLevel)
#: Parts of a byte that bytes on the way are rounded to.
_GRID = 1024.0


class ShardKinds:
    """Shards of one kind add the same to the sums of every rank that holds them, so sums are made of kinds.

    Kinds may be added, none is ever removed.

    Args:
        prices: Prices steps of the task.

    Attributes:
        code_width: H.
        rows_VX: What a kind of shard adds to the sums of a rank that holds it.
        codes_VH: Of these, the codes.
        moved_VC: What is moved.
        bytes_VM: Bytes by memory level.
        twins: For each table, by name, the index of the first one that is like it in all that prices and bytes depend
            on.
    """

    def __init__(self, prices: StepPrices) -> None:
        self._prices, self._tables, self._topology = prices, prices.tables, prices.topology
        self._model = prices.costs.kernel
        some = UnplacedShard.of(Shard.whole(self._tables.tables[0]), Tier.TABLE_WISE, self._topology)
        self.code_width = self._model.encode([some.local(self._topology, self._tables.batch_size)]).shape[1]
        self._set_rows(np.zeros((0, self.code_width + len(prices.columns) + len(LEVELS))))
        # By what parts are known; None for what the model cannot price.
        self._kinds: dict[Hashable, int | None] = {}
        self.twins = self._tables.first_alike

    def split(self, sums_X: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Codes, what is moved, and bytes by memory level, of sums with X as their last axis."""
        codes_X, moved_X, bytes_X = np.split(sums_X, [self.code_width, sums_X.shape[-1] - len(LEVELS)], axis=-1)
        return codes_X, moved_X, bytes_X

    def learn(self, options: Iterable[ShardingOption]) -> None:
        """Adds the kinds of all parts of some options, with one call of the model for those that are new."""
        new: dict[Hashable, UnplacedShard] = {}
        for option in options:
            for part in option.parts:
                if (key := self._key(part)) not in self._kinds:
                    new.setdefault(key, part)
        placed = [part.placed(0, self._topology) for part in new.values()]
        locals_ = locals_of(placed, self._tables.batch_size)
        codes_UH, is_priced_U = _encoded(self._model, locals_, self.code_width)
        # Sums of such numbers are exact, so that what has left a rank leaves nothing behind.
        moved_UC = np.rint(self._prices.moved(placed) * _GRID) / _GRID
        bytes_UM = np.array([list(local.held_bytes.values()) for local in locals_], dtype=np.float64)
        rows_UX = np.column_stack([codes_UH, moved_UC, bytes_UM.reshape(-1, len(LEVELS))])
        kinds_U = len(self.rows_VX) + np.cumsum(is_priced_U) - 1
        for key, kind, is_priced in zip(new, kinds_U.tolist(), is_priced_U.tolist(), strict=True):
            self._kinds[key] = kind if is_priced else None
        self._set_rows(np.concatenate([self.rows_VX, rows_UX[is_priced_U]]))

    def _set_rows(self, rows_VX: FloatArray) -> None:
        self.rows_VX = rows_VX
        self.codes_VH, self.moved_VC, self.bytes_VM = self.split(rows_VX)

    def of_parts(self, parts: Sequence[UnplacedShard]) -> int | None:
        """The kind of parts that are held together; None if one has not been learned, or the model cannot price it."""
        kinds = [kind for part in parts if (kind := self._kinds.get(self._key(part))) is not None]
        if len(kinds) < len(parts):
            return None
        if len(kinds) == 1:
            return kinds[0]
        if (key := tuple(kinds)) not in self._kinds:
            self._kinds[key] = len(self.rows_VX)
            self._set_rows(np.concatenate([self.rows_VX, self.rows_VX[kinds].sum(axis=0, keepdims=True)]))
        return self._kinds[key]

    def _key(self, part: UnplacedShard) -> Hashable:
        """Parts with the same key are of one kind."""
        shard = part.shard
        rows = (shard.rows.start, shard.rows.stop, shard.rows.by)
        held = (part.tier, part.exchange, part.collective, part.grad_sync, part.memory)
        return (self.twins[shard.table.name], rows, shard.embedding_dim, *held)


def _encoded(model: CostModel, locals_: Sequence[LocalShard], code_width: int) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Codes of shards, shape (U, H), and whether the model can price each, (U,)."""
    codes_UH, is_priced_U = np.zeros((len(locals_), code_width)), np.ones(len(locals_), dtype=np.bool_)
    if not locals_:
        return codes_UH, is_priced_U
    try:
        codes_UH[:] = model.encode(locals_)
    except ModelError:
        by_kind: dict[Hashable, list[int]] = {}
        for index, local in enumerate(locals_):
            by_kind.setdefault((local.kernel_kind, local.level), []).append(index)
        for indices in by_kind.values():
            try:
                codes_UH[indices] = model.encode([locals_[index] for index in indices])
            except ModelError:
                is_priced_U[indices] = False
    return codes_UH, is_priced_U
