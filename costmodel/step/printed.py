"""Models of steps that were trained (`autoshard.trained-steps/1`): what `autoshard train step --json` prints."""

from __future__ import annotations

from typing import Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import ANY_TEXT, Field, list_of
from costmodel.registry.printed import Printed, trained_model
from costmodel.step.model import StepCard

TRAINED_STEPS: Final[Printed] = Document(
    name="trained-steps",
    meaning="What `autoshard train step --json` prints: models of collectives, of dense layers and of whole steps.",
    make=dict,
    fields=lambda _: (
        Field("registry", ANY_TEXT, "Folder of the registry."),
        Field("models", list_of(trained_model(*StepCard.printed("metrics", "training"))), "The models."),
    ),
    parts=dict,
)
