"""The service attacked by who has no key: `python -m studies service`.

A client with a key asks for small plans, and probes ask whether the service is alive, in rounds without and with an
attack, in turn. Attackers have eight addresses of loopback and a process of their own at the lowest priority, since
theirs would be other machines' cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import httpx
import jwt
import typer

from autoshard.api import Scope
from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.table import Table
from server.access import COMMAND_LINE
from server.storage.database import Database
from server.storage.keys import KeyStore
from server.storage.location import parsed_url
from studies.frame import Machine, OutputOptions, StudyResult
from studies.service.arrivals import Latencies, Outcome, Spacing, arrival_times, clients_of, send_at
from studies.service.bodies import JSON_HEADERS, small_task
from studies.service.processes import DatabaseKind, RunningService, new_database, running

_ADDRESSES: Final = tuple(f"127.0.1.{number}" for number in range(1, 9))
_BODY: Final = b"[" + b"{}," * ((16 << 20) // 3 - 2) + b"{}]"
_LOOPS, _HALF_OPEN, _WRONG_SECRETS = 3, 32, 2
_NUM_WARM_UP, _SETTLE_S, _NICEST = 20, 2.0, 19
_Attack = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackStudy:
    """What a client with a key and probes waited, without and with an attack.

    Attributes:
        seconds: Length of a round; there are as many with as without an attack.
        rate_per_s: Small plans per second, and probes, which are twice as many.
        latencies: Of plans and probes, without and with an attack.
        plans_ratio: 99th percentile of plans with an attack over that without.
        cores: Cores that the service takes for an attack alone, its planning processes aside.
        attackers: Answers that attackers got, by what they did and status, and connections that were closed on them.
    """

    seconds: float
    rate_per_s: float
    latencies: tuple[Latencies, ...]
    plans_ratio: float
    cores: float
    attackers: dict[str, int]


@command_options()
class AttackOptions:
    """Options of the study `service`."""

    rounds: Annotated[int, typer.Option(min=1, help="Rounds without and with an attack each.")] = 3
    seconds: Annotated[float, positive_option("Seconds of a round.")] = 30.0
    rate: Annotated[float, positive_option("Small plans per second; probes are twice as many.")] = 4.0


def measure(options: AttackOptions) -> AttackStudy:
    """Starts a service with a key and an issuer of tokens that does not answer, and attacks it now and then.

    Raises:
        ExecutionError: If the service does not start.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autoshard-attack-")))
        address = stack.enter_context(new_database(DatabaseKind.SQLITE, folder))
        with closing(Database(parsed_url(address))) as database:
            _, secret = KeyStore(database).create("study", [Scope.ADMIN], COMMAND_LINE)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        issuer = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = ("--workers", "2", "--oidc-issuer", issuer, "--oidc-audience", "study")
        service = stack.enter_context(running(RunningService(folder, address, arguments)))
        return asyncio.run(_rounds(options, service, secret))


async def _rounds(options: AttackOptions, service: RunningService, secret: str) -> AttackStudy:
    url = service.url
    client, probe = clients_of(url, 2)
    client.headers["Authorization"] = f"Bearer {secret}"
    seeds = itertools.count()

    async def plan(_: int) -> httpx.Response:
        return await client.post("/v1/plans", content=small_task(next(seeds)), headers=JSON_HEADERS)

    async def look(_: int) -> httpx.Response:
        return await probe.get("/livez", headers={"Connection": "close"})  # as a kubelet does

    found: dict[str, list[Outcome]] = {}
    attackers: Counter[str] = Counter()
    described = (await client.get("/openapi.json")).raise_for_status().json()["paths"]
    endpoints = ["POST /page/session", *(f"POST {path}" for path, verbs in described.items() if "post" in verbs)]
    for number in range(_NUM_WARM_UP):
        await plan(number)
    for number in range(2 * options.rounds):
        is_attacked = number % 2 == 1
        with _attacking(url, endpoints, attackers) if is_attacked else contextlib.nullcontext():
            await asyncio.sleep(_SETTLE_S)
            sent = {
                "plans": send_at(_times(options.rate, options.seconds, number), plan, max_open=100),
                "probes": send_at(_times(2 * options.rate, options.seconds, number), look, max_open=100),
            }
            for name, outcomes in zip(sent, await asyncio.gather(*sent.values()), strict=True):
                found.setdefault(f"{name}{', attacked' if is_attacked else ''}", []).extend(outcomes)
    with _attacking(url, endpoints, attackers):
        await asyncio.sleep(_SETTLE_S)
        before_s = service.cpu_s()
        await asyncio.sleep(options.seconds)
        cores = (service.cpu_s() - before_s) / options.seconds
    for one in (client, probe):
        await one.aclose()
    latencies = {name: Latencies.of(name, outcomes) for name, outcomes in sorted(found.items())}
    ratio = latencies["plans, attacked"].p99_ms / latencies["plans"].p99_ms
    return AttackStudy(
        seconds=options.seconds,
        rate_per_s=options.rate,
        latencies=tuple(latencies.values()),
        plans_ratio=round(ratio, 2),
        cores=round(cores, 3),
        attackers=dict(sorted(attackers.items())),
    )


def _times(rate: float, seconds: float, seed: int) -> Sequence[float]:
    return arrival_times(rate, seconds, Spacing.POISSON, seed)


@contextmanager
def _attacking(url: str, endpoints: Sequence[str], attackers: Counter[str]) -> Iterator[None]:
    """Attacks until the end of the block; then counts what attackers were answered."""
    context = multiprocessing.get_context("spawn")
    is_over, results = context.Event(), context.Queue()
    process = context.Process(target=_attack, args=(url, endpoints, is_over, results), daemon=True)
    process.start()
    try:
        yield
    finally:
        is_over.set()
        attackers.update(results.get())
        process.join()


def _attack(url: str, endpoints: Sequence[str], is_over: Event, results: Any) -> None:
    os.nice(_NICEST)
    results.put(asyncio.run(_Attackers(url, endpoints).run(is_over)))


class _Attackers:
    def __init__(self, url: str, endpoints: Sequence[str]) -> None:
        self._place = urlsplit(url)
        self._endpoints = itertools.cycle(endpoints)
        self._addresses = itertools.cycle(_ADDRESSES)
        self.counts: Counter[str] = Counter()

    async def run(self, is_over: Event) -> Counter[str]:
        """Attacks in all ways at the same time; returns what came of it."""
        token = jwt.encode({"sub": "nobody"}, "secret" * 8, headers={"kid": "unknown"})
        ways: list[_Attack] = [lambda: self._ask("large body", next(self._endpoints), body=_BODY)] * _LOOPS
        ways += [lambda: self._ask("wrong key", "GET /v1/plans", secret="wrong" * 8)] * _WRONG_SECRETS
        ways += [lambda: self._ask("sign-in", "POST /page/session", secret="wrong" * 8)] * _WRONG_SECRETS
        ways += [lambda: self._ask("unknown token", "GET /v1/plans", secret=token)] * _WRONG_SECRETS
        ways += [self._half_open] * (_HALF_OPEN * len(_ADDRESSES))
        tasks = [asyncio.create_task(self._repeat(way)) for way in ways]
        await asyncio.to_thread(is_over.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.counts

    async def _repeat(self, attack: _Attack) -> None:
        while True:
            try:
                await attack()
            except OSError:
                self.counts["closed"] += 1

    async def _ask(self, name: str, endpoint: str, secret: str = "", body: bytes = b"") -> None:
        lines = [f"{endpoint} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"Authorization: Bearer {secret}"] if secret else []
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
        answer = await self._sent("\r\n".join([*lines, "", ""]).encode(), memoryview(body))
        self.counts[f"{name}: {answer.split(b' ')[1].decode() if answer else 'closed'}"] += 1

    async def _half_open(self) -> None:
        await self._sent(b"GET / HTTP/1.1\r\nX-Slow: ", memoryview(b""))
        self.counts["half-open: closed"] += 1

    async def _sent(self, head: bytes, body: memoryview) -> bytes:
        """What comes back of a connection, to which no more is sent then."""
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.bind((next(self._addresses), 0))
            await loop.sock_connect(connection, (self._place.hostname, self._place.port))
            await loop.sock_sendall(connection, head)
            sending = asyncio.ensure_future(loop.sock_sendall(connection, body))
            try:
                return await loop.sock_recv(connection, 1 << 12)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)


def latency_table(study: AttackStudy) -> Table:
    """A line for plans and probes, without and with an attack."""
    return Table.of(
        study.latencies,
        (
            ("requests", lambda row: row.name),
            ("sent", lambda row: f"{row.num_requests:,}"),
            ("answered", lambda row: f"{row.num_answered:,}"),
            ("p50 ms", lambda row: f"{row.p50_ms:.1f}"),
            ("p95 ms", lambda row: f"{row.p95_ms:.1f}"),
            ("p99 ms", lambda row: f"{row.p99_ms:.1f}"),
            ("max ms", lambda row: f"{row.max_ms:.1f}"),
        ),
        caption=f"{study.rate_per_s:g} small plans per second with a key, rounds of {study.seconds:g} s",
    )


def main(options: AttackOptions, output: OutputOptions) -> None:
    """Attacks a service of its own without a key, and reports what a client with one waits meanwhile.

    Three loops send the largest body to everything that takes one; 256 connections from eight addresses stay half
    open; others send wrong keys, and tokens of an issuer that does not answer.

    Example:
        python -m studies service
    """
    study = measure(options)
    document = Machine.of("service", options).document(study, "autoshard.service_attack/1")
    told = ", ".join(f"{name} {count:,}" for name, count in study.attackers.items())
    notes = (
        f"p99 of plans {study.plans_ratio:g} times that without an attack",
        f"the attack alone takes the service {study.cores:g} cores",
        f"attackers: {told}",
    )
    output.write(StudyResult(name="service-attack", document=document, tables=(latency_table(study),), notes=notes))
