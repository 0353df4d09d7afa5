"""Runs the service in this process until it is told to stop."""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
import time
from contextlib import closing
from types import FrameType

import structlog
import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from autoshard.core.errors import AutoshardError, InvalidOptionError
from server.first_keys import provide_keys
from server.logs import set_up_logs
from server.memory import freeze, give_back_large_blocks
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.storage.storage import Storage, open_storage
from server.telemetry import sent_traces
from server.web.app import create_app
from server.web.connections import limited_protocol

_log = structlog.get_logger()
#: Connections that are accepted in one turn of the loop, and that wait for that in the system: one that finds no place
#: there would try again after a second.
_ACCEPTED_AT_ONCE, _WAITING_CONNECTIONS = 16, 4096


def run_service(settings: ServerSettings) -> None:
    """Listens, serves, and returns after SIGTERM.

    Args:
        settings: Address, limits and models. The log names the port if that is 0.

    Raises:
        InvalidOptionError: If the address cannot be listened on, needs keys and there are none, or the database cannot
            be used.
        AutoshardError: If the models cannot be loaded.
    """
    give_back_large_blocks()
    with (
        closing(listening(settings.host, settings.port)) as listener,
        closing(open_storage(settings.num_jobs, settings.max_client_bytes)) as storage,
    ):
        first_secret = provide_keys(settings, listener, storage.keys)
        set_up_logs()
        if first_secret is not None:
            _log.info("first key", secret=first_secret)
        with sent_traces():
            failure = _serve(settings, listener, storage)
    if failure is not None:
        raise AutoshardError(failure)


def _serve(settings: ServerSettings, listener: socket.socket, storage: Storage) -> str | None:
    """Serves until it is told to stop; returns why the service could not go on, if so."""
    # The planning processes share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // settings.num_workers)))
    failures: list[str] = []
    url = _url(listener)

    def stop(reason: str) -> None:
        failures.append(reason)
        server.should_exit = True

    pool = WorkerPool(
        settings, on_ready=lambda: _log.info("listening", page=f"{url}/", docs=f"{url}/docs"), on_failure=stop
    )
    server = _server(settings, create_app(settings, pool, storage, is_draining=lambda: server.is_draining))
    # uvicorn ends with the signal that stopped it, which would make an orderly stop look like a crash.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    _log.info("starting", url=url)
    freeze()
    try:
        server.run(sockets=[listener])
    finally:
        pool.kill()  # a second Ctrl-C skips the orderly stop, and the processes ignore what Python would send them
    return failures[0] if failures else None


class _DrainingServer(uvicorn.Server):
    """Takes requests in for a while after the first signal to stop; the second one ends that."""

    def __init__(self, config: uvicorn.Config, drain_s: float) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._ends_at = math.inf
        self.is_draining = False

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.is_draining or self._drain_s == 0:
            super().handle_exit(sig, frame)
        else:
            self._ends_at = time.monotonic() + self._drain_s
        self.is_draining = True

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_WAITING_CONNECTIONS)

    @override
    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or time.monotonic() >= self._ends_at
        return await super().on_tick(counter)


def _server(settings: ServerSettings, app: ASGIApp) -> _DrainingServer:
    return _DrainingServer(
        uvicorn.Config(
            app,
            http=limited_protocol(settings),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_ACCEPTED_AT_ONCE,
            proxy_headers=False,  # see server.web.app, which believes those of trusted proxies only
            timeout_graceful_shutdown=math.ceil(settings.grace_s),
        ),
        settings.drain_s,
    )


def _url(listener: socket.socket) -> str:
    name, port = listener.getsockname()[:2]
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on an address.

    Raises:
        InvalidOptionError: If it cannot.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=128)
        # Connections inherit it. asyncio does not see that they are TCP's, and an answer of two packets would wait
        # 40 ms for the client to acknowledge the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        field = "--port" if used or error.errno == errno.EACCES else "--host"
        reason = f"port {port} is in use" if used else (error.strerror or str(error)).lower()
        raise InvalidOptionError(f"cannot listen on {host}:{port}: {reason}", field=field) from None
