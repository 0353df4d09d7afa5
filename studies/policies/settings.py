"""Size and subject of an evaluation."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.core.accepted import AT_LEAST_1, Range
from studies.frame import RegistryOption

#: Tables and ranks of a task.
Size = tuple[int, int]

#: Fields that may differ between two runs into one folder: their parts are the same.
_FREE: Final = (
    *("registry", "store", "num_seeds", "num_step_seeds", "num_replayed", "measured_updates"),
    "joint_updates",
    *("transfer", "inference", "unseen_ratios"),
)


@command_options()
class EvaluationSettings:
    """Size of an evaluation. The defaults are the paper's where it names them; fields without help are set in Python.

    Source:
        AutoShard Sec. 5.1 and 5.2.
    """

    registry: RegistryOption = None
    store: Annotated[
        Path | None, typer.Option(help="Folder of samples, for cost models without some features in table2.")
    ] = None
    device: Annotated[str, typer.Option(help="Key of the device whose models price.")] = "cpu"
    tables: Annotated[str, typer.Option(help="Pool that tasks are drawn from.")] = "metasyn"
    scale: Annotated[
        int, typer.Option(min=1, help="Divides rows and batch of the pool; the cost model must cover that batch.")
    ] = 64
    num_seeds: Annotated[int, typer.Option("--seeds", min=1, help="Trainings, each with tasks of its own.")] = 5
    num_updates: Annotated[int, typer.Option("--updates", min=1, help="Updates of each policy.")] = 300
    num_step_seeds: Annotated[int, typer.Option("--step-seeds", min=1, help="As --seeds, of steps.")] = 2
    step_updates: Annotated[int, typer.Option(min=1, help="As --updates, of steps.")] = 100
    auto_s: Annotated[float, positive_option("Seconds that `auto` may search.")] = 1.0
    search_s: Annotated[float, positive_option("Seconds of the search for best known plans.")] = 60.0
    num_replayed: Annotated[
        int,
        typer.Option(
            "--replay", min=0, help="Tasks of each seed of fig8, fig9 and fig11 whose plans are measured here."
        ),
    ] = 0
    measured_updates: Annotated[
        int,
        typer.Option(min=0, help="Updates of one more curve of fig12-training, whose rewards are measured here."),
    ] = 0
    joint_updates: Annotated[
        int, typer.Option(min=0, help="Updates of the policy in figure joint, which also trains its cost model.")
    ] = 100
    num_train_tasks: int = 90
    num_validation_tasks: int = 20
    num_test_tasks: int = 10
    """Per seed."""
    num_target_tasks: int = 20
    """Unseen tasks for the targets and for training curves; the same for all seeds."""
    num_tables: int = 80
    num_ranks: int = 8
    num_samples: int = 64
    """Placements that the policy draws where it may draw."""
    num_random: int = 10_000
    """Random placements per task."""
    cost_updates: int = 3000
    """Updates of each cost model without some features."""
    curve_updates: int = 200
    """Updates of training curves."""
    curve_every: int = 5
    """Updates between two points of a curve."""
    memory_share: float = 0.9
    """Share of all memory that tasks with little memory fill."""
    unseen_ratios: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    transfer: tuple[Size, ...] = ((80, 8), (160, 16), (240, 24), (320, 32), (400, 40), (560, 56), (800, 80))
    """Sizes of tasks that policies of `num_tables` tables are tried on."""
    inference: tuple[Size, ...] = ((20, 2), (40, 4), (80, 8), (160, 16), (320, 32), (480, 48), (800, 80))
    """Sizes of tasks that planners are timed on."""
    num_timed: int = 5
    """Runs of each planner of which the median is taken."""

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(
            self,
            *("num_train_tasks", "num_validation_tasks", "num_test_tasks", "num_target_tasks", "num_tables"),
            *("num_ranks", "num_random", "cost_updates", "curve_updates", "curve_every", "num_timed"),
        )
        Range(at_least=2).check_fields(self, "num_samples")
        Range(above=0, below=1).check_fields(self, "memory_share")

    def quick(self) -> EvaluationSettings:
        """The same, no larger than a first look in minutes allows."""
        return replace(
            self,
            num_seeds=min(self.num_seeds, 2),
            num_step_seeds=1,
            num_train_tasks=8,
            num_validation_tasks=4,
            num_test_tasks=2,
            num_target_tasks=3,
            num_tables=24,
            num_ranks=4,
            num_updates=min(self.num_updates, 8),
            num_samples=8,
            auto_s=min(self.auto_s, 0.1),
            search_s=min(self.search_s, 0.5),
            num_random=300,
            cost_updates=60,
            step_updates=min(self.step_updates, 4),
            joint_updates=min(self.joint_updates, 8),
            curve_updates=8,
            curve_every=2,
            unseen_ratios=(0.0, 0.5, 1.0),
            transfer=((24, 4), (48, 8), (72, 12)),
            inference=((12, 2), (24, 4), (48, 8)),
            num_timed=2,
        )

    @property
    def size(self) -> Size:
        """Tables and ranks of the tasks that policies are trained on."""
        return self.num_tables, self.num_ranks

    @property
    def num_tasks_replayed(self) -> int:
        """Test tasks of each seed that are replayed."""
        return min(self.num_replayed, self.num_test_tasks)

    @property
    def large(self) -> Size:
        """The largest tasks that policies are tried on."""
        return max(self.transfer)

    def identity(self) -> dict[str, Any]:
        """Fields that two evaluations must share for one to continue from the other's parts."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE}
