"""What the trainings found: gaps of normalised entropy to one replica group, and growth of moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.runtime import Verification
from studies.frame import Summary
from studies.runtime.moments.launching import NoiseResult, TrainedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Gaps of one number of groups and moment scale to one group, over paired seeds.

    Attributes:
        num_groups: Replica groups, M.
        moment_scale: c.
        percent: For each seed, the gap after each evaluation: 100 (NE / NE of one group - 1).
    """

    num_groups: int
    moment_scale: int
    percent: tuple[tuple[float, ...], ...]

    def at(self, evaluation: int) -> Summary:
        """Mean and deviation over seeds at one evaluation."""
        return Summary.of([of_seed[evaluation] for of_seed in self.percent])

    @property
    def last(self) -> Summary:
        """Of the last evaluation."""
        return self.at(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Gaps of one number of groups with and without moment scaling, seed by seed.

    Attributes:
        num_groups: Replica groups, M.
        num_seeds: Pairs.
        num_smaller: Pairs whose gap is smaller with c = M than with c = 1; below 0 it is better than one group.
        num_nearer: Pairs whose gap is nearer to 0 with c = M.
    """

    num_groups: int
    num_seeds: int
    num_smaller: int
    num_nearer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of moments on noise.

    Attributes:
        num_groups: Replica groups, M.
        ratio: Sum of all moments over that of one group; Proposition 1 expects M.
        num_states: Different states among groups after each step up to the first synchronisation.
    """

    num_groups: int
    ratio: float
    num_states: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentResults:
    """All numbers of the study.

    Attributes:
        groups: Numbers of replica groups; the first is 1.
        verifications: For each of them, errors against unsharded tables with c = M.
        noise: For each of them, moments on noise.
        tuning: One group with each learning rate.
        runs: The compared trainings.
    """

    groups: tuple[int, ...]
    verifications: tuple[Verification, ...]
    noise: tuple[NoiseResult, ...]
    tuning: tuple[TrainedRun, ...]
    runs: tuple[TrainedRun, ...]

    def gaps(self, num_groups: int, moment_scale: int) -> Gaps:
        """Gaps to one group."""
        found = {(one.run.seed, one.run.num_groups, one.run.moment_scale): one.entropies for one in self.runs}
        seeds = dict.fromkeys(one.run.seed for one in self.runs)
        percent = tuple(
            tuple(
                100 * (own / base - 1.0)
                for own, base in zip(found[seed, num_groups, moment_scale], found[seed, 1, 1], strict=True)
            )
            for seed in seeds
        )
        return Gaps(num_groups=num_groups, moment_scale=moment_scale, percent=percent)

    def scales(self, num_groups: int) -> tuple[int, ...]:
        """Moment scales that a number of groups was trained with, rising."""
        return tuple(sorted({one.run.moment_scale for one in self.runs if one.run.num_groups == num_groups}))

    def all_gaps(self) -> tuple[Gaps, ...]:
        """Gaps of all numbers of groups but 1, with all their scales."""
        return tuple(self.gaps(groups, scale) for groups in self.groups[1:] for scale in self.scales(groups))

    def pairs(self) -> tuple[Pairs, ...]:
        """Pairs of all numbers of groups but 1."""
        return tuple(self._pairs(num_groups) for num_groups in self.groups[1:])

    def growth(self) -> tuple[Growth, ...]:
        """Growth of moments of all numbers of groups."""
        base = self.noise[0].moment
        return tuple(
            Growth(num_groups=one.num_groups, ratio=one.moment / base, num_states=one.num_states) for one in self.noise
        )

    def _pairs(self, num_groups: int) -> Pairs:
        scaled, plain = (self.gaps(num_groups, scale).percent for scale in (num_groups, 1))
        last = [(one[-1], other[-1]) for one, other in zip(scaled, plain, strict=True)]
        return Pairs(
            num_groups=num_groups,
            num_seeds=len(last),
            num_smaller=sum(one < other for one, other in last),
            num_nearer=sum(abs(one) < abs(other) for one, other in last),
        )


def best_rate(tuning: Sequence[TrainedRun]) -> float:
    """Learning rate of the run with the least normalised entropy at the end."""
    return min(tuning, key=lambda one: one.entropies[-1]).run.learning_rate
