"""How long a running job takes to go over to another plan, and to save and load its tables: `python -m studies adopt`.

Processes on a cluster of network namespaces adopt plans of the same tables, one after the other, and the time is set
against what the bytes that have to cross the links take at the links' rate. Two processes of this machine save and load
the same tables. TorchRec moves its tables on the same cluster, where it can.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final

import numpy as np
import torch
import torch.distributed as dist
import typer

from autoshard.commands.options import command_options
from autoshard.core import (
    AccessProfile,
    EmbeddingTable,
    Feature,
    GradSync,
    Optimizer,
    PlacedShard,
    RowRange,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
    Topology,
)
from autoshard.formats import read_plan
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.holdings import Holding, holdings_of
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.engine.rows.places import located
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.cluster.network import ClusterSpec, open_cluster
from studies.frame import OutputOptions, StudyResult
from studies.frame.jobs import do_job, run_job

SCHEMA: Final = "autoshard.adopt/1"
_DIM, _BATCH = 64, 64
#: Plans in the order in which they are adopted, each after the one before.
_CHAIN: Final = (
    "table-wise",
    "table-wise, elsewhere",
    "row-wise",
    "column-wise",
    "row-wise",
    "a copy per node",
    "table-wise",
)
_SETTINGS: Final = FusedSettings(learning_rate=0.05)


@command_options()
class AdoptOptions:
    """Options of the study `adopt`."""

    mib: Annotated[int, typer.Option(min=4, help="Size of all tables in MiB, weights alone.")] = 1024
    num_nodes: Annotated[int, typer.Option(min=2, help="Nodes of the cluster.")] = 2
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Processes of each node.")] = 2
    mbit_per_s: Annotated[float, typer.Option(min=1, help="Rate of a node's link.")] = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """One plan after another.

    Attributes:
        before: Name of the plan before.
        after: Name of the plan that follows.
        link_bytes: Bytes that the busiest direction of a node's link has to carry.
        needed_s: What they take at the link's rate.
        seconds: What adopting took, on the slowest process.
        sent_bytes: Bytes that all processes sent, also within nodes.
    """

    before: str
    after: str
    link_bytes: int
    needed_s: float
    seconds: float
    sent_bytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table of results."""
        ratio = f"{self.seconds / self.needed_s:.2f}" if self.needed_s else "-"
        sizes = (f"{size / 2**20:.0f}" for size in (self.link_bytes, self.sent_bytes))
        return (self.before, self.after, *sizes, f"{self.needed_s:.2f}", f"{self.seconds:.2f}", ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Tables saved into a state dict and loaded from one.

    Attributes:
        save_s: Seconds of `state_dict`, on the slowest process.
        load_s: Those of `load_state_dict`.
        extra_save_bytes: Peak memory beside tables and state dict, on the process that has most.
        extra_load_bytes: The same of loading.
    """

    save_s: float
    load_s: float
    extra_save_bytes: int
    extra_load_bytes: int


def plans(mib: int, topology: Topology, ranks_per_node: int) -> dict[str, ShardingPlan]:
    """Plans of the same tables by name, one table for each rank."""
    ranks = range(topology.world_size)
    num_rows = mib * 2**20 // (4 * _DIM * len(ranks))
    tables = tuple(
        EmbeddingTable(
            name=f"t{rank}",
            num_embeddings=num_rows,
            embedding_dim=_DIM,
            optimizer=Optimizer.ROWWISE_ADAGRAD,
            features=(Feature(name=f"f{rank}", pooling_factor=1.0),),
            access=AccessProfile.zipf(num_rows, 1.0),
        )
        for rank in ranks
    )
    everyone = (tuple(ranks),)
    nodes = tuple(tuple(ranks[start : start + ranks_per_node]) for start in ranks[::ranks_per_node])
    bounds = np.linspace(0, _DIM // 4, len(ranks) + 1).astype(int) * 4
    columns = list(pairwise(bounds.tolist()))
    shards = {
        "table-wise": [PlacedShard.table_wise(Shard.whole(one), rank) for rank, one in enumerate(tables)],
        "table-wise, elsewhere": [
            PlacedShard.table_wise(Shard.whole(one), (rank + ranks_per_node) % len(ranks))
            for rank, one in enumerate(tables)
        ],
        "row-wise": [PlacedShard(shard=Shard.whole(one), tier=Tier.ROW_WISE, replicas=everyone) for one in tables],
        "column-wise": [
            PlacedShard.table_wise(Shard(table=one, rows=RowRange(start=0, stop=num_rows), columns=of), rank)
            for one in tables
            for rank, of in enumerate(columns)
        ],
        "a copy per node": [
            PlacedShard(shard=Shard.whole(one), tier=Tier.FLEX, replicas=nodes, grad_sync=GradSync.SPARSE)
            for one in tables
        ],
    }
    table_set = TableSet(batch_size=_BATCH * len(ranks), tables=tables)
    return {
        name: ShardingPlan(tables=table_set, topology=topology, shards=tuple(placed)) for name, placed in shards.items()
    }


def link_bytes(before: ShardingPlan, after: ShardingPlan, ranks_per_node: int) -> int:
    """Bytes that the busiest direction of a node's link carries if each rank gets what it lacks once.

    A rank lacks what it does not hold, in rows and columns. What another rank of its node has does not cross a link;
    what several other nodes have comes from all of them alike.
    """
    num_ranks = before.topology.world_size
    num_nodes = num_ranks // ranks_per_node
    carried_ND = np.zeros((num_nodes, 2))
    given, taken = (_owned(plan, num_ranks) for plan in (before, after))
    for table in range(len(before.tables.tables)):
        bounds = sorted({bound for of in (given, taken) for one in of[table] for bound in one[0]})
        for first, last in pairwise(bounds):
            holders_NR, wanted_NR = (
                np.any([mask_NR for columns, mask_NR in of[table] if columns[0] <= first < columns[1]], axis=0)
                for of in (given, taken)
            )
            # Moments of row-wise AdaGrad travel with each part of the columns.
            row_bytes = 4 * (last - first + 1)
            lacking_NR = wanted_NR & ~holders_NR
            nodes_NK = holders_NR.reshape(len(holders_NR), num_nodes, ranks_per_node).any(axis=2)
            for rank in range(num_ranks):
                node = rank // ranks_per_node
                crossing_N = lacking_NR[:, rank] & ~nodes_NK[:, node]
                carried_ND[node, 0] += row_bytes * crossing_N.sum()
                shares_NK = nodes_NK[crossing_N] / nodes_NK[crossing_N].sum(axis=1, keepdims=True)
                carried_ND[:, 1] += row_bytes * shares_NK.sum(axis=0)
    return round(carried_ND.max())


def _owned(plan: ShardingPlan, num_ranks: int) -> dict[int, list[tuple[tuple[int, int], np.ndarray]]]:
    """By table, columns of each holding and which ranks have which rows, (N, R)."""
    found: dict[int, list[tuple[tuple[int, int], np.ndarray]]] = {}
    for holding in holdings_of(plan, num_ranks):
        found.setdefault(holding.table, []).append((holding.columns, _mask(holding, num_ranks)))
    return found


def _mask(holding: Holding, num_ranks: int) -> np.ndarray:
    mask_NR = np.zeros((holding.of.num_embeddings, num_ranks), dtype=bool)
    for held in holding.ranges:
        part_N, _ = located(held, torch.arange(holding.of.num_embeddings))
        for replica in held.replicas:
            for part, rank in enumerate(replica):
                mask_NR[:, rank] |= (part_N == part).numpy()
    return mask_NR


def adopted(job: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Adopts the plans of a job, one after the other: seconds of the slowest process, and bytes of all, of each."""
    first, *rest = (read_plan(path) for path in job["plan_paths"])
    embeddings = ShardedEmbeddings(first, _SETTINGS)
    found = []
    for plan in rest:
        sent_bytes = [0]

        def adopt(plan: ShardingPlan = plan, sent_bytes: list[int] = sent_bytes) -> None:
            sent_bytes[0] = embeddings.adopt(plan)

        seconds = _timed(adopt)
        total = torch.tensor(sent_bytes)
        dist.all_reduce(total)
        found.append((seconds, int(total)))
    embeddings.close()
    return found


def saved(job: Mapping[str, Any]) -> dict[str, float]:
    """Saves and loads the tables of a job's plan."""
    embeddings = ShardedEmbeddings(read_plan(job["plan_paths"][0]), _SETTINGS)
    state: dict[str, Any] = {}
    before = _peak_bytes()
    save_s = _timed(lambda: state.update(embeddings.state_dict()))
    held = sum(one.to_local().nbytes for key, one in state.items() if hasattr(one, "to_local"))
    after_save = _peak_bytes()
    load_s = _timed(lambda: embeddings.load_state_dict(state))
    extra = torch.tensor([after_save - before - held, _peak_bytes() - max(after_save, before)])
    dist.all_reduce(extra, op=dist.ReduceOp.MAX)
    embeddings.close()
    return {
        "save_s": save_s,
        "load_s": load_s,
        "extra_save_bytes": int(extra[0]),
        "extra_load_bytes": int(extra[1]),
    }


def _timed(act: Callable[[], object]) -> float:
    """Seconds that something takes on the slowest process."""
    dist.barrier()
    begun = time.perf_counter()
    act()
    seconds = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _peak_bytes() -> int:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(options: AdoptOptions, output: OutputOptions) -> None:
    """Measures how long a running job takes to go over to another plan.

    Example:
        python -m studies adopt --mbit-per-s 1000
    """
    spec = ClusterSpec(
        num_nodes=options.num_nodes, ranks_per_node=options.ranks_per_node, bits_per_s=options.mbit_per_s * 1e6
    )
    made = plans(options.mib, spec.topology(), options.ranks_per_node)
    chain = [made[name] for name in _CHAIN]
    with open_cluster(spec) as cluster:
        measured = run_job(_MODULE, {"measure": "adopt"}, chain, spec.num_ranks, launcher=cluster)
    adoptions = []
    for (before, after), (seconds, sent_bytes) in zip(pairwise(_CHAIN), measured, strict=True):
        needed = link_bytes(made[before], made[after], options.ranks_per_node)
        adoptions.append(
            Adoption(
                before=before,
                after=after,
                link_bytes=needed,
                needed_s=8 * needed / spec.bits_per_s,
                seconds=seconds,
                sent_bytes=sent_bytes,
            )
        )
    here = plans(options.mib, local_topology("cpu", 2, options.mib << 21), 1)
    savings = {
        name: Saving(**run_job(_MODULE, {"measure": "save"}, [here[name]], 2))
        for name in ("table-wise", "row-wise", "column-wise")
    }
    output.write(_result(options, adoptions, savings))


def _result(options: AdoptOptions, adoptions: Sequence[Adoption], savings: Mapping[str, Saving]) -> StudyResult:
    cluster = f"{options.num_nodes} nodes of {options.ranks_per_node} ranks, links of {options.mbit_per_s:g} Mbit/s"
    tables = (
        Table(
            columns=("from", "to", "MiB over a link", "MiB sent", "link needs s", "took s", "ratio"),
            rows=tuple(one.cells for one in adoptions),
            caption=f"Plans adopted one after the other: {options.mib} MiB of tables on {cluster}",
        ),
        Table(
            columns=("plan", "state_dict s", "extra MiB", "load_state_dict s", "extra MiB of loading"),
            rows=tuple(
                (
                    name,
                    f"{one.save_s:.2f}",
                    f"{one.extra_save_bytes / 2**20:.0f}",
                    f"{one.load_s:.2f}",
                    f"{one.extra_load_bytes / 2**20:.0f}",
                )
                for name, one in savings.items()
            ),
            caption=f"{options.mib} MiB of tables saved and loaded on 2 processes of this machine",
        ),
    )
    document = {
        "schema": SCHEMA,
        "mib": options.mib,
        "num_nodes": options.num_nodes,
        "ranks_per_node": options.ranks_per_node,
        "mbit_per_s": options.mbit_per_s,
        "adoptions": [_fields(one) for one in adoptions],
        "savings": {name: _fields(one) for name, one in savings.items()},
    }
    return StudyResult(name="adopt", document=document, tables=tables)


def _fields(one: Adoption | Saving) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


_MODULE: Final = "studies.runtime.adoption"
_MEASURES: Final = {"adopt": adopted, "save": saved}

if __name__ == "__main__":
    do_job(lambda job: _MEASURES[job["measure"]](job))
