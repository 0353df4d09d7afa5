"""OPER's equations, and the parallelization of least exchange by OR-tools' CP-SAT, on the paper's data too.

The matrix L, what a parallelization costs (Eq. 1 to 3), and when copies pay (Eq. 4 and 5). A parallelization is given
by `paths_NR`: rank r reads group n from rank `paths_NR[n, r]`. That is OPER's P_n, whose row r has its only 1 in that
column.

Shape suffixes: N row groups, R ranks. Entry [i, j] of a matrix (R, R) is about rank i fetching from rank j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.core import TableSet, Topology
from autoshard.core.accepted import ABOVE_0
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.communication import link_levels
from autoshard.evaluation.device_memory import device_memory
from autoshard.planners.exact.cp_sat import load_cp_model

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


#: Costs in the whole numbers that CP-SAT works with: all lookups over the slowest link cost so many.
_RESOLUTION = 10_000_000
_NUM_SEARCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactTask:
    """Groups to be placed and copied.

    Attributes:
        lookups_N: Lookups of each group per rank and step (A), in rows of average size.
        bytes_N: Bytes of each group.
        capacity_R: Bytes that each rank may hold, copies included.
        extra_bytes: Bytes of all copies beyond the first of each group.
        fetch_ms_RR: L.
    """

    lookups_N: FloatArray
    bytes_N: IntArray
    capacity_R: IntArray
    extra_bytes: int
    fetch_ms_RR: MsArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactPaths:
    """What CP-SAT found.

    Attributes:
        paths_NR: The rank from which each rank reads each group.
        max_ms: The most loaded rank's exchange.
        bound_ms: No parallelization of these groups has less.
    """

    paths_NR: PathArray
    max_ms: float
    bound_ms: float


def rank_exchange_ms(paths_NR: PathArray, lookups_N: FloatArray, fetch_ms_RR: MsArray) -> MsArray:
    """Cost of each rank's exchange, shape (R,): of what it fetches or of what it serves, whichever is more (Eq. 3)."""
    links_RR = exchange_ms(paths_NR, lookups_N, fetch_ms_RR)
    np.fill_diagonal(links_RR, 0.0)
    return np.asarray(np.maximum(links_RR.sum(axis=0), links_RR.sum(axis=1)))


def least_exchange(task: ExactTask, *, effort: float = 60.0, seed: int = 0) -> ExactPaths:
    """The paths whose most loaded rank has the least exchange, as far as the effort reaches.

    Args:
        task: What to place.
        effort: Work in CP-SAT's deterministic units, about seconds on one core.
        seed: Seed of the solver.

    Raises:
        ModelError: If OR-tools is not installed.
        InvalidOptionError: If the effort is not positive.
        InfeasiblePlanError: If nothing was found that fits.

    Source:
        OPER Sec. 3.2 and 3.3: Eq. 1 to 3 as a mixed-integer linear problem, solved with Gurobi in Table 3.
    """
    ABOVE_0.check(effort, "effort")
    cp_model = load_cp_model()
    model = cp_model.CpModel()
    reads = _add_paths(model, task)
    unit_ms = _minimise(model, reads, task)
    solver = cp_model.CpSolver()
    # Several searches take turns on one core: one alone finds little where ranks are alike.
    solver.parameters.num_workers = _NUM_SEARCHES
    solver.parameters.interleave_search = True
    solver.parameters.random_seed = seed % (1 << 31)
    solver.parameters.max_deterministic_time = effort
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InfeasiblePlanError("no parallelization within the memory limits was found in time")
    paths_NR = np.array(
        [[list(map(solver.boolean_value, reads_R)).index(True) for reads_R in reads_RR] for reads_RR in reads]
    )
    found_ms_R = rank_exchange_ms(paths_NR, task.lookups_N, task.fetch_ms_RR)
    bound_ms = float(solver.best_objective_bound) * unit_ms
    return ExactPaths(paths_NR=paths_NR, max_ms=float(found_ms_R.max()), bound_ms=bound_ms)


def _add_paths(model: Any, task: ExactTask) -> list[list[list[Any]]]:
    """Adds the binary variables P_n[i][j], of which a rank has one for each group, and the limits of memory."""
    groups, ranks = range(len(task.lookups_N)), range(len(task.capacity_R))
    holds = [[model.new_bool_var("") for _ in ranks] for _ in groups]
    # A rank that holds a group reads its own; without copies all read the one that holds it.
    is_single = task.extra_bytes < int(task.bytes_N.min())
    reads = [
        [[holds_R[j] if i == j or is_single else model.new_bool_var("") for j in ranks] for i in ranks]
        for holds_R in holds
    ]
    for holds_R, reads_RR in zip(holds, reads, strict=True):
        model.add_bool_or(holds_R)
        for reads_R in reads_RR:
            model.add_exactly_one(reads_R)
            for read, held in zip(reads_R, holds_R, strict=True):
                if read is not held:
                    model.add_implication(read, held)
    # Bytes are large numbers: in units of which all bytes are so many, rounded up, they are exact enough.
    unit = max(1, int(task.bytes_N.sum()) // _RESOLUTION)
    bytes_N = [-(-int(size) // unit) for size in task.bytes_N]
    held_bytes = [sum(size * held[rank] for size, held in zip(bytes_N, holds, strict=True)) for rank in ranks]
    for held, capacity in zip(held_bytes, task.capacity_R.tolist(), strict=True):
        if capacity < int(task.bytes_N.sum()):
            model.add(held <= capacity // unit)
    model.add(sum(held_bytes) <= sum(bytes_N) + task.extra_bytes // unit)
    return reads


def _minimise(model: Any, reads: list[list[list[Any]]], task: ExactTask) -> float:
    """Asks for the least exchange of the most loaded rank; the milliseconds that one unit of it stands for."""
    links_RR = task.fetch_ms_RR.copy()
    np.fill_diagonal(links_RR, 0.0)
    unit_ms = max(float(task.lookups_N.sum() * links_RR.sum(axis=0).max()), 1e-12) / _RESOLUTION
    costs_NRR = np.rint(task.lookups_N[:, None, None] * links_RR / unit_ms).astype(np.int64).tolist()
    most = model.new_int_var(0, 2 * _RESOLUTION, "")
    ranks = range(len(links_RR))
    for rank in ranks:
        others = [other for other in ranks if other != rank]
        for pairs in ([(rank, other) for other in others], [(other, rank) for other in others]):
            both = list(zip(reads, costs_NRR, strict=True))
            model.add(sum(cost_RR[i][j] * reads_RR[i][j] for reads_RR, cost_RR in both for i, j in pairs) <= most)
    model.minimize(most)
    return unit_ms
