"""Samples of collectives, which processes of this machine measure together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from autoshard.core.accepted import FINITE_ABOVE_0
from autoshard.core.errors import DeviceError
from autoshard.formats.stores.collective_samples import COLLECTIVE_SAMPLES, CollectiveSample
from autoshard.formats.stores.measured_samples import machine_columns
from autoshard.runtime.processes.launch import LOCAL, START_S, Launcher, running_workers
from bench.collecting.collection import CollectedSamples
from bench.collecting.options import SampleKind
from bench.collecting.sample_log import Advance, SampleLog
from bench.collectives.operators import collective_from_json, refusal
from bench.collectives.sampling import CollectiveSettings, Processes, choose_collectives, chunks_of, fewest_first
from bench.measuring.devices import BenchDevice, find_device
from bench.measuring.provenance import described_hardware, installed_software

_WORKER = "bench.collectives.worker"
#: `bench` is a generic name: the one beside this file has to come first where the processes look for it.
_PATH = (str(Path(__file__).resolve().parents[2]),)


def collect_collectives(
    store: Path,
    processes: Processes,
    settings: CollectiveSettings | None = None,
    *,
    device: str = "auto",
    num_samples: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    advance: Advance = lambda *_: None,
    launcher: Launcher = LOCAL,
) -> CollectedSamples:
    """Measures collectives on processes of this machine and appends the samples to a store.

    What the store has fewest samples of comes first, small sizes before large, so that a run that was ended early is
    continued by the next one.

    Args:
        store: The store's folder.
        processes: What runs them.
        settings: What and how.
        device: `cpu` (gloo), `cuda` (NCCL), or `auto`: CUDA where every process gets a GPU.
        num_samples: Samples to add at most; None for no limit.
        seconds: Time to measure, without the start of the processes; what does not fit is skipped and counted, and
            what is left over goes into measuring all again. None for measuring all once.
        seed: Of unequal splits and of the order of runs.
        advance: Told how many samples have just been measured, and the seconds since the last call.
        launcher: Nodes that the processes run on.

    Raises:
        InputError: If an option makes no sense, or the store holds files of another kind.
        SampleStoreError: If the store cannot be written.
        DeviceError: If a GPU is missing or out of memory.
        ExecutionError: If a process dies, hangs, or receives wrong data. Earlier samples are written.
    """
    settings = settings or CollectiveSettings()
    chosen = choose_collectives(processes, settings, seed)
    FINITE_ABOVE_0.check(seconds, "seconds")
    found = _device_for(device, processes.nproc)
    log = SampleLog(COLLECTIVE_SAMPLES, store, settings.seconds_per_file, advance=advance)
    for reason in filter(None, map(refusal, chosen)):
        log.fail(reason, reason)
    wanted = fewest_first([one for one in chosen if not refusal(one)], store, found.key, processes)
    job = {
        "device": found.device.type,
        "node_size": processes.node_size,
        "rounds": asdict(settings.rounds),
        "reference_bytes": settings.reference_bytes,
        "num_samples": num_samples,
        "seconds": seconds,
        "seed": seed,
        "timeout_s": START_S + settings.stall_timeout_s,  # this process looks after hanging ones
        "chunks": [[asdict(one) for one in chunk] for chunk in chunks_of(wanted, settings)],
    }
    workers = running_workers(
        _WORKER, job, processes.nproc, stall_timeout_s=settings.stall_timeout_s, path=_PATH, launcher=launcher
    )
    with log.recording(), workers as (_, reports):
        _record(reports, _fixed_fields(found, processes), processes, log)
    return log.collection(SampleKind.COLLECTIVES, found.key, skipped={})


def _record(
    reports: Iterator[Any], fixed: dict[str, Any], processes: Processes, log: SampleLog[CollectiveSample]
) -> None:
    """Takes what the processes report; libraries of theirs print to standard output, too."""
    for report in reports:
        event = report.get("event") if isinstance(report, dict) else None
        if event == "skipped":
            log.fail(report["reason"], report["reason"], count=report["count"])
        if event == "measured":
            for row in report["measured"]:
                log.add(_sample(row, report, fixed, processes), fixed["backend"])
            log.write_when_due()
            log.advance(len(report["measured"]))


def _fixed_fields(device: BenchDevice, processes: Processes) -> dict[str, Any]:
    software = installed_software()
    return {
        "device": device.key,
        "device_name": device.name,
        "backend": "nccl" if device.is_cuda else "gloo",
        "torch_version": software.torch_version,
        "autoshard_version": software.autoshard_version,
        "git_commit": software.git_commit,
        "num_hosts": 1,
        **machine_columns(described_hardware(device)),
        **asdict(processes),
    }


def _sample(
    row: dict[str, Any], report: dict[str, Any], fixed: dict[str, Any], processes: Processes
) -> CollectiveSample:
    collective = collective_from_json(row["collective"])
    movement = processes.movement(collective)
    sent_R, received_R = movement.sent_bytes()
    group_size, num_nodes = processes.group_shape(collective.level)
    return CollectiveSample(
        **fixed,
        collected_at=datetime.now(UTC),
        collective=replace(collective, bytes_per_rank=movement.bytes_per_rank),
        group_size=group_size,
        num_nodes=num_nodes,
        mean_sent_bytes=float(sent_R.mean()),
        max_sent_bytes=int(sent_R.max()),
        max_received_bytes=int(received_R.max()),
        latency_ms=row["latency_ms"],
        spread=row["spread"],
        reference_ms=report["reference_ms"],
        num_rounds=report["num_rounds"],
    )


def _device_for(wanted: str, nproc: int) -> BenchDevice:
    num_gpus = torch.cuda.device_count()
    if wanted == "auto":
        wanted = "cuda" if num_gpus >= nproc else "cpu"
    found = find_device(wanted)
    if found.is_cuda and num_gpus < nproc:
        raise DeviceError(f"{nproc} processes need a GPU each, this machine has {num_gpus}")
    return found
