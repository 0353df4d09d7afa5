"""A planning process: loads models once, then answers requests one by one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import structlog

from autoshard.core.errors import AutoshardError, InputError
from autoshard.planning import get_planner, planner_names
from costmodel.registry.versions import models_in_use
from server.logs import set_up_logs
from server.memory import freeze, give_back_large_blocks
from server.settings import ServerSettings
from server.tasks.answering import answer_work
from server.tasks.context import TaskContext
from server.tasks.reply import Reply
from server.tasks.work import Work

READY = b"ready"
#: Ends the search of a process that plans: nobody waits for its plan any more.
STOP_SIGNAL = signal.SIGUSR1

_log = structlog.get_logger()


def run_worker(pipe: Connection, settings: ServerSettings) -> None:
    """Answers requests until the pipe is closed. Says `READY` first, or why it cannot start.

    A planner that goes on for too long after its time limit ends the process, by SIGALRM.
    """
    # A terminal, or a service manager, sends these to the whole group: the service decides when its processes end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    stop = threading.Event()
    signal.signal(STOP_SIGNAL, lambda *_: stop.set())
    set_up_logs()
    give_back_large_blocks()
    try:
        _load_models(settings)
    except AutoshardError as error:
        pipe.send_bytes(str(error).encode())
        return
    freeze()
    try:
        pipe.send_bytes(READY)
        while True:
            _answer_next(pipe, settings, stop)
    except (EOFError, ConnectionError):
        return  # the service has gone
    except Exception as error:
        _log.exception("fault while planning")
        raise SystemExit(1) from error


def _answer_next(pipe: Connection, settings: ServerSettings, stop: threading.Event) -> None:
    """Answers one request, of which nothing is kept while this process waits for the next one."""
    work = Work.receive(pipe)
    stop.clear()
    answered(work, settings, stop.is_set).send(pipe)


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


def answered(work: Work, settings: ServerSettings, is_stopped: Callable[[], bool] = lambda: False) -> Reply:
    """The answer to a request.

    Args:
        work: The request.
        settings: Limits and models.
        is_stopped: Whether planners are to end soon.
    """
    begun_s = time.perf_counter()
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=work.request_id)
    context = TaskContext(
        settings=settings.of_team(work.team),
        actor=work.actor,
        allow_s=lambda limit_s: _end_in(limit_s + settings.overtime_of(limit_s)),
        is_stopped=is_stopped,
        started_s=work.received_s,
    )
    _end_in(settings.overtime_s)
    try:
        reply = answer_work(work, context)
        waited_s = 0.0 if work.received_s is None else begun_s - work.received_s
        return replace(reply, waited_s=waited_s, worked_s=time.perf_counter() - begun_s)
    except AutoshardError as error:
        return Reply.of_error(error)
    except (ArithmeticError, MemoryError, RecursionError):
        # Limits of single fields cannot rule out every combination of them, and this process is needed for others.
        _log.exception("a task whose numbers cannot be planned with")
        return Reply.of_error(InputError("its numbers are too large or too small to plan with", field="body"))
    finally:
        _end_in(0)


def _end_in(seconds: float) -> None:
    """Has the system end this process after a time, whatever it is doing then; 0 calls that off."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
