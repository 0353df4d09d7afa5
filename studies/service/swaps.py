"""The study `service-swaps`: models swapped under load, damaged ones among them."""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.formats import tables_to_json
from autoshard.formats.documents.json_document import format_json
from autoshard.formats.metasyn import metasyn
from autoshard.report.images import NumberTable
from bench.measuring.devices import find_device
from costmodel.registry.versions import Registry, shipped_models
from studies.frame import Machine, OutputOptions, StudyResult, command_line
from studies.frame.documents import to_document
from studies.service.arrivals import Answers, Call, send_at_rate
from studies.service.processes import ServiceProcess, running_service

SCHEMA: Final = "autoshard.service_swaps/1"
_PROMOTIONS: Final = "/v1/models/cost/cpu/promotions"
_NUM_VERSIONS: Final = 5
_DAMAGED_EVERY: Final = 5


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
    answers: Answers


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, damaged = _publish(Registry(folder / "registry"))
        with running_service(folder, None, "--registry", str(folder / "registry"), "--shadow", "0") as service:
            numbers = _swapped(service, options, whole, damaged)
    table = NumberTable.of(
        [numbers],
        f"{options.swaps} swaps, {options.gap_s:g} s apart, one in {_DAMAGED_EVERY} of a damaged version",
        (
            ("swapped", lambda one: str(one.num_swapped)),
            ("damaged, refused", lambda one: str(one.num_refused)),
            ("wrong", lambda one: str(one.num_wrong)),
            ("next plan by another version", lambda one: str(one.num_stale)),
            ("plans asked for", lambda one: str(one.answers.num_sent)),
            ("made", lambda one: str(one.answers.num_accepted)),
            ("not made", lambda one: str(one.answers.num_sent - one.answers.num_accepted)),
        ),
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


def _swapped(service: ServiceProcess, options: SwapOptions, whole: list[str], damaged: list[str]) -> Numbers:
    call = _plan_call()
    found: list[tuple[bool, int, bool]] = []
    swapping = threading.Thread(target=_swap, args=(service.url, options, whole, damaged, call, found))
    swapping.start()
    answers = send_at_rate(service.url, [call], rate=options.rate, seconds=options.swaps * options.gap_s, num_clients=4)
    swapping.join()
    return Numbers(
        machine=Machine.this(find_device("cpu"), command_line("service-swaps", options)),
        num_swapped=sum(not is_damaged and status == 200 for is_damaged, status, _ in found),
        num_refused=sum(is_damaged and status == 422 for is_damaged, status, _ in found),
        num_wrong=options.swaps - sum(status == (422 if is_damaged else 200) for is_damaged, status, _ in found),
        num_stale=sum(is_stale for _, _, is_stale in found),
        answers=answers,
    )


def _swap(
    url: str,
    options: SwapOptions,
    whole: list[str],
    damaged: list[str],
    call: Call,
    found: list[tuple[bool, int, bool]],
) -> None:
    """Swaps one version after the other, and asks for a plan after each."""
    current = whole[0]
    transport = httpx.HTTPTransport(local_address="127.0.0.9")
    with httpx.Client(base_url=url, timeout=60, trust_env=False, transport=transport) as client:
        for number in range(options.swaps):
            started = time.monotonic()
            is_damaged = number % _DAMAGED_EVERY == _DAMAGED_EVERY - 1
            version = (damaged if is_damaged else whole)[(number + 1) % _NUM_VERSIONS]
            answer = client.post(_PROMOTIONS, json={"version": version, "force": True})
            current = current if answer.status_code != 200 else version
            plan = client.post(call.path, content=call.body, headers={"content-type": "application/json"}).json()
            model = plan.get("plan", {}).get("predicted", {}).get("cost_model")
            found.append((is_damaged, answer.status_code, model != f"learned:cpu@{current}"))
            time.sleep(max(0.0, started + options.gap_s - time.monotonic()))


def _plan_call() -> Call:
    tables = metasyn().scaled(64).redrawn(12, 1)
    body = {"tables": tables_to_json(tables), "topology": "cpu-4", "planner": "cost-greedy"}
    return Call(method="POST", path="/v1/plans", body=format_json(body).encode())
