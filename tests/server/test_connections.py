"""Limits of connections and of what they hold: real sockets, a real service."""

import asyncio
import contextlib
import socket

import pytest
import uvicorn

from server.planning.workers import WorkerPool
from server.problems import BusyError, ClientBusyError
from server.service import listening
from server.settings import ServerSettings
from server.storage.location import DATABASE_VARIABLE
from server.storage.storage import open_storage
from server.web.access import AccessControl
from server.web.app import make_routes
from server.web.buffers import BufferBudget
from server.web.connections import limited_protocol
from server.web.request_log import RequestLog

MIB = 1 << 20


def address_of(service):
    host, port = service.url.removeprefix("http://").split(":")
    return host, int(port)


def slow_body(stack, service, num_bytes):
    """A connection that has sent all but one byte of a body."""
    connection = stack.enter_context(socket.create_connection(address_of(service), timeout=30))
    head = "POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.suppress(ConnectionError):  # it may be answered before
        connection.sendall(f"{head}Content-Length: {num_bytes}\r\n\r\n".encode() + b" " * (num_bytes - 1))
    return connection


def test_answers_of_several_packets_do_not_wait_for_the_client():
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# Bodies that arrive too slowly on a busy machine are refused for that.
@pytest.mark.slow
def test_slow_bodies_of_one_client_hold_half_of_the_buffered_bytes(service):
    with contextlib.ExitStack() as stack:
        held = [slow_body(stack, service, 15 * MIB) for _ in range(2)]
        third = slow_body(stack, service, 15 * MIB)
        answer = third.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"\r\nretry-after: 1\r\n" in answer.lower()
        with service.client() as client:
            assert (
                client.post("/v1/plans", content="{", headers={"content-type": "application/json"}).status_code == 400
            )
        for connection in held:
            connection.sendall(b"{")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")


def opened(stack, address, source="127.0.0.1", sent=b"GET / HTTP/1.1\r\nX-Slow: "):
    """A connection from an address of this machine, with the start of a request."""
    connection = stack.enter_context(socket.create_connection(address, timeout=30, source_address=(source, 0)))
    connection.sendall(sent)
    return connection


def asked(stack, address, path, source="127.0.0.1"):
    """The answer to a request on a connection of its own."""
    connection = opened(stack, address, source, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection.recv(1 << 16)


def is_open(connection):
    """Whether the service has not closed a connection that it has nothing to say to."""
    connection.settimeout(0.2)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_of_connections_without_a_request_one_address_has_its_share_and_the_oldest_are_closed(service):
    most = ServerSettings().max_connections // 2
    address = address_of(service)
    with contextlib.ExitStack() as stack:
        held = [opened(stack, address) for _ in range(most)]
        assert all(map(is_open, (held[0], held[-1])))
        more = [opened(stack, address) for _ in range(8)]
        assert asked(stack, address, "/livez").startswith(b"HTTP/1.1 200")
        assert [is_open(one) for one in held[:10]] == [False] * 9 + [True]
        assert all(map(is_open, more))


def test_connections_of_many_addresses_keep_nobody_out(service):
    """The reproduction of the audit: two addresses with 128 half-open connections each, and then some more."""
    address = address_of(service)
    with contextlib.ExitStack() as stack:
        for number in range(2, 10):
            for _ in range(60):
                opened(stack, address, f"127.0.0.{number}")
        for path in ("/livez", "/metrics", "/v1/plans"):
            assert asked(stack, address, path, "127.0.1.1").startswith(b"HTTP/1.1 200"), path


def test_probes_are_answered_while_as_many_requests_are_open_as_may_be(tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    settings = ServerSettings(max_connections=8)
    pool = WorkerPool(settings, on_ready=lambda: None, on_failure=lambda _: None)

    over = asyncio.Event()

    async def slow(scope, _receive, send):
        if scope["path"] == "/v1/plans":
            await over.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def status(address, path, source="127.0.0.9"):
        reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        try:
            return int((await reader.readline()).split()[1])
        finally:
            writer.close()

    async def play(storage):
        routes = make_routes(settings, pool, storage)
        app = RequestLog(AccessControl(slow, routes, storage, settings), routes.state.metrics)
        async with serving(app, max_connections=8) as address:
            held = [
                asyncio.ensure_future(status(address, "/v1/plans", f"127.0.0.{2 + number % 2}")) for number in range(8)
            ]
            await asyncio.sleep(0.5)
            found = [await status(address, path) for path in ("/v1/plans", "/livez", "/readyz", "/metrics")]
            refused = await status(address, "/v1/models", "127.0.0.2")
            over.set()
            assert await asyncio.gather(*held) == [200] * 8
            return found, refused, await status(address, "/livez")

    with contextlib.closing(open_storage()) as storage:
        assert asyncio.run(play(storage)) == ([503, 200, 200, 200], 429, 200)


@pytest.mark.parametrize("num_bytes", [MIB // 2, 16 * MIB])
def test_the_client_of_a_body_that_nobody_reads_reads_the_answer(service, num_bytes):
    with socket.create_connection(address_of(service), timeout=30) as connection:
        head = "POST /v1/models/cost/cpu/rollbacks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with contextlib.suppress(ConnectionError):  # a long one is cut off after a while
            connection.sendall(f"{head}Content-Length: {num_bytes}\r\n\r\n".encode() + bytes(num_bytes))
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                answer += part
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"must have at most 1,024 bytes" in answer


def test_what_is_no_http_is_told_so(service):
    with socket.create_connection(address_of(service), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/problem+json" in answer


def test_bytes_are_counted_beyond_the_first_and_given_back():
    budget = BufferBudget(ServerSettings(max_buffered_bytes=100, free_body_bytes=10))
    small, large, other = budget.open("a"), budget.open("a"), budget.open("b")
    small.receive(10)
    assert budget.total == 0
    large.receive(60)
    assert budget.total == 50
    with pytest.raises(ClientBusyError):
        small.receive(1)
    other.receive(10)
    other.receive(50)
    with pytest.raises(BusyError):
        budget.open("c").receive(11)
    large.answer(1000)  # is there already, and counts
    assert budget.total == 1100
    for buffer in (small, large, other):
        buffer.close()
    assert budget.total == 0


@contextlib.asynccontextmanager
async def serving(app, **limits):
    """A server with this application, in this process; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    protocol = limited_protocol(ServerSettings(**limits))
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, lifespan="off", log_config=None))
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        await task


def test_a_connection_without_a_request_is_closed():
    async def play(sent):
        async with serving(None, head_timeout_s=0.05) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()

    for sent in (b"", b"GET /livez HTTP/1.1\r\nX-Slow: "):
        asyncio.run(asyncio.wait_for(play(sent), 30))


def test_an_answer_that_nobody_reads_is_given_up():
    ended = []

    async def large_answer(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b" " * (32 * MIB)})
        ended.append(True)

    async def play():
        async with serving(large_answer, write_timeout_s=0.05) as address:
            _, writer = await asyncio.open_connection(*address, limit=1)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not ended:
                await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(asyncio.wait_for(play(), 30))
