"""`autoshard doctor`."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.text import Text

from autoshard.commands.setup.packages import found_packages, missing_packages
from autoshard.console import JsonOption, emit, working
from autoshard.table import facts


def doctor(as_json: JsonOption = False) -> None:
    """Says what is installed, which devices and trained models there are, and what is missing, on one screen.

    Example:
        autoshard doctor
        autoshard doctor --json
    """
    from autoshard.commands.printed import DOCTOR

    with working("Looking around"):
        found = found_here()
    emit(DOCTOR.to_json(found), _rendered(found), as_json=as_json)


def found_here() -> dict[str, Any]:
    """Versions, devices, models and what is missing, as the command's JSON has them."""
    from autoshard import __version__

    packages = found_packages()
    devices = list(_devices())
    return {
        "autoshard": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": devices,
        "models": [_models(key) for key in dict.fromkeys(str(device["key"]) for device in devices)],
        "missing": missing_packages() + list(_mismatches(packages, devices)) + list(_not_compiled()),
    }


def _devices() -> Iterator[dict[str, Any]]:
    """The processor, then the GPUs."""
    from autoshard.commands.setup.gpus import found_gpus
    from autoshard.core.machine import gpu_key
    from autoshard.hardware import processor_name

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield {"key": "cpu", "name": processor_name(), "cores": cores, "memory_bytes": memory}
    for gpu in found_gpus():
        yield {"key": gpu_key(gpu.name), "name": gpu.name, "cores": None, "memory_bytes": gpu.memory_bytes}


def _models(device: str) -> dict[str, Any]:
    """What prices kernels, collectives, dense layers and steps of a kind of device; None where nothing was trained."""
    from autoshard.core.errors import ModelError
    from autoshard.planning import step_models
    from autoshard.plugins import kernel_model_loaders

    try:
        kernel = next((model for load in kernel_model_loaders() if (model := load(None, device)) is not None), None)
        steps = step_models(device)
    except ModelError as error:
        return {"device": device, "error": str(error)}
    named = {"kernel": kernel, "communication": steps.comm, "dense": steps.dense, "step": steps.step}
    return {"device": device, **{part: None if one is None else one.name for part, one in named.items()}}


def _mismatches(packages: list[dict[str, Any]], devices: list[dict[str, Any]]) -> Iterator[str]:
    """What is there and does not fit together."""
    names = {one["name"] for one in packages}
    has_gpu = len(devices) > 1
    if has_gpu and "fbgemm-gpu-cpu" in names:
        yield "fbgemm-gpu for the GPU that is here: fbgemm-gpu-cpu runs on the processor only"


def _not_compiled() -> Iterator[str]:
    from autoshard.planners.hybrid.compiled.library import library

    if library() is None:
        yield (
            "the compiled search: plans within short time limits are a few percent longer; install autoshard again "
            "where there is a C compiler"
        )


def _rendered(found: Mapping[str, Any]) -> Group:
    from autoshard.report.wording import write_bytes

    rows = [("autoshard", f"{found['autoshard']}, Python {found['python']}, {found['platform']}")]
    for one in found["packages"]:
        rows.append((one["name"], one["version"] or f"missing; {one['needed_by']}"))
    for one in found["devices"]:
        cores = f", {one['cores']} cores" if one["cores"] else ""
        rows.append((f"device {one['key']}", f"{one['name']}{cores}, {write_bytes(one['memory_bytes'])}"))
    for one in found["models"]:
        parts = [f"{part} {name or 'analytic'}" for part, name in one.items() if part not in ("device", "error")]
        rows.append((f"models of {one['device']}", one.get("error") or ", ".join(parts)))
    missing = found["missing"]
    verdict = ["Nothing is missing."] if not missing else ["Missing:", *(f"  {line}" for line in missing)]
    return Group(facts(rows), Text(), *(Text(line) for line in verdict))
