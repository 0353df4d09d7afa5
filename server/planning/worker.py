"""A planning process: loads models once, then answers request bodies one by one."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from multiprocessing.connection import Connection

import structlog

from autoshard.core import Payload, ShardingPlan, TableSet, Topology
from autoshard.core.errors import AutoshardError, InputError, UnknownNameError
from autoshard.core.quoting import shown
from autoshard.formats import (
    bundled_table_sets,
    bundled_topologies,
    bundled_topology,
    digest,
    load_tables,
    parse_json,
    plan_from_json,
    plan_to_json,
    tables_from_json,
    topology_from_json,
)
from autoshard.planners.planner import PlanRequest
from autoshard.planning import get_planner, make_costs, make_plan, planner_names
from costmodel.registry.versions import models_in_use
from server.bodies import PlanAnswer, PlanBody, PlanFacts, parse_plan_body
from server.logs import set_up_logs
from server.planning.reply import Reply
from server.planning.task_size import check_documents, check_task
from server.problems import problem_of
from server.settings import ServerSettings

READY = b"ready"
#: Of the names by which a plan is searched: lists of 100,000 plans read all of them.
_SEARCHED_CHARACTERS = 256

_log = structlog.get_logger()


def run_worker(pipe: Connection, settings: ServerSettings) -> None:
    """Answers request bodies until the pipe is closed. Says `READY` first, or why it cannot start.

    A planner that goes on for too long after its time limit ends the process, by SIGALRM.
    """
    # A terminal, or a service manager, sends these to the whole group: the service decides when its processes end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    set_up_logs()
    try:
        _load_models(settings)
    except AutoshardError as error:
        pipe.send_bytes(str(error).encode())
        return
    try:
        pipe.send_bytes(READY)
        while True:
            _answer(pipe.recv_bytes(), settings).send(pipe)
    except (EOFError, BrokenPipeError):
        return  # the service has gone
    except Exception as error:
        _log.exception("fault while planning")
        raise SystemExit(1) from error


def _load_models(settings: ServerSettings) -> None:
    """Loads the models in use, shipped ones included, so that a damaged one stops the service and not a request.

    Planners are imported, too: some take seconds, which would be most of the first request's time limit. One that
    cannot be imported fails the requests for it, and no others.
    """
    for kind, name, models in models_in_use(settings.registry):
        models.load(kind, name)
    for name in planner_names():
        try:
            get_planner(name)
        except AutoshardError as error:
            _log.warning("planner unavailable", reason=str(error))


def _answer(body: bytes, settings: ServerSettings) -> Reply:
    """The answer to a request body."""
    _end_in(settings.overtime_s)
    try:
        return _plan(parse_plan_body(parse_json(body)), settings)
    except AutoshardError as error:
        return _problem(error)
    except (ArithmeticError, MemoryError, RecursionError):
        # Limits of single fields cannot rule out every combination of them, and this process is needed for others.
        _log.exception("a task whose numbers cannot be planned with")
        return _problem(InputError("its numbers are too large or too small to plan with", field="body"))
    finally:
        _end_in(0)


def _problem(error: AutoshardError) -> Reply:
    problem = problem_of(error)
    return Reply(status=problem.status, body=problem.model_dump_json(exclude_none=True).encode())


def _end_in(seconds: float) -> None:
    """Has the system end this process after a time, whatever it is doing then; 0 calls that off."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _plan(body: PlanBody, settings: ServerSettings) -> Reply:
    _end_in(body.time_limit_s + settings.overtime_of(body.time_limit_s))
    check_documents(body, settings)
    tables, topology = _tables(body), _topology(body)
    check_task(tables, topology, settings)
    request = PlanRequest(
        tables=tables,
        topology=topology,
        costs=make_costs(tables, topology, settings.registry),
        seed=body.seed,
        time_limit_s=body.time_limit_s,
        options=body.options,
        registry=settings.registry,
        payload=Payload.parse(body.payload, "payload"),
        start=None if body.start is None else plan_from_json(body.start, "start"),
    )
    plan = make_plan(body.planner, request)
    document = plan_to_json(plan)
    answer = PlanAnswer(id=digest(document), plan=document)
    return Reply(status=200, body=answer.model_dump_json().encode(), facts=_facts(answer.id, body.planner, plan))


def _facts(plan_id: str, planner: str, plan: ShardingPlan) -> PlanFacts:
    assert plan.predicted is not None
    tables, topology = plan.tables.tables, plan.topology
    words = [planner, topology.device, *(level.name for level in topology.levels), *(table.name for table in tables)]
    return PlanFacts(
        id=plan_id,
        planner=planner,
        device=topology.device,
        num_tables=len(tables),
        num_ranks=topology.world_size,
        step_ms=plan.predicted.step_ms.value,
        # PostgreSQL holds every character but this one.
        search_text=" ".join(words)[:_SEARCHED_CHARACTERS].casefold().replace("\0", " "),
    )


def _tables(body: PlanBody) -> TableSet:
    if isinstance(body.tables, str):
        if body.tables not in bundled_table_sets():
            raise _not_bundled(body.tables, bundled_table_sets(), "tables")
        return load_tables(body.tables)
    return tables_from_json(body.tables, "tables")


def _topology(body: PlanBody) -> Topology:
    if isinstance(body.topology, str):
        found = bundled_topology(body.topology)
        if found is None:
            raise _not_bundled(body.topology, bundled_topologies(), "topology")
        return found
    return topology_from_json(body.topology, "topology")


# Other names are paths to the loaders; a client must not read the service's files.
def _not_bundled(name: str, known: Iterable[str], field: str) -> UnknownNameError:
    return UnknownNameError(f"{shown(name)} is not bundled; there are: {', '.join(known)}", field=field)
