"""Draws AutoShard's figures for this sharding policy, on CPUs: `python -m studies policy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard import console
from autoshard.commands.options import command_options
from studies.frame import OutputOptions, command_line
from studies.policies.settings import EvaluationSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from studies.policies.figure import Figure

_FIGURES_HELP = (
    "Names with commas between them: fig8, fig9, table2, table3, fig10, fig11, fig12-training, fig12-inference, joint, "
    "targets, steps. table3 and fig10 need --store."
)


@command_options()
class PolicyOptions:
    """Options of the study `policy`."""

    parts: Annotated[Path, typer.Option(help="Folder for finished parts, checkpoints and trained policies.")]
    figures: Annotated[str | None, typer.Option(help=_FIGURES_HELP, show_default="all")] = None
    quick: Annotated[bool, typer.Option("--quick", help="Small tasks and short trainings: for a first look.")] = False
    settings: EvaluationSettings

    def chosen(self) -> Sequence[Figure]:
        """Figures to compute."""
        from studies.policies.figures.catalogue import choose

        return choose(self.figures)


def main(options: PolicyOptions, output: OutputOptions) -> None:
    """Trains and compares policies as AutoShard's paper does, and writes figures and tables.

    Parts that are finished are kept in --parts: a run that was stopped goes on, and a later one adds figures. Two
    processes may work on different figures of one folder at the same time, once it has fig8.

    Example:
        python -m studies policy --registry registry --parts evaluation --replay 10 -o evaluation
    """
    from studies.policies import Lab, policy_result

    chosen = options.chosen()
    lab = Lab(options.settings.quick() if options.quick else options.settings, options.parts)

    def on_part(name: str) -> None:
        console.log(f"{name} is finished")
        advance(1)

    with console.progress("Parts", sum(len(figure.parts(lab.settings)) for figure in chosen)) as advance:
        for figure in chosen:
            figure.run(lab, on_part)
    output.write(policy_result(lab, command_line("policy", options)))
