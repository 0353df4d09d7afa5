"""OPER's equations: the matrix L, what a parallelization costs (Eq. 1 to 3), and when copies pay (Eq. 4 and 5).

A parallelization is given by `paths_NR`: rank r reads group n from rank `paths_NR[n, r]`. That is OPER's P_n, whose
row r has its only 1 in that column.

Shape suffixes: N row groups, R ranks. Entry [i, j] of a matrix (R, R) is about rank i fetching from rank j.
"""

from __future__ import annotations

import math

import numpy as np

from autoshard.core import TableSet, Topology
from autoshard.core.accepted import ABOVE_0
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.costs import MsArray
from autoshard.evaluation.communication import link_levels
from autoshard.evaluation.device_memory import device_memory

PathArray = IntArray


def mean_row_bytes(tables: TableSet) -> float:
    """Bytes of weights that a lookup reads on average: the S of the row that L is for."""
    lookups_T = [table.pooling_factor for table in tables.tables]
    bytes_T = [table.embedding_dim * table.dtype.num_bytes for table in tables.tables]
    return float(np.average(bytes_T, weights=lookups_T if any(lookups_T) else None))


def fetch_matrix_ms(topology: Topology, row_bytes: float) -> MsArray:
    """L: milliseconds in which one rank fetches one row from another, or looks it up in its own memory.

    Args:
        topology: Its `fetch_ms` is the answer if it has one. Else a row's bytes go over the all-to-all bandwidth of
            the innermost level that holds both ranks, without latency, since rows travel together; on the diagonal
            over the device's bandwidth for gathered rows.
        row_bytes: Weights of an average row.

    Source:
        OPER Sec. 3.2, where L is profiled.
    """
    if topology.fetch_ms is not None:
        return np.array(topology.fetch_ms, dtype=np.float64)
    local = device_memory(topology.device, topology.memory_bandwidth.hbm).gather_bytes_per_s
    # link_levels has -1 on the diagonal, which is the last entry here.
    bytes_per_s = np.array([*(level.all_to_all.bytes_per_s for level in topology.levels), local])
    return np.asarray(row_bytes / bytes_per_s[link_levels(topology)] * 1e3)


def held_bytes(paths_NR: PathArray, bytes_N: IntArray, num_ranks: int) -> IntArray:
    """Bytes that each rank holds, shape (R,): a copy of every group that some rank reads there.

    Source:
        OPER Eq. 1.
    """
    held_NR = np.zeros((len(bytes_N), num_ranks), dtype=np.bool_)
    held_NR[np.arange(len(bytes_N))[:, None], paths_NR] = True
    return np.asarray(bytes_N @ held_NR)


def lookup_ms(paths_NR: PathArray, rows_N: FloatArray, fetch_ms_RR: MsArray) -> MsArray:
    """Milliseconds in which each rank looks up what is read there, by itself and by others, shape (R,).

    Args:
        paths_NR: The parallelization.
        rows_N: Lookups of each group per rank and step (A), in rows of average size: S A over the average S, which
            `fetch_ms_RR` is for.
        fetch_ms_RR: L.

    Source:
        OPER Eq. 2.
    """
    rows_R = np.bincount(paths_NR.ravel(), np.repeat(rows_N, paths_NR.shape[1]), minlength=len(fetch_ms_RR))
    return np.asarray(rows_R * fetch_ms_RR.diagonal())


def exchange_ms(paths_NR: PathArray, rows_N: FloatArray, fetch_ms_RR: MsArray) -> MsArray:
    """Milliseconds in which rank i fetches what it reads from rank j, shape (R, R), arguments as `lookup_ms`.

    Source:
        OPER Eq. 3, with L[i][j] where it prints L[j][j]; the diagonal is what a rank reads from itself.
    """
    num_ranks = len(fetch_ms_RR)
    links_NR = np.arange(num_ranks) * num_ranks + paths_NR
    rows = np.bincount(links_NR.ravel(), np.repeat(rows_N, num_ranks), minlength=num_ranks**2)
    return np.asarray(rows.reshape(num_ranks, num_ranks) * fetch_ms_RR)


def duplication_frequency(p2p_bytes_per_s: float, all_reduce_bytes_per_s: float, batch_per_rank: float) -> float:
    """Lookups per sample above which a row on every rank travels less than a row on one.

    Args:
        p2p_bytes_per_s: Bandwidth at which ranks fetch rows from each other.
        all_reduce_bytes_per_s: Bandwidth of a ring all-reduce, by the bytes that a rank sends: 2 (R - 1) / R times
            those that are reduced.
        batch_per_rank: Samples per rank and step.

    Raises:
        InvalidOptionError: If an argument is not positive.

    Source:
        OPER Eq. 4 and 5: BW_p2p / (batch * BW_all_reduce), where the batch is that of one rank.
    """
    ABOVE_0.check(p2p_bytes_per_s, "p2p_bytes_per_s")
    ABOVE_0.check(all_reduce_bytes_per_s, "all_reduce_bytes_per_s")
    ABOVE_0.check(batch_per_rank, "batch_per_rank")
    return p2p_bytes_per_s / (batch_per_rank * all_reduce_bytes_per_s)


def topology_frequency(topology: Topology, fetch_ms_RR: MsArray, row_bytes: float, batch_per_rank: float) -> float:
    """`duplication_frequency` of a topology of two or more ranks; infinite where fetching is free.

    Ranks fetch at the mean of L over pairs of ranks; the all-reduce is the outermost level's.
    """
    num_ranks = topology.world_size
    mean_ms = float(fetch_ms_RR[~np.eye(num_ranks, dtype=np.bool_)].mean())
    if mean_ms <= 0:
        return math.inf
    # A level's bandwidth counts the bytes that are reduced, Eq. 5 those that a ring sends for them.
    ring = 2 * (num_ranks - 1) / num_ranks * topology.levels[-1].all_reduce.bytes_per_s
    return duplication_frequency(row_bytes / (mean_ms * 1e-3), ring, batch_per_rank)
