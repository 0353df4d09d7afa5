import asyncio

import httpx
import pytest

from studies.service.proxy import Proxy, Replica

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhere"
CUT = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhe"


async def replica_of(answer):
    """A replica that gives one answer to all that is asked, but for its health."""

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(OK if b"/readyz" in head else answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, Replica(server.sockets[0].getsockname()[1])


async def asked(*answers, method="GET", headers=None):
    """Statuses of four requests, and how many were sent again."""
    proxy = Proxy()
    made = [await replica_of(answer) for answer in answers]
    proxy.replicas += [replica for _, replica in made]
    async with proxy.serving() as url, httpx.AsyncClient(trust_env=False) as client:
        while not all(replica.is_ready for replica in proxy.replicas):
            await asyncio.sleep(0.01)
        found = [(await client.request(method, url, headers=headers)).status_code for _ in range(4)]
    for server, _ in made:
        server.close()
    return found, proxy.num_repeated


@pytest.mark.smoke
def test_an_answer_that_is_cut_off_is_asked_for_again_elsewhere():
    assert asyncio.run(asked(CUT, OK)) == ([200] * 4, 2)
    assert asyncio.run(asked(b"", OK, method="POST", headers={"Idempotency-Key": "k"})) == ([200] * 4, 2)


@pytest.mark.smoke
def test_what_cannot_be_done_twice_is_not_sent_again():
    assert asyncio.run(asked(CUT, OK, method="POST"))[0].count(502) == 2


@pytest.mark.smoke
def test_without_a_replica_that_answers_the_request_fails():
    assert asyncio.run(asked(CUT, CUT))[0] == [502] * 4
