"""Under which layouts a checkpoint of one loads: `python -m studies checkpoint-pairs`.

One table is trained for a step under each layout, saved, and loaded under each of the layouts: by this project's
checkpoints, and by TorchRec's `DistributedModelParallel` with `torch.distributed.checkpoint`, its model and its fused
optimizer.

Shape suffixes: N rows, D embedding dim, C columns of all features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import torch
import torch.distributed as dist
import typer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

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
)
from autoshard.formats import read_plan
from autoshard.runtime.checkpoints import Checkpoint, Checkpoints
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.frame import OutputOptions, StudyResult
from studies.frame.jobs import do_job, run_job

SCHEMA: Final = "autoshard.checkpoint-pairs/1"
_NAME, _NUM_ROWS, _DIM = "t", 96, 16
_SETTINGS: Final = FusedSettings(learning_rate=0.1)
#: What TorchRec has of these layouts.
OF_TORCHREC: Final = ("table-wise", "row-wise", "column-wise", "data-parallel")
EXACT, LOST, OTHER = "exact", "moments lost", "other numbers"


@command_options()
class CheckpointPairsOptions:
    """Options of the study `checkpoint-pairs`."""

    processes: Annotated[int, typer.Option(min=2, help="Processes.")] = 2


def plans(num_processes: int) -> dict[str, ShardingPlan]:
    """One table in each layout."""
    ranks = tuple(range(num_processes))
    table = EmbeddingTable(
        name=_NAME,
        num_embeddings=_NUM_ROWS,
        embedding_dim=_DIM,
        optimizer=Optimizer.ROWWISE_ADAGRAD,
        features=(Feature(name=_NAME, pooling_factor=4.0),),
        access=AccessProfile.zipf(_NUM_ROWS, 1.0),
    )
    whole, each = Shard.whole(table), tuple((rank,) for rank in ranks)
    columns = [(start, start + _DIM // num_processes) for start in range(0, _DIM, _DIM // num_processes)]
    rows = [RowRange(start=start, stop=stop) for start, stop in pairwise((0, 10, 50, _NUM_ROWS))]
    shards = {
        "table-wise": [PlacedShard.table_wise(whole, 0)],
        "row-wise": [PlacedShard(shard=whole, tier=Tier.ROW_WISE, replicas=(ranks,))],
        "column-wise": [PlacedShard.table_wise(replace(whole, columns=of), rank) for rank, of in enumerate(columns)],
        "data-parallel": [PlacedShard(shard=whole, tier=Tier.DATA_PARALLEL, replicas=each, grad_sync=GradSync.DENSE)],
        "grid": [
            PlacedShard(shard=replace(whole, columns=of), tier=Tier.ROW_WISE, replicas=(ranks,)) for of in columns
        ],
        "row groups": [
            PlacedShard.table_wise(replace(whole, rows=of), number % num_processes) for number, of in enumerate(rows)
        ],
    }
    tables = TableSet(batch_size=8 * num_processes, tables=(table,))
    topology = local_topology("cpu", num_processes, 1 << 30)
    return {name: ShardingPlan(tables=tables, topology=topology, shards=tuple(of)) for name, of in shards.items()}


def measure(job: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What comes of each pair, `SAVED under / LOADED under`, by who saves and loads."""
    of_plans = dict(zip(job["names"], map(read_plan, job["plan_paths"]), strict=True))
    folder = Path(job["folder"])
    return {
        "autoshard": _pairs(of_plans, lambda plan, name: _saved(plan, folder / name), _loaded),
        "TorchRec": _pairs(
            {name: of_plans[name] for name in OF_TORCHREC},
            lambda plan, name: _torchrec_saved(name, plan, folder / f"torchrec {name}"),
            _torchrec_loaded,
        ),
    }


def _pairs(
    layouts: Mapping[str, ShardingPlan],
    save: Callable[[ShardingPlan, str], tuple[Path, torch.Tensor, torch.Tensor | None]],
    load: Callable[[str, ShardingPlan, Path], tuple[torch.Tensor, torch.Tensor | None]],
) -> dict[str, str]:
    found = {}
    for before, plan in layouts.items():
        place, weights_ND, moments_N = save(plan, before)
        for after, other in layouts.items():
            try:
                loaded_ND, loaded_N = load(after, other, place)
            except (CheckpointException, RuntimeError, ValueError) as error:
                cause = min(error.failures.items())[1][0] if isinstance(error, CheckpointException) else error
                found[f"{before} / {after}"] = f"{type(cause).__name__}: {str(cause).splitlines()[0]}"
                continue
            if loaded_N is None or moments_N is None:
                outcome = LOST
            else:
                is_same = torch.equal(loaded_ND, weights_ND) and torch.allclose(loaded_N, moments_N, 1e-6, 0)
                outcome = EXACT if is_same else OTHER
            found[f"{before} / {after}"] = outcome
    return found


def _saved(plan: ShardingPlan, place: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    embeddings = ShardedEmbeddings(plan, _SETTINGS)
    ids = draw_samples(plan.tables, 1, embeddings.local_batch_size, (0, dist.get_rank())).ids
    weighted_C = torch.arange(1.0, _DIM + 1)
    (embeddings(ids).pooled_BC * weighted_C).sum().backward()
    embeddings.end_step()
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"embeddings": embeddings}, plan=plan)
        checkpoints.wait()
        latest = checkpoints.latest()
    assert latest is not None
    weights_ND, moments_N = _state(embeddings)
    embeddings.close()
    return latest.folder, weights_ND, moments_N


def _loaded(_: str, plan: ShardingPlan, place: Path) -> tuple[torch.Tensor, torch.Tensor]:
    embeddings = ShardedEmbeddings(plan, replace(_SETTINGS, seed=1))
    Checkpoint(place).load({"embeddings": embeddings})
    found = _state(embeddings)
    embeddings.close()
    return found


def _state(embeddings: ShardedEmbeddings) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the mean moment of each row."""
    state = embeddings.table_state(_NAME)
    return state.weights_ND.clone(), state.expanded().mean(dim=1)


def _torchrec_saved(layout: str, plan: ShardingPlan, place: Path) -> tuple[Path, torch.Tensor, torch.Tensor | None]:
    from torchrec import KeyedJaggedTensor

    model = _torchrec_model(layout, plan)
    generator = torch.Generator().manual_seed(dist.get_rank())
    others = [f"other{rank}" for rank in range(dist.get_world_size())]
    ids = KeyedJaggedTensor.from_lengths_sync(
        keys=[_NAME, *others],
        values=torch.randint(_NUM_ROWS, (32,), generator=generator),
        lengths=torch.tensor([4] * 8 + [0] * 8 * len(others), dtype=torch.int32),
    )
    weighted_C = torch.arange(1.0, _DIM + 1).repeat(1 + len(others))
    (model(ids).values() * weighted_C).sum().backward()
    save_state(_torchrec_state(model), checkpoint_id=place)
    return place, *_torchrec_read(place)


def _torchrec_loaded(layout: str, plan: ShardingPlan, place: Path) -> tuple[torch.Tensor, torch.Tensor | None]:
    model = _torchrec_model(layout, plan)
    state = _torchrec_state(model)
    load_state(state, checkpoint_id=place)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    again = place.with_name(f"{place.name}, {layout}")
    save_state(_torchrec_state(model), checkpoint_id=again)
    return _torchrec_read(again)


def _torchrec_state(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def _torchrec_read(place: Path) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and the mean moment of each row in a checkpoint; None where it has no moments."""
    sizes = FileSystemReader(place).read_metadata().state_dict_metadata
    kept = [key for key in sizes if key.endswith((f"embedding_bags.{_NAME}.weight", f"{_NAME}.momentum1"))]
    found = {key: torch.empty(sizes[key].size) for key in kept}  # type: ignore[union-attr]
    load_state(found, checkpoint_id=place)
    weights = {key: one for key, one in found.items() if not key.endswith("momentum1")}
    moments = [one for key, one in found.items() if key not in weights]
    [weights_ND] = weights.values()
    # Those of column shards lie one after the other.
    return weights_ND, moments[0].view(-1, _NUM_ROWS).mean(dim=0) if moments else None


def _torchrec_model(layout: str, plan: ShardingPlan) -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import sharding_plan as ways
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv
    from torchrec.distributed.types import ShardingPlan as TorchRecPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    size = dist.get_world_size()
    [table] = plan.tables.tables
    # TorchRec fails on processes without tables: each has another one beside that.
    num_rows = {_NAME: table.num_embeddings, **{f"other{rank}": 4 for rank in range(size)}}
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=_DIM, num_embeddings=rows, feature_names=[name])
        for name, rows in num_rows.items()
    ]
    collection = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    apply_optimizer_in_backward(
        RowWiseAdagrad, collection.parameters(), {"lr": _SETTINGS.learning_rate, "eps": _SETTINGS.eps}
    )
    way = {
        "table-wise": ways.table_wise(rank=0),
        "row-wise": ways.row_wise(),
        "column-wise": ways.column_wise(ranks=list(range(size))),
        "data-parallel": ways.data_parallel(),
    }[layout]
    sharder = EmbeddingBagCollectionSharder()
    all_ways = {_NAME: way, **{f"other{rank}": ways.table_wise(rank=rank) for rank in range(size)}}
    module_plan = ways.construct_module_sharding_plan(
        collection, all_ways, sharder=sharder, local_size=size, world_size=size, device_type="cpu"
    )
    group = dist.distributed_c10d._get_default_group()
    return DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=TorchRecPlan(plan={"": module_plan}),
        sharders=[sharder],
    )


def main(options: CheckpointPairsOptions, output: OutputOptions) -> None:
    """Saves a table under each layout and loads it under each, beside TorchRec.

    Example:
        python -m studies checkpoint-pairs -o docs/figures
    """
    import torchrec

    of_plans = plans(options.processes)
    with TemporaryDirectory(prefix="autoshard-pairs-") as name:
        job = {"folder": name, "names": list(of_plans)}
        found = run_job(_MODULE, job, list(of_plans.values()), options.processes)
    versions = {"autoshard": "autoshard", "TorchRec": f"TorchRec {torchrec.__version__}"}
    tables = tuple(
        _table(found[name], tuple(of_plans) if name == "autoshard" else OF_TORCHREC, title)
        for name, title in versions.items()
    )
    document = {
        "schema": SCHEMA,
        "processes": options.processes,
        "torchrec_version": torchrec.__version__,
        "pairs": found,
    }
    output.write(StudyResult(name="checkpoint-pairs", document=document, tables=tables))


def _table(pairs: Mapping[str, str], layouts: Sequence[str], title: str) -> Table:
    return Table(
        columns=(f"{title}: saved", *layouts),
        rows=tuple(
            (before, *(pairs[f"{before} / {after}"].partition(":")[0] for after in layouts)) for before in layouts
        ),
        caption=f"{title}, a table of row-wise AdaGrad; rows are saved under, columns loaded under",
    )


_MODULE: Final = "studies.runtime.checkpoint_pairs"

if __name__ == "__main__":
    do_job(measure)
