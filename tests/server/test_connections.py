"""Limits of connections and of what they hold: real sockets, a real service."""

import asyncio
import contextlib
import socket

import pytest
import uvicorn

from server.problems import BusyError, ClientBusyError
from server.service import listening
from server.settings import ServerSettings
from server.web.buffers import BufferBudget
from server.web.connections import limited_protocol

MIB = 1 << 20


def address_of(service):
    host, port = service.url.removeprefix("http://").split(":")
    return host, int(port)


def slow_body(stack, service, num_bytes):
    """A connection that has sent all but one byte of a body."""
    connection = stack.enter_context(socket.create_connection(address_of(service), timeout=30))
    head = "POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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


def test_connections_of_one_address_are_limited(service):
    most = ServerSettings().max_connections // 2
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(address_of(service), timeout=30)) for _ in range(most + 9)
        ]
        opened[-1].sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = opened[-1].recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"urn:autoshard:problem:too-many-requests" in answer
        assert b"\r\nretry-after: 1\r\n" in answer
    with service.client() as client:
        assert client.get("/livez").status_code == 200


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
