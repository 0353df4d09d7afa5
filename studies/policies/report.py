"""The evaluation as one page, an image per figure, and a file of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import autoshard
from autoshard.report.images import FigureReport, Section
from studies.frame import StudyResult
from studies.policies.figures.catalogue import FIGURES
from studies.policies.lab import Lab

SCHEMA: Final = "autoshard.policy_evaluation/1"
_WIDTH: Final = 1100


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
