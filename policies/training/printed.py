"""A policy that was trained (`autoshard.trained-policy/1`): what `autoshard train policy --json` prints."""

from __future__ import annotations

from typing import Final

from autoshard.formats.documents.kinds import TEXT, Field, or_null
from costmodel.registry.printed import Printed, trained_document
from policies.planning.trained import PolicyCard

TRAINED_POLICY: Final[Printed] = trained_document(
    "trained-policy",
    "What `autoshard train policy --json` prints: the policy that was trained, and what became of it.",
    Field("cost_model", or_null(TEXT), "Version of the cost model that gave the rewards; null if it has none."),
    *PolicyCard.printed("training"),
)
