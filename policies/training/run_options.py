"""What is trained, on what, and for how long: the options of `train policy`; no torch here."""

from __future__ import annotations

from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import AcceleratorOption, seed_option, share_option
from autoshard.commands.options import Needs, command_options
from autoshard.core.choices import Device
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from policies.algorithms.training_options import Budget, TrainingOptions
from policies.choices import Algorithm, CostLoss, Items

if TYPE_CHECKING:
    from policies.planning.tasks import TaskKind

_LEARNING, _FILES = "Learning", "Files"


@command_options(panel="Tasks")
class TaskOptions:
    """What is learned from."""

    tables: Annotated[
        str, typer.Option(help="Pool that tasks are drawn from: a file, or the name of a bundled one.")
    ] = "metasyn"
    scale: Annotated[
        int, typer.Option(min=1, help="Divides rows and batch of the pool; the cost model must cover that batch.")
    ] = 64
    num_tasks: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tasks to train on.")] = 90
    num_tables: Annotated[int, typer.Option(min=1, help="Tables per task.")] = 80
    num_ranks: Annotated[int, typer.Option(min=1, help="Ranks per task.")] = 8
    items: Annotated[
        Items,
        typer.Option(
            help="What is placed: whole tables, ranges of rows, or tables whose hot rows may be cut off and shared "
            "by all ranks."
        ),
    ] = Items.TABLES
    objective: Annotated[
        str,
        typer.Option(help="What is optimised: `balance` or `max_kernel` of kernel times, or `step`, with exchanges."),
    ] = "balance"
    memory_fill: Annotated[
        float | None, share_option("Share of all memory that a task's tables take. [default: unlimited memory]")
    ] = None
    device: Annotated[str, typer.Option(help="Key of the device that plans are for.")] = "cpu"

    def __post_init__(self) -> None:
        from env import Objective  # which imports torch

        if self.objective not in list(Objective):
            raise InvalidOptionError(
                f"must be any of {', '.join(Objective)}, got {shown(self.objective)}", field="--objective"
            )

    @property
    def kind(self) -> TaskKind:
        """What tasks are like."""
        from policies.planning.tasks import TaskKind

        return TaskKind(
            device=self.device,
            num_tables=self.num_tables,
            num_ranks=self.num_ranks,
            items=self.items,
            memory_fill=self.memory_fill,
        )


@command_options()
class PolicyRunOptions:
    """What is trained, on what, and for how long."""

    tasks: TaskOptions = field(default_factory=TaskOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    ray: Annotated[bool, typer.Option("--ray", help="Run the actors on a Ray cluster.", rich_help_panel=_LEARNING)] = (
        False
    )
    ray_address: Annotated[
        str,
        typer.Option(
            help="Address of the cluster: `auto`, HOST:PORT, or `local` to start one here.", rich_help_panel=_LEARNING
        ),
        Needs("--ray", lambda options: options.ray),
    ] = "auto"
    joint: Annotated[
        bool,
        typer.Option(
            "--joint",
            help="Train the cost model along with the policy, from samples in --store and from measured rewards; "
            "without --store from the policy's own placements alone.",
            rich_help_panel=_LEARNING,
        ),
    ] = False
    store: Annotated[Path | None, typer.Option(help="Folder with samples, for --joint.", rich_help_panel=_LEARNING)] = (
        None
    )
    cost_loss: Annotated[
        CostLoss,
        typer.Option(
            help="With --joint: the cost model's loss, relative or (as AutoShard has it) squared errors.",
            rich_help_panel=_LEARNING,
        ),
        Needs("--joint", lambda options: options.joint),
    ] = CostLoss.RELATIVE
    seed: Annotated[int, seed_option("Seed of the weights, the tasks and the actions.", rich_help_panel=_LEARNING)] = 0
    accelerator: AcceleratorOption = Device.AUTO
    mixed_precision: Annotated[
        bool,
        typer.Option(
            "--mixed-precision",
            help="With V-trace, without --joint: matrix products of the learner in bf16; weights stay fp32.",
            rich_help_panel=_LEARNING,
        ),
    ] = False
    budget: Budget = field(default_factory=Budget)
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoints; training goes on from the one that is there.", rich_help_panel=_FILES
        ),
    ] = None
    tensorboard: Annotated[
        Path | None,
        typer.Option(help="Folder for TensorBoard's logs; goes on from those that are there.", rich_help_panel=_FILES),
    ] = None

    def __post_init__(self) -> None:
        if self.mixed_precision and (self.joint or self.training.algorithm is not Algorithm.VTRACE):
            raise InvalidOptionError(f"goes with {Algorithm.VTRACE} only, without --joint", field="--mixed-precision")
        if self.ray and not self.training.num_actors:
            raise InvalidOptionError("needs actors, which are what runs there", field="ray_address")
        if self.joint and self.store is None and not self.training.share_measured:
            raise InvalidOptionError(
                "needs the folder of samples that the cost model is trained from, or --reward measured", field="--store"
            )
        if self.store is not None and not self.joint:
            raise InvalidOptionError("goes with --joint only", field="--store")
        if self.joint and (self.tasks.items, self.tasks.objective) != (Items.TABLES, "balance"):
            raise InvalidOptionError("trains on whole tables and their balance only", field="--joint")

    @property
    def cluster(self) -> str | None:
        """Cluster that actors run on, as RayActors takes it; None for processes of this machine."""
        return self.ray_address if self.ray else None

    @property
    def ending(self) -> Budget:
        """The budget. Scores that a cost model in training gives say little about progress: patience is asked for."""
        if self.joint and self.budget.patience is None:
            return replace(self.budget, patience=0)
        return self.budget
