"""OPER's data sets and machines (its Table 1 and Sec. 6.1), as far as they are published.

Shape suffixes: R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.core import AccessProfile, EmbeddingTable, Level, Link, MemoryBytes, TableSet, Topology
from autoshard.formats import load_tables, load_topology

#: Samples per GPU and step. Not in the paper; with these, Table 2's first line comes out to its last digit.
BATCH_PER_RANK = 16_384
#: Zipf exponent of all tables.
ALPHA = 1.05
#: Of Table 1.
AVAZU_ROWS, AVAZU_DIM = 8_900_000, 16
TERABYTE_ROWS, TERABYTE_DIM = 242_500_000, 64
#: Distinct values of Avazu's columns, as hpcaitech/CachedEmbedding has them (recsys/datasets/avazu.py). Of its 21
#: columns the first is left out, of 7 values: the paper counts 20.
_AVAZU_VALUES = (
    *(7, 4737, 7745, 26, 8552, 559, 36, 2686408, 6729486, 8251),
    *(5, 4, 2626, 8, 9, 435, 4, 68, 172, 60),
)
LARGE_ROWS = 2_500_000_000
#: How much longer a row takes from another node than from a GPU of the own one (Fig. 8).
LINK_GAP = 4.21
#: Cost of a row in the own memory over one from a GPU of the own node: NVLink's 300 GB/s and HBM's 1,555 GB/s.
_OWN_MEMORY = 300 / 1555
_A100_BYTES = 40 << 30


def dgx_a100() -> Topology:
    """One node of 8 A100 (Sec. 6.1)."""
    return load_topology("a100-8")


def two_nodes() -> Topology:
    """Fig. 8's cluster: 2 nodes of 4 GPUs whose links differ 4.21 times."""
    node_R = np.arange(8) // 4
    cost_RR = np.where(node_R[:, None] == node_R, 1.0, LINK_GAP)
    np.fill_diagonal(cost_RR, _OWN_MEMORY)
    row_ms = 64 / 300e9 * 1e3
    return replace(_cluster(2), fetch_ms=tuple(tuple(row) for row in (cost_RR * row_ms).tolist()))


def eight_nodes() -> Topology:
    """32 A100 in nodes of 4, for the larger synthetic data."""
    return _cluster(8)


def _cluster(num_nodes: int) -> Topology:
    near, far = Link(bytes_per_s=3e11), Link(bytes_per_s=3e11 / LINK_GAP)
    return Topology(
        world_size=4 * num_nodes,
        device="a100",
        memory_bytes=MemoryBytes(hbm=_A100_BYTES),
        levels=(
            Level(name="node", size=4, all_to_all=near, all_reduce=near),
            Level(name="cluster", size=4 * num_nodes, all_to_all=far, all_reduce=far),
        ),
    )


def kaggle(num_ranks: int = 8) -> TableSet:
    """Criteo Kaggle: 26 tables of dimension 16."""
    return replace(load_tables("criteo-kaggle"), batch_size=BATCH_PER_RANK * num_ranks)


def avazu(num_ranks: int = 8) -> TableSet:
    """Avazu: 8.9 million rows of dimension 16 in 20 tables, in the proportions of its columns' distinct values."""
    scale = AVAZU_ROWS / sum(_AVAZU_VALUES)
    kinds = replace(load_tables("criteo-kaggle").tables[0], embedding_dim=AVAZU_DIM)
    tables = []
    for index, num_values in enumerate(_AVAZU_VALUES):
        feature = replace(kinds.features[0], name=f"feature_{index}")
        table = replace(kinds, name=f"avazu_{index}", features=(feature,))
        tables.append(_resized(table, max(1, round(scale * num_values))))
    return TableSet(batch_size=BATCH_PER_RANK * num_ranks, tables=tuple(tables))


def terabyte(num_ranks: int = 8) -> TableSet:
    """Criteo Terabyte: 242.5 million rows of dimension 64, in the proportions of the published sizes of its tables."""
    return _in_proportion(TERABYTE_ROWS, num_ranks)


def syn_large(num_ranks: int = 32) -> TableSet:
    """As large as Syn_Large: 2.5 billion rows of dimension 64, in the same proportions."""
    return _in_proportion(LARGE_ROWS, num_ranks)


def _in_proportion(num_rows: int, num_ranks: int) -> TableSet:
    published = load_tables("criteo-1tb")
    scale = num_rows / sum(table.num_embeddings for table in published.tables)
    wide = [replace(table, embedding_dim=TERABYTE_DIM) for table in published.tables]
    tables = tuple(_resized(table, max(1, round(scale * table.num_embeddings))) for table in wide)
    return TableSet(batch_size=BATCH_PER_RANK * num_ranks, tables=tables)


def _resized(table: EmbeddingTable, num_rows: int) -> EmbeddingTable:
    access = AccessProfile.zipf(num_rows, ALPHA)
    return replace(table, num_embeddings=num_rows, access=access)
