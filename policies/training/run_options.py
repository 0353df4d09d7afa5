"""What a policy is trained on, and for how long: the options of `train policy`; no torch here."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated

import typer

from autoshard.commands.arguments import AcceleratorOption, positive_option, seed_option
from autoshard.commands.options import command_options
from autoshard.core.choices import Device
from autoshard.core.errors import InvalidOptionError
from policies.planning.trained import ANY_DEVICE


@command_options(panel="Tasks")
class TaskOptions:
    """What is learned from."""

    device: Annotated[
        str,
        typer.Option(
            help="Key of the device that the policy is for: it learns from tasks on machines of that device; `any` for "
            "all machines."
        ),
    ] = ANY_DEVICE
    num_tasks: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tasks to train on.")] = 240
    search_seconds: Annotated[
        float, positive_option("Seconds of the search that says of each task what its options cost.")
    ] = 2.0


@command_options(panel="Learning")
class LearningOptions:
    """How the policy learns: from searches, then from its own best placements, then by V-trace."""

    updates: Annotated[
        int,
        typer.Option(
            min=0, max=1 << 20, help="Updates from the labels of searches, each of eight tasks; 0 for V-trace alone."
        ),
    ] = 1500
    improvements: Annotated[
        int,
        typer.Option(
            min=0,
            max=1 << 10,
            help="Rounds of self-improvement: every task's best of eight placements, after bursts of the search, "
            "becomes its label where its step is shorter; each is learned from with a fifth of the updates.",
        ),
    ] = 1
    vtrace_updates: Annotated[
        int,
        typer.Option(min=0, max=1 << 20, help="Updates by V-trace, each of eight episodes of one task."),
    ] = 0
    actors: Annotated[
        int,
        typer.Option(min=0, max=1024, help="Processes that search and play; 0: this one does it."),
    ] = 0
    seed: Annotated[int, seed_option("Seed of the weights, the tasks and the choices.")] = 0
    accelerator: AcceleratorOption = Device.AUTO
    fine_tune: Annotated[
        bool,
        typer.Option(
            "--fine-tune", help="Begin with the weights of the policy that is in use for the device, not random ones."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.updates == 0 and self.vtrace_updates == 0:
            raise InvalidOptionError("must be at least 1 without --vtrace-updates, got 0", field="--updates")


@command_options()
class PolicyRunOptions:
    """What is trained, on what, and for how long."""

    tasks: TaskOptions = field(default_factory=TaskOptions)
    learning: LearningOptions = field(default_factory=LearningOptions)
    seconds: Annotated[
        float | None, positive_option("Seconds after which learning ends; half of them are for searches.")
    ] = None
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder for labels and weights; training goes on from what is there.", rich_help_panel="Files"
        ),
    ] = None
