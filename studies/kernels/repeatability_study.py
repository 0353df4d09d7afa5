"""The study `repeatability`: how far measurements of the same sets lie apart."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard import console
from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from bench.measuring.devices import find_device
from studies.frame import BenchDeviceOption, FromOption, OutputOptions, command_line, read_document
from studies.kernels.repeatability import Repeatability, measure_repeatability, settings_of
from studies.kernels.repeatability_report import SCHEMA, repeatability_result


@command_options()
class RepeatabilityOptions:
    """Options of the study `repeatability`."""

    seconds: Annotated[float, positive_option("How long to measure.")] = 600.0
    tables: Annotated[int, typer.Option(min=1, help="Tables of the set that is watched first.")] = 8
    device: BenchDeviceOption = "auto"
    scale: Annotated[
        int | None, typer.Option(help="Divide rows and batch.", show_default="64 on a CPU, 1 on a GPU")
    ] = None
    from_file: FromOption = None


def main(options: RepeatabilityOptions, output: OutputOptions) -> None:
    """Measures the same sets over and over, and reports how far the samples lie apart.

    Example:
        python -m studies repeatability --seconds 600 -o docs/figures
    """
    if options.from_file is not None:
        found = read_document(options.from_file, Repeatability, SCHEMA)
    else:
        target = find_device(options.device)
        with console.progress("Measuring, seconds", options.seconds) as advance:
            found = measure_repeatability(
                target,
                settings_of(target),
                num_tables=options.tables,
                seconds=options.seconds,
                scale=options.scale,
                command=command_line("repeatability", options),
                advance=advance,
            )
    output.write(repeatability_result(found))
