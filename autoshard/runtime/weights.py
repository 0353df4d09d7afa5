"""Initial weights of tables: the same for every plan, whoever holds the rows.

Shape suffixes: N rows, D embedding dim.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch

from autoshard.core import EmbeddingTable

#: Rows that are drawn at once. Part of the meaning of a seed: another value gives other weights.
CHUNK_ROWS = 16_384


def initial_chunks(table: EmbeddingTable, seed: int) -> Iterator[tuple[int, torch.Tensor]]:
    """A table's initial weights, piece by piece.

    Each chunk of rows has a generator of its own, keyed by seed, table name and chunk, so that any holder of any
    rows draws the same numbers without drawing the others'.

    Args:
        table: The table.
        seed: Same seed, same weights.

    Yields:
        First row of the chunk, and its weights, fp32 of shape (N, D), uniform in [-1/sqrt(rows), 1/sqrt(rows)).
    """
    for start in range(0, table.num_embeddings, CHUNK_ROWS):
        yield start, initial_chunk(table, start, seed)


def initial_chunk(table: EmbeddingTable, start: int, seed: int) -> torch.Tensor:
    """One piece of a table's initial weights, see `initial_chunks`.

    Args:
        table: The table.
        start: First row of the chunk, a multiple of `CHUNK_ROWS`.
        seed: Same seed, same weights.
    """
    bound = 1 / math.sqrt(table.num_embeddings)
    rows = min(CHUNK_ROWS, table.num_embeddings - start)
    digest = hashlib.sha256(f"{seed}/{start // CHUNK_ROWS}/{table.name}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    drawn_ND = rng.random((rows, table.embedding_dim), dtype=np.float32)
    return torch.from_numpy(drawn_ND).mul_(2 * bound).sub_(bound)


def initialise(weights_ND: torch.Tensor, table: EmbeddingTable, seed: int) -> None:
    """Writes a table's initial weights into a tensor of its shape, whatever its dtype and device."""
    with torch.no_grad():
        for start, chunk_ND in initial_chunks(table, seed):
            weights_ND[start : start + len(chunk_ND)].copy_(chunk_ND)
