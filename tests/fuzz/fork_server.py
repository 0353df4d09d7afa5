"""A process that has imported the command line once, and forks a child for every command that it is told to run.

It reads one JSON object per line on standard input (`arguments`, `folder`, `timeout_s`), and answers with one on
standard output. The child runs in the folder, with its output in files there: imports cost nothing, and nothing of one
command is seen by the next.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import select
import signal
import sys
import time
import traceback

from autoshard import cli

OUT, ERR = ".stdout", ".stderr"
#: Packages and modules that commands import, without torch: its memory makes a fork four times as slow.
LIGHT = (
    *("autoshard.commands", "autoshard.formats", "autoshard.evaluation", "autoshard.planners", "autoshard.planning"),
    *(
        "autoshard.report",
        "autoshard.whatif",
        "bench.commands",
        "bench.dense.report",
        "bench.store",
        "costmodel.kernel.command",
    ),
    *(
        "costmodel.registry.command",
        "costmodel.plugin",
        "costmodel.step.plugin",
        "policies.training.command",
        "server.commands",
    ),
    *(
        "numpy.ma",
        "plotly.graph_objs",
        "plotly.io",
        "plotly.offline",
        "plotly.validator_cache",
        "pyarrow.parquet",
        "rich.progress",
    ),
    # Arrow imports them where pandas is installed.
    *("pandas", "pyarrow.pandas_compat"),
    # Lower bounds, errors of sets, and databases.
    *("scipy.optimize", "scipy.sparse", "alembic.command", "sqlalchemy.dialects.sqlite"),
)
#: What those import besides that execute plans, train, or ask a policy.
HEAVY = (*LIGHT, "autoshard.runtime", "bench", "costmodel", "env", "policies", "fbgemm_gpu")
OWN = ("autoshard", "bench", "costmodel", "env", "policies", "server")
#: Left out: programs, whose import starts threads or takes long.
NOT_IMPORTED = ("__main__", "torchrec_engine", "compiled._search")  # the last is no Python module
#: What a command may ask for beyond the imports; it would use up the machine's memory else.
MOST_DATA_BYTES = 3 << 30


def import_all(names):
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(["list", "tables"])  # for what typer imports, and so that our own packages come first
    for name in names:
        package = importlib.import_module(name)
        # Of others' packages only what is named.
        inner = getattr(package, "__path__", []) if name.partition(".")[0] in OWN else []
        for module in pkgutil.walk_packages(inner, f"{name}."):
            if not any(part in module.name for part in NOT_IMPORTED):
                importlib.import_module(module.name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot fork"
    gc.collect()
    gc.freeze()


def run(request):
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        run_in_child(request, writing)
    os.close(writing)
    handle = os.pidfd_open(child)
    ready, _, _ = select.select([handle], [], [], request["timeout_s"])
    os.close(handle)
    # All that it started, too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = json.loads(pipe.readline() or "{}")
    return {
        "code": os.waitstatus_to_exitcode(status),
        "error": said.get("error"),
        "peak_bytes": usage.ru_maxrss * 1024,
        "seconds": time.monotonic() - started,
        "is_hanging": not ready,
    }


def run_in_child(request, pipe):
    """As the program `autoshard` would, but for what only ends a process."""
    code = 1
    try:
        os.setsid()
        os.chdir(request["folder"])
        for name, stream in ((OUT, 1), (ERR, 2)):
            file = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
            os.dup2(file, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        limit_memory()
        sys.stderr.write = telling(sys.stderr.write, pipe)
        code = cli.main(request["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 as Python ends a process
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def limit_memory():
    with open("/proc/self/status", encoding="ascii") as status:
        held = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + MOST_DATA_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def telling(write, pipe):
    """Writes to standard error, and also tells the kind of error that is printed."""

    def told(text):
        if text.startswith("error: "):
            os.write(pipe, (json.dumps({"error": type(sys.exc_info()[1]).__name__}) + "\n").encode())
        return write(text)

    return told


def main():
    import_all(HEAVY if "--heavy" in sys.argv else LIGHT)
    # Answers only: whatever else is printed goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
