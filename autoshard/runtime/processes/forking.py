"""Starts the processes of a run on the CPU of this machine: `... processes.forking N -m MODULE FOLDER`.

It imports what they need once and forks them, where torchrun has each process import it: that takes a process 4 s of
CPU time and 200 MB of its own (64 processes 17 GB, forked 8.5 GB with all that they execute; 2-core AMD EPYC, November
2026). They find the environment that torchrun gives, and what it says of a killed process is said in its words.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Final, NoReturn

#: Imported before processes are forked; no import of these starts a thread.
_NEEDED: Final = ("autoshard.runtime.processes.session", "autoshard.runtime.embeddings")
#: How long processes get to end by themselves once one has failed.
_GRACE_S, _POLL_S = 5.0, 0.05
_HOST: Final = "127.0.0.1"


def main() -> NoReturn:
    """Starts the processes that the command line tells, and ends when they have ended."""
    num_processes, module, folder = int(sys.argv[1]), sys.argv[3], sys.argv[4]
    for name in _NEEDED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or collections would write to the memory that is shared
    with socket.create_server((_HOST, 0), backlog=num_processes) as listener:
        port = listener.getsockname()[1]
        ranks = {_fork(rank, num_processes, port, module, folder): rank for rank in range(num_processes)}
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(
            _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=False
        )
    code = _wait(ranks)
    del store
    sys.stderr.flush()
    os._exit(code)


def _fork(rank: int, num_processes: int, port: int, module: str, folder: str) -> int:
    """Starts one process; returns its id."""
    if pid := os.fork():
        return pid
    os.setsid()
    size = str(num_processes)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not rank 0's
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    sys.argv = [module, folder]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    os._exit(0)


def _wait(ranks: dict[int, int]) -> int:
    """Waits until all processes have ended, and ends the others once one has failed.

    Args:
        ranks: By process id.

    Returns:
        The exit code: 1 if one failed.
    """
    left, failed_at = dict(ranks), 0.0
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG if failed_at else 0)
        if pid == 0:
            if time.monotonic() - failed_at > _GRACE_S:
                _signal(left, signal.SIGKILL)
            time.sleep(_POLL_S)
            continue
        rank, code = left.pop(pid), os.waitstatus_to_exitcode(status)
        if code and not failed_at:
            failed_at = time.monotonic()
            print(f"rank : {rank}\nexitcode : {code} (pid: {pid})", file=sys.stderr)
            _signal(left, signal.SIGTERM)
    return int(failed_at > 0)


def _signal(pids: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
