"""The study `policy`: AutoShard's figures for this sharding policy, on CPUs: `python -m studies policy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import autoshard
from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core.errors import UnknownNameError
from autoshard.report.images import FigureReport, Section
from studies.frame import OutputOptions, StudyResult, command_line
from studies.policies.figures import (
    ablations,
    blind_costs,
    heuristics,
    inference,
    joint_training,
    random_search,
    steps,
    targets,
    training_curves,
    transfer,
    unseen_tables,
)
from studies.policies.lab import EvaluationSettings, Figure, Lab

SCHEMA: Final = "autoshard.policy_evaluation/1"
_WIDTH: Final = 1100
#: In the order of the page.
FIGURES: Final[Mapping[str, Figure]] = {
    module.FIGURE.name: module.FIGURE
    for module in (
        *(heuristics, random_search, ablations, blind_costs, unseen_tables, transfer, training_curves),
        *(inference, joint_training, targets, steps),
    )
}


def choose(names: str | None) -> Sequence[Figure]:
    """The figures of a list of names with commas; all of them when left out.

    Raises:
        UnknownNameError: If there is no such figure.
    """
    if names is None:
        return list(FIGURES.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in FIGURES]
    if unknown or not chosen:
        named = f"no figure is named {unknown[0]!r}" if unknown else "needs at least one name"
        raise UnknownNameError(f"{named}; there are: {', '.join(FIGURES)}", field="--figures")
    return [FIGURES[name] for name in FIGURES if name in chosen]


def sections(lab: Lab) -> dict[str, Section]:
    """Sections of all figures that are finished, by name."""
    found = {name: figure.section(lab) for name, figure in FIGURES.items()}
    return {name: section for name, section in found.items() if section is not None}


def policy_result(lab: Lab, command: str) -> StudyResult:
    """Numbers, page and images of all finished figures.

    Args:
        lab: Has the parts.
        command: Command of the evaluation, for the record.
    """
    shown = sections(lab)
    about = _about(lab, command)
    page = FigureReport(
        title="The sharding policy, evaluated",
        subtitle=f"AutoShard's figures, from models of {lab.settings.device}",
        sections=tuple(shown.values()),
        provenance=about,
    )
    return StudyResult(
        name="policy",
        document=_document(lab, shown, about),
        page=page,
        images={f"-{name}": section.figure for name, section in shown.items()},
        width=_WIDTH,
    )


def _about(lab: Lab, command: str) -> tuple[tuple[str, str], ...]:
    settings = lab.settings
    return (
        ("Command", command),
        ("Tables", f"{settings.tables}, rows and batch divided by {settings.scale}"),
        ("Costs", lab.model.name),
        ("Seeds", f"{settings.num_seeds}"),
        ("Version", f"autoshard {autoshard.__version__}"),
    )


def _document(lab: Lab, shown: Mapping[str, Section], about: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    figures = {}
    for name, section in shown.items():
        figure = FIGURES[name]
        figures[name] = {
            "title": section.title,
            "caption": section.caption,
            "parts": {part.name: lab.parts.read(figure.part_name(part)) for part in figure.parts(lab.settings)},
            "tables": [
                {"caption": table.caption, "columns": table.headings, "lines": table.lines} for table in section.tables
            ],
        }
    return {"schema": SCHEMA, "about": dict(about), "settings": lab.settings.identity(), "figures": figures}


_FIGURES_HELP = f"Names with commas between them: {', '.join(FIGURES)}. table3 and fig10 need --store."


@command_options()
class PolicyOptions:
    """Options of the study `policy`."""

    parts: Annotated[Path, typer.Option(help="Folder for finished parts, checkpoints and trained policies.")]
    figures: Annotated[str | None, typer.Option(help=_FIGURES_HELP, show_default="all")] = None
    quick: Annotated[bool, typer.Option("--quick", help="Small tasks and short trainings: for a first look.")] = False
    settings: EvaluationSettings


def main(options: PolicyOptions, output: OutputOptions) -> None:
    """Trains and compares policies as AutoShard's paper does, and writes figures and tables.

    Parts that are finished are kept in --parts: a run that was stopped goes on, and a later one adds figures. Two
    processes may work on different figures of one folder at the same time, once it has fig8.

    Example:
        python -m studies policy --registry registry --parts evaluation --replay 10 -o evaluation
    """
    chosen = choose(options.figures)
    lab = Lab(options.settings.quick() if options.quick else options.settings, options.parts)

    def on_part(name: str) -> None:
        console.log(f"{name} is finished")
        advance(1)

    with console.progress("Parts", sum(len(figure.parts(lab.settings)) for figure in chosen)) as advance:
        for figure in chosen:
            figure.run(lab, on_part)
    output.write(policy_result(lab, command_line("policy", options)))
