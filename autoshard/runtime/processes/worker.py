"""One process of a run: `torchrun -m autoshard.runtime.processes.worker FOLDER`, started by `launch`.

The folder holds `job.json`; the process of rank 0 writes `results.json` into it, a process that fails writes
`error.<rank>.json`. Progress goes to standard output, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autoshard.core.errors import AutoshardError
from autoshard.formats import atomic_write
from autoshard.runtime.processes.job import ERROR_FILE, JOB_FILE, PID_FILE, RESULTS_FILE, ErrorRecord
from autoshard.runtime.result_json import RUN
from autoshard.runtime.results import RunRequest


def main() -> None:
    """Executes the requests of the job."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # for the thread of `Watch`
    run_worker(_work)


def run_worker(work: Callable[[Any, Path, int], object]) -> NoReturn:
    """Does this process's work and ends the process.

    The folder that the command line names holds the job. It gets this process's id, the results of the process of rank
    0 if there are some, and the error if there is one.

    Args:
        work: What to do, given the job, the folder and the rank of this process; gives results that can be written as
            JSON, or None. What it writes itself must be closed when it returns.
    """
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    atomic_write(folder / PID_FILE.format(rank=rank), str(os.getpid()))
    try:
        threading.Thread(target=_exit_with_launcher, daemon=True).start()
        results = work(json.loads((folder / JOB_FILE).read_text(encoding="utf-8")), folder, rank)
        if results is not None and rank == 0:
            atomic_write(folder / RESULTS_FILE, json.dumps(results, allow_nan=False))
    except BaseException as error:  # noqa: BLE001 - the process ends
        traceback.print_exc()
        _fail(error, folder, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads may still be winding down after `destroy_process_group`, and abort an orderly exit.
    os._exit(0)


def _fail(error: BaseException, folder: Path, rank: int) -> NoReturn:
    """Ends the process, and leaves its error."""
    atomic_write(folder / ERROR_FILE.format(rank=rank), json.dumps(_record(error).to_json()))
    sys.stderr.flush()
    # An orderly exit would wait for collectives that are under way, whose peers wait for this process.
    os._exit(1)


def _work(job: Any, folder: Path, rank: int) -> object:
    # Imported here: torch and FBGEMM take a second, in which a broken import should still leave an error file.
    from autoshard.runtime.processes.watch import Watch

    watch = Watch(folder, rank, int(os.environ["WORLD_SIZE"]), lambda error: _fail(error, folder, rank))
    try:
        requests = [RunRequest(**request) for request in job["requests"]]
        results = _execute(requests, job["rounds"], folder, lambda: watch.wants_stop)
    except Exception as error:
        raise watch.explained(error) from error
    watch.close()
    return results


def _execute(requests: Sequence[RunRequest], rounds: int, folder: Path, wants_stop: Callable[[], bool]) -> object:
    from autoshard.runtime.processes.session import open_session

    def advance(done: int, total: int) -> None:
        if os.environ.get("LOCAL_RANK") == "0":  # each machine's launcher hears of its own
            print(json.dumps({"done": done, "total": total}), flush=True)

    with open_session(requests, folder, advance, wants_stop, rounds) as session:
        results = session.run_all()
    return {"results": [RUN.to_json(result) for result in results]}


def _exit_with_launcher() -> None:
    """Ends this process when the one that started the run is gone: nobody holds the other end of standard input."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def _record(error: BaseException) -> ErrorRecord:
    if isinstance(error, AutoshardError):
        return ErrorRecord(
            time_s=time.time(), kind=error.kind, message=error.message, field=error.field, source=error.source
        )
    # The first line only: FBGEMM and torch append C++ stack traces.
    text = str(error).strip() or type(error).__name__
    return ErrorRecord(time_s=time.time(), kind=type(error).__name__, message=text.splitlines()[0])


if __name__ == "__main__":
    main()
