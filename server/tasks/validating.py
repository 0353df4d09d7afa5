"""Checks of tables and topologies, without planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autoshard.api import Fault, ValidationAnswer, ValidationBody
from autoshard.core import TableSet, Topology
from autoshard.core.errors import FormatError, InputError
from autoshard.formats import TableList
from server.problems import fault_of
from server.tasks.context import TaskContext
from server.tasks.inputs import constrained, tables_of, topology_of
from server.tasks.reply import Reply
from server.tasks.size import check_documents, check_tables, check_task

T = TypeVar("T")


def answer_validate(body: ValidationBody, context: TaskContext) -> Reply:
    """The first fault of each document and of the constraints, all of a table list; with both, of their size, too."""
    if body.tables is None and body.topology is None:
        raise FormatError("must hold tables, a topology or both", field="body")
    faults: list[Fault] = []
    lists: list[TableList] = []
    tables = _checked(lambda: _tables(body, context, lists), faults)
    topology = _checked(lambda: _topology(body, context), faults)
    if tables is not None and topology is not None:
        _checked(lambda: check_task(tables, topology, context.settings), faults)
    if tables is not None:
        _checked(lambda: constrained(tables, topology, body.constraints), faults)
    return Reply(status=200, body=_answer(faults, tables, topology, lists).model_dump_json().encode())


def _tables(body: ValidationBody, context: TaskContext, lists: list[TableList]) -> TableSet | None:
    check_documents(body.tables, None, context.settings)
    if body.tables is None:
        return None
    tables = tables_of(body.tables, told=lists.append)
    check_tables(tables, context.settings)
    return tables


def _topology(body: ValidationBody, context: TaskContext) -> Topology | None:
    check_documents(None, body.topology, context.settings)
    return None if body.topology is None else topology_of(body.topology)


def _checked(read: Callable[[], T], faults: list[Fault]) -> T | None:
    """What is read; None, and one fault more, if it cannot be."""
    try:
        return read()
    except InputError as error:
        faults += map(fault_of, error.faults if isinstance(error, FormatError) and error.faults else [error])
        return None


def _answer(
    faults: list[Fault], tables: TableSet | None, topology: Topology | None, lists: list[TableList]
) -> ValidationAnswer:
    ranks = range(topology.world_size) if topology else ()
    return ValidationAnswer(
        is_valid=not faults,
        faults=faults,
        columns=dict(lists[0].columns) if lists else None,
        notes=list(lists[0].notes) if lists else [],
        num_tables=len(tables.tables) if tables else None,
        table_bytes=tables.storage_bytes if tables else None,
        num_ranks=topology.world_size if topology else None,
        hbm_bytes=sum(topology.memory_of(rank).hbm for rank in ranks) if topology else None,
    )
