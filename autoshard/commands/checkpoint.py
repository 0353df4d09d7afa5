"""`autoshard checkpoint`: what checkpoints of jobs hold, whether they are whole, and those of other projects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group

from autoshard.commands.arguments import written_file
from autoshard.commands.options import command_options
from autoshard.console import JsonOption, emit
from autoshard.core.quoting import write_bytes
from autoshard.table import Column, Table, facts, texts

if TYPE_CHECKING:
    from autoshard.core import ShardingPlan
    from autoshard.runtime.checkpoints import Checkpoint

_DAMAGED = 1

CheckpointArgument = Annotated[
    Path,
    typer.Argument(help="Folder of a checkpoint; or of several, for the last of them.", metavar="CHECKPOINT"),
]
PlanOption = Annotated[Path, typer.Option("--plan", help="A plan of the same tables.", metavar="PLAN")]


def show_checkpoint(checkpoint: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Shows what a checkpoint holds: its step, tables, plan and files.

    Example:
        autoshard checkpoint show checkpoints
    """
    from autoshard.runtime.checkpoints.manifest import MANIFEST

    found = _opened(checkpoint)
    manifest = found.manifest
    summary = facts(
        [
            ("checkpoint", found.folder),
            ("step", f"{manifest.step:,}"),
            *([] if manifest.base is None else [("delta upon step", f"{manifest.base:,}")]),
            ("saved at", manifest.saved_at),
            ("processes", manifest.num_processes),
            ("plan", manifest.plan_digest),
            ("state of", ", ".join(manifest.states)),
            ("bytes", write_bytes(manifest.num_bytes)),
        ]
    )
    tables = Table.of(
        manifest.tables,
        [
            ("table", lambda one: one.name),
            (Column("optimizer"), lambda one: found.plan.tables[one.name].optimizer),
            (Column("tensors"), lambda one: ", ".join(f"{name} {list(of)}" for name, of in one.tensors.items())),
        ],
        is_boxed=True,
    )
    files = Table.of(
        manifest.files,
        [
            ("file", lambda file: file.name),
            (Column("bytes", justify="right", text=write_bytes), lambda file: file.num_bytes),
            (Column("hashed blocks", justify="right"), lambda file: f"{len(file.sha256)}"),
        ],
        is_boxed=True,
    )
    emit(MANIFEST.to_json(manifest), Group(summary, tables, files), as_json=as_json)


def verify_checkpoint(checkpoint: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Reads all files of a checkpoint, and names those that are missing, truncated or altered; exits with 1 then.

    Example:
        autoshard checkpoint verify checkpoints/step-000000001000
    """
    found = _opened(checkpoint)
    damaged = found.verify()
    files = found.manifest.files
    result = {"folder": str(found.folder), "step": found.step, "num_files": len(files), "damaged": damaged}
    whole = f"{len(files)} files of {found.folder} are as they were saved, {write_bytes(found.manifest.num_bytes)}"
    rendered = Table(columns=texts("damaged"), rows=[(one,) for one in damaged]) if damaged else whole
    emit(result, rendered, as_json=as_json, kind="checkpoint-verification")
    if damaged:
        raise typer.Exit(_DAMAGED)


def reshard_checkpoint(checkpoint: CheckpointArgument, plan: PlanOption, as_json: JsonOption = False) -> None:
    """Says whether a checkpoint can be loaded under a plan, and what each rank reads of it and then holds.

    Checkpoints are free of the plan: nothing has to be rewritten. A table that is missing or another one is refused.

    Example:
        autoshard checkpoint reshard checkpoints --plan plan.json
    """
    from autoshard.formats import read_plan
    from autoshard.runtime.checkpoints.resharding import reshard

    loaded = read_plan(plan)
    found = _opened(checkpoint)
    work = reshard(found, loaded)
    ranks = Table.of(
        work.ranks,
        [
            ("rank", lambda one: one.rank),
            (Column("reads", text=write_bytes, justify="right"), lambda one: one.read_bytes),
            (Column("then holds", text=write_bytes, justify="right"), lambda one: one.held_bytes),
        ],
        is_boxed=True,
    )
    title = f"Step {found.step:,}, saved by {found.manifest.num_processes} processes, loads on {len(work.ranks)} ranks"
    result = {
        "step": found.step,
        "plan_digest": found.manifest.plan_digest,
        "ranks": [{"rank": one.rank, "read_bytes": one.read_bytes, "held_bytes": one.held_bytes} for one in work.ranks],
        "averaged": list(work.averaged),
    }
    note = f"Tables whose row-wise moments become means over parts of the columns: {', '.join(work.averaged) or 'none'}"
    emit(result, Group(title, ranks, note), as_json=as_json, kind="checkpoint-resharding")


@command_options()
class ImportCheckpointOptions:
    """Options of `autoshard checkpoint import`."""

    source: Annotated[
        Path,
        typer.Argument(
            help="Folder that torch.distributed.checkpoint wrote (of TorchRec, too), or a state dict: a file of "
            "torch.save or .safetensors.",
            metavar="SOURCE",
        ),
    ]
    plan: PlanOption
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of checkpoints to write it into.")]
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Steps that were made; left out, those that a state dict of this project tells, or 0."
        ),
    ] = None
    fresh_moments: Annotated[
        bool, typer.Option("--fresh-moments", help="Moments that are missing begin at 0, and are not refused.")
    ] = False


def import_checkpoint(options: ImportCheckpointOptions, as_json: JsonOption = False) -> None:
    """Makes a checkpoint of the tables in one of TorchRec or PyTorch, with the moments of fused optimizers.

    Example:
        autoshard checkpoint import torchrec-checkpoint --plan plan.json -o checkpoints

    Example with weights alone:
        autoshard checkpoint import model.pt --plan plan.json --fresh-moments -o checkpoints
    """
    from autoshard.formats import read_plan
    from autoshard.runtime.checkpoints.exchange import import_checkpoint as make_checkpoint

    plan: ShardingPlan = read_plan(options.plan)
    made = make_checkpoint(options.source, plan, options.output, step=options.step, fresh_moments=options.fresh_moments)
    result = {"folder": str(made.folder), "step": made.step, "num_tables": len(made.manifest.tables)}
    text = f"Wrote {made.folder}: {len(made.manifest.tables)} tables, {write_bytes(made.manifest.num_bytes)}"
    emit(result, text, as_json=as_json, kind="imported-checkpoint")


@command_options()
class ExportCheckpointOptions:
    """Options of `autoshard checkpoint export`."""

    checkpoint: CheckpointArgument
    output: Annotated[Path, written_file("--output", "-o", help="File to write, .safetensors.")]
    prefix: Annotated[
        str, typer.Option(help="What keys begin with: the path of the collection in the model that reads them.")
    ] = ""


def export_checkpoint(options: ExportCheckpointOptions, as_json: JsonOption = False) -> None:
    """Writes the weights of a checkpoint's tables as a plain state dict, with the keys of TorchRec's collections.

    Of a delta checkpoint, it writes the rows that were updated since the one before: their ids, and their weights.

    Example:
        autoshard checkpoint export checkpoints -o weights.safetensors --prefix sparse_arch.embedding_bag_collection.
    """
    from autoshard.runtime.checkpoints.exchange import export_weights

    found = _opened(options.checkpoint)
    num_bytes = export_weights(found, options.output, prefix=options.prefix)
    result = {"file": str(options.output), "step": found.step, "bytes": num_bytes}
    emit(result, f"Wrote {options.output}: {write_bytes(num_bytes)}", as_json=as_json, kind="exported-checkpoint")


def _opened(path: Path) -> Checkpoint:
    """The checkpoint of a folder, or the last of those in it.

    Raises:
        InputError: If there is none.
    """
    from autoshard.runtime.checkpoints import Checkpoint
    from autoshard.runtime.checkpoints.manifest import committed_folders

    inside = committed_folders(path)
    return Checkpoint(inside[-1] if inside else path)
