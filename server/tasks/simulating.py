"""Steps of one set of tables on other clusters and with other batch sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from autoshard.api import SimulationBody
from autoshard.core import Payload, TableSet
from autoshard.core.errors import FormatError
from autoshard.results.sweep import SweepPoint
from autoshard.results.sweep_record import SIMULATION, SweepRecord
from autoshard.whatif.sweep import Simulator, sweep_points
from server.settings import ServerSettings
from server.tasks.context import TaskContext
from server.tasks.inputs import tables_of, topology_of
from server.tasks.reply import Reply
from server.tasks.size import check_documents, check_points, check_total_time


def answer_simulate(body: SimulationBody, context: TaskContext) -> Reply:
    """Plans and prices every combination; those without a plan have the reason."""
    for topology in body.topologies:
        check_documents(body.tables, topology, context.settings)
    tables = tables_of(body.tables)
    points = _points(body, tables, context.settings)
    context.allow_s(len(points) * body.time_limit_s)
    simulator = _simulator(body, tables, context)
    name = body.tables if isinstance(body.tables, str) else "tables"
    # Where the service keeps its models is nothing to its clients.
    settings = simulator.settings(name) | {"registry": None}
    found = SweepRecord(settings=settings, points=tuple(map(simulator.simulate, points)))
    return Reply(status=200, body=json.dumps(SIMULATION.to_json(found), allow_nan=False).encode(), planner=body.planner)


def _points(body: SimulationBody, tables: TableSet, settings: ServerSettings) -> Sequence[SweepPoint]:
    if body.group_sizes and body.groups != [1]:
        raise FormatError("cannot be given with groups", field="group_sizes")
    batch_sizes, groups = body.batch_sizes or [tables.batch_size], body.group_sizes or body.groups
    points_per_rank = len(body.topologies) * len(batch_sizes) * len(groups)
    check_points(tables, body.ranks, points_per_rank, settings)
    check_total_time(len(body.ranks) * points_per_rank, "points", body.time_limit_s)
    return sweep_points(
        machines=[_name(given, index) for index, given in enumerate(body.topologies)],
        ranks=body.ranks,
        groups=body.groups,
        group_sizes=body.group_sizes or (),
        batch_sizes=batch_sizes,
        is_batch_per_rank=body.is_batch_per_rank,
    )


def _simulator(body: SimulationBody, tables: TableSet, context: TaskContext) -> Simulator:
    read = {
        _name(given, index): topology_of(given, f"topologies[{index}]") for index, given in enumerate(body.topologies)
    }
    # A bundled machine knows more levels than it has by default, so the simulator makes it by its name.
    machines = {name: topology for name, topology in read.items() if name not in body.topologies}
    return Simulator(
        tables=tables,
        machines=machines,
        planner=body.planner,
        options=body.options,
        time_limit_s=body.time_limit_s,
        seed=body.seed,
        payload=Payload.parse(body.payload, "payload"),
        registry=context.registry,
        risk=body.risk,
        overlap=body.overlap,
        layout=body.layout,
        sync_every=body.sync_every,
        num_batches=body.num_batches,
        lengths=body.lengths,
    )


def _name(topology: object, index: int) -> str:
    return topology if isinstance(topology, str) else f"topologies[{index}]"
