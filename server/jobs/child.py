"""The process that does a job's work: it has a process group of its own, and ends with the service."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autoshard.api import (
    JOB_BODIES,
    CalibrateBody,
    CollectBody,
    ComparisonBody,
    JobKind,
    PlanJobBody,
    TrainCostBody,
    TrainPolicyBody,
)
from autoshard.cli import main
from autoshard.console import print_progress
from autoshard.core.errors import AutoshardError, InfeasiblePlanError, InputError
from autoshard.formats import parse_json
from costmodel.registry.aliases import Alias
from server.problems import InternalError
from server.settings import ServerSettings
from server.tasks.comparing import answer_compare
from server.tasks.context import TaskContext
from server.tasks.planning import answer_plan
from server.tasks.reply import Reply

#: Seconds between two lines that say how far a job is; the service looks at its log every second.
PROGRESS_EVERY_S = 2.0
#: Numbers of errors of a disk that takes no more.
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
#: Message of the service to a job's process: its search is to end.
STOP = b"stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildWork:
    """What a child process is to do.

    Attributes:
        kind: Kind of the job.
        request: JSON text of its request.
        job_id: The job.
        folder: Folder of the job, which is there; the log and checkpoints are in it.
        settings: Limits and models.
    """

    kind: JobKind
    request: bytes
    job_id: str
    folder: Path
    settings: ServerSettings

    @property
    def log(self) -> Path:
        """All that it prints."""
        return self.folder / "log"


def run_child(pipe: Connection, work: ChildWork) -> None:
    """Does a job's work, sends a `Reply`, and ends."""
    os.setsid()
    _print_to(work.log)
    _log_searches()
    print_progress(PROGRESS_EVERY_S)
    stop = threading.Event()
    threading.Thread(target=_end_with, args=(pipe, stop), daemon=True).start()
    try:
        reply = _reply(work, stop)
    except AutoshardError as error:
        with suppress(OSError):  # the job says it, too
            print(error, file=sys.stderr, flush=True)
        reply = Reply.of_error(error)
    except OSError as error:
        if error.errno not in _DISK_FAULTS:
            raise
        reply = Reply.of_error(InternalError(f"its files cannot be written: {os.strerror(error.errno).lower()}"))
    reply.send(pipe)


def _print_to(log: Path) -> None:
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _log_searches() -> None:
    """Prints what searches say of the best plan so far: the last line of the log is the job's progress."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    searches = logging.getLogger("autoshard.planners")
    searches.addHandler(handler)
    searches.setLevel(logging.DEBUG)


def _end_with(pipe: Connection, stop: threading.Event) -> None:
    """Ends this process and all that it started when the service's end of the pipe is closed, by its death too.

    Until then, a message that comes stops the search.
    """
    try:
        while True:
            pipe.recv_bytes()
            stop.set()
    finally:
        os.killpg(0, signal.SIGKILL)


def _reply(work: ChildWork, stop: threading.Event) -> Reply:
    body: Any = JOB_BODIES[work.kind].parse(parse_json(work.request))
    context = TaskContext(settings=work.settings, allow_s=lambda _: None, is_stopped=stop.is_set)
    if isinstance(body, PlanJobBody):
        return answer_plan(body, context)
    if isinstance(body, ComparisonBody):
        return answer_compare(body, context)
    return _of_command(_command(body, work), work)


def _command(body: CollectBody | CalibrateBody | TrainCostBody | TrainPolicyBody, work: ChildWork) -> list[str]:
    """The command line of a job that is a command of autoshard."""
    store = ["--store", str(work.settings.samples_folder)]
    # The operator alone changes which models are used, by a promotion.
    publishing = ["--alias", Alias.CANDIDATE]
    if work.settings.registry is not None:
        publishing += ["--registry", str(work.settings.registry)]
    values = {name: value for name, value in body.model_dump().items() if value is not None}
    options = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    # The seed of the job: measuring anew goes on after what is stored, and no set of tables is measured twice.
    seed = ["--seed", str(int(work.job_id[:8], 16))]
    if isinstance(body, CollectBody):
        return ["collect", *store, *options, *seed]
    if isinstance(body, CalibrateBody):
        # A store of its own: a model that was trained from the samples would be fitted to them a second time.
        own = ["--store", str(work.settings.calibration_folder)]
        return ["calibrate", *own, *publishing, *options, *seed]
    if isinstance(body, TrainCostBody):
        return ["train", "cost", *store, *publishing, *options]
    return ["train", "policy", *publishing, *options, "--checkpoint", str(work.folder / "checkpoint")]


def _of_command(arguments: list[str], work: ChildWork) -> Reply:
    """Runs a command in this process.

    Raises:
        AutoshardError: If it fails, with the last line that it printed.
    """
    output = work.folder / "output.json"
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
    code = main([*arguments, "--json"])
    sys.stdout.flush()
    if code != 0:
        print(file=sys.stderr, flush=True)  # fails where the log could not be written
        raise _failure(code, work.settings.without_folders(_last_line(work.log)))
    document = json.loads(output.read_bytes())
    return Reply(status=200, body=json.dumps(document).encode())


def _failure(code: int, line: str) -> AutoshardError:
    kinds: dict[int, type[AutoshardError]] = {2: InputError, 3: InfeasiblePlanError}
    return kinds.get(code, InternalError)(line.removeprefix("error: "))


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it ended without a word"
