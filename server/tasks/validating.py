"""Checks of tables and topologies, without planning."""

from __future__ import annotations

from autoshard.core import TableSet, Topology
from autoshard.core.errors import FormatError, InputError
from server.bodies import Fault, ValidationAnswer, ValidationBody
from server.tasks.context import TaskContext
from server.tasks.inputs import tables_of, topology_of
from server.tasks.reply import Reply
from server.tasks.size import check_documents, check_task


def answer_validate(body: ValidationBody, context: TaskContext) -> Reply:
    """Names the first fault of each document; both without faults are checked together, too."""
    if body.tables is None and body.topology is None:
        raise FormatError("must hold tables, a topology or both", field="body")
    faults: list[Fault] = []
    tables: TableSet | None = None
    topology: Topology | None = None
    try:
        check_documents(body.tables, None, context.settings)
        tables = None if body.tables is None else tables_of(body.tables)
    except InputError as error:
        faults.append(_fault(error))
    try:
        check_documents(None, body.topology, context.settings)
        topology = None if body.topology is None else topology_of(body.topology)
    except InputError as error:
        faults.append(_fault(error))
    if tables is not None and topology is not None:
        try:
            check_task(tables, topology, context.settings)
        except InputError as error:
            faults.append(_fault(error))
    return Reply(status=200, body=_answer(faults, tables, topology).model_dump_json().encode())


def _answer(faults: list[Fault], tables: TableSet | None, topology: Topology | None) -> ValidationAnswer:
    ranks = range(topology.world_size) if topology else ()
    return ValidationAnswer(
        is_valid=not faults,
        faults=faults,
        num_tables=len(tables.tables) if tables else None,
        table_bytes=sum(table.storage_bytes for table in tables.tables) if tables else None,
        num_ranks=topology.world_size if topology else None,
        hbm_bytes=sum(topology.memory_of(rank).hbm for rank in ranks) if topology else None,
    )


def _fault(error: InputError) -> Fault:
    return Fault(type=f"urn:autoshard:problem:{error.kind}", detail=str(error), field=error.field)
