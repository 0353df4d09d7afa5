"""The study `service-swaps`: models swapped under load, damaged ones among them."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
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
from costmodel.registry.versions import Registry, shipped_models
from studies.frame import Machine, OutputOptions, StudyResult, command_line
from studies.frame.documents import to_document
from studies.service.arrivals import Latencies, Spacing, arrival_times, clients_of, send_at
from studies.service.bodies import JSON_HEADERS, small_task
from studies.service.processes import DatabaseKind, RunningService, new_database, running

SCHEMA: Final = "autoshard.service_swaps/1"
_PROMOTIONS: Final = "/v1/models/cost/cpu/promotions"
_NUM_VERSIONS: Final = 5
_DAMAGED_EVERY: Final = 5
_MAX_OPEN: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What became of swaps and requests.

    Attributes:
        machine: Where it was.
        num_swapped: Versions that became the production one.
        num_refused: Damaged versions that did not.
        num_wrong: Damaged versions that became the production one, and whole ones that did not.
        num_stale: Swaps after which the next plan was priced by another version.
        answers: Of the plans that were asked for meanwhile.
    """

    machine: Machine
    num_swapped: int
    num_refused: int
    num_wrong: int
    num_stale: int
    answers: Latencies


@command_options()
class SwapOptions:
    """Options of the study `service-swaps`."""

    swaps: Annotated[int, typer.Option(min=1, help="Swaps; every fifth is of a damaged version.")] = 100
    rate: Annotated[float, positive_option("Plans asked for per second meanwhile.")] = 4.0
    gap_s: Annotated[float, positive_option("Seconds from one swap to the next.")] = 0.5


def main(options: SwapOptions, output: OutputOptions) -> None:
    """Swaps the production model of a service that makes plans, and offers it damaged ones.

    Example:
        python -m studies service-swaps -o docs/figures
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autoshard-swaps-")))
        whole, damaged = _publish(Registry(folder / "registry"))
        address = stack.enter_context(new_database(DatabaseKind.SQLITE, folder))
        words = ("--registry", str(folder / "registry"), "--shadow", "0")
        service = stack.enter_context(running(RunningService(folder, address, words)))
        numbers = asyncio.run(_swapped(service.url, options, whole, damaged))
    table = Table.of(
        [numbers],
        (
            ("swapped", lambda one: str(one.num_swapped)),
            ("damaged, refused", lambda one: str(one.num_refused)),
            ("wrong", lambda one: str(one.num_wrong)),
            ("next plan by another version", lambda one: str(one.num_stale)),
            ("plans asked for", lambda one: str(one.answers.num_requests)),
            ("made", lambda one: str(one.answers.num_answered)),
            ("not made", lambda one: str(one.answers.num_requests - one.answers.num_answered)),
        ),
        caption=f"{options.swaps} swaps, {options.gap_s:g} s apart, one in {_DAMAGED_EVERY} of a damaged version",
    )
    notes = tuple(f"{name}: {value}" for name, value in numbers.machine.described())
    output.write(StudyResult(name="service-swaps", document=to_document(numbers, SCHEMA), tables=(table,), notes=notes))


def _publish(models: Registry) -> tuple[list[str], list[str]]:
    """Whole versions, and as many that are damaged once they are published."""
    stored = shipped_models().load("cost", "cpu")
    card = {key: value for key, value in stored.card.items() if key != "weights_sha256"}
    versions = [
        models.publish("cost", "cpu", stored.tensors, {**card, "scale_ms": card["scale_ms"] * (1 + number / 100)})
        for number in range(2 * _NUM_VERSIONS)
    ]
    whole, damaged = versions[:_NUM_VERSIONS], versions[_NUM_VERSIONS:]
    models.promote("cost", "cpu", whole[0])
    for version in damaged:
        weights = models.root / "cost" / "cpu" / version / "weights.safetensors"
        text = bytearray(weights.read_bytes())
        text[-1] ^= 1
        weights.write_bytes(bytes(text))
    return whole, damaged


async def _swapped(url: str, options: SwapOptions, whole: list[str], damaged: list[str]) -> Numbers:
    swapping, *clients = clients_of(url, 5)
    numbers = itertools.count()

    async def plan(number: int) -> httpx.Response:
        client = clients[number % len(clients)]
        return await client.post("/v1/plans", content=small_task(next(numbers)), headers=JSON_HEADERS)

    times_s = arrival_times(options.rate, options.swaps * options.gap_s, Spacing.POISSON, 0)
    asking = asyncio.create_task(send_at(times_s, plan, max_open=_MAX_OPEN))
    found = await _swap(swapping, options, whole, damaged)
    answers = Latencies.of("plans", await asking)
    for client in (swapping, *clients):
        await client.aclose()
    return Numbers(
        machine=Machine.this(find_device("cpu"), command_line("service-swaps", options)),
        num_swapped=sum(not one.is_damaged and one.status == 200 for one in found),
        num_refused=sum(one.is_damaged and one.status == 422 for one in found),
        num_wrong=sum(one.status != (422 if one.is_damaged else 200) for one in found),
        num_stale=sum(one.is_stale for one in found),
        answers=answers,
    )


@dataclass(frozen=True, slots=True)
class _Swap:
    is_damaged: bool
    status: int
    is_stale: bool


async def _swap(client: httpx.AsyncClient, options: SwapOptions, whole: list[str], damaged: list[str]) -> list[_Swap]:
    """Swaps one version after the other, and asks for a plan after each."""
    current, found = whole[0], []
    for number in range(options.swaps):
        started_s = time.monotonic()
        is_damaged = number % _DAMAGED_EVERY == _DAMAGED_EVERY - 1
        version = (damaged if is_damaged else whole)[(number + 1) % _NUM_VERSIONS]
        answer = await client.post(_PROMOTIONS, json={"version": version, "force": True})
        current = current if answer.status_code != 200 else version
        plan = await client.post("/v1/plans", content=small_task(0), headers=JSON_HEADERS)
        model = plan.json().get("plan", {}).get("predicted", {}).get("cost_model")
        found.append(_Swap(is_damaged, answer.status_code, model != f"learned:cpu@{current}"))
        await asyncio.sleep(max(0.0, started_s + options.gap_s - time.monotonic()))
    return found
