"""Times a TorchRec model's way to tables, and its plan's way to TorchRec and back."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from autoshard.console import JsonOption, emit
from autoshard.core import Level, Link, MemoryBytes, PlacedShard, Shard, ShardingPlan, TableSet, Tier, Topology
from autoshard.formats.torchrec import from_torchrec, to_torchrec
from autoshard.formats.torchrec.modules import ModelTables, read_model
from autoshard.formats.torchrec.stored_plans import read_stored_plan, write_stored_plan

T = TypeVar("T")

#: Tables of one module, and sizes of tables.
_PER_MODULE, _ROWS, _DIM = 500, 1000, 64
#: One table in so many has its rows split over all ranks.
_SPLIT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorTimes:
    """Seconds of each way; modules are made, and libraries imported, before the clock starts.

    Attributes:
        num_tables: Tables of the model.
        world_size: Ranks of the plan; the rows of one table in ten are split over all of them.
        import_s: Model to tables.
        export_s: Plan to TorchRec's plan.
        back_s: TorchRec's plan to a plan.
        write_s: TorchRec's plan to a file.
        read_s: The file to TorchRec's plan, as plain data.
    """

    num_tables: int
    world_size: int
    import_s: float
    export_s: float
    back_s: float
    write_s: float
    read_s: float


def measure(num_tables: int, world_size: int) -> DoorTimes:
    """Times all ways of a model of so many tables."""
    model = _model(num_tables)
    found, import_s = _timed(lambda: read_model(model))
    plan = _plan(found.tables, world_size)
    exported, export_s = _timed(lambda: to_torchrec(plan, found.places))
    _, back_s = _timed(lambda: from_torchrec(exported, plan.tables, plan.topology, found.places))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.pt"
        _, write_s = _timed(lambda: write_stored_plan(exported, path))
        stored, read_s = _timed(lambda: read_stored_plan(path))
    _check(plan, from_torchrec(stored, plan.tables, plan.topology, found.places), found)
    return DoorTimes(
        num_tables=num_tables,
        world_size=world_size,
        import_s=import_s,
        export_s=export_s,
        back_s=back_s,
        write_s=write_s,
        read_s=read_s,
    )


def main(
    num_tables: Annotated[int, typer.Option(min=1, help="Tables of the model.")] = 5000,
    world_size: Annotated[int, typer.Option(min=2, help="Ranks of the plan.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Times the import of a TorchRec model, and the export of its plan and its way back.

    Example:
        python -m studies torchrec-doors
    """
    times = asdict(measure(num_tables, world_size))
    lines = [f"{name.removesuffix('_s'):>10} {value:.2f} s" for name, value in times.items() if name.endswith("_s")]
    emit(times, "\n".join([f"{num_tables:,} tables on {world_size} ranks", *lines]), as_json=as_json)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    made = work()
    return made, time.perf_counter() - started


def _model(num_tables: int) -> torch.nn.Module:
    modules = torch.nn.ModuleList()
    for first in range(0, num_tables, _PER_MODULE):
        configs = [
            EmbeddingBagConfig(name=f"t{n}", num_embeddings=_ROWS, embedding_dim=_DIM, feature_names=[f"f{n}"])
            for n in range(first, min(first + _PER_MODULE, num_tables))
        ]
        modules.append(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    return modules


def _plan(tables: TableSet, world_size: int) -> ShardingPlan:
    link = Link(bytes_per_s=1e9)
    topology = Topology(
        world_size=world_size,
        device="a100",
        memory_bytes=MemoryBytes(hbm=1 << 40),
        levels=(Level(name="node", size=world_size, all_to_all=link, all_reduce=link),),
    )
    ranks = tuple(range(world_size))
    shards = (
        PlacedShard(shard=Shard.whole(table), tier=Tier.ROW_WISE, replicas=(ranks,))
        if number % _SPLIT == 0
        else PlacedShard.table_wise(Shard.whole(table), number % world_size)
        for number, table in enumerate(tables.tables)
    )
    return ShardingPlan(tables=tables, topology=topology, shards=tuple(shards))


def _check(plan: ShardingPlan, back: ShardingPlan, found: ModelTables) -> None:
    """Stops a measurement of something else: the plan that came back holds all tables as they were."""
    assert len(found.places) == len(plan.shards) == len(back.shards)
    assert all(one.replicas == other.replicas for one, other in zip(plan.shards, back.shards, strict=True))
