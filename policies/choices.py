"""What a training can be told to do, by the names that the command line takes; no torch here."""

from __future__ import annotations

from enum import StrEnum

from policies import POLICY_KIND


class Algorithm(StrEnum):
    """What learns; both train the same network."""

    VTRACE = "vtrace"
    """AutoShard's: an actor-critic corrected by V-trace."""
    PPO = "ppo"
    """Proximal policy optimization, for comparison."""


class RewardSource(StrEnum):
    """Where rewards of finished placements come from; what agents see is always predicted."""

    MODEL = "model"
    """The cost model."""
    MEASURED = "measured"
    """The micro-benchmark, on this machine."""
    MIXED = "mixed"
    """The cost model, but for a share of the updates."""


class CostLoss(StrEnum):
    """What a cost model in joint training makes small."""

    RELATIVE = "relative"
    """The absolute error over the measured time."""
    SQUARED = "squared"
    """The squared error, as AutoShard has it."""


class Items(StrEnum):
    """What is placed."""

    TABLES = "tables"
    """Whole tables."""
    ROW_GROUPS = "row_groups"
    """Equal ranges of the rows of tables."""
    TIERS = "tiers"
    """Whole tables, whose hot rows may be cut off; all ranks may share any of it."""

    @property
    def policy_kind(self) -> str:
        """What the registry keeps policies under that place them."""
        return POLICY_KIND if self is Items.TABLES else f"{POLICY_KIND}-{self}"
