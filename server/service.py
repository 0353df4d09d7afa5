"""Runs the service in this process until it is told to stop."""

from __future__ import annotations

import errno
import math
import os
import signal
import socket

import structlog
import uvicorn

from autoshard.core.errors import AutoshardError, InvalidOptionError
from server.logs import set_up_logs
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.web.app import create_app
from server.web.connections import limited_protocol

_log = structlog.get_logger()


def run_service(settings: ServerSettings) -> None:
    """Listens, serves, and returns after SIGTERM.

    Args:
        settings: Address, limits and models. The log names the port if that is 0.

    Raises:
        InvalidOptionError: If the address cannot be listened on.
        AutoshardError: If the models cannot be loaded.
    """
    listener = _listen(settings.host, settings.port)
    set_up_logs()
    # The planning processes share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // settings.num_workers)))
    failures: list[str] = []
    url = _url(listener)

    def stop(reason: str) -> None:
        failures.append(reason)
        server.should_exit = True

    pool = WorkerPool(settings, on_ready=lambda: _log.info("listening", url=url, docs="/docs"), on_failure=stop)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings, pool),
            http=limited_protocol(settings),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(settings.grace_s),
        )
    )
    # uvicorn ends with the signal that stopped it, which would make an orderly stop look like a crash.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    _log.info("starting", url=url)
    try:
        server.run(sockets=[listener])
    finally:
        pool.kill()  # a second Ctrl-C skips the orderly stop, and the processes ignore what Python would send them
    if failures:
        raise AutoshardError(failures[0])


def _url(listener: socket.socket) -> str:
    name, port = listener.getsockname()[:2]
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        field = "--port" if used or error.errno == errno.EACCES else "--host"
        reason = f"port {port} is in use" if used else (error.strerror or str(error)).lower()
        raise InvalidOptionError(f"cannot listen on {host}:{port}: {reason}", field=field) from None
