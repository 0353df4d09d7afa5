"""How large an evaluation is, and of what."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from autoshard.core.errors import InvalidOptionError

#: Tables and ranks of a task.
Size = tuple[int, int]

#: What may differ between two runs into one folder: their parts are the same.
_FREE: Final = (
    *("registry", "store", "num_seeds", "num_step_seeds", "num_replayed", "measured_updates"),
    *("transfer", "inference", "unseen_ratios"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """What is trained and compared. The defaults are the paper's where it names them.

    Source:
        AutoShard Sec. 5.1 and 5.2.
    """

    tables: str = "metasyn"
    """Pool of tables: a file, or the name of a bundled one."""
    scale: int = 64
    """Divides rows and batch of the pool; the cost model must cover that batch."""
    device: str = "cpu"
    """Key of the device kind whose models price."""
    registry: Path | None = None
    """Folder of trained models; the default one if None."""
    store: Path | None = None
    """Folder of samples, from which cost models without some features are trained; none of these if None."""
    num_seeds: int = 5
    """Trainings, each with training and test tasks of its own."""
    num_train_tasks: int = 90
    num_validation_tasks: int = 20
    num_test_tasks: int = 10
    """Per seed."""
    num_target_tasks: int = 20
    """Unseen tasks for what has to be reached, and for training curves; the same for all seeds."""
    num_tables: int = 80
    num_ranks: int = 8
    num_updates: int = 300
    """Of each policy."""
    num_samples: int = 64
    """Placements that the policy draws where it may draw."""
    auto_s: float = 1.0
    """Time limit of `auto`."""
    search_s: float = 60.0
    """Time of the search for the best known plan."""
    num_random: int = 10_000
    """Random placements per task."""
    cost_updates: int = 3000
    """Updates of each cost model without some features."""
    curve_updates: int = 200
    """Updates of training curves."""
    curve_every: int = 5
    """Updates between two points of a curve."""
    measured_updates: int = 0
    """Updates of a training curve whose rewards are measured on this machine; 0 for none."""
    num_step_seeds: int = 2
    """Trainings for each kind of items whose objective is the whole step, which take ten times as long."""
    step_updates: int = 100
    """Of each of these."""
    memory_share: float = 0.9
    """Share of all memory that tasks with little memory fill."""
    unseen_ratios: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    transfer: tuple[Size, ...] = ((80, 8), (160, 16), (240, 24), (320, 32), (400, 40), (560, 56), (800, 80))
    """Sizes of tasks that policies of `num_tables` tables are tried on."""
    inference: tuple[Size, ...] = ((20, 2), (40, 4), (80, 8), (160, 16), (320, 32), (480, 48), (800, 80))
    """Sizes of tasks that planners are timed on."""
    num_timed: int = 5
    """Runs of each planner of which the median is taken."""
    num_replayed: int = 0
    """Tasks of each seed whose plans are replayed on this machine; 0 for none."""

    def __post_init__(self) -> None:
        for name in (
            *("num_seeds", "num_train_tasks", "num_validation_tasks", "num_test_tasks", "num_target_tasks"),
            *(
                "num_tables",
                "num_ranks",
                "num_updates",
                "num_random",
                "cost_updates",
                "num_step_seeds",
                "step_updates",
                "curve_updates",
                "curve_every",
            ),
            *("num_timed", "scale"),
        ):
            if getattr(self, name) < 1:
                raise InvalidOptionError(f"must be at least 1, got {getattr(self, name)}", field=name)
        if self.num_samples < 2:
            raise InvalidOptionError(f"must be at least 2, got {self.num_samples}", field="num_samples")
        for name in ("num_replayed", "measured_updates"):
            if getattr(self, name) < 0:
                raise InvalidOptionError(f"must be at least 0, got {getattr(self, name)}", field=name)
        for name in ("auto_s", "search_s"):
            if not getattr(self, name) > 0:
                raise InvalidOptionError(f"must be above 0 seconds, got {getattr(self, name)}", field=name)
        if not 0 < self.memory_share < 1:
            raise InvalidOptionError(f"must be in (0, 1), got {self.memory_share}", field="memory_share")

    def quick(self) -> EvaluationSettings:
        """The same, so small that it takes minutes and says little: for a first look."""
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
            num_updates=8,
            num_samples=8,
            auto_s=0.1,
            search_s=0.5,
            num_random=300,
            cost_updates=60,
            step_updates=4,
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
    def large(self) -> Size:
        """The largest tasks that policies are tried on."""
        return max(self.transfer)

    def identity(self) -> dict[str, Any]:
        """What two evaluations must share for one to go on with the other's parts."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE}
