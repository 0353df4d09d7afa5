"""The service under load: `python -m studies service-load KIND`.

Requests arrive at their own times, however long answers take, and latencies count from these times: what is measured is
what users wait. Service and clients share this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from sqlalchemy import insert, text

from autoshard import console
from autoshard.api import JobState
from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.table import Table
from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.location import parsed_url
from server.storage.plans import plan_row
from server.storage.schema import PLAN_DOCUMENTS, PLANS, now_us
from server.tasks.answering import answer_work
from server.tasks.context import TaskContext
from server.tasks.reply import Reply
from server.tasks.work import Body, Work, WorkKind
from studies.frame import Machine, OutputOptions, StudyResult
from studies.service.arrivals import Latencies, Outcome, Spacing, arrival_times, clients_of, send_at
from studies.service.bodies import JSON_HEADERS, job_task, large_tasks, long_bodies, small_task
from studies.service.processes import DatabaseKind, RunningService, new_database, running

_NUM_DOCUMENTS, _ROWS_AT_ONCE = 10, 500
_PLANNERS: Final = ("auto", "cost-greedy", "flexshard", "neo", "karmarkar-karp")
_DEVICES: Final = ("cpu", "a100", "h100")
_NUM_RANKS: Final = (8, 16, 32, 128)
#: Of one plan in so many.
RARE_PLANNER: Final = "cp-sat"
_RARE_EVERY: Final = 5000


def fill(address: str, num_plans: int) -> list[str]:
    """Stores plans; returns some of their ids.

    Their documents are answers to real requests; ids, names and times differ, so that each has a row of its own.
    """
    replies = [_answered(seed) for seed in range(_NUM_DOCUMENTS)]
    database, ids = Database(parsed_url(address)), []
    with console.progress("Storing plans", num_plans) as advance:
        rows = _rows(replies, num_plans)
        while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            with database.writing() as connection:
                connection.execute(insert(PLANS), [plan for plan, _ in batch])
                connection.execute(insert(PLAN_DOCUMENTS), [document for _, document in batch])
            ids.append(batch[0][0]["id"])
            advance(len(batch))
    if not database.is_sqlite:  # as the server does by itself after a minute
        with database.writing() as connection:
            connection.execute(text("ANALYZE"))
    database.close()
    return ids


def _answered(seed: int) -> Reply:
    context = TaskContext(settings=ServerSettings(), allow_s=lambda _: None)
    return answer_work(Work(kind=WorkKind.PLAN, body=Body(small_task(seed))), context)


def _rows(replies: Sequence[Reply], count: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    rng, first_us = random.Random(0), now_us() - 1_000_000 * count
    answers = [zlib.compress(reply.body) for reply in replies]
    for number in range(count):
        facts = replies[number % len(replies)].facts
        assert facts is not None
        plan_id = f"sha256:{rng.getrandbits(256):064x}"
        planner = RARE_PLANNER if number % _RARE_EVERY == 0 else rng.choice(_PLANNERS)
        device = rng.choice(_DEVICES)
        names = f"{planner} {device} team-{number % 1000:03d} {facts.search_text}"[:256]
        named = {"id": plan_id, "planner": planner, "device": device, "search_text": names}
        stored = facts.model_copy(update={**named, "num_ranks": rng.choice(_NUM_RANKS)})
        document = {"plan_id": plan_id, "answer": answers[number % len(answers)]}
        yield plan_row(stored, first_us + 1_000_000 * number), document


#: Over capacity, by which requests come in the kind `overload`.
_OVER: Final = 10.0
_NUM_TASKS, _NUM_ALONE, _NUM_READ_PLANS, _CAPACITY_S = 60, 40, 20, 10.0
_MAX_OPEN: Final = 200
#: Seconds between two looks at the memory; the second number is of the kind `bodies`, whose peaks are short.
_MEMORY_EVERY_S: Final = (1.0, 0.02)
_NUM_LONG_JOBS, _NUM_SHORT_JOBS, _JOB_LOOK_S = 50, 5, 0.1
_NUM_BODIES: Final = 5

_Send = Callable[[int], Awaitable[httpx.Response]]


class LoadKind(StrEnum):
    """What clients do."""

    PLANS = "plans"
    """Ask `auto` for plans of 80 tables on 8 ranks within 0.1 s."""
    READS = "reads"
    """Read stored plans of this size."""
    LISTS = "lists"
    """List and search many stored plans."""
    OVERLOAD = "overload"
    """Ask for plans at ten times the rate that can be answered."""
    JOBS = "jobs"
    """Ask for jobs of 1 s, one after another, after one client has asked for 50 of an hour."""
    BODIES = "bodies"
    """Send bodies of 16 MiB, two clients each without a pause."""


_RATES: Final = {LoadKind.PLANS: 8.0, LoadKind.READS: 200.0, LoadKind.LISTS: 4.0, LoadKind.OVERLOAD: 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """Requests to a service, and what became of them.

    Attributes:
        kind: What clients did.
        database: What the service ran on.
        rate_per_s: Requests per second.
        seconds: Length of the run, without what came before.
        latencies: By what was asked for; where plans are made, first those asked for one after another.
        memory_mib: Memory of the service and its processes, once a second or more often.
    """

    kind: LoadKind
    database: DatabaseKind
    rate_per_s: float
    seconds: float
    latencies: tuple[Latencies, ...]
    memory_mib: tuple[float, ...]


@command_options()
class LoadOptions:
    """Options of the study `service-load`."""

    kind: Annotated[LoadKind, typer.Argument(help="plans, reads, lists, overload, jobs or bodies.")]
    database: Annotated[DatabaseKind, typer.Option(help="What the service runs on.")] = DatabaseKind.SQLITE
    rate: Annotated[float | None, positive_option("Requests per second.")] = None
    seconds: Annotated[float, positive_option("Seconds for which requests are counted.")] = 60.0
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds of the same load before that.")] = 10.0
    spacing: Annotated[Spacing, typer.Option(help="How arrivals are spaced.")] = Spacing.POISSON
    clients: Annotated[int, typer.Option(min=1, max=100, help="Clients, each with an address of its own.")] = 4
    workers: Annotated[int, typer.Option(min=1, help="Planning processes of the service.")] = 2
    plans: Annotated[int, typer.Option(min=1000, help="Stored plans of the kind lists.")] = 100_000
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0


def measure(options: LoadOptions) -> ServiceLoad:
    """Starts a service on an empty database, and sends it requests.

    Raises:
        ExecutionError: If the service does not start.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autoshard-load-")))
        address = stack.enter_context(new_database(options.database, folder))
        ids = fill(address, options.plans) if options.kind is LoadKind.LISTS else []
        arguments = ("--workers", str(options.workers), "--rate", "1000000")
        service = stack.enter_context(running(RunningService(folder, address, arguments)))
        return asyncio.run(_Load(options, service, ids).run())


class _Load:
    def __init__(self, options: LoadOptions, service: RunningService, ids: Sequence[str]) -> None:
        self._options, self._service, self._ids = options, service, ids
        self._rng = random.Random(options.seed)
        self._clients = clients_of(service.url, options.clients)

    async def run(self) -> ServiceLoad:
        """Measures what the options say."""
        kind, memory = self._options.kind, asyncio.create_task(self._watch_memory())
        rate, found = self._options.rate or _RATES.get(kind, 0.0), []
        sends: dict[str, _Send] = {}
        if kind is LoadKind.JOBS:
            found = [await self._behind_long_jobs()]
        elif kind is LoadKind.BODIES:
            await self._one_by_one(self._plans(large_tasks(_NUM_READ_PLANS)), _NUM_READ_PLANS)
            self._memory_mib.clear()
            found = [await self._sent_by_two(name, body) for name, body in long_bodies().items()]
        elif kind is LoadKind.LISTS:
            sends = dict(self._lists())
        elif kind is LoadKind.READS:
            sends = {"reads": self._reads(await self._stored())}
        else:
            send = self._plans(large_tasks(_NUM_TASKS))
            await self._one_by_one(send, _NUM_TASKS)  # each process has answered some before anything is counted
            found.append(Latencies.of("one after another", await self._one_by_one(send, _NUM_ALONE)))
            rate = rate or _OVER * await self._capacity(send)
            sends = {str(kind): send}
        for name, send in sends.items():
            found.append(await self._counted(name, send, rate, self._options.seconds / len(sends)))
        memory.cancel()
        for client in self._clients:
            await client.aclose()
        return ServiceLoad(
            kind=kind,
            database=self._options.database,
            rate_per_s=round(rate, 2),
            seconds=self._options.seconds,
            latencies=tuple(found),
            memory_mib=tuple(self._memory_mib),
        )

    async def _counted(self, name: str, send: _Send, rate: float, seconds: float) -> Latencies:
        """Latencies at a rate, without those of the warm-up."""
        warm_up_s = self._options.warm_up
        times_s = arrival_times(rate, warm_up_s + seconds, self._options.spacing, self._options.seed)
        outcomes = await send_at(times_s, send, max_open=_MAX_OPEN)
        return Latencies.of(name, [one for one in outcomes if one.arrived_s >= warm_up_s])

    async def _one_by_one(self, send: _Send, count: int) -> list[Outcome]:
        return [one for number in range(count) for one in await send_at([0.0], _numbered(send, number), max_open=1)]

    async def _capacity(self, send: _Send) -> float:
        """Plans per second that as many clients get as there are planning processes, each without a pause."""
        numbers, until_s = itertools.count(), time.perf_counter() + _CAPACITY_S

        async def ask() -> None:
            while time.perf_counter() < until_s:
                (await send(next(numbers))).raise_for_status()

        await asyncio.gather(*(ask() for _ in range(self._options.workers)))
        return next(numbers) / _CAPACITY_S

    def _plans(self, bodies: Sequence[bytes]) -> _Send:
        return lambda number: self._client(number).post(
            "/v1/plans", content=bodies[number % len(bodies)], headers=JSON_HEADERS
        )

    async def _stored(self) -> list[str]:
        """Ids of plans that are made and stored."""
        send = self._plans(large_tasks(_NUM_READ_PLANS))
        return [(await send(number)).raise_for_status().json()["id"] for number in range(_NUM_READ_PLANS)]

    def _reads(self, ids: Sequence[str]) -> _Send:
        return lambda number: self._client(number).get(f"/v1/plans/{self._rng.choice(ids)}")

    def _lists(self) -> Iterator[tuple[str, _Send]]:
        for name, query in (
            ("first page", {}),
            ("a planner", {"planner": "auto"}),
            ("a rare planner", {"planner": RARE_PLANNER}),
            ("device and ranks", {"device": "h100", "num_ranks": "128"}),
            ("a common text", {"text": "team-017"}),
            ("a text of no plan", {"text": "nothing like it"}),
        ):
            yield name, self._listed(query)
        yield "reads", self._reads(self._ids)

    def _listed(self, query: dict[str, str]) -> _Send:
        return lambda number: self._client(number).get("/v1/plans", params={**query, "limit": "50"})

    async def _behind_long_jobs(self) -> Latencies:
        """Of short jobs of a client, each from when it is asked for to its end, while another one has 50 of an hour."""
        first, second = self._clients[:2]
        long = [await self._job(first, job_task(limit_s=3600.0, seed=seed)) for seed in range(_NUM_LONG_JOBS)]
        while await self._state(first, long[0]) != JobState.RUNNING:
            await asyncio.sleep(_JOB_LOOK_S)

        async def short(number: int) -> httpx.Response:
            job = await self._job(second, job_task(limit_s=1.0, seed=number))
            while not (state := await self._state(second, job)).is_final:
                await asyncio.sleep(_JOB_LOOK_S)
            return httpx.Response(200 if state == JobState.SUCCEEDED else 500)

        found = Latencies.of("jobs of 1 s, to their end", await self._one_by_one(short, _NUM_SHORT_JOBS))
        for job in long:
            (await first.post(f"/v1/jobs/{job}/cancel")).raise_for_status()
        return found

    async def _job(self, client: httpx.AsyncClient, body: bytes) -> str:
        made = await client.post("/v1/jobs/plan", content=body, headers=JSON_HEADERS)
        job: str = made.raise_for_status().json()["id"]
        return job

    async def _state(self, client: httpx.AsyncClient, job: str) -> JobState:
        return JobState((await client.get(f"/v1/jobs/{job}")).raise_for_status().json()["state"])

    async def _sent_by_two(self, name: str, body: bytes) -> Latencies:
        """Of bodies that two clients send, each one after another."""
        sent = (self._one_by_one(self._always(client, body), _NUM_BODIES) for client in self._clients[:2])
        return Latencies.of(name, [one for some in await asyncio.gather(*sent) for one in some])

    def _always(self, client: httpx.AsyncClient, body: bytes) -> _Send:
        return lambda _: client.post("/v1/plans", content=body, headers=JSON_HEADERS)

    def _client(self, number: int) -> httpx.AsyncClient:
        return self._clients[number % len(self._clients)]

    async def _watch_memory(self) -> None:
        self._memory_mib: list[float] = []
        while True:
            found = await asyncio.to_thread(self._service.memory_bytes)
            self._memory_mib.append(round(found / (1 << 20), 1))
            await asyncio.sleep(_MEMORY_EVERY_S[self._options.kind is LoadKind.BODIES])


def _numbered(send: _Send, number: int) -> _Send:
    return lambda _: send(number)


def latency_table(load: ServiceLoad) -> Table:
    """A line for each thing that was asked for."""
    return Table.of(
        load.latencies,
        (
            ("requests", lambda row: row.name),
            ("sent", lambda row: f"{row.num_requests:,}"),
            ("answered", lambda row: f"{row.num_answered:,}"),
            ("refused", lambda row: f"{row.num_refused:,}"),
            ("failed", lambda row: f"{row.num_failed:,}"),
            ("p50 ms", lambda row: f"{row.p50_ms:.1f}"),
            ("p95 ms", lambda row: f"{row.p95_ms:.1f}"),
            ("p99 ms", lambda row: f"{row.p99_ms:.1f}"),
            ("max ms", lambda row: f"{row.max_ms:.1f}"),
        ),
        caption=f"{load.kind} on {load.database}, {load.rate_per_s:g} requests per second",
    )


def main(options: LoadOptions, output: OutputOptions) -> None:
    """Sends a service of its own requests that arrive at their own times, and reports how long they took.

    Latencies count from the scheduled arrival. The service has two planning processes, and its memory is noted once a
    second or, for bodies, 50 times.

    Example:
        python -m studies service-load plans --seconds 120
        python -m studies service-load lists --database postgresql
    """
    load = measure(options)
    document = Machine.of("service-load", options).document(load, "autoshard.service_load/1")
    memory = load.memory_mib
    note = f"memory {memory[0]:,.0f} MiB at first, {max(memory):,.0f} at most, {memory[-1]:,.0f} at last"
    name = f"service-{options.kind}-{options.database}"
    output.write(StudyResult(name=name, document=document, tables=(latency_table(load),), notes=(note,)))
