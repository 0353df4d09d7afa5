"""The study `service-load`: what clients of the service feel at given rates, and beyond what it can do."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import numpy as np
import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.console import log
from autoshard.core.accepted import check_choice
from autoshard.formats import tables_to_json
from autoshard.formats.metasyn import metasyn
from autoshard.report.images import NumberTable
from bench.measuring.devices import find_device
from server.bodies import PlanAnswer, PlanFacts
from server.storage.location import DATABASE_VARIABLE
from server.storage.storage import open_storage
from studies.frame import FromOption, Machine, OutputOptions, PartsOption, PartStore, StudyResult, command_line
from studies.frame.documents import read_document, to_document
from studies.frame.options import names_in
from studies.service.arrivals import Answers, Call, send_at_rate
from studies.service.processes import ServiceProcess, running_service, sqlite_in

SCHEMA: Final = "autoshard.service_load/1"
_NUM_TABLES, _TOPOLOGY, _LIMIT_S = 80, "a100-8", 0.1
_FIRST_SEED: Final = 9001
#: Different tasks that are asked for in turn: none again soon, and few enough to be drawn quickly.
_NUM_TASKS: Final = 200
_NUM_CLIENTS: Final = 8
#: Plans that are read in turn, and documents that lists of many plans stand for.
_NUM_READ: Final = 20
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run.

    Attributes:
        name: Its name.
        answers: What became of its requests.
        start_mib: Memory of the service before it.
        most_mib: The most at any second of it.
    """

    name: str
    answers: Answers
    start_mib: float
    most_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTimes:
    """Lists of many stored plans, one after the other.

    Attributes:
        num_plans: Stored plans.
        milliseconds: Time of each request, by what was asked for.
    """

    num_plans: int
    milliseconds: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """All runs, and where they were made."""

    machine: Machine
    database: str
    scenarios: tuple[Scenario, ...]
    lists: ListTimes | None


@command_options()
class LoadOptions:
    """Options of the study `service-load`."""

    runs: Annotated[
        str, typer.Option(help="Runs to make, with commas between them: plans, reads, lists, overload.")
    ] = "plans,reads,lists,overload"
    database: Annotated[
        str | None,
        typer.Option(help="Address of an empty PostgreSQL database.", show_default="a file of SQLite for each run"),
    ] = None
    seconds: Annotated[float, positive_option("Length of each run at a rate.")] = 60.0
    rate: Annotated[float, positive_option("Plans asked for per second in the run `plans`.")] = 8.0
    read_rate: Annotated[float, positive_option("Stored plans read per second in the run `reads`.")] = 200.0
    overload: Annotated[float, positive_option("Requests over what the service can do in the run `overload`.")] = 10.0
    plans: Annotated[int, typer.Option(min=100, help="Stored plans in the run `lists`.")] = 100_000
    workers: Annotated[int, typer.Option(min=1, help="Planning processes.")] = 2
    parts: PartsOption = None
    from_file: FromOption = None

    def __post_init__(self) -> None:
        for name in names_in(self.runs):
            check_choice(name, [*_RUNS, "lists"], "--runs")


def main(options: LoadOptions, output: OutputOptions) -> None:
    """Measures the service from outside: a real process, real databases, requests on the loopback.

    `plans` asks for plans of 80 tables on 8 ranks within 0.1 s, each of other tables; `reads` for stored plans; `lists`
    for pages of many stored plans; `overload` for ten times the plans that the service can make.

    Example:
        python -m studies service-load --parts load-parts -o docs/figures
        python -m studies service-load --runs lists --database postgresql://autoshard@127.0.0.1/load
    """
    path = options.from_file
    numbers = run_study(options) if path is None else read_document(path, Numbers, SCHEMA)
    notes = tuple(f"{name}: {value}" for name, value in numbers.machine.described())
    output.write(
        StudyResult(
            name=f"service-load-{numbers.database}",
            document=to_document(numbers, SCHEMA),
            tables=tuple(_tables(numbers)),
            notes=notes,
        )
    )


def run_study(options: LoadOptions) -> Numbers:
    """Makes all runs that are not finished."""
    parts = PartStore(options.parts)
    database = "sqlite" if options.database is None else "postgresql"
    parts.check_identity(
        {
            "database": database,
            "seconds": options.seconds,
            "rate": options.rate,
            "read_rate": options.read_rate,
            "overload": options.overload,
            "plans": options.plans,
            "workers": options.workers,
        }
    )
    asked = names_in(options.runs)
    scenarios: list[Scenario] = []
    for name in (name for name in _RUNS if name in asked):
        found = parts.find_data(name, _Runs, partial(_run, name, options))
        scenarios.extend(found.scenarios)
    lists = parts.find_data("lists", ListTimes, partial(_lists, options)) if "lists" in asked else None
    return Numbers(
        machine=Machine.this(find_device("cpu"), command_line("service-load", options)),
        database=database,
        scenarios=tuple(scenarios),
        lists=lists,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    scenarios: tuple[Scenario, ...]


def _run(name: str, options: LoadOptions) -> _Runs:
    with _service(options) as service:
        return _Runs(scenarios=tuple(_RUNS[name](service, options)))


@contextmanager
def _service(options: LoadOptions) -> Iterator[ServiceProcess]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--workers", str(options.workers)]
        with running_service(Path(folder), options.database, *words) as service:
            yield service


def _plans(service: ServiceProcess, options: LoadOptions) -> Iterator[Scenario]:
    """Plans at the asked rate, after a few that find what is found once only."""
    calls = _plan_calls(_NUM_TASKS)
    _warm_up(service, calls)
    yield _scenario("plans", service, calls, rate=options.rate, seconds=options.seconds)


def _reads(service: ServiceProcess, options: LoadOptions) -> Iterator[Scenario]:
    """Stored plans, in turn."""
    calls = [Call(method="GET", path=f"/v1/plans/{answer.id}") for answer in _made(service)]
    yield _scenario("reads", service, calls, rate=options.read_rate, seconds=options.seconds)


def _overload(service: ServiceProcess, options: LoadOptions) -> Iterator[Scenario]:
    """Plans at a rate with no wait, then at many times what the service can do."""
    calls = _plan_calls(_NUM_TASKS)
    capacity = _warm_up(service, calls) * options.workers
    yield _scenario("unloaded", service, calls, rate=0.2 * capacity, seconds=options.seconds)
    yield _scenario("overload", service, calls, rate=options.overload * capacity, seconds=options.seconds)


_RUNS: Final[Mapping[str, Callable[[ServiceProcess, LoadOptions], Iterator[Scenario]]]] = {
    "plans": _plans,
    "reads": _reads,
    "overload": _overload,
}


def _scenario(name: str, service: ServiceProcess, calls: list[Call], *, rate: float, seconds: float) -> Scenario:
    log(f"{name}: {rate:.3g} requests per second for {seconds:g} s")
    start_bytes = service.resident_bytes
    seen_bytes = [start_bytes]
    answers = send_at_rate(
        service.url,
        calls,
        rate=rate,
        seconds=seconds,
        num_clients=_NUM_CLIENTS,
        observe=lambda: seen_bytes.append(service.resident_bytes),
    )
    return Scenario(name=name, answers=answers, start_mib=start_bytes / _MIB, most_mib=max(seen_bytes) / _MIB)


def _plan_calls(number: int) -> list[Call]:
    pool = metasyn()
    bodies = (
        {
            "tables": tables_to_json(pool.redrawn(_NUM_TABLES, _FIRST_SEED + index)),
            "topology": _TOPOLOGY,
            "planner": "auto",
            "time_limit_s": _LIMIT_S,
        }
        for index in range(number)
    )
    return [Call(method="POST", path="/v1/plans", body=json.dumps(body).encode()) for body in bodies]


def _warm_up(service: ServiceProcess, calls: list[Call]) -> float:
    """Plans per second of one planning process that is asked for one after the other."""
    took_s = []
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client:
        for call in calls[-_NUM_READ:]:
            started = time.perf_counter()
            client.post(call.path, content=call.body, headers={"content-type": "application/json"}).raise_for_status()
            took_s.append(time.perf_counter() - started)
    return 1.0 / float(np.median(took_s))


def _made(service: ServiceProcess) -> list[PlanAnswer]:
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client:
        answers = [
            client.post(call.path, content=call.body, headers={"content-type": "application/json"})
            for call in _plan_calls(_NUM_READ)
        ]
    return [PlanAnswer.model_validate_json(answer.raise_for_status().content) for answer in answers]


#: Queries of lists: the first page, filters that few and many plans pass, and words.
_QUERIES: Final = {
    "first page": "limit=50",
    "largest page": "limit=200",
    "of one planner": "limit=50&planner=neo",
    "of a planner without plans": "limit=50&planner=none",
    "part of a name, in all": "limit=50&text=node",
    "part of a name, in none": "limit=50&text=nowhere",
}
_NUM_REPEATS: Final = 20


def _lists(options: LoadOptions) -> ListTimes:
    with tempfile.TemporaryDirectory() as folder:
        with running_service(Path(folder), options.database) as service:
            made = _made(service)
        _store_many(options.database or sqlite_in(Path(folder)), made, options.plans)
        with (
            running_service(Path(folder), options.database) as service,
            httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client,
        ):
            times = {name: _timed(client, f"/v1/plans?{query}") for name, query in _QUERIES.items()}
            times["pages one after the other"] = tuple(_paged(client))
    return ListTimes(num_plans=options.plans, milliseconds=times)


def _store_many(database: str, made: list[PlanAnswer], number: int) -> None:
    """Stores as many plans as asked for, as the service does, but many in one transaction; documents are real."""
    log(f"lists: storing {number:,} plans")
    before = os.environ.get(DATABASE_VARIABLE)
    os.environ[DATABASE_VARIABLE] = database
    storage = open_storage()
    rng = np.random.default_rng(0)
    try:
        for start in range(0, number, 1000):
            with storage.database.writing() as connection:
                for index in range(start, min(start + 1000, number)):
                    answer = made[index % len(made)]
                    storage.plans.add(connection, _facts(answer.plan, index, rng), answer.model_dump_json().encode())
    finally:
        storage.close()
        os.environ.pop(DATABASE_VARIABLE)
        if before is not None:
            os.environ[DATABASE_VARIABLE] = before


def _facts(plan: Mapping[str, Any], index: int, rng: np.random.Generator) -> PlanFacts:
    # Of a hundred plans, ninety are by one planner and one by another.
    planner = "auto" if index % 10 else ("neo" if index % 100 == 0 else "cost-greedy")
    names = " ".join(table["name"] for table in plan["tables"]["tables"])
    return PlanFacts(
        id=f"sha256:{rng.bytes(32).hex()}",
        planner=planner,
        device="a100",
        num_tables=_NUM_TABLES,
        num_ranks=8,
        step_ms=float(rng.uniform(1, 10)),
        search_text=f"{planner} a100 node {names}"[:256],
    )


def _timed(client: httpx.Client, path: str) -> tuple[float, ...]:
    took_ms = []
    for _ in range(_NUM_REPEATS):
        started = time.perf_counter()
        client.get(path).raise_for_status()
        took_ms.append(1e3 * (time.perf_counter() - started))
    return tuple(took_ms)


def _paged(client: httpx.Client) -> Iterator[float]:
    cursor = ""
    for _ in range(_NUM_REPEATS):
        started = time.perf_counter()
        page = client.get(f"/v1/plans?limit=200{cursor}").raise_for_status().json()
        yield 1e3 * (time.perf_counter() - started)
        if page["next"] is None:
            return
        cursor = f"&cursor={page['next']}"


def _milliseconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3g}"


def _tables(numbers: Numbers) -> Iterator[NumberTable]:
    if numbers.scenarios:
        yield NumberTable.of(
            numbers.scenarios,
            f"Requests of {_NUM_CLIENTS} clients at a rate, times from when they were due ({numbers.database})",
            (
                ("run", lambda one: one.name),
                ("per second", lambda one: f"{one.answers.rate:.3g}"),
                ("sent", lambda one: f"{one.answers.num_sent:,}"),
                ("accepted", lambda one: f"{one.answers.num_accepted:,}"),
                ("refused", lambda one: f"{one.answers.num_refused:,}"),
                ("of these without Retry-After", lambda one: str(one.answers.num_hasty)),
                ("failed", lambda one: str(one.answers.num_failed)),
                ("p50, ms", lambda one: _milliseconds(one.answers.p50_ms)),
                ("p95, ms", lambda one: _milliseconds(one.answers.p95_ms)),
                ("p99, ms", lambda one: _milliseconds(one.answers.p99_ms)),
                ("longest, ms", lambda one: _milliseconds(one.answers.max_ms)),
                ("memory before, MiB", lambda one: f"{one.start_mib:,.0f}"),
                ("most, MiB", lambda one: f"{one.most_mib:,.0f}"),
            ),
        )
    if numbers.lists is not None:
        yield NumberTable.of(
            list(numbers.lists.milliseconds.items()),
            f"Lists of {numbers.lists.num_plans:,} stored plans, one request after the other ({numbers.database})",
            (
                ("asked for", lambda item: item[0]),
                ("median, ms", lambda item: f"{np.median(item[1]):.3g}"),
                ("longest, ms", lambda item: f"{max(item[1]):.3g}"),
            ),
        )
