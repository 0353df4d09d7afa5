"""Kills services at random moments of writes and jobs: `python -m studies service-kills`.

A part of the study is one database: its service is killed and started again, and what it had acknowledged is looked
for after every start. At the end all jobs must have been done once.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.table import Table
from bench.measuring.devices import find_device
from studies.frame import Machine, OutputOptions, PartsOption, PartStore, StudyResult, command_line, to_document
from studies.service.activities import Activity, JobWrites, PlanWrites
from studies.service.processes import DatabaseKind, RunningService, new_database

SCHEMA: Final = "autoshard.service_kills/1"
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
        faults: What was lost, damaged or done twice.
    """

    num_starting: int
    num_writing: int
    acknowledged: dict[str, int]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRuns:
    """All parts.

    Attributes:
        database: Kind of database.
        parts: The parts.
    """

    database: DatabaseKind
    parts: tuple[KillPart, ...]


class _Part:
    def __init__(self, service: RunningService, seed: int) -> None:
        self._service, self._rng = service, random.Random(seed)
        first = 1 + 2 * seed * _SEEDS
        self.activities: tuple[Activity, ...] = (PlanWrites(first), JobWrites(first + _SEEDS))
        self._faults: list[str] = []

    def run(self, times: int) -> KillPart:
        """Kills so many times.

        Raises:
            ExecutionError: If the service does not start any more.
        """
        num_starting = 0
        for number in range(1, times + 1):
            if number % _STARTING_EVERY == 0:
                num_starting += 1
                self._service.start(until_ready=False)
                time.sleep(self._rng.uniform(0.0, _STARTING_S))
                self._service.kill()
            else:
                self._service.start()
                asyncio.run(self._kill_while_writing())
        self._service.start()
        asyncio.run(self._finish())
        self._service.stop()
        for activity in self.activities:
            self._faults += activity.check_audit(self._service.database)
        return KillPart(
            num_starting=num_starting,
            num_writing=times - num_starting,
            acknowledged={activity.name: activity.num_acknowledged for activity in self.activities},
            faults=tuple(self._faults),
        )

    async def _kill_while_writing(self) -> None:
        async with self._client() as client:
            for activity in self.activities:
                self._faults += await activity.check(client)
            writers = [asyncio.create_task(self._write(client, activity)) for activity in self.activities]
            await asyncio.sleep(self._rng.uniform(0.0, _WRITING_S))
            self._service.kill()
            await asyncio.gather(*writers)

    async def _write(self, client: httpx.AsyncClient, activity: Activity) -> None:
        """Writes until the service is gone."""
        while True:
            try:
                fault = await activity.act(client)
            except httpx.TransportError:
                return
            self._faults += [fault] if fault else []

    async def _finish(self) -> None:
        async with self._client() as client:
            for activity in self.activities:
                self._faults += await activity.finish(client)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._service.url, timeout=_TIMEOUT_S, trust_env=False)


@command_options()
class KillOptions:
    """Options of the study `service-kills`."""

    database: Annotated[DatabaseKind, typer.Option(help="What the service runs on.")] = DatabaseKind.SQLITE
    times: Annotated[int, typer.Option(min=1, help="Kills.")] = 200
    per_part: Annotated[int, typer.Option(min=1, help="Kills of the service of one database.")] = 10
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
            service = RunningService(folder, address, ("--workers", "1"))
            times = min(options.per_part, options.times - number * options.per_part)
            try:
                return _Part(service, options.seed + number).run(times)
            finally:
                if service.process.poll() is None:
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
            ("faults", lambda row: str(len(row[1].faults))),
        ),
        caption=f"SIGKILLs of services on {runs.database}, and what clients had been told was written",
    )


def _acknowledged(name: str, row: tuple[int, KillPart]) -> str:
    return str(row[1].acknowledged[name])


def _faults(parts: Sequence[KillPart]) -> list[str]:
    return [fault for part in parts for fault in part.faults]


def main(options: KillOptions, output: OutputOptions) -> None:
    """Kills services with SIGKILL and checks that no acknowledged write is lost and no job is done twice.

    Clients make and delete plans and make jobs. A quarter of the kills comes while the service starts. After each
    start all plans that were acknowledged must be readable and whole, the deleted ones gone, and the latest request,
    sent again with its idempotency key, answered as before. At the end each job must have succeeded once.

    Exit code: 0 nothing lost, 1 otherwise.

    Example:
        python -m studies service-kills --database postgresql --times 200 --parts kills-postgresql
    """
    store = PartStore(options.parts)
    store.check_identity({"database": options.database, "per_part": options.per_part, "seed": options.seed})
    count = -(-options.times // options.per_part)
    found = []
    with console.progress("Killing services", count) as advance:
        for number in range(count):
            found.append(store.find_data(f"{number:03d}", KillPart, partial(run_part, options, number)))
            advance(1)
    runs = KillRuns(database=options.database, parts=tuple(found))
    on = Machine.this(find_device("cpu"), command_line("service-kills", options))
    document = {**to_document(runs, SCHEMA), "machine": on.to_json()}
    faults = _faults(runs.parts)
    note = "\n".join([f"{options.times} kills, {len(faults)} faults", *faults])
    name = f"service-kills-{options.database}"
    output.write(StudyResult(name=name, document=document, tables=(part_table(runs),), notes=(note,)))
    if faults:
        raise typer.Exit(1)
