"""The event loop, watched while every endpoint gets the bodies that are worst for it."""

import asyncio
import contextlib
import gc
import multiprocessing
import re
import select
import socket
import time

import pytest
import uvicorn

from server.access import COMMAND_LINE
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.storage.location import DATABASE_VARIABLE
from server.storage.storage import open_storage
from server.web.app import guarded, make_routes
from server.web.connections import limited_protocol

MIB = 1 << 20
JSON = "application/json"
PLACES = {"plan_id": "sha256:" + "0" * 64, "other_id": "sha256:" + "0" * 64, "job_id": "0" * 32}
#: Most milliseconds for which one turn of the loop may take the process; what is measured is 1 to 17 ms.
MOST_MS = 40.0


def worst_bodies():
    """Bodies by what they are; those that are chunked have one byte in each chunk."""
    keys = b",".join(b'"%d":0' % number for number in range(300_000))
    yield "keys", b"{" + keys + b"}", False
    yield "keys of a field", b'{"tables":{' + keys + b'},"topology":"cpu-8"}', False
    yield "objects", b"[" + b"{}," * (16 * MIB // 3 - 2) + b"{}]", False
    yield "texts", b'{"tables":[' + b'"",' * (4 * MIB) + b'""]}', False
    yield "zeros", bytes(16 * MIB), False
    yield "deep", b"[" * (8 * MIB), False
    yield "single bytes", b'{"tables":"' + b"x" * (MIB // 2), True
    yield "short objects", b"[" + b"{}," * 10_000 + b"{}]", False  # short enough to be parsed by the service itself


def send(address, method, path, body, is_chunked, media_type):
    """Sends a request until it is answered; returns the status, or None if the connection was closed."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\n"
    if is_chunked:
        content = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()
        content += b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    else:
        content = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    left = memoryview(content)
    with socket.create_connection(address, timeout=60) as connection, contextlib.suppress(OSError):
        while not select.select([connection], [connection] if left else [], [], 60)[0]:
            left = left[connection.send(left[: 1 << 18]) :]
        return int(connection.recv(1 << 16).split(b" ")[1])
    return None


def attack(pipe, address):
    """Sends what it is told to, until it is told nothing; has the bodies by name."""
    bodies = {name: (body, is_chunked) for name, body, is_chunked in worst_bodies()}
    pipe.send(list(bodies))
    while (told := pipe.recv()) is not None:
        method, path, name, media_type = told
        pipe.send(send(address, method, path, *bodies[name], media_type))


class Watchdog:
    """Finds turns of the loop that took long.

    A turn counts by the smaller one of wall clock and processor time of all threads: what keeps the loop waiting is a
    thread of this process that does not give up the interpreter, not another process that has the core.
    """

    def __init__(self):
        self.longest_ms = 0.0

    async def watch(self):
        wall, used = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(0.001)
            wall, used, before = time.perf_counter(), time.process_time(), (wall, used)
            self.longest_ms = max(self.longest_ms, 1000 * min(wall - before[0], used - before[1]))

    def take(self):
        longest, self.longest_ms = self.longest_ms, 0.0
        return longest


@contextlib.asynccontextmanager
async def serving(folder, storage):
    """The whole service in this process; yields its address and its routes."""
    settings = ServerSettings(data=folder, rate=1e6, stranger_rate=1e6, num_workers=1)
    ready = asyncio.Event()
    pool = WorkerPool(settings, on_ready=ready.set, on_failure=pytest.fail)
    routes = make_routes(settings, pool, storage)
    config = uvicorn.Config(
        guarded(routes, storage, settings), http=limited_protocol(settings), log_config=None, access_log=False
    )
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await ready.wait()
        yield listener.getsockname(), routes
    finally:
        server.should_exit = True
        await task


def operations(routes):
    """Method and path of everything that the application answers."""
    for route in routes.routes:
        path = re.sub(r"\{(\w+)\}", lambda place: PLACES.get(place[1], "x"), route.path)
        for method in sorted(getattr(route, "methods", None) or ("GET",)):
            yield method, path


async def watched(folder, storage):
    """Longest turns in ms, by method, path and body."""
    found, dog = {}, Watchdog()
    async with serving(folder, storage) as (address, routes):
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        client = multiprocessing.get_context("spawn").Process(target=attack, args=(theirs, address), daemon=True)
        client.start()
        names = await asyncio.to_thread(ours.recv)
        watching = asyncio.ensure_future(dog.watch())
        for method, path in operations(routes):
            media_type = JSON if path != "/v1/samples" else "application/vnd.apache.parquet"
            for name in names if method not in ("GET", "HEAD") else names[-2:-1]:
                dog.take()
                ours.send((method, path, name, media_type))
                status = await asyncio.to_thread(ours.recv)
                await asyncio.sleep(0.05)
                found[method, path, name] = (dog.take(), status)
        watching.cancel()
        ours.send(None)
        client.join()
    return found


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    monkeypatch.setenv("AUTOSHARD_REGISTRY", str(tmp_path / "registry"))
    with contextlib.closing(open_storage()) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("with_keys", [False, True], ids=["allowed", "refused"])
def test_no_body_of_any_endpoint_keeps_the_loop(tmp_path, storage, with_keys):
    if with_keys:
        storage.keys.create("somebody's", {"plan"}, COMMAND_LINE)
    found = asyncio.run(watched(tmp_path / "data", storage))
    gc.unfreeze()
    print(*sorted(((round(ms, 1), str(status), *key) for key, (ms, status) in found.items()))[-40:], sep="\n")
    assert len({(method, path) for method, path, _ in found}) >= 50
    assert {key: ms for key, (ms, _) in found.items() if ms > MOST_MS} == {}
    statuses = {status for _, status in found.values()} - {None}
    assert not {status for status in statuses if status >= 500 and status not in (503, 504)}
    assert not with_keys or 200 not in {status for (method, _, _), (_, status) in found.items() if method == "POST"}
