"""Writes one checkpoint, on all processes at once, so that it is whole or not there."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.serialization import get_crc32_options, set_crc32_options
from torch.utils._pytree import tree_map

from autoshard import __version__
from autoshard.core import ShardingPlan
from autoshard.core.errors import AutoshardError, ExecutionError, InputError
from autoshard.formats import digest, plan_to_json, write_plan
from autoshard.formats.row_orders import with_row_orders
from autoshard.runtime.checkpoints.contents import PiecePlanner, StoredTensor
from autoshard.runtime.checkpoints.deltas import write_updates
from autoshard.runtime.checkpoints.manifest import (
    PLAN_NAME,
    Manifest,
    SavedFile,
    SavedTable,
    commit,
    committed_name,
    saved_file,
    writing_folder,
)
from autoshard.runtime.checkpoints.storage import HashedFilesWriter
from autoshard.runtime.checkpoints.together import alone, cause, from_all
from autoshard.runtime.engine.rows.updates import UpdatedRows

#: Addresses of objects, which differ between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedState:
    """A job's state that is copied, and not written yet.

    Attributes:
        step: Steps that were made.
        flat: The state, as `contents.staged` gives it.
        states: Names of what it is the state of.
        same: Names of those whose tensors have to be the same on all processes, too.
        tables: Tables among that.
        plan: The plan that the tables are sharded by.
        row_orders: Its row orders, to be saved with it, by table; None to leave it as it is.
        begun_with: Digest of the plan that the job was begun with; None if that is this one, or nobody knows.
        base: Step of the checkpoint that `updates` go upon; None where the state has all rows.
        updates: Rows of tables that were updated since that one.
    """

    step: int
    flat: dict[str, Any]
    states: tuple[str, ...]
    same: tuple[str, ...] = ()
    tables: tuple[SavedTable, ...]
    plan: ShardingPlan
    row_orders: Mapping[str, torch.Tensor] | None = None
    begun_with: str | None = None
    base: int | None = None
    updates: Sequence[UpdatedRows] = ()


def write_checkpoint(
    folder: Path, job: StagedState, group: dist.ProcessGroup | None = None, planner: PiecePlanner | None = None
) -> Path:
    """Writes and commits a checkpoint; its state is let go of once it is in files.

    Args:
        folder: The folder of checkpoints, which all processes see.
        job: What this process has of the state.
        group: The processes, over gloo; None for this one alone.
        planner: How tensors are written; None for those of the state.

    Returns:
        The checkpoint's folder.

    Raises:
        ExecutionError: If it cannot be written: on all processes. Nothing is left of it then.
    """
    rank = 0 if group is None else group.rank()
    try:
        return _write(folder, job, group, rank, planner or PiecePlanner())
    except (AutoshardError, CheckpointException, OSError, RuntimeError) as error:
        if rank == 0:
            shutil.rmtree(writing_folder(folder, job.step), ignore_errors=True)
        raise ExecutionError(f"checkpoint of step {job.step} was not written: {cause(error)}") from error


def _write(root: Path, job: StagedState, group: dist.ProcessGroup | None, rank: int, planner: PiecePlanner) -> Path:
    folder = writing_folder(root, job.step)

    def begin() -> dict[str, str]:
        if rank == 0:
            folder.mkdir(parents=True)
        return {name: _compared(job, name) for name in job.states}

    _check_alike(from_all(group, begin))
    writer = HashedFilesWriter(folder)
    with _no_checksums():
        if group is None:
            with alone():
                save_state(job.flat, storage_writer=writer, planner=planner, no_dist=True)
        else:
            save_state(job.flat, storage_writer=writer, planner=planner, process_group=group)
    job.flat.clear()

    plan = job.plan

    def describe() -> list[SavedFile]:
        nonlocal plan
        own = write_updates(folder, rank, job.updates)
        if rank == 0:
            if job.row_orders is not None:
                ids = {name: ids_N.cpu().numpy() for name, ids_N in job.row_orders.items()}
                plan = with_row_orders(plan, ids, folder / PLAN_NAME)
                own += [folder / order.file for order in plan.row_orders.values()]
            write_plan(plan, folder / PLAN_NAME)
            own += [folder / PLAN_NAME]
        return writer.files.saved + [saved_file(file) for file in own]

    files = from_all(group, describe)
    manifest = Manifest(
        step=job.step,
        base=job.base,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        plan_digest=digest(plan_to_json(plan)),
        num_processes=len(files),
        autoshard_version=__version__,
        torch_version=torch.__version__,
        states=job.states,
        tables=job.tables,
        files=tuple(file for of_process in files for file in of_process),
        begun_with=job.begun_with,
    )

    def finish() -> None:
        if rank == 0:
            _check_shared(folder, manifest)
            commit(folder, manifest)

    from_all(group, finish)
    return root / committed_name(job.step)


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Leaves out the checksums of torch.save, which take longer than all else, 2 s a GiB; files have hashes.

    What the job saves by torch.save meanwhile has none either; torch reads it all the same.
    """
    usual = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(usual)


def _compared(job: StagedState, name: str) -> str:
    """What of a state has to be the same on all processes: all that is no tensor and, of some, digests of tensors."""

    def shown(leaf: object) -> object:
        if isinstance(leaf, StoredTensor) and name in job.same:
            tensor = job.flat[leaf.key]
            return tensor.dtype, tensor.shape, _digest(tensor.reshape(-1).view(torch.uint8).numpy().data)
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:  # `repr` leaves out the middle of large ones
            return leaf.dtype, leaf.shape, _digest(leaf.tobytes())
        return leaf

    return _ADDRESS.sub("", repr(tree_map(shown, job.flat[name])))


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_alike(structures: list[dict[str, str]]) -> None:
    """Refuses a state that differs between processes: only one process's would be kept.

    Args:
        structures: What has to be the same, of each process, by name.

    Raises:
        InputError: If it does; the field is its name.
    """
    for process, own in enumerate(structures):
        for name, text in own.items():
            if structures[0].get(name) != text:
                raise InputError(
                    f"differs between processes 0 and {process}: must be the same on all, or gathered by state_dict "
                    "as RandomState does it",
                    field=name,
                )


def _check_shared(folder: Path, manifest: Manifest) -> None:
    """Refuses a folder in which process 0 does not see what the others wrote.

    Raises:
        ExecutionError: If a file is missing.
    """
    for file in manifest.files:
        if not (folder / file.name).is_file():
            raise ExecutionError(f"{file.name} of another process is not in {folder}: all processes must share it")
