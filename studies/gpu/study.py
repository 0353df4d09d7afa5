"""The study `gpu`: a run on one GPU within its minutes, and its report."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Final

import plotly.graph_objects as go
import torch
import typer
from plotly.subplots import make_subplots

from autoshard import console
from autoshard.commands.arguments import DeviceOption, positive_option
from autoshard.commands.options import command_options
from autoshard.core.choices import Device
from autoshard.core.errors import ExecutionError
from autoshard.formats.files import atomic_write
from autoshard.report.figures import in_house_style
from autoshard.report.images import FigureReport, ImageError, Section, find_browser
from bench.measuring.devices import find_device
from studies.frame import FromOption, Machine, StudyResult, command_line, names_in, to_document
from studies.frame.results import write_result
from studies.gpu import caches, card, checks, clock, costs, engines, fig4, plans, samples, waits
from studies.gpu.stages import SCHEMA, Found, Outcome, Stage, State, failures, run_stages

#: In the order in which they run; a new stage has its place here.
STAGES: Final[tuple[Stage, ...]] = (
    card.STAGE,
    clock.STAGE,
    samples.STAGE,
    costs.STAGE,
    plans.STAGE,
    engines.STAGE,
    waits.STAGE,
    fig4.STAGE,
    caches.STAGE,
    checks.STAGE,
)
#: Left of the minutes for the last report, and for its picture.
_REPORT_S, _PICTURE_S = 5.0, 15.0
_WIDTH: Final = 1440


@command_options()
class GpuOptions:
    """Options of the study `gpu`."""

    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for numbers, samples and report.")]
    minutes: Annotated[float, positive_option("Time of all stages and the report.")] = 9.0
    device: DeviceOption = Device.AUTO
    resume: Annotated[
        Path | None, typer.Option(help="Folder of an earlier run: stages that are done there are not run again.")
    ] = None
    stages: Annotated[
        str,
        typer.Option(help="Stages to run, with commas between them; again if they are done.", show_default="all"),
    ] = ""
    from_file: FromOption = None
    images: Annotated[bool, typer.Option(help="Draw the picture, which takes a browser.")] = True
    started: float = field(default_factory=time.monotonic)
    """When the run began, by the monotonic clock."""

    @property
    def chosen(self) -> tuple[Stage, ...]:
        """The stages to run.

        Raises:
            InvalidOptionError: If one is unknown.
        """
        names = names_in(self.stages, "--stages", [stage.name for stage in STAGES]) if self.stages else ()
        return tuple(stage for stage in STAGES if not names or stage.name in names)


def main(options: GpuOptions) -> None:
    """Measures one GPU within its minutes: ceilings, clocks, samples, cost models, caches; leaves a report of one page.

    Each stage writes its result the moment it has it, so that a run that is cut leaves what it had.

    Example:
        python -m studies gpu --minutes 9 -o gpu-run
        python -m studies gpu --minutes 9 -o gpu-run-2 --resume gpu-run
    """
    found = _measured(options) if options.from_file is None else Found.read(options.from_file.parent)
    _write_page(found, options.output_dir)
    if options.images:
        _write_picture(found, options.output_dir)
    console.emit(to_document(found, SCHEMA), gpu_result(found).to_markdown(), as_json=False)
    failed = failures(found)
    if failed:
        raise ExecutionError("stages failed: " + "; ".join(f"{name} ({why})" for name, why in failed.items()))


def _measured(options: GpuOptions) -> Found:
    device, folder, chosen = find_device(options.device), options.output_dir, options.chosen
    machine = Machine.this(device, command_line("gpu", options))
    found = Found(machine=machine)
    if options.resume is not None:
        found = replace(Found.read(options.resume), machine=machine)
        if options.stages:
            found = found.reopened([stage.name for stage in chosen])
        for name in (samples.SAMPLES_FILE, costs.MODELS_FILE):
            earlier = options.resume / name
            if earlier.exists() and options.resume.resolve() != folder.resolve():
                atomic_write(folder / name, earlier.read_bytes())
    found.write(folder)

    def on_result(now: Found) -> None:
        _write_page(now, folder)
        gc.collect()
        if device.is_cuda:
            torch.cuda.empty_cache()

    reserved_s = _REPORT_S + (_PICTURE_S if options.images and _has_browser() else 0.0)
    deadline = options.started + 60.0 * options.minutes - reserved_s
    return run_stages(chosen, device, folder, found, deadline=deadline, on_result=on_result)


def _has_browser() -> bool:
    try:
        find_browser()
    except ImageError:
        return False
    return True


def gpu_result(found: Found) -> StudyResult:
    """Numbers, page and picture of what stages have left."""
    sections = tuple(_sections(found))
    page = FigureReport(
        title="One GPU, measured",
        subtitle=found.machine.device_name,
        sections=sections,
        facts=tuple(_facts(found)),
        provenance=found.machine.described(),
    )
    return StudyResult(name="gpu", document=to_document(found, SCHEMA), page=page, width=_WIDTH)


def _sections(found: Found) -> Iterator[Section]:
    for stage in STAGES:
        outcome = found.outcomes.get(stage.name)
        if outcome is None:
            continue
        # A stage that was cut may not have what its sections show.
        if outcome.state is State.DONE or outcome.numbers:
            yield from _shown(stage, outcome)
        if outcome.state is State.CUT:
            caption = f"It was ended after {outcome.seconds:.0f} s; `--resume` runs it again."
            yield Section(title=f"The stage {stage.name} was cut", caption=caption)
        if outcome.error:
            yield Section(title=f"The stage {stage.name} failed", caption=outcome.error.strip().splitlines()[-1])


def _shown(stage: Stage, outcome: Outcome) -> Sequence[Section]:
    try:
        return stage.show(outcome.numbers)
    except (KeyError, IndexError, ValueError):
        if outcome.state is State.DONE:
            raise
        return ()


def _facts(found: Found) -> Iterator[tuple[str, str, str]]:
    for stage in STAGES:
        outcome = found.outcomes.get(stage.name)
        if outcome is not None:
            text = stage.headline(outcome.numbers) if outcome.state is State.DONE else str(outcome.state)
            yield stage.name, text, f"{outcome.seconds:.0f} s"


def _write_page(found: Found, folder: Path) -> None:
    result = gpu_result(found)
    write_result(result, folder)
    atomic_write(folder / "gpu.md", result.to_markdown() + "\n")


def _write_picture(found: Found, folder: Path) -> None:
    """The page's figures in one image; where there is no browser, the page has them all the same."""
    drawn = [section for section in _sections(found) if section.figure is not None]
    if not drawn:
        return
    result = replace(gpu_result(found), images={"": joined(drawn)})
    try:
        write_result(result, folder)
    except ImageError as error:
        console.warn(f"no picture: {error}")


def joined(sections: Sequence[Section]) -> go.Figure:
    """Figures of one plot each, two in a row, under the titles of their sections."""
    num_rows = -(-len(sections) // 2)
    titles = [f"<b>{section.title}</b>" for section in sections]
    whole = make_subplots(num_rows, 2, subplot_titles=titles, horizontal_spacing=0.08, vertical_spacing=0.3 / num_rows)
    in_house_style(whole, height=420 * num_rows)
    for place, section in enumerate(sections):
        at = {"row": place // 2 + 1, "col": place % 2 + 1}
        for trace in section.figure.data:
            whole.add_trace(trace, **at)
        for name, update in (("xaxis", whole.update_xaxes), ("yaxis", whole.update_yaxes)):
            axis = section.figure.layout[name].to_plotly_json()
            update(**{key: value for key, value in axis.items() if key not in ("anchor", "domain")}, **at)
    whole.update_layout(showlegend=False, margin={"t": 40})
    return whole
