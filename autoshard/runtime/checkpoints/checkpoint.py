"""One committed checkpoint: shown, verified, and loaded under any plan of the same tables."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.stateful import Stateful

from autoshard.core import EmbeddingTable, ShardingPlan
from autoshard.core.errors import ExecutionError, FormatError, InputError
from autoshard.formats import read_plan
from autoshard.runtime.checkpoints.contents import (
    JobTable,
    check_modules,
    check_names,
    job_tables,
    restored,
    template,
)
from autoshard.runtime.checkpoints.deltas import apply_updates, is_update_file, read_updates
from autoshard.runtime.checkpoints.manifest import (
    MANIFEST,
    MANIFEST_NAME,
    METADATA_NAME,
    PLAN_NAME,
    Manifest,
    altered,
    check_files,
    check_told_apart,
    committed_name,
    damaged_files,
)
from autoshard.runtime.checkpoints.storage import HashedFilesReader
from autoshard.runtime.checkpoints.together import cause, from_all
from autoshard.runtime.engine.rows.updates import UpdatedRows

#: Fields of a table that have to be the same where its state is loaded.
_KEPT_FIELDS = ("num_embeddings", "embedding_dim", "dtype", "optimizer")


class Checkpoint:
    """A committed checkpoint.

    Args:
        folder: Its folder, `.../step-000000001000`.

    Attributes:
        folder: The same.
        manifest: What it holds.

    Raises:
        InputError: If it is no checkpoint, or its manifest cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST_NAME).is_file():
            raise FormatError(
                f"is no checkpoint: must have a {MANIFEST_NAME}, which is written last", source=str(folder)
            )
        self.manifest: Manifest = MANIFEST.read(self.folder / MANIFEST_NAME)

    @property
    def step(self) -> int:
        """Step after which it was saved."""
        return self.manifest.step

    @cached_property
    def plan(self) -> ShardingPlan:
        """The plan that it was saved under.

        Raises:
            InputError: If its file cannot be read, or is another than was saved.
        """
        of_plan = [file for file in self.manifest.files if file.name == PLAN_NAME]
        check_files(self.folder, damaged_files(self.folder, of_plan))
        return read_plan(self.folder / PLAN_NAME)

    def chain(self) -> list[Checkpoint]:
        """The checkpoints that make it up: one with all rows, and the deltas upon it in their order, itself last.

        Raises:
            InputError: If one of them is missing.
        """
        chain = [self]
        while (base := chain[0].manifest.base) is not None:
            folder = self.folder.parent / committed_name(base)
            if not folder.is_dir():
                raise FormatError(f"needs {folder.name}, which is missing: it is a delta", source=str(chain[0].folder))
            chain.insert(0, Checkpoint(folder))
        return chain

    def verify(self) -> list[str]:
        """What is wrong with its files, each by its name: missing, of another size, altered.

        Reads all of them, of a delta also those of the checkpoints that it needs; returns nothing if all are as they
        were saved.

        Raises:
            InputError: If a checkpoint that it needs is missing.
        """
        return [told for one in self.chain() for told in damaged_files(one.folder, one.manifest.files)]

    def load(
        self,
        state: Mapping[str, Stateful],
        *,
        group: dist.ProcessGroup | None = None,
        verify: bool = True,
        partial: bool = False,
    ) -> None:
        """Brings a job to the state that was saved; all processes call it, under whatever plan and however many.

        Each process reads its even share of the rows of each table, in the shapes that were saved, and these go from
        there to where the job's plan has them. Nothing is changed before all that can be checked is.

        Args:
            state: What to load, by the names that it was saved under.
            group: The processes; None for all.
            verify: Whether each process hashes what it reads, before anything is made of it. Sizes are always checked.
            partial: Whether `state` may leave out names that were saved, for a job that only looks up.

        Raises:
            InputError: If the checkpoint is of other tables or layers, or a name is missing: the field names it. If a
                file is missing or damaged: the text names it, on all processes.
            ExecutionError: If processes load different checkpoints, or a file cannot be read.
        """
        check_names(state)
        tables = job_tables(state)
        self._check_names(state, partial=partial)
        chain = self.chain()
        if len(chain) > 1:
            self.check_told_apart()
        chain[0].check_tables({one.key: one.table for one in tables}, state)
        members = group or dist.distributed_c10d._get_default_group()
        self._check_all_alike(chain, members)
        check_modules(FileSystemReader(self.folder).read_metadata(), state, tables)
        if verify:
            of_processes = from_all(
                members, lambda: [fault for one in chain for fault in one._damaged_updates(members)]
            )
            check_files(self.folder, [fault for faults in of_processes for fault in faults])
        flat = self._read_chain(chain, state, tables, members, verify=verify)
        for name, stateful in state.items():
            stateful.load_state_dict(restored(flat, name, tables))

    def _read_chain(
        self,
        chain: Sequence[Checkpoint],
        state: Mapping[str, Stateful],
        tables: Sequence[JobTable],
        group: dist.ProcessGroup,
        *,
        verify: bool,
    ) -> dict[str, Any]:
        """What this process needs of a state; of a delta, its tables are put upon those of the checkpoints before."""
        flat = chain[0]._read(state, tables, group, verify=verify)
        if len(chain) == 1:
            return flat
        of_tables = tuple(f"{one.key}." for one in tables)
        rows = {key: tensor for key, tensor in flat.items() if key.startswith(of_tables)}
        for one in chain[1:]:
            apply_updates(rows, tables, one.updates())
        return self._read(state, tables, group, verify=verify) | rows

    def _read(
        self, state: Mapping[str, Stateful], tables: Sequence[JobTable], group: dist.ProcessGroup, *, verify: bool
    ) -> dict[str, Any]:
        """What this process needs of what torch.distributed.checkpoint wrote.

        Raises:
            FormatError: If a file that a process reads is altered: on all of them.
            ExecutionError: If a file cannot be read: on all of them.
        """
        reader = HashedFilesReader(self.folder, self.manifest.files if verify else ())
        flat = template(reader.read_metadata(), list(state), tables)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        error = None
        try:
            load_state(flat, storage_reader=reader, planner=planner, process_group=group)
        except CheckpointException as found:
            error = found
        names = {name for of_process in from_all(group, lambda: reader.files.altered) for name in of_process}
        check_files(self.folder, [altered(name) for name in sorted(names)])
        if error is not None:
            raise ExecutionError(f"cannot be read: {cause(error)}", source=str(self.folder)) from error
        return flat

    def _damaged_updates(self, group: dist.ProcessGroup) -> list[str]:
        """What is wrong with this process's part of a delta's files of updated rows."""
        files = [file for file in self.manifest.files if is_update_file(file.name)]
        return damaged_files(self.folder, files[group.rank() :: group.size()])

    def updates(self) -> Iterator[UpdatedRows]:
        """Rows of a delta, of all processes that saved it; none of a checkpoint that has all rows.

        Raises:
            FormatError: If a file cannot be read.
        """
        for file in self.manifest.files:
            if is_update_file(file.name):
                yield from read_updates(self.folder / file.name)

    def _check_names(self, state: Mapping[str, Stateful], *, partial: bool) -> None:
        saved = self.manifest.states
        for name in state:
            if name not in saved:
                raise InputError(f"is not in the checkpoint, which has {', '.join(saved)}", field=name)
        for name in saved:
            if name not in state and not partial:
                raise InputError(
                    "is in the checkpoint, and nothing takes it: give it, or load with partial=True", field=name
                )

    def check_tables(self, running: Mapping[str, EmbeddingTable], names: Collection[str] | None = None) -> None:
        """Refuses to load into other tables than were saved.

        Args:
            running: The tables, by what the keys of their tensors begin with.
            names: Names of the states that are loaded; None for all.

        Raises:
            InputError: If a table is missing on either side, differs, or has no moments; the field names it.
        """
        saved = {one.key: one for one in self.manifest.tables if names is None or one.key.partition(".")[0] in names}
        for key, table in running.items():
            if key not in saved:
                raise InputError("is a table of the plan, and not in the checkpoint", field=table.name)
            _check_table(self.plan.tables[table.name], table)
            for moment in table.optimizer.moments:
                if moment.name not in saved[key].tensors:
                    raise InputError(
                        f"has no {moment.name} in the checkpoint: {table.optimizer} needs them", field=table.name
                    )
        for key, one in saved.items():
            if key not in running:
                raise InputError("is a table of the checkpoint, and not in the plan", field=one.name)

    def check_told_apart(self) -> None:
        """Refuses tables of one name, see `manifest.check_told_apart`."""
        check_told_apart((one.name, one.key) for one in self.manifest.tables)

    def _check_all_alike(self, chain: Sequence[Checkpoint], group: dist.ProcessGroup) -> None:
        """Refuses files that differ in size or, of what says how to read the others, in a byte; on all processes."""

        def look() -> tuple[str, list[str]]:
            manifest = json.dumps(MANIFEST.to_json(self.manifest))
            return manifest, [
                fault
                for one in chain
                for fault in damaged_files(one.folder, one.manifest.files, lambda file: file.name == METADATA_NAME)
            ]

        found = from_all(group, look)
        for process, (manifest, _) in enumerate(found):
            if manifest != found[0][0]:
                raise ExecutionError(f"process {process} loads another checkpoint than process 0")
        check_files(self.folder, list(dict.fromkeys(fault for _, faults in found for fault in faults)))


def _check_table(saved: EmbeddingTable, running: EmbeddingTable) -> None:
    """Refuses to load the state of a table into another one.

    Raises:
        InputError: If rows, columns, dtype or optimizer differ; the field names it.
    """
    for name in _KEPT_FIELDS:
        if (had := getattr(saved, name)) != (has := getattr(running, name)):
            raise InputError(f"must be {had}, as in the checkpoint, got {has}", field=f"{running.name}.{name}")
