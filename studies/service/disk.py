"""The service's disk runs full while clients write: `python -m studies service-disk`.

The database is on a small disk of its own, in memory, which only root can mount. Clients make and delete plans and make
jobs before it is full, while it is full, and when it has room again; at the end all that they were told is looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.core.errors import ExecutionError
from autoshard.table import Table
from studies.frame import Machine, OutputOptions, StudyResult
from studies.service.activities import Activity, JobWrites, PlanWrites
from studies.service.arrivals import clients_of
from studies.service.processes import DatabaseKind, RunningService, new_database, running

_PHASES: Final = ("before", "full", "again")
_DISK: Final = "64m"
#: Of so many clients, one makes jobs.
_JOBS_EVERY: Final = 5
#: Between the seeds of clients, so that no plan is asked for twice.
_SEEDS: Final = 1_000_000
_PAUSE_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStudy:
    """What clients were told was written, and what of it was there.

    Attributes:
        clients: Clients, all of which write one request after the other.
        seconds: Length of each phase.
        acknowledged: Writes that were acknowledged, by phase.
        told: What `/readyz` said while the disk was full.
        causes: What the log has as causes, each once.
        recovered_s: Seconds from the room to the first write that was acknowledged.
        faults: What was lost, damaged or done twice.
    """

    clients: int
    seconds: float
    acknowledged: dict[str, int]
    told: str
    causes: tuple[str, ...]
    recovered_s: float
    faults: tuple[str, ...]


@command_options()
class DiskOptions:
    """Options of the study `service-disk`."""

    clients: Annotated[int, typer.Option(min=1, max=200, help="Clients.")] = 20
    seconds: Annotated[float, positive_option("Seconds before the disk is full, for which it is, and after that.")] = (
        20.0
    )


def measure(options: DiskOptions) -> DiskStudy:
    """Runs a service, fills its disk, and makes room again.

    Raises:
        ExecutionError: If the disk cannot be mounted, or the service does not start.
    """
    activities: list[Activity] = [
        (JobWrites if number % _JOBS_EVERY == 0 else PlanWrites)(number * _SEEDS) for number in range(options.clients)
    ]
    with (
        tempfile.TemporaryDirectory(prefix="autoshard-disk-") as name,
        _small_disk(Path(name) / "disk") as disk,
        new_database(DatabaseKind.SQLITE, disk) as address,
    ):
        with running(RunningService(Path(name), address, ("--workers", "2"))) as service:
            study = asyncio.run(_phases(options, service, activities, disk / "ballast"))
        audited = itertools.chain.from_iterable(one.check_audit(address) for one in activities)
        return replace(study, faults=(*study.faults, *audited))


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "none", str(folder)]
    if subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode:
        raise ExecutionError("only root mounts a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


async def _phases(
    options: DiskOptions, service: RunningService, activities: Sequence[Activity], ballast: Path
) -> DiskStudy:
    clients = clients_of(service.url, len(activities) + 1)
    probe, counts = clients.pop(), dict.fromkeys(_PHASES, 0)
    faults: list[str] = []
    first_s: list[float] = []

    async def write(client: httpx.AsyncClient, activity: Activity, phase: str, until_s: float) -> None:
        while time.monotonic() < until_s:
            before = activity.num_acknowledged
            faults.extend(filter(None, [await activity.act(client)]))
            counts[phase] += activity.num_acknowledged - before
            if phase == "again" and activity.num_acknowledged > before:
                first_s.append(time.monotonic())
            await asyncio.sleep(_PAUSE_S)

    for phase in _PHASES:
        if phase == "full":
            _fill(ballast)
        elif phase == "again":
            told = (await probe.get("/readyz")).json().get("detail", "")
            ballast.unlink()
        began_s = time.monotonic()
        pairs = zip(clients, activities, strict=True)
        await asyncio.gather(*(write(*pair, phase, began_s + options.seconds) for pair in pairs))
    for client, activity in zip(clients, activities, strict=True):
        faults += await activity.finish(client)
        await client.aclose()
    await probe.aclose()
    return DiskStudy(
        clients=options.clients,
        seconds=options.seconds,
        acknowledged=counts,
        told=told,
        causes=tuple(sorted(_causes(service.log))),
        recovered_s=round(min(first_s, default=float("inf")) - began_s, 2),
        faults=tuple(faults),
    )


def _fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _causes(log: Path) -> set[str]:
    entries = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{"))
    return {entry["cause"] for entry in entries if entry["event"] == "database fault"}


def phase_table(study: DiskStudy) -> Table:
    """A line for each phase."""
    return Table.of(
        study.acknowledged.items(),
        (("disk", lambda row: row[0]), ("writes acknowledged", lambda row: f"{row[1]:,}")),
        caption=f"{study.clients} clients write for {study.seconds:g} s each before SQLite's disk is full, while it is "
        "full, and when it has room again",
    )


def main(options: DiskOptions, output: OutputOptions) -> None:
    """Fills the disk of a service that clients write to, makes room, and looks for all that was acknowledged.

    Four of five clients make and delete plans, the others make jobs. The database is SQLite's, on a disk of 64 MiB in
    memory; only root can mount it.

    Exit code: 0 nothing lost, 1 otherwise.

    Example:
        python -m studies service-disk
    """
    study = measure(options)
    document = Machine.of("service-disk", options).document(study, "autoshard.service_disk/1")
    notes = (
        f"while it was full, /readyz said: {study.told}; the log: {', '.join(study.causes)}",
        f"the first write after {study.recovered_s:g} s of room",
        "\n".join([f"{len(study.faults)} faults", *study.faults]),
    )
    output.write(StudyResult(name="service-disk", document=document, tables=(phase_table(study),), notes=notes))
    if study.faults:
        raise typer.Exit(1)
