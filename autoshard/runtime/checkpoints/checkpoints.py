"""Checkpoints of a training job, written while it goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from autoshard.console import warn
from autoshard.core import ShardingPlan
from autoshard.core.accepted import check_choice
from autoshard.core.errors import AutoshardError, ExecutionError, InputError
from autoshard.runtime.checkpoints.checkpoint import Checkpoint
from autoshard.runtime.checkpoints.contents import check_names, job_tables, saved_tables, staged
from autoshard.runtime.checkpoints.manifest import check_told_apart, committed_folders, remove, sweep
from autoshard.runtime.checkpoints.together import cause, from_all, host_group
from autoshard.runtime.checkpoints.writing import StagedState, write_checkpoint
from autoshard.runtime.engine.groups import WeakGroup

OnError = Literal["raise", "warn"]


class Checkpoints:
    """The checkpoints of a job in a folder that all its processes see: written in the background, the last few kept.

    Every process makes one, and calls `save`, `wait` and `close` in step with the others. A checkpoint is either whole
    or not there, whenever a process is killed or the disk is full: its files are written into a folder of another name,
    hashed and brought to the disk, its manifest last, and then the folder is renamed. What killed jobs left is removed
    when the next one starts.

    Args:
        folder: The folder, of one job at a time; made if it is not there.
        keep: How many checkpoints to keep, at least 1; older ones are removed once a new one is there.
        group: The processes; None for all.
        on_error: What a checkpoint that cannot be written does: `raise` ends the job at its next `save` or `wait`,
            `warn` says so and lets it go on. The checkpoints before it stay either way.

    Raises:
        InputError: If `keep` or `on_error` is not accepted.
        ExecutionError: If the folder cannot be made or cleared: on all processes.
    """

    _group = WeakGroup[dist.ProcessGroup]()

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        group: dist.ProcessGroup | None = None,
        on_error: OnError = "raise",
    ) -> None:
        if keep < 1:
            raise InputError(f"must be at least 1, got {keep}", field="keep")
        check_choice(on_error, ("raise", "warn"), "on_error")
        self.folder, self._keep, self._on_error = Path(folder).absolute(), keep, on_error
        self._group = host_group(group)
        self._rank = dist.get_rank(group)
        self._writer: threading.Thread | None = None
        self._error: AutoshardError | None = None
        self._base: tuple[int, ShardingPlan] | None = None
        from_all(self._group, self._prepare)

    def _prepare(self) -> None:
        if self._rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)

    def save(
        self,
        step: int,
        state: Mapping[str, Stateful],
        *,
        plan: ShardingPlan,
        row_orders: Mapping[str, torch.Tensor] | None = None,
        begun_with: str | None = None,
        delta: bool = False,
    ) -> None:
        """Saves a job's state; returns when it has been copied, and writes it while training goes on.

        Waits for the checkpoint before. What is no tensor of a table has to be the same on all processes: it is
        written once. Only layers of modules are not compared: their buffers may differ, and one process's are kept.

        Args:
            step: Steps that were made; above that of the last checkpoint.
            state: What to save, by name: objects with `state_dict` and `load_state_dict`, as models with sharded
                embeddings in them, optimizers, loaders, `RandomState`.
            plan: The plan that the embeddings are sharded by.
            row_orders: Row ids in falling access frequency, by table, to save in files beside the plan; None to leave
                the plan as it is, with the names of its files elsewhere.
            begun_with: Digest of the plan that the job was begun with, if it has adopted this one since.
            delta: Whether to save, of the tables, only rows that were updated since the checkpoint before, which it
                then needs. The first that this object saves, and the first after another plan or an error, has all
                rows. The embeddings' settings have to say `marks_rows`. A checkpoint of all rows now and then keeps
                chains of deltas short.

        Raises:
            InputError: If the step is not after the last checkpoint's, a name has a dot or no state, the plan is of
                other tables, or replica groups differ at this step. Of a delta, if rows are not marked, or two tables
                have one name.
            ExecutionError: If the checkpoint before could not be written, unless `on_error` is `warn`.
        """
        self.wait()
        check_names(state)
        tables = job_tables(state)
        if tables and {one.table.name for one in tables} != {table.name for table in plan.tables.tables}:
            raise InputError("must be that of the embeddings: it has other tables", field="plan")
        last = self.latest()
        if last is not None and step <= last.step:
            raise InputError(f"must be above {last.step}, of which there is a checkpoint, got {step}", field="step")
        embeddings = list({id(one.embeddings): one.embeddings for one in tables}.values())
        if delta and not all(one.marks_rows for one in embeddings):
            raise InputError("must be True in the settings of the embeddings, for deltas", field="marks_rows")
        if delta:
            check_told_apart((one.table.name, one.key) for one in tables)
        base = self._base[0] if delta and self._base is not None and self._base[1] == plan else None
        self._base, updates = None, []
        with contextlib.ExitStack() as stack:
            for one in embeddings if base is not None else ():
                stack.enter_context(one.without_tables())
            flat = staged(state, tables)
        for one in embeddings:
            updates += one.take_updates(copies=base is not None)
        self._base = (step, plan)
        job = StagedState(
            step=step,
            flat=flat,
            states=tuple(state),
            same=tuple(name for name, one in state.items() if not isinstance(one, torch.nn.Module)),
            tables=saved_tables(flat, tables),
            plan=plan,
            row_orders=row_orders,
            begun_with=begun_with,
            base=base,
            updates=updates,
        )
        self._writer = threading.Thread(target=self._write, args=(job,), name="checkpoint")
        self._writer.start()

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint that is being written is there.

        Raises:
            ExecutionError: If it could not be written, once; unless `on_error` is `warn`.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None and self._on_error == "raise":
            raise error

    def latest(self) -> Checkpoint | None:
        """The last committed checkpoint; None if there is none."""
        folders = committed_folders(self.folder)
        return Checkpoint(folders[-1]) if folders else None

    def all(self) -> list[Checkpoint]:
        """All committed checkpoints, by rising step."""
        return [Checkpoint(folder) for folder in committed_folders(self.folder)]

    def close(self) -> None:
        """Waits for what is being written, and lets go of the process group; before it is destroyed."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self._group)
            del self._group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, job: StagedState) -> None:
        """The thread: writes one checkpoint and removes what is older than those to keep, or keeps why it could not."""
        group = self._group
        try:
            write_checkpoint(self.folder, job, group)
            from_all(group, self._remove_old)
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            last = self.latest()
            kept = "there is no other one" if last is None else f"the last one is of step {last.step}"
            self._error = ExecutionError(f"{cause(error)}; {kept}")
            self._base = None  # no delta goes upon what is not there
            if self._rank == 0 and self._on_error == "warn":
                warn(str(self._error))

    def _remove_old(self) -> None:
        if self._rank == 0:
            folders = committed_folders(self.folder)
            needed = {one.folder for folder in folders[-self._keep :] for one in Checkpoint(folder).chain()}
            # The newest first: a delta goes before what it needs.
            for old in reversed([folder for folder in folders if folder not in needed]):
                remove(old)
