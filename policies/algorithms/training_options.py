"""How a policy is trained, and when training ends; no torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer

from autoshard.commands.arguments import positive_option, share_option
from autoshard.commands.options import Needs, command_options
from autoshard.core.accepted import AT_LEAST_1
from autoshard.core.errors import InvalidOptionError
from policies.choices import Algorithm, RewardSource

_DEFAULT_SECONDS = 60.0
#: Evaluations without progress after which a training of more than a minute ends, if not told otherwise.
_DEFAULT_PATIENCE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class VTraceSettings:
    """How V-trace learns; the defaults are AutoShard's (C.2).

    Attributes:
        num_steps: Steps of each episode per update.
        learning_rate: Of Adam.
        discount: Per step.
        entropy_weight: Weight of the policy's entropy, which is raised.
        baseline_weight: Weight of the value head's loss.
        max_grad_norm: Gradients beyond this norm are scaled down to it.
        compare_within_task: Whether an advantage is taken over the mean of the same task and step, in units of the
            task's standard deviation. It takes several episodes of each task at a time, which are then worth more
            than as many of different tasks, and makes easy and hard tasks count alike.
        whole_episodes: Whether an update takes as many steps more as it takes each episode to end, and learns from
            one episode in each environment; for tasks whose episodes differ in length.
    """

    num_steps: int = 100
    learning_rate: float = 1e-3
    discount: float = 1.0
    entropy_weight: float = 0.001
    baseline_weight: float = 0.5
    max_grad_norm: float = 40.0
    compare_within_task: bool = False
    whole_episodes: bool = False

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "num_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOSettings:
    """How PPO learns.

    Attributes:
        learning_rate: Of Adam.
        num_epochs: Passes over the episodes of an update.
        num_minibatches: Parts that each pass cuts them into; fewer where episodes cannot be dealt evenly.
        clip_range: Probabilities may move by this share before they count for nothing.
        gae_lambda: Of generalised advantages; 1 for whole returns.
        entropy_weight: Weight of the policy's entropy, which is raised.
        baseline_weight: Weight of the value head's loss.
        max_grad_norm: Gradients beyond this norm are scaled down to it.
        compare_within_task: As for V-trace.

    Source:
        Schulman et al. 2017; stable-baselines3's defaults but for the learning rate, epochs, entropy, and lambda: the
        only reward comes with the last item.
    """

    learning_rate: float = 1e-3
    num_epochs: int = 4
    num_minibatches: int = 4
    clip_range: float = 0.2
    gae_lambda: float = 1.0
    entropy_weight: float = 0.001
    baseline_weight: float = 0.5
    max_grad_norm: float = 0.5
    compare_within_task: bool = True

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "num_epochs", "num_minibatches")


@command_options(panel="Learning")
class TrainingOptions:
    """How the policy is trained.

    Source:
        AutoShard C.2. Differs: each of the 8 tasks of an update is played 4 times, in whole episodes that are compared
        with each other, and the learning rate is twice as high. The slowest rank of 20 validation tasks took, relative
        to cost-greedy, 1.001 to 1.002 after 5 seconds of training and 1.000 after 10; with 12 rollouts 1.007 to 1.011
        and 1.002 to 1.005; with the paper's settings and one 1.004 to 1.009 and 1.015 to 1.017 (80 tables, 8 ranks,
        two seeds; one core of a Xeon, November 2026).
    """

    algorithm: Annotated[Algorithm, typer.Option(help="Training algorithm; both train the same network.")] = (
        Algorithm.VTRACE
    )
    num_actors: Annotated[
        int,
        typer.Option(
            "--actors",
            min=0,
            help="Processes that play episodes while this one learns, with V-trace; 0: this one does both in turns.",
        ),
    ] = 0
    reward: Annotated[
        RewardSource,
        typer.Option(
            help="Where rewards come from: predicted, measured on this machine, or measured in a share of the updates."
        ),
    ] = RewardSource.MODEL
    measured_share: Annotated[
        float,
        share_option("With --reward mixed: share of the updates with measured rewards."),
        Needs("--reward mixed", lambda options: options.reward is RewardSource.MIXED),
    ] = 0.1
    num_groups: int = 8
    """Tasks per update."""
    num_rollouts: int = 4
    """Episodes per task and update."""
    evaluate_every: int = 10
    """Updates between two evaluations."""
    settings: VTraceSettings = field(
        default_factory=lambda: VTraceSettings(learning_rate=2e-3, compare_within_task=True)
    )
    """Of V-trace; an update's steps are set to the items of a task, so that episodes are whole."""
    ppo: PPOSettings = field(default_factory=PPOSettings)
    """Of PPO."""

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "num_groups", "num_rollouts", "evaluate_every")
        learner = self.settings if self.algorithm is Algorithm.VTRACE else self.ppo
        if self.num_rollouts == 1 and learner.compare_within_task:
            raise InvalidOptionError("must be at least 2 to compare episodes, got 1", field="num_rollouts")
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

    def check(self, *, is_of_steps: bool, may_split: bool, is_joint: bool = False, num_processes: int = 1) -> None:
        """Refuses what does not go with what is trained.

        Args:
            is_of_steps: Whether whole steps are the objective, not kernels.
            may_split: Whether items may be split, so that episodes differ in length.
            is_joint: Whether the cost model is trained along.
            num_processes: Processes that train together.

        Raises:
            InvalidOptionError: If the algorithm, the actors or the source of rewards cannot do that.
        """
        is_ppo, is_measured = self.algorithm is Algorithm.PPO, self.reward is not RewardSource.MODEL
        vtrace, actors = f"must be {Algorithm.VTRACE}", f"got {self.num_actors}"
        for is_wrong, field_name, told in (
            (
                is_joint and num_processes > 1,
                "--joint",
                f"trains in one process, whose buffer the cost model learns from, got {num_processes}",
            ),
            (
                is_ppo and is_joint,
                "algorithm",
                f"{vtrace} in joint training, whose gradients reach the cost model, got {self.algorithm}",
            ),
            (
                is_ppo and may_split,
                "algorithm",
                f"{vtrace} where items may be split, since episodes differ in length then, got {self.algorithm}",
            ),
            (is_ppo and num_processes > 1, "algorithm", f"{vtrace} in several processes, got {self.algorithm}"),
            (
                self.num_actors and is_joint,
                "num_actors",
                f"must be 0 in joint training, which prices all tasks anew after every update, {actors}",
            ),
            (
                is_measured and is_of_steps,
                "reward",
                f"must be {RewardSource.MODEL} for steps, of which kernels are measured alone, got {self.reward}",
            ),
            (
                is_measured and may_split,
                "reward",
                f"must be {RewardSource.MODEL} where items may be split, as tiers may, got {self.reward}",
            ),
            (
                is_measured and num_processes > 1,
                "reward",
                f"must be {RewardSource.MODEL} in several processes, which would disturb each other's measurements, "
                f"got {self.reward}",
            ),
        ):
            if is_wrong:
                raise InvalidOptionError(told, field=field_name)

    @property
    def share_measured(self) -> float:
        """Share of the updates whose rewards are measured."""
        shares = {RewardSource.MODEL: 0.0, RewardSource.MIXED: self.measured_share, RewardSource.MEASURED: 1.0}
        return shares[self.reward]


@command_options(panel="When to end")
class Budget:
    """When training ends: after so many updates or seconds, whichever comes first; counted over resumed runs."""

    num_updates: Annotated[int | None, typer.Option("--updates", min=1, help="Ends after so many updates.")] = None
    seconds: Annotated[
        float | None,
        positive_option(f"Ends after so many seconds. [default: {_DEFAULT_SECONDS:g}, without --updates]"),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Ends after so many evaluations in a row, one every 10 updates, that are not at least 0.05% better; "
            f"0 for never. [default: {_DEFAULT_PATIENCE} with --seconds above {_DEFAULT_SECONDS:g}, else never]",
        ),
    ] = None

    @property
    def limit_s(self) -> float | None:
        """Seconds; None for no limit."""
        return _DEFAULT_SECONDS if self.num_updates is None and self.seconds is None else self.seconds

    @property
    def most_stale(self) -> int | None:
        """Evaluations in a row without progress (see Plateau) after which training ends early; None for never."""
        if self.patience is None and self.seconds is not None and self.seconds > _DEFAULT_SECONDS:
            return _DEFAULT_PATIENCE
        return self.patience or None

    def share(self, num_updates: int, elapsed_s: float) -> float:
        """Share of the budget that is used up, at most 1."""
        by_updates = num_updates / self.num_updates if self.num_updates else 0.0
        by_time = elapsed_s / self.limit_s if self.limit_s else 0.0
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
