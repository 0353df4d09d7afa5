"""How a policy is trained, and when training ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.core.accepted import ABOVE_0, AT_LEAST_0, AT_LEAST_1, SHARE
from autoshard.core.errors import InvalidOptionError
from policies.choices import Algorithm, RewardSource
from policies.ppo import PPOSettings
from policies.vtrace import VTraceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How the policy is trained.

    Attributes:
        num_groups: Tasks per update.
        num_rollouts: Episodes per task and update.
        evaluate_every: Updates between two evaluations.
        algorithm: What learns.
        num_actors: Processes that play episodes while the learner learns; 0 to do both in turns in one process.
        reward: Where rewards come from.
        measured_share: Share of the updates whose rewards are measured, for `RewardSource.MIXED`.
        settings: Of V-trace; an update's steps are set to the items of a task, so that episodes are whole.
        ppo: Of PPO.

    Source:
        AutoShard C.2. Differs: each of the 8 tasks of an update is played 4 times, in whole episodes that are compared
        with each other, and the learning rate is twice as high. The slowest rank of 20 validation tasks took, relative
        to cost-greedy, 1.001 to 1.002 after 5 seconds of training and 1.000 after 10; with 12 rollouts 1.007 to 1.011
        and 1.002 to 1.005; with the paper's settings and one 1.004 to 1.009 and 1.015 to 1.017 (80 tables, 8 ranks,
        two seeds; one core of a Xeon, November 2026).
    """

    num_groups: int = 8
    num_rollouts: int = 4
    evaluate_every: int = 10
    algorithm: Algorithm = Algorithm.VTRACE
    num_actors: int = 0
    reward: RewardSource = RewardSource.MODEL
    measured_share: float = 0.1
    settings: VTraceSettings = field(
        default_factory=lambda: VTraceSettings(learning_rate=2e-3, compare_within_task=True)
    )
    ppo: PPOSettings = field(default_factory=PPOSettings)

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "num_groups", "num_rollouts", "evaluate_every")
        learner = self.settings if self.algorithm is Algorithm.VTRACE else self.ppo
        if self.num_rollouts == 1 and learner.compare_within_task:
            raise InvalidOptionError("must be at least 2 to compare episodes, got 1", field="num_rollouts")
        AT_LEAST_0.check_fields(self, "num_actors")
        SHARE.check_fields(self, "measured_share")
        if self.num_actors and self.algorithm is not Algorithm.VTRACE:
            raise InvalidOptionError(
                f"must be 0 with {self.algorithm}, which cannot learn from weights of the past, got {self.num_actors}",
                field="num_actors",
            )
        if self.num_actors and self.reward is not RewardSource.MODEL:
            raise InvalidOptionError(
                f"must be 0 with {self.reward} rewards, which actors would disturb, got {self.num_actors}",
                field="num_actors",
            )

    @property
    def share_measured(self) -> float:
        """Share of the updates whose rewards are measured."""
        shares = {RewardSource.MODEL: 0.0, RewardSource.MIXED: self.measured_share, RewardSource.MEASURED: 1.0}
        return shares[self.reward]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When training ends: after so many updates or seconds, whichever comes first; counted over resumed runs.

    Attributes:
        num_updates: Updates; None for no limit.
        seconds: Seconds; None for no limit.
        patience: Evaluations in a row without progress (see Plateau) after which training ends early; None for never.
    """

    num_updates: int | None = None
    seconds: float | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        ABOVE_0.check_fields(self, "num_updates", "seconds", "patience")
        if self.num_updates is None and self.seconds is None:
            raise InvalidOptionError("name a number of updates or of seconds", field="budget")

    def share(self, num_updates: int, elapsed_s: float) -> float:
        """Share of the budget that is used up, at most 1."""
        by_updates = num_updates / self.num_updates if self.num_updates else 0.0
        by_time = elapsed_s / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_updates, by_time))


#: Less than this share of the score is no progress: tasks differ from each other by more.
PROGRESS = 0.0005


@dataclass(slots=True, kw_only=True)
class Plateau:
    """How long a score, of which less is better, has made no progress.

    Attributes:
        reference: The score at the last progress: an improvement of more than a share of `PROGRESS` over the one
            before.
        num_stale: Evaluations since then.
        num_updates: Updates before the last evaluation.
    """

    reference: float = float("inf")
    num_stale: int = 0
    num_updates: int = -1

    def add(self, num_updates: int, score: float) -> None:
        """Takes one more evaluation into account, unless it repeats the last one after a checkpoint."""
        if num_updates == self.num_updates:
            return
        self.num_updates = num_updates
        if score < self.reference * (1 - PROGRESS):
            self.reference, self.num_stale = score, 0
        else:
            self.num_stale += 1

    def is_reached(self, patience: int | None) -> bool:
        """Whether there was no progress for so many evaluations; never if None."""
        return patience is not None and self.num_stale >= patience
