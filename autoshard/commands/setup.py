"""`autoshard doctor`, `init` and `detect`: what is installed, and a topology to begin with."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from autoshard.commands.arguments import written_file
from autoshard.commands.options import command_options
from autoshard.commands.packages import found_packages, missing_packages
from autoshard.console import JsonOption, emit, log, working
from autoshard.core import accepted
from autoshard.core.accepted import MAX_WORLD_SIZE
from autoshard.core.errors import AutoshardError, InvalidOptionError
from autoshard.table import facts

if TYPE_CHECKING:
    from autoshard.core import TableSet, Topology


def doctor(as_json: JsonOption = False) -> None:
    """Says what is installed, which devices and trained models there are, and what is missing, on one screen.

    Example:
        autoshard doctor
        autoshard doctor --json
    """
    with working("Looking around"):
        found = found_here()
    emit(found, _rendered(found), as_json=as_json, kind="doctor")


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
    from autoshard.commands.machine import found_gpus
    from autoshard.core.machine import gpu_key
    from autoshard.hardware import CPU, this_processor

    here = this_processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield {"key": CPU, "model": here.key_in(CPU), "name": str(here), "cores": cores, "memory_bytes": memory}
    for gpu in found_gpus():
        key = gpu_key(gpu.name)
        yield {"key": key, "model": key, "name": gpu.name, "cores": None, "memory_bytes": gpu.memory_bytes}


def _models(device: str) -> dict[str, Any]:
    """What prices kernels, collectives, dense layers and steps of a kind of device; None where nothing was trained."""
    from autoshard.core.errors import ModelError
    from autoshard.plugins import kernel_model_loaders, step_models

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

    try:
        library()
    except AutoshardError as error:
        yield f"the compiled search: {error.message}"


def _rendered(found: Mapping[str, Any]) -> Group:
    from autoshard.core.quoting import write_bytes

    rows = [("autoshard", f"{found['autoshard']}, Python {found['python']}, {found['platform']}")]
    for one in found["packages"]:
        rows.append((one["name"], one["version"] or f"missing; {one['needed_by']}"))
    for one in found["devices"]:
        cores = f", {one['cores']} cores" if one["cores"] else ""
        rows.append((f"device {one['key']}", f"{one['name']}{cores}, {write_bytes(one['memory_bytes'])}"))
        if one["model"] != one["key"]:
            rows.append(("its model in topologies", one["model"]))
    for one in found["models"]:
        parts = [f"{part} {name or 'analytic'}" for part, name in one.items() if part not in ("device", "error")]
        rows.append((f"models of {one['device']}", one.get("error") or ", ".join(parts)))
    missing = found["missing"]
    verdict = ["Nothing is missing."] if not missing else ["Missing:", *(f"  {line}" for line in missing)]
    return Group(facts(rows), Text(), *(Text(line) for line in verdict))


#: Questions of `autoshard init` by option: what is asked, and the answer when nobody is there to give one.
_QUESTIONS: Mapping[str, tuple[str, int | float | str]] = {
    "num_tables": ("Embedding tables", 8),
    "num_embeddings": ("Rows of each", 100_000),
    "embedding_dim": ("Columns of each", 64),
    "pooling_factor": ("Ids per sample of each", 10.0),
    "batch_size": ("Samples per step over all ranks", 8192),
    "topology": ("Ranks, as a bundled topology such as cpu-8 or dgx-a100-16", "cpu-8"),
}
_ASKED = "asked for"


def _asked(at_least: int, at_most: float, help: str) -> Any:
    """An option that answers a question, with a number in a range."""
    return typer.Option(min=at_least, max=at_most, help=help, show_default=_ASKED)


@command_options()
class InitOptions:
    """Options of `autoshard init`."""

    folder: Annotated[Path, typer.Argument(help="Folder of the files.", metavar="[FOLDER]")] = Path()
    num_tables: Annotated[int | None, _asked(1, accepted.MAX_TABLES, "Embedding tables.")] = None
    num_embeddings: Annotated[int | None, _asked(1, accepted.MAX_ROWS, "Rows of each.")] = None
    embedding_dim: Annotated[int | None, _asked(1, accepted.MAX_EMBEDDING_DIM, "Columns of each.")] = None
    pooling_factor: Annotated[float | None, _asked(0, accepted.MAX_POOLING_FACTOR, "Mean ids per sample of each.")] = (
        None
    )
    batch_size: Annotated[int | None, _asked(1, accepted.MAX_BATCH_SIZE, "Samples per step over all ranks.")] = None
    topology: Annotated[
        str | None,
        typer.Option(
            help="A bundled topology to start from (`autoshard list topologies`).",
            show_default=_ASKED,
        ),
    ] = None
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The same as FOLDER.", metavar="FOLDER")] = None
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False

    def __post_init__(self) -> None:
        if self.output is not None and self.folder != Path():
            raise InvalidOptionError("cannot be given with FOLDER, which is the same", field="--output")

    def answers(self) -> Mapping[str, Any]:
        """Answers to all questions: what was left out is asked for; without a terminal, the usual answers.

        Raises:
            InvalidOptionError: If an answer is out of its option's range.
        """
        given = {name: getattr(self, name) for name in _QUESTIONS}
        answers = {name: _answer(*_QUESTIONS[name]) if value is None else value for name, value in given.items()}
        replace(self, **answers)  # checks them
        return answers


def _answer(question: str, usual: float | str) -> Any:
    if not sys.stdin.isatty():
        return usual
    return typer.prompt(question, default=usual, type=type(usual), err=True)


def init(options: InitOptions, as_json: JsonOption = False) -> None:
    """Asks a few questions, then writes a tables.yaml and a topology.yaml with a comment on every field.

    Options answer questions before they are asked; without a terminal, usual answers do. Edit the files, then plan with
    them.

    Example:
        autoshard init
        autoshard plan tables.yaml --topology topology.yaml -o plan.json
    """
    from autoshard.formats import load_topology, tables_from_json, tables_to_json, write_tables, write_topology

    folder = options.output or options.folder
    tables_path, topology_path = folder / "tables.yaml", folder / "topology.yaml"
    for path in (tables_path, topology_path):
        if path.exists() and not options.force:
            raise InvalidOptionError("is there already; --force writes over it", source=str(path))
    answers = options.answers()
    # As they will be read: no file is written that plan refuses.
    tables = tables_from_json(tables_to_json(_tables(answers)))
    topology = load_topology(answers["topology"])
    write_tables(tables, tables_path)
    write_topology(topology, topology_path)
    result = {"tables": str(tables_path), "topology": str(topology_path)}
    text = f"Wrote {tables_path} and {topology_path}. Next: autoshard plan {tables_path} --topology {topology_path}"
    emit(result, text, as_json=as_json, kind="init")


def _tables(answers: Mapping[str, Any]) -> TableSet:
    from autoshard.core import AccessProfile, EmbeddingTable, Feature, TableSet

    access = AccessProfile.zipf(answers["num_embeddings"], 1.0)
    return TableSet(
        batch_size=answers["batch_size"],
        tables=tuple(
            EmbeddingTable(
                name=f"table_{number}",
                num_embeddings=answers["num_embeddings"],
                embedding_dim=answers["embedding_dim"],
                features=(Feature(name=f"feature_{number}", pooling_factor=answers["pooling_factor"]),),
                access=access,
            )
            for number in range(answers["num_tables"])
        ),
    )


@command_options()
class DetectOptions:
    """Options of `autoshard detect`."""

    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_WORLD_SIZE,
            help="Ranks of a machine.",
            show_default="one for each GPU, or torchrun's, or 1",
        ),
    ] = None
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_WORLD_SIZE, help="Machines like this.", show_default="torchrun's, or 1"),
    ] = None
    output: Annotated[
        Path | None, written_file("--output", "-o", help="File to write the topology to; .yaml has comments.")
    ] = None


def detect(options: DetectOptions, as_json: JsonOption = False) -> None:
    """Describes this machine, or those of a torchrun job, as a topology: ranks, memory, links.

    GPUs are described by NVML where nvidia-ml-py is installed (`autoshard[nvml]`), else by torch. Links are those of
    the bundled topology nearest to the device, at most the peak of NVLinks or PCIe slots that NVML and the system name;
    InfiniBand ports and network cards count where the system says how fast they are. Lines on standard error say what
    was assumed. `autoshard collect --kinds collectives` measures links.

    Example:
        autoshard detect -o topology.yaml
        autoshard detect --ranks 8 --nodes 2 -o topology.json
    """
    from autoshard.commands.machine import this_machine
    from autoshard.formats import topology_to_json, write_topology

    if (options.ranks or 1) * (options.nodes or 1) > MAX_WORLD_SIZE:
        raise InvalidOptionError(f"must be at most {MAX_WORLD_SIZE:,} ranks on all machines together", field="--nodes")
    topology, notes = this_machine(ranks=options.ranks, nodes=options.nodes)
    for note in notes:
        log(note)
    if options.output is not None:
        write_topology(topology, options.output)
        log(f"Wrote {options.output}")
    emit(topology_to_json(topology), _summary(topology), as_json=as_json)


def _summary(topology: Topology) -> str:
    from autoshard.core.quoting import write_bytes

    nodes = "1 machine" if topology.num_nodes == 1 else f"{topology.num_nodes} machines"
    return f"{topology.world_size} ranks of {topology.device} on {nodes}, {write_bytes(topology.memory_bytes.hbm)} each"
