"""Command `samples`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from autoshard import console
from autoshard.commands.arguments import ImageOption, open_client, server_option, written_file
from autoshard.commands.options import Needs, command_options
from autoshard.commands.plan import draw
from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.core.quoting import shown

if TYPE_CHECKING:
    from autoshard.core import TableSet
    from autoshard.formats.stores.sample_store import SampleStore, SampleT
    from autoshard.formats.stores.samples import SampleTable
    from bench.store.coverage import Coverage


@command_options()
class SamplesOptions:
    """Which samples are looked at."""

    store: Annotated[Path, typer.Argument(help="Folder with samples.")]
    device: Annotated[str | None, typer.Option(help="Look at this device only, such as `cpu` or `h200`.")] = None
    html: Annotated[
        Path | None,
        written_file("--output", "-o", "--html", help="Write a page of the regions that the samples of kernels cover."),
    ] = None
    image: ImageOption = None
    tables: Annotated[
        str | None,
        typer.Option(help="With --html or --image: tables to cover, a file or a bundled name."),
        Needs("--html or --image", lambda options: options.shows_coverage),
    ] = None
    scale: Annotated[
        int,
        typer.Option(min=1, help="With --tables: divide their rows and batch by this."),
        Needs("--tables", lambda options: options.tables is not None),
    ] = 64

    send_to: Annotated[str | None, server_option("Send the samples to a service (`autoshard serve`).")] = None

    @property
    def shows_coverage(self) -> bool:
        """Whether regions are counted, for a page or for images."""
        return self.html is not None or self.image is not None


def samples(options: SamplesOptions, as_json: console.JsonOption = False) -> None:
    """Shows what a store of samples holds, and checks its files for damage.

    Counts the samples of kernels by device, and how many of them are noisy (their runs differ too much; models are not
    trained on them), were measured again, or were measured at a throttled clock. Copies count once.

    Example:
        autoshard samples samples --html coverage.html --image coverage.svg --tables metasyn
        autoshard samples samples --send-to http://localhost:8000
    """
    from autoshard.formats import load_tables
    from autoshard.formats.stores.collective_samples import COLLECTIVE_SAMPLES
    from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
    from autoshard.formats.stores.samples import devices_in
    from bench.dense.report import dense_table
    from bench.store.summary import summarise, summary_table

    pool = None if options.tables is None else load_tables(options.tables).scaled(options.scale)
    store, device = options.store, options.device
    found = {
        "kernels": devices_in(store),
        "dense": DENSE_SAMPLES.devices(store),
        "collectives": COLLECTIVE_SAMPLES.devices(store),
    }
    chosen = {kind: [key for key in keys if device in (None, key)] for kind, keys in found.items()}
    if not any(chosen.values()):
        of_device = "" if device is None else f" of device {shown(device)}"
        held = ", ".join(sorted({key for keys in found.values() for key in keys}))
        hint = f"it holds: {held}" if held else "`autoshard collect` adds some"
        raise SampleStoreError(f"holds no samples{of_device}; {hint}", source=str(store))
    kernels = {key: _checked(store, key) for key in chosen["kernels"]}
    summaries = [summarise(table) for table in kernels.values()]
    dense = {key: _intact(store, key, DENSE_SAMPLES.read(store, key)) for key in chosen["dense"]}
    collectives = {key: _intact(store, key, COLLECTIVE_SAMPLES.read(store, key)) for key in chosen["collectives"]}
    parts: list[RenderableType] = [summary_table(summaries)] if summaries else []
    for key, layers in dense.items():
        parts += [f"dense layers on {key}: {len(layers):,} samples", dense_table(layers)]
    parts += [f"collectives on {key}: {len(measured):,} samples" for key, measured in collectives.items()]
    if options.send_to is not None:
        parts.append(f"Sent {_sent(store, chosen, options.send_to):,} samples to {options.send_to}.")
    coverage = _coverage(kernels, pool) if options.shows_coverage else None
    if coverage is not None and options.html is not None:
        parts.append(f"Wrote {_write_page(options.html, options.store, coverage)}.")
    result = {
        "store": str(store),
        "devices": [asdict(summary) for summary in summaries],
        "dense": {key: len(layers) for key, layers in dense.items()},
        "collectives": {key: len(measured) for key, measured in collectives.items()},
        "html": None if options.html is None else str(options.html),
    }
    console.emit(result, Group(*parts), as_json=as_json, kind="store")
    if coverage is not None and options.image is not None:
        from bench.store.coverage_report import coverage_pictures

        draw(coverage_pictures(coverage), options.image)


def _sent(store: Path, chosen: Mapping[str, Sequence[str]], server: str) -> int:
    """Sends the files of some devices to a service; the number of samples in them."""
    from autoshard.formats.stores.collective_samples import COLLECTIVE_SAMPLES
    from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
    from autoshard.formats.stores.samples import KERNEL_SAMPLES

    stores: dict[str, SampleStore[Any]] = {
        "kernels": KERNEL_SAMPLES,
        "dense": DENSE_SAMPLES,
        "collectives": COLLECTIVE_SAMPLES,
    }
    files = [file for kind, keys in chosen.items() for key in keys for file in stores[kind].files(store, key)]
    num_samples = 0
    with open_client(server) as client, console.progress("Sending samples", len(files)) as advance:
        for file in files:
            num_samples += client.send_samples(file)
            advance(1)
    return num_samples


def _checked(store: Path, device: str) -> SampleTable:
    from autoshard.formats.stores.samples import read_samples

    table = read_samples(store, device)
    _intact(store, device, table.samples)
    return table


def _intact(store: Path, device: str, samples: Sequence[SampleT]) -> Sequence[SampleT]:
    """The samples, if the content of each matches its id."""
    from autoshard.formats.stores.sample_store import damaged_samples

    with console.progress("Checking samples", len(samples)) as advance:
        damaged = damaged_samples(samples, advance)
    if damaged:
        raise SampleStoreError(
            f"{len(damaged)} of {len(samples)} samples of {device} do not match their id, the first is "
            f"{shown(damaged[0].sample_id)}; remove the files that hold them",
            source=str(store),
        )
    return samples


def _coverage(kernels: dict[str, SampleTable], pool: TableSet | None) -> Coverage:
    """The regions that samples of kernels cover, and what of a pool lies in them.

    Raises:
        InvalidOptionError: If there are samples of no device, or of several.
    """
    from bench.store.coverage import coverage_of

    if len(kernels) != 1:
        held = ", ".join(kernels) or "none"
        raise InvalidOptionError(f"must name one device with samples of kernels; there are: {held}", field="device")
    (table,) = kernels.values()
    return coverage_of(table, pool)


def _write_page(html: Path, store: Path, coverage: Coverage) -> Path:
    from autoshard.formats import atomic_write
    from bench.store.coverage_report import coverage_html

    atomic_write(html, coverage_html(coverage, title=f"What the samples in {store.name} cover"))
    return html
