"""Seeds that numpy, torch and JSON take alike."""

from __future__ import annotations

from autoshard.core.accepted import Range

#: numpy's older generators, which Stable-Baselines3 seeds, take no more.
MAX_SEED = 2**32 - 1


def check_seed(seed: int) -> None:
    """Refuses what is no seed.

    Raises:
        InvalidOptionError: If it is outside of [0, MAX_SEED].
    """
    Range(at_least=0, at_most=MAX_SEED).check(seed, "seed")
