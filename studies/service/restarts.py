"""Restarts two replicas behind a proxy, one after the other, under load: `python -m studies service-restarts`."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.table import Table
from bench.measuring.devices import find_device
from studies.frame import Machine, OutputOptions, StudyResult, command_line, to_document
from studies.service.arrivals import Latencies, Outcome, clients_of, send_at
from studies.service.bodies import JSON_HEADERS, small_task
from studies.service.processes import DatabaseKind, RunningService, new_database
from studies.service.proxy import Proxy, Replica

SCHEMA: Final = "autoshard.service_restarts/1"
_NUM_REPLICAS, _MAX_OPEN = 2, 200
#: One request in so many makes a plan; the others read one, or a list.
_PLANS_EVERY, _LISTS_EVERY = 4, 5
_SETTLE_S, _POLL_S = 0.5, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingRestarts:
    """Restarts, and requests meanwhile.

    Attributes:
        num_restarts: Restarts.
        rate_per_s: Requests per second.
        num_repeated: Requests that the proxy sent to a second replica.
        latencies: Of the requests.
    """

    num_restarts: int
    rate_per_s: float
    num_repeated: int
    latencies: Latencies


@command_options()
class RestartOptions:
    """Options of the study `service-restarts`."""

    times: Annotated[int, typer.Option(min=1, help="Restarts.")] = 20
    rate: Annotated[float, positive_option("Requests per second.")] = 20.0


class _Replica:
    """A service whose address the proxy knows."""

    def __init__(self, service: RunningService, proxy: Proxy) -> None:
        self._service, self._proxy, self._known = service, proxy, Replica(0)

    async def start(self) -> None:
        """Starts it, and waits until the proxy sends it requests."""
        await asyncio.to_thread(self._service.start)
        self._known = Replica(int(self._service.url.rpartition(":")[2]))
        self._proxy.replicas.append(self._known)
        while not self._known.is_ready:
            await asyncio.sleep(_POLL_S)

    async def restart(self) -> None:
        """Ends it by SIGTERM, as a process manager does that knows of no proxy, and starts it again."""
        await asyncio.to_thread(self._service.stop)
        self._proxy.replicas.remove(self._known)
        await self.start()

    def end(self) -> None:
        """Ends it, if it runs."""
        if self._service.process.poll() is None:
            self._service.stop()


def measure(options: RestartOptions) -> RollingRestarts:
    """Restarts replicas under load.

    Raises:
        ExecutionError: If a replica does not start, or does not end in order.
    """
    proxy = Proxy()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autoshard-restarts-")))
        address = stack.enter_context(new_database(DatabaseKind.POSTGRESQL, folder))
        replicas = []
        for number in range(_NUM_REPLICAS):
            service = RunningService(folder / str(number), address, ("--workers", "1"))
            replicas.append(_Replica(service, proxy))
        return asyncio.run(_run(options, proxy, replicas))


async def _run(options: RestartOptions, proxy: Proxy, replicas: list[_Replica]) -> RollingRestarts:
    async with proxy.serving() as url:
        try:
            for replica in replicas:
                await replica.start()
            outcomes = await _loaded(options, url, replicas)
        finally:
            for replica in replicas:
                replica.end()
    return RollingRestarts(
        num_restarts=options.times,
        rate_per_s=options.rate,
        num_repeated=proxy.num_repeated,
        latencies=Latencies.of("mixed", outcomes),
    )


async def _loaded(options: RestartOptions, url: str, replicas: list[_Replica]) -> list[Outcome]:
    """Outcomes of requests until all restarts are done."""
    (client,), is_over = clients_of(url, 1), asyncio.Event()
    first = await client.post("/v1/plans", content=small_task(0), headers=JSON_HEADERS)
    send = _mixed(client, first.raise_for_status().json()["id"])

    async def load() -> list[Outcome]:
        outcomes, second = [], 1.0
        for start in itertools.count():
            times_s = [number / options.rate for number in range(round(second * options.rate))]
            numbered = _from(send, start * len(times_s))
            outcomes.append(asyncio.create_task(send_at(times_s, numbered, max_open=_MAX_OPEN)))
            await asyncio.sleep(second)
            if is_over.is_set():
                break
        return [one for batch in await asyncio.gather(*outcomes) for one in batch]

    loading = asyncio.create_task(load())
    for number in range(options.times):
        await replicas[number % len(replicas)].restart()
        await asyncio.sleep(_SETTLE_S)
    is_over.set()
    found = await loading
    await client.aclose()
    return found


def _mixed(client: httpx.AsyncClient, plan_id: str) -> Callable[[int], Awaitable[httpx.Response]]:
    def send(number: int) -> Awaitable[httpx.Response]:
        if number % _PLANS_EVERY == 0:
            headers = {**JSON_HEADERS, "Idempotency-Key": uuid.uuid4().hex}
            return client.post("/v1/plans", content=small_task(number + 1), headers=headers)
        return client.get("/v1/plans" if number % _LISTS_EVERY == 0 else f"/v1/plans/{plan_id}")

    return send


def _from(send: Callable[[int], Awaitable[httpx.Response]], first: int) -> Callable[[int], Awaitable[httpx.Response]]:
    return lambda number: send(first + number)


def main(options: RestartOptions, output: OutputOptions) -> None:
    """Restarts two replicas on one PostgreSQL in turn, behind a proxy, and counts requests that failed.

    A quarter of the requests makes plans, with idempotency keys; the others read and list. The proxy asks `/readyz`
    five times a second, and sends a request whose connection ends to the other replica.

    Exit code: 0 all requests answered, 1 otherwise.

    Example:
        python -m studies service-restarts --times 20 --rate 20
    """
    found = measure(options)
    on = Machine.this(find_device("cpu"), command_line("service-restarts", options))
    document = {**to_document(found, SCHEMA), "machine": on.to_json()}
    seen = found.latencies
    numbers = (
        *(str(found.num_restarts), f"{seen.num_requests:,}", f"{seen.num_answered:,}", f"{found.num_repeated:,}"),
        *(f"{seen.num_refused + seen.num_failed:,}", f"{seen.p50_ms:.1f}", f"{seen.p99_ms:.1f}", f"{seen.max_ms:.1f}"),
    )
    columns = ("restarts", "requests", "answered", "sent again", "not answered", "p50 ms", "p99 ms", "max ms")
    table = Table(columns=columns, rows=(numbers,), caption="Rolling restarts of two replicas behind a proxy")
    output.write(StudyResult(name="service-restarts", document=document, tables=(table,), notes=seen.faults))
    if seen.num_answered < seen.num_requests:
        raise typer.Exit(1)
