"""Seeds that numpy, torch and JSON take alike."""

from __future__ import annotations

from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown

#: numpy's older generators, which Stable-Baselines3 seeds, take no more.
MAX_SEED = 2**32 - 1


def check_seed(seed: int) -> None:
    """Refuses what is no seed.

    Raises:
        InvalidOptionError: If it is outside of [0, MAX_SEED].
    """
    if not 0 <= seed <= MAX_SEED:
        raise InvalidOptionError(f"must be in [0, {MAX_SEED}], got {shown(seed)}", field="seed")
