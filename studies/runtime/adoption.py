"""How long a running job takes to go over to another plan, and to save and load its tables: `python -m studies adopt`.

Processes on a cluster of network namespaces adopt plans of the same tables, one after the other, and the time is set
against what the bytes that have to cross the links take at the links' rate. Two processes of this machine save and load
the same tables. TorchRec moves its tables on the same cluster, where it can.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from typing import Annotated, Any, Final
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import typer
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from autoshard.commands.options import command_options
from autoshard.core import (
    GradSync,
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
from autoshard.runtime.engine.rows.moving import ROUND_BYTES
from autoshard.runtime.engine.rows.places import located
from autoshard.runtime.processes.devices import peak_bytes
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.cluster.network import ClusterSpec, open_cluster
from studies.frame import OutputOptions, StudyResult
from studies.frame.jobs import do_job, greatest, run_job, slowest_s
from studies.runtime.checkpoint_cost import DIM, tables_of_ranks

SCHEMA: Final = "autoshard.adopt/1"
_BATCH: Final = 64
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
_CPU: Final = torch.device("cpu")


@command_options()
class AdoptOptions:
    """Options of the study `adopt`."""

    mib: Annotated[int, typer.Option(min=4, help="Size of all tables in MiB, weights alone.")] = 1024
    num_nodes: Annotated[int, typer.Option(min=2, help="Nodes of the cluster.")] = 2
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Processes of each node.")] = 2
    mbit_per_s: Annotated[float, typer.Option(min=1, help="Rate of a node's link.")] = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """One plan after another.

    Attributes:
        before: Name of the plan before.
        after: Name of the plan that follows.
        link_bytes: Bytes that the busiest direction of a node's link has to carry.
        needed_s: What they take at the link's rate.
        alone_s: What an all-to-all of the same bytes took right before, on the slowest process.
        seconds: What adopting took.
        sent_bytes: Bytes that all processes sent, also within nodes.
    """

    before: str
    after: str
    link_bytes: int
    needed_s: float
    alone_s: float
    seconds: float
    sent_bytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table of results."""
        sizes = (f"{size / 2**20:.0f}" for size in (self.link_bytes, self.sent_bytes))
        times = (f"{one:.2f}" for one in (self.needed_s, self.alone_s, self.seconds))
        ratios = (f"{self.seconds / one:.2f}" if one else "-" for one in (self.needed_s, self.alone_s))
        return (self.before, self.after, *sizes, *times, *ratios)


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
    tables = tables_of_ranks(mib, len(ranks), pooling_factor=1.0)
    everyone = (tuple(ranks),)
    nodes = tuple(tuple(ranks[start : start + ranks_per_node]) for start in ranks[::ranks_per_node])
    bounds = np.linspace(0, DIM // 4, len(ranks) + 1).astype(int) * 4
    columns = list(pairwise(bounds.tolist()))
    shards = {
        "table-wise": [PlacedShard.table_wise(Shard.whole(one), rank) for rank, one in enumerate(tables)],
        "table-wise, elsewhere": [
            PlacedShard.table_wise(Shard.whole(one), (rank + ranks_per_node) % len(ranks))
            for rank, one in enumerate(tables)
        ],
        "row-wise": [PlacedShard(shard=Shard.whole(one), tier=Tier.ROW_WISE, replicas=everyone) for one in tables],
        "column-wise": [
            PlacedShard.table_wise(Shard(table=one, rows=RowRange(start=0, stop=one.num_embeddings), columns=of), rank)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Carried:
    """What has to travel from one plan to another, if each rank gets once what it does not hold, in rows and columns.

    Attributes:
        link_bytes: Bytes in the busiest direction of a node's link: what no rank of the node has.
        bytes_RR: Bytes by giver and taker, where all ranks that have a row give it alike often within their node, or,
            where no rank of the taker's has it, to others.
    """

    link_bytes: int
    bytes_RR: np.ndarray

    @classmethod
    def between(cls, before: ShardingPlan, after: ShardingPlan, ranks_per_node: int) -> Carried:
        """Of two plans of the same tables."""
        num_ranks = before.topology.world_size
        num_nodes = num_ranks // ranks_per_node
        links_K2, bytes_RR = np.zeros((num_nodes, 2)), np.zeros((num_ranks, num_ranks))
        given, taken = (_owned(plan, num_ranks) for plan in (before, after))
        for table in range(len(before.tables.tables)):
            bounds = sorted({bound for of in (given, taken) for one in of[table] for bound in one[0]})
            for first, last in pairwise(bounds):
                holders_NR, wanted_NR = (
                    np.any([mask_NR for columns, mask_NR in of[table] if columns[0] <= first < columns[1]], axis=0)
                    for of in (given, taken)
                )
                # Each part of the columns has its moment of row-wise AdaGrad.
                row_bytes = 4 * (last - first + 1)
                lacking_NR = wanted_NR & ~holders_NR
                nodes_NK = holders_NR.reshape(len(holders_NR), num_nodes, ranks_per_node).any(axis=2)
                for rank in range(num_ranks):
                    lacking_N, node = lacking_NR[:, rank], rank // ranks_per_node
                    near_NR = holders_NR & (np.arange(num_ranks) // ranks_per_node == node)
                    givers_NR = np.where(near_NR.any(axis=1, keepdims=True), near_NR, holders_NR)
                    bytes_RR[:, rank] += row_bytes * _shares(givers_NR[lacking_N])
                    crossing_N = lacking_N & ~nodes_NK[:, node]
                    links_K2[node, 0] += row_bytes * crossing_N.sum()
                    links_K2[:, 1] += row_bytes * _shares(nodes_NK[crossing_N])
        return cls(link_bytes=round(links_K2.max()), bytes_RR=bytes_RR.round())


def _shares(holders_NH: np.ndarray) -> np.ndarray:
    """Rows that each holder gives."""
    total: np.ndarray = (holders_NH / holders_NH.sum(axis=1, keepdims=True)).sum(axis=0)
    return total


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


def adopted(job: Mapping[str, Any]) -> list[tuple[float, float, int]]:
    """Adopts the plans of a job, one after the other.

    Returns:
        Of each, seconds of the slowest process, seconds of an all-to-all of the same bytes, and bytes of all processes.
    """
    first, *rest = (read_plan(path) for path in job["plan_paths"])
    embeddings = ShardedEmbeddings(first, _SETTINGS)
    found = []
    for plan, bytes_RR in zip(rest, job["bytes"], strict=True):
        alone_s = slowest_s(partial(_carry, np.array(bytes_RR)))
        sent_bytes = [0]

        def adopt(plan: ShardingPlan = plan, sent_bytes: list[int] = sent_bytes) -> None:
            sent_bytes[0] = embeddings.adopt(plan)

        seconds = slowest_s(adopt)
        total = torch.tensor(sent_bytes)
        dist.all_reduce(total)
        found.append((seconds, alone_s, int(total)))
    embeddings.close()
    return found


def _carry(bytes_RR: np.ndarray) -> None:
    """Sends so many bytes from rank to rank, in rounds as those of an adoption."""
    num_rounds = max(1, -(-int(bytes_RR.sum()) // ROUND_BYTES))
    sizes_RR = -(-bytes_RR.astype(int) // num_rounds)
    sent, received = sizes_RR[dist.get_rank()].tolist(), sizes_RR[:, dist.get_rank()].tolist()
    outgoing, incoming = (torch.zeros(sum(of), dtype=torch.uint8) for of in (sent, received))
    for _ in range(num_rounds):
        dist.all_to_all_single(incoming, outgoing, received, sent)


def saved(job: Mapping[str, Any]) -> dict[str, float]:
    """Saves and loads the tables of a job's plan."""
    embeddings = ShardedEmbeddings(read_plan(job["plan_paths"][0]), _SETTINGS)
    state: dict[str, Any] = {}
    before = peak_bytes(_CPU, 0)
    save_s = slowest_s(lambda: state.update(embeddings.state_dict()))
    held = sum(one.to_local().nbytes for key, one in state.items() if hasattr(one, "to_local"))
    after_save = peak_bytes(_CPU, 0)
    load_s = slowest_s(lambda: embeddings.load_state_dict(state))
    extra_save, extra_load = greatest(after_save - before - held), greatest(peak_bytes(_CPU, after_save))
    embeddings.close()
    return {
        "save_s": save_s,
        "load_s": load_s,
        "extra_save_bytes": int(extra_save),
        "extra_load_bytes": int(extra_load),
    }


def resharded(job: Mapping[str, Any]) -> dict[str, float | str]:
    """Has TorchRec move tables of the same size, each on a rank, to other layouts: seconds, or the error, by layout."""
    num_ranks = dist.get_world_size()
    found: dict[str, float | str] = {}
    names = [f"t{rank}" for rank in range(num_ranks)]
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=job["num_rows"], embedding_dim=DIM, feature_names=[f"f_{name}"])
        for name in names
    ]
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": _SETTINGS.learning_rate}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    for layout, sharding in (
        ("table-wise, elsewhere", lambda rank: table_wise(rank=(rank + job["ranks_per_node"]) % num_ranks)),
        ("column-wise", lambda _: column_wise(ranks=list(range(num_ranks)))),
        ("row-wise", lambda _: row_wise()),
    ):
        tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        before, after = (
            construct_module_sharding_plan(
                tables,
                {name: of(rank) for rank, name in enumerate(names)},
                sharder=sharder,
                local_size=num_ranks,
                world_size=num_ranks,
                device_type="cpu",
            )
            for of in (lambda rank: table_wise(rank=rank), sharding)
        )
        # It needs layers of its own around the tables.
        model = torch.nn.Sequential(OrderedDict(tables=tables, dense=torch.nn.Linear(1, 1)))
        sharded = DistributedModelParallel(
            model, device=_CPU, plan=TorchRecPlan({"tables": before}), sharders=[sharder]
        )
        try:
            found[layout] = slowest_s(partial(sharded.reshard, {"tables": (0.0, after)}, "tables"))
        except (AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
            found[layout] = f"{type(error).__name__}: {error}"
    return found


def main(options: AdoptOptions, output: OutputOptions) -> None:
    """Measures how long a running job takes to go over to another plan.

    Example:
        python -m studies adopt --mbit-per-s 400
    """
    spec = ClusterSpec(
        num_nodes=options.num_nodes, ranks_per_node=options.ranks_per_node, bits_per_s=options.mbit_per_s * 1e6
    )
    made = plans(options.mib, spec.topology(), options.ranks_per_node)
    chain = [made[name] for name in _CHAIN]
    carried = [Carried.between(*pair, options.ranks_per_node) for pair in pairwise(chain)]
    job: dict[str, Any] = {"measure": "adopt", "bytes": [one.bytes_RR.tolist() for one in carried]}
    with open_cluster(spec) as cluster:
        measured = run_job(_MODULE, job, chain, spec.num_ranks, launcher=cluster)
    adoptions = [
        Adoption(
            before=before,
            after=after,
            link_bytes=one.link_bytes,
            needed_s=8 * one.link_bytes / spec.bits_per_s,
            alone_s=alone_s,
            seconds=seconds,
            sent_bytes=sent_bytes,
        )
        for (before, after), one, (seconds, alone_s, sent_bytes) in zip(
            pairwise(_CHAIN), carried, measured, strict=True
        )
    ]
    with open_cluster(spec) as cluster, patch.dict(os.environ, PYTHONHASHSEED="0"):
        # The processes name messages by hashes of strings, which have to be the same on all of them.
        num_rows = chain[0].tables.tables[0].num_embeddings
        job = {"measure": "torchrec", "num_rows": num_rows, "ranks_per_node": options.ranks_per_node}
        peer = run_job(_MODULE, job, [], spec.num_ranks, launcher=cluster)
    here = plans(options.mib, local_topology("cpu", 2, options.mib << 21), 1)
    savings = {
        name: Saving(**run_job(_MODULE, {"measure": "save"}, [here[name]], 2))
        for name in ("table-wise", "row-wise", "column-wise")
    }
    output.write(_result(options, adoptions, peer, savings))


def _result(
    options: AdoptOptions,
    adoptions: Sequence[Adoption],
    peer: Mapping[str, float | str],
    savings: Mapping[str, Saving],
) -> StudyResult:
    cluster = f"{options.num_nodes} nodes of {options.ranks_per_node} ranks, links of {options.mbit_per_s:g} Mbit/s"
    tables = (
        Table(
            columns=(
                "from",
                "to",
                "MiB over a link",
                "MiB sent",
                "link needs s",
                "all-to-all alone s",
                "adopt s",
                "adopt / link",
                "adopt / all-to-all",
            ),
            rows=tuple(one.cells for one in adoptions),
            caption=f"Plans adopted one after the other: {options.mib} MiB of tables on {cluster}",
        ),
        Table(
            columns=("from table-wise to", "seconds, or error"),
            rows=tuple((name, one if isinstance(one, str) else f"{one:.2f}") for name, one in peer.items()),
            caption=f"TorchRec {version('torchrec')}, DistributedModelParallel.reshard, same tables and links",
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
        "torchrec": {"version": version("torchrec"), "reshard": dict(peer)},
        "savings": {name: _fields(one) for name, one in savings.items()},
    }
    return StudyResult(name="adopt", document=document, tables=tables)


def _fields(one: Adoption | Saving) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


_MODULE: Final = "studies.runtime.adoption"
_MEASURES: Final = {"adopt": adopted, "save": saved, "torchrec": resharded}

if __name__ == "__main__":
    do_job(lambda job: _MEASURES[job["measure"]](job))
