"""Planning tasks that are small enough for processes of one machine."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import partial

import numpy as np

from autoshard.core import AccessProfile, DenseLayers, EmbeddingTable, Pooling, TableSet
from autoshard.formats import load_tables

#: Pool of the tables. Rows are divided, so that eight processes hold 80 tables and some copies of them.
POOL, SCALE = "metasyn", 256
_MOST_TABLES, _FEWEST_TABLES = 80, 20
#: Zipf exponents of skewed tables.
_ALPHAS = (0.8, 1.3)
#: Share of tables that are sequences in tasks that have some.
_SEQUENCE_SHARE = 0.3
#: Sequences send a row per lookup, all else a sum per bag, so that their batches are smaller.
_BATCHES, _SEQUENCE_BATCHES = (256, 512, 1024), (64, 128)
_DENSE = DenseLayers(num_dense_features=13, bottom_mlp=(64, 16), top_mlp=(64, 1))


class TaskKind(StrEnum):
    """What the ids of a task's tables look like."""

    UNIFORM = "uniform"
    SKEWED = "skewed"
    SEQUENCES = "sequences"
    """Skewed, and some tables are sequences."""


def drawn_task(number: int, seed: int, *, most_tables: int = _MOST_TABLES) -> tuple[TaskKind, TableSet]:
    """One task: kinds take turns, all else is random.

    Args:
        number: Of the task.
        seed: Same seed, same tasks.
        most_tables: Most tables of a task, at least 20.
    """
    rng = np.random.default_rng([seed, number])
    kind = tuple(TaskKind)[number % len(TaskKind)]
    num_tables = round(float(np.exp(rng.uniform(np.log(_FEWEST_TABLES), np.log(most_tables)))))
    batch_size = int(rng.choice(_SEQUENCE_BATCHES if kind is TaskKind.SEQUENCES else _BATCHES))
    pool = load_tables(POOL).scaled(SCALE).sample(num_tables, int(rng.integers(2**31)))
    tables = tuple(map(partial(_as_kind, kind, rng), pool.tables))
    return kind, replace(pool, tables=tables, batch_size=batch_size, dense=_DENSE)


def _as_kind(kind: TaskKind, rng: np.random.Generator, table: EmbeddingTable) -> EmbeddingTable:
    if kind is TaskKind.UNIFORM:
        return replace(table, access=AccessProfile.uniform(table.num_embeddings))
    access = AccessProfile.zipf(table.num_embeddings, float(rng.uniform(*_ALPHAS)))
    is_sequence = kind is TaskKind.SEQUENCES and rng.random() < _SEQUENCE_SHARE
    return replace(table, access=access, pooling=Pooling.SEQUENCE if is_sequence else table.pooling)
