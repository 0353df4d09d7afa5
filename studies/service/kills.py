"""Kills services at random moments of writes and jobs: `python -m studies service-kills`.

A part of the study is one database: its services are killed and started again, and what they had acknowledged is looked
for after every start. At the end all jobs must have been done once.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import httpx
import typer

from autoshard.commands.options import command_options
from autoshard.table import Table
from studies.frame import Machine, OutputOptions, PartsOption, PartStore, StudyResult
from studies.service.activities import Activity, JobWrites, PlanWrites
from studies.service.processes import DatabaseKind, RunningService, new_database

#: One kill in so many comes while the service starts, the others while clients write.
_STARTING_EVERY: Final = 4
#: Latest moments after the start of the process, and after clients begin to write.
_STARTING_S, _WRITING_S = 6.0, 3.0
_TIMEOUT_S: Final = 30.0
#: Between the seeds of parts and of activities, so that no plan is asked for twice.
_SEEDS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPart:
    """Kills of services of one database.

    Attributes:
        num_starting: Kills while the service started.
        num_writing: Kills while clients wrote.
        acknowledged: Writes that were acknowledged, by their kind.
        recoveries_s: Seconds from a kill to the next start of a job that the killed process did, for each such job.
        faults: What was lost, damaged or done twice.
    """

    num_starting: int
    num_writing: int
    acknowledged: dict[str, int]
    recoveries_s: tuple[float, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRuns:
    """All parts.

    Attributes:
        database: Kind of database.
        processes: Services of each database.
        parts: The parts.
    """

    database: DatabaseKind
    processes: int
    parts: tuple[KillPart, ...]


class _Part:
    """Services of one database; all but the one that was killed last run."""

    def __init__(self, services: Sequence[RunningService], seed: int) -> None:
        self._services, self._rng = services, random.Random(seed)
        self._killed = services[0]
        self._kills: list[tuple[float, Path]] = []
        first = 1 + 2 * seed * _SEEDS
        self.activities: tuple[Activity, ...] = (PlanWrites(first), JobWrites(first + _SEEDS))
        self._faults: list[str] = []

    def run(self, kills: int) -> KillPart:
        """Kills so many times.

        Raises:
            ExecutionError: If a service does not start any more.
        """
        num_starting = 0
        for service in self._services[1:]:
            service.start()
        for number in range(1, kills + 1):
            if number % _STARTING_EVERY == 0:
                num_starting += 1
                self._killed.start(until_ready=False)
                time.sleep(self._rng.uniform(0.0, _STARTING_S))
                self._kill(self._killed)
            else:
                self._killed.start()
                asyncio.run(self._kill_while_writing())
        self._killed.start()
        asyncio.run(self._finish())
        for service in self._services:
            service.stop()
        for activity in self.activities:
            self._faults += activity.check_audit(self._killed.database)
        return KillPart(
            num_starting=num_starting,
            num_writing=kills - num_starting,
            acknowledged={activity.name: activity.num_acknowledged for activity in self.activities},
            recoveries_s=tuple(_recoveries_s(self._kills, self._killed.folder)),
            faults=tuple(self._faults),
        )

    def _kill(self, service: RunningService) -> None:
        self._kills.append((time.time(), service.log))
        service.kill()
        self._killed = service

    async def _kill_while_writing(self) -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(_client(service)) for service in self._services]
            for activity in self.activities:
                self._faults += await activity.check(self._rng.choice(clients))
            is_over = asyncio.Event()
            writers = [asyncio.create_task(self._write(clients, activity, is_over)) for activity in self.activities]
            await asyncio.sleep(self._rng.uniform(0.0, _WRITING_S))
            self._kill(self._rng.choice(self._services))
            is_over.set()
            await asyncio.gather(*writers)

    async def _write(self, clients: Sequence[httpx.AsyncClient], activity: Activity, is_over: asyncio.Event) -> None:
        """Writes to one service after the other until one of them is gone."""
        while not is_over.is_set():
            try:
                fault = await activity.act(self._rng.choice(clients))
            except httpx.TransportError:
                return
            self._faults += [fault] if fault else []

    async def _finish(self) -> None:
        async with _client(self._killed) as client:
            for activity in self.activities:
                self._faults += await activity.finish(client)


def _client(service: RunningService) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=service.url, timeout=_TIMEOUT_S, trust_env=False)


def _recoveries_s(kills: Sequence[tuple[float, Path]], folder: Path) -> Iterator[float]:
    """Seconds from kills to the next start of the jobs that were interrupted, as the services' logs tell.

    Args:
        kills: Time of each kill, in s since the epoch, and the log of the process that was killed.
        folder: The logs of all processes.
    """
    starts = defaultdict(list)
    for log in folder.glob("*.log"):
        for job, begun_s in _job_events(log, "job begun"):
            starts[job].append(begun_s)
    for killed_s, log in kills:
        ended = {job for job, _ in _job_events(log, "job ended")}
        for job in {job for job, _ in _job_events(log, "job begun")} - ended:
            again_s = [begun_s for begun_s in starts[job] if begun_s > killed_s]
            if again_s:  # else its end was stored and not logged
                yield min(again_s) - killed_s


def _job_events(log: Path, event: str) -> Iterator[tuple[str, float]]:
    """Jobs of a kind of event in a log, and when, in s since the epoch."""
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith("{") and line.endswith("}"):  # the last line may be cut off
            entry = json.loads(line)
            if entry["event"] == event:
                yield entry["job"], datetime.fromisoformat(entry["timestamp"]).timestamp()


@command_options()
class KillOptions:
    """Options of the study `service-kills`."""

    database: Annotated[DatabaseKind, typer.Option(help="What the service runs on.")] = DatabaseKind.SQLITE
    processes: Annotated[int, typer.Option(min=1, max=8, help="Services of one database.")] = 1
    kills: Annotated[int, typer.Option(min=1, help="Kills.")] = 200
    per_part: Annotated[int, typer.Option(min=1, help="Kills of the services of one database.")] = 10
    seed: Annotated[int, typer.Option(min=0, help="Of the moments.")] = 0
    parts: PartsOption = None


def run_part(options: KillOptions, number: int) -> KillPart:
    """One part.

    Raises:
        ExecutionError: If a service does not start.
    """
    with tempfile.TemporaryDirectory(prefix="autoshard-kills-") as name:
        folder = Path(name)
        with new_database(options.database, folder) as address:
            services = [RunningService(folder, address, ("--workers", "1")) for _ in range(options.processes)]
            kills = min(options.per_part, options.kills - number * options.per_part)
            try:
                return _Part(services, options.seed + number).run(kills)
            finally:
                for service in services:
                    if service.is_running:
                        service.kill()


def part_table(runs: KillRuns) -> Table:
    """A line for each part."""
    return Table.of(
        enumerate(runs.parts, start=1),
        (
            ("part", lambda row: str(row[0])),
            ("killed while starting", lambda row: str(row[1].num_starting)),
            ("killed while written to", lambda row: str(row[1].num_writing)),
            *((name, partial(_acknowledged, name)) for name in runs.parts[0].acknowledged),
            ("jobs begun again", lambda row: str(len(row[1].recoveries_s))),
            ("after at most", lambda row: f"{max(row[1].recoveries_s, default=0.0):.1f} s"),
            ("faults", lambda row: str(len(row[1].faults))),
        ),
        caption=f"SIGKILLs of services on {runs.database} ({runs.processes} at the same time), what clients "
        "had been told was written, and jobs that were begun again because their process had been killed",
    )


def _acknowledged(name: str, row: tuple[int, KillPart]) -> str:
    return str(row[1].acknowledged[name])


def main(options: KillOptions, output: OutputOptions) -> None:
    """Kills services with SIGKILL and checks that no acknowledged write is lost and no job is done twice.

    Clients make and delete plans and make jobs. A quarter of the kills comes while the service starts. After each
    start all plans that were acknowledged must be readable and whole, the deleted ones gone, and the latest request,
    sent again with its idempotency key, answered as before. At the end each job must have succeeded once. With several
    processes, the one to be killed is drawn, and jobs that it did are left to the others.

    Exit code: 0 nothing lost, 1 otherwise.

    Example:
        python -m studies service-kills --database postgresql --processes 2 --kills 500 --parts kills-postgresql
    """
    identity = {name: getattr(options, name) for name in ("database", "processes", "per_part", "seed")}
    store = PartStore.of(options.parts, identity)
    count = -(-options.kills // options.per_part)
    makers = {f"{number:03d}": partial(run_part, options, number) for number in range(count)}
    found = store.find_all("Killing services", KillPart, makers)
    runs = KillRuns(database=options.database, processes=options.processes, parts=tuple(found))
    document = Machine.of("service-kills", options).document(runs, "autoshard.service_kills/2")
    name = f"service-kills-{options.database}" + (f"-{options.processes}" if options.processes > 1 else "")
    output.write(StudyResult(name=name, document=document, tables=(part_table(runs),), notes=(_note(runs),)))
    if any(part.faults for part in runs.parts):
        raise typer.Exit(1)


def _note(runs: KillRuns) -> str:
    kills = sum(part.num_starting + part.num_writing for part in runs.parts)
    recoveries_s = [time_s for part in runs.parts for time_s in part.recoveries_s] or [0.0]
    faults = [fault for part in runs.parts for fault in part.faults]
    again = f"jobs begun again after a median of {median(recoveries_s):.1f} and at most {max(recoveries_s):.1f} s"
    return "\n".join([f"{kills} kills, {again}, {len(faults)} faults", *faults])
