"""The study `repeatability`: how far measurements of the same sets lie apart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.report.images import write_report
from bench.measuring.devices import find_device
from studies.kernels.repeatability import Repeatability, measure_repeatability, settings_of
from studies.kernels.repeatability_report import SCHEMA, repeatability_report, repeatability_table
from studies.measured_data import read_document
from studies.programs import command_line


def main(
    seconds: Annotated[float, typer.Option(help="How long to measure.")] = 600.0,
    tables: Annotated[int, typer.Option(help="Tables of the set that is watched first.")] = 8,
    device: Annotated[str, typer.Option(help="`auto` (a GPU if there is one), `cpu` or `cuda`.")] = "auto",
    scale: Annotated[int | None, typer.Option(help="Divide rows and batch; 64 on a CPU, 1 on a GPU.")] = None,
    output_dir: Annotated[Path, typer.Option(help="Folder for repeatability.png, .html and .json.")] = Path(
        "docs/figures"
    ),
    from_file: Annotated[Path | None, typer.Option("--from", help="Report these numbers; measure nothing.")] = None,
    as_json: console.JsonOption = False,
) -> None:
    """Measures the same sets over and over, and reports how far the samples lie apart.

    Example:
        python -m studies repeatability --seconds 600
    """
    if from_file is not None:
        found = read_document(from_file, Repeatability, SCHEMA)
    else:
        target = find_device(device)
        options = {"seconds": seconds, "tables": tables, "device": target.device.type, "scale": scale}
        command = command_line("repeatability", **options, output_dir=output_dir)
        with console.progress("Measuring, seconds", seconds) as advance:
            found = measure_repeatability(
                target,
                settings_of(target),
                num_tables=tables,
                seconds=seconds,
                scale=scale,
                command=command,
                advance=advance,
            )
    report = repeatability_report(found)
    console.emit(report.document, repeatability_table(found), as_json=as_json)
    files = write_report(report, output_dir, "repeatability")
    console.log(f"Wrote {', '.join(map(str, files))}.")
