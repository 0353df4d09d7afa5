"""Options of the planner `auto`, which plans that are made from its own keep to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from autoshard.core import ShardingPlan
from autoshard.core.accepted import AT_LEAST_0, check_choice, listed
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.evaluation.batch_memory import has_room
from autoshard.planners.planner import options_kept, parse_options
from autoshard.planners.space.options import BY_ACCESS_RANK, ShardingType

#: The planner's name.
AUTO = "auto"
#: Stands for all sharding types.
ALL = "all"
#: Sharding types of plans that are made by kernels alone.
_OF_KERNELS = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)
#: Plans over several replica groups; not a way to hold one table, but to hold all of them several times.
_GROUPS = "replica_groups"
_NAMES = (*map(str, ShardingType), _GROUPS)


class AutoObjective(StrEnum):
    """What plans are made short."""

    STEP = "step"
    """The predicted step."""
    KERNEL = "kernel"
    """Kernel time of the slowest rank, of tables on single ranks, whole or cut by columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions:
    """Options of the `auto` planner."""

    objective: str = field(
        default="step",
        metadata={
            "help": "What is minimised: step (the predicted step, over all sharding types) or kernel (the "
            "slowest rank's kernels, over table_wise and column_wise)."
        },
    )
    sharding_types: str = field(
        default=ALL,
        metadata={"help": f"Sharding types to choose from, with commas: all, or any of {', '.join(_NAMES)}."},
    )
    reserved_bytes: int = field(
        default=0,
        metadata={"help": "Device memory of every rank that must stay free beside all that counts."},
    )
    steps: int = field(
        default=0,
        metadata={
            "help": "Most steps of the search; 0 for as many as the time limit allows. With a number, the same seed "
            "gives the same plan on every machine that makes them in time."
        },
    )
    prefer_whole: bool = field(
        default=True,
        metadata={
            "help": "Where a calibrated model prices steps, cut tables only if that makes the step shorter by more "
            "than the model's median error."
        },
    )
    policy: bool = field(
        default=True,
        metadata={"help": "Within short limits, ask the trained policy which options to price first, if there is one."},
    )
    count_activations: bool = field(
        default=True,
        metadata={
            "help": "Whether what training needs has to fit beside the tables: inputs, outputs and gradients of a long "
            "batch, and the dense layers. Where objective is kernel, only tables count."
        },
    )
    min_partition: int = field(
        default=0,
        metadata={
            "help": "Least columns of a column shard, at least 4; 0 for 32 bytes of a row. Other planners' plans with "
            "narrower ones are no starts then."
        },
    )

    def __post_init__(self) -> None:
        check_choice(self.objective, AutoObjective, "options.objective")
        AT_LEAST_0.check_fields(self, "reserved_bytes", "steps", "min_partition", within="options.")
        if not set(self._listed) <= set(_NAMES):
            for name in self._listed:
                check_choice(name, (ALL, *_NAMES), "options.sharding_types")
        if self.objective == AutoObjective.KERNEL:
            self._check_kernel()

    def _check_kernel(self) -> None:
        if self.sharding_types != ALL and not {ShardingType.TABLE_WISE} <= set(self._listed) <= set(_OF_KERNELS):
            raise InvalidOptionError(
                f"must be all, table_wise or {','.join(_OF_KERNELS)} where objective is kernel, "
                f"got {shown(self.sharding_types)}",
                field="options.sharding_types",
            )

    @property
    def _listed(self) -> tuple[str, ...]:
        return _NAMES if self.sharding_types == ALL else listed(self.sharding_types)

    @classmethod
    def kept_of(cls, plan: ShardingPlan) -> dict[str, object]:
        """Those that a plan of this planner was made with, as it says them; none for other plans."""
        made = plan.provenance
        return options_kept(cls, made.options) if made is not None and made.planner == AUTO else {}

    @classmethod
    def of_plan(cls, plan: ShardingPlan) -> AutoOptions:
        """Those that a plan of this planner was made with; the usual ones for other plans.

        Raises:
            InvalidOptionError: If one is not accepted.
        """
        return parse_options(cls, cls.kept_of(plan))

    @property
    def counts_activations(self) -> bool:
        """Whether what training needs has to fit beside the tables."""
        return self.count_activations and self.objective == AutoObjective.STEP

    def has_room(self, plan: ShardingPlan) -> bool:
        """Whether a plan leaves free what they ask for."""
        return has_room(plan, self.reserved_bytes, count_activations=self.counts_activations)

    @property
    def types(self) -> frozenset[ShardingType]:
        """Ways that tables may be held."""
        names = frozenset(ShardingType(name) for name in self._listed if name != _GROUPS) or frozenset(ShardingType)
        return names & frozenset(_OF_KERNELS) if self.objective == AutoObjective.KERNEL else names

    @property
    def cuts_by_access(self) -> bool:
        """Whether rows may be held by how often they are looked up."""
        return self.objective == AutoObjective.STEP and not self.types.isdisjoint(BY_ACCESS_RANK)

    @property
    def with_groups(self) -> bool:
        """Whether there may be several replica groups."""
        return _GROUPS in self._listed and self.objective == AutoObjective.STEP

    def in_one_group(self) -> AutoOptions:
        """The same for plans of one replica group."""
        if not self.with_groups:
            return self
        names = [name for name in self._listed if name != _GROUPS] or list(ShardingType)
        return replace(self, sharding_types=",".join(names))
