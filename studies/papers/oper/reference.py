"""OPER beside CP-SAT on the paper's data: the solver's line of Table 3, and a method more for Fig. 10.

Shape suffixes: R ranks, N row groups. Entry [i, j] of a matrix (R, R) is what rank i fetches from rank j.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autoshard.core import TableSet, Topology
from autoshard.planners.oper import lookup_bytes, row_groups
from studies.papers.oper.equations import exchange_ms, fetch_matrix_ms
from studies.papers.oper.exact import ExactPaths, ExactTask, least_exchange, rank_exchange_ms
from studies.papers.oper.results import INFERENCE, MIB, MethodLoads, links, make_plan, rank_mib
from studies.papers.oper.tasks import dgx_a100

#: The only threshold at which the paper's solver came to an end (Table 3).
COARSE = 0.05
#: Work of CP-SAT in its own units: 20 to 40 s of one core.
_EFFORT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """OPER's heuristic and CP-SAT on groups of one threshold: exchange of the most loaded rank in MiB per step.

    Attributes:
        data: Name of the data.
        ratio: Extra memory.
        oper: OPER's, without search over thresholds.
        exact: CP-SAT's.
        bound: No parallelization of the same groups has less.
        least: Of the least loaded rank, CP-SAT's.
        cpu_s: Seconds of one core that CP-SAT took.
        loads: What CP-SAT's parallelization puts on ranks and links.
    """

    data: str
    ratio: float
    oper: float
    exact: float
    bound: float
    least: float
    cpu_s: float
    loads: MethodLoads


def against_exact(data: str, tables: TableSet, ratio: float, *, effort: float = _EFFORT) -> Reference:
    """OPER at threshold 5% on one node, and the least that CP-SAT finds for the same groups.

    Where there are copies, OPER cuts the groups that it copies further, which CP-SAT does not.
    """
    topology = dgx_a100()
    plan = make_plan(tables, topology, mode=INFERENCE, threshold=COARSE, balance=0.0, extra_memory_ratio=ratio)
    task = _task(tables, topology, ratio)
    start_s = time.process_time()
    found = least_exchange(task, effort=effort)
    cpu_s = time.process_time() - start_s
    unit_ms = float(task.fetch_ms_RR[0, 1]) * MIB / _row_bytes(tables)
    exact_R = rank_exchange_ms(found.paths_NR, task.lookups_N, task.fetch_ms_RR) / unit_ms
    return Reference(
        data=data,
        ratio=ratio,
        oper=float(rank_mib(plan).max()),
        exact=float(exact_R.max()),
        bound=found.bound_ms / unit_ms,
        least=float(exact_R.min()),
        cpu_s=cpu_s,
        loads=_loads(task, found, _row_bytes(tables)),
    )


def _task(tables: TableSet, topology: Topology, ratio: float) -> ExactTask:
    shards = row_groups(tables, COARSE)
    rows_per_byte = tables.batch_size / topology.world_size / _row_bytes(tables)
    return ExactTask(
        lookups_N=lookup_bytes(shards) * rows_per_byte,
        bytes_N=np.array([shard.storage_bytes for shard in shards], dtype=np.int64),
        capacity_R=np.array([topology.memory_of(rank).hbm for rank in range(topology.world_size)], dtype=np.int64),
        extra_bytes=int(ratio * sum(shard.storage_bytes for shard in shards)),
        fetch_ms_RR=fetch_matrix_ms(topology, _row_bytes(tables)),
    )


def _loads(task: ExactTask, found: ExactPaths, row_bytes: float) -> MethodLoads:
    """Who is read from holds a copy; lookups take place there (Eq. 1 and 2)."""
    ranks = np.arange(len(task.capacity_R))
    is_held_NR = (found.paths_NR[:, :, None] == ranks).any(axis=1)
    mib_RR = exchange_ms(found.paths_NR, task.lookups_N, np.full_like(task.fetch_ms_RR, row_bytes / MIB))
    return MethodLoads(memory_R=task.bytes_N @ is_held_NR / MIB, lookups_R=mib_RR.sum(axis=0), links=links(mib_RR))


def _row_bytes(tables: TableSet) -> float:
    """Of any row: the paper's data have tables of one width each."""
    return float(tables.tables[0].embedding_dim * tables.tables[0].dtype.num_bytes)
