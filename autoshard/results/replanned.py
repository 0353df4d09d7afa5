"""What changing a plan for today's access gains and costs (`autoshard.replan/1`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from autoshard.core import Estimate
from autoshard.core.accepted import FINITE, Range
from autoshard.core.declared import Meaning, Size
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import fields_of
from autoshard.formats.documents.prediction_json import ESTIMATE


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedTable:
    """A table of which ranks receive something."""

    table: Annotated[str, Meaning("Its name.")]
    received_bytes: Annotated[float, Meaning("Bytes of weights and optimizer states that ranks receive.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanning:
    """The best plan near an older one, and whether it pays to change to it."""

    is_changed: Annotated[bool, Meaning("Whether the new plan is taken; if not, the older one stays.")]
    reason: Annotated[str, Meaning("Why.")]
    step_ms_before: Annotated[Estimate, Meaning("Step of the older plan on today's access.")]
    step_ms_after: Annotated[Estimate, Meaning("Step of the new plan, taken or not.")]
    gain: Annotated[
        float, Range(at_least=-1, kind=FINITE), Meaning("Step of the older plan over that of the new one, minus 1.")
    ]
    migration_bytes: Annotated[float, Meaning("Bytes that ranks receive to change to it.")]
    migration_ms: Annotated[float, Meaning("How long that takes over the links of the topology.")]
    pays_off_after_steps: Annotated[
        float | None, Meaning("Steps after which the change has paid for itself; null if it never does.")
    ]
    horizon_steps: Annotated[float, Meaning("Steps within which it had to.")]
    num_kept: Annotated[int, Meaning("Tables that a search held otherwise, and that stay since moving does not pay.")]
    tables: Annotated[tuple[MovedTable, ...], Size(), Meaning("Tables that move, most bytes first.")]


#: What `autoshard replan --json` prints.
REPLAN: Final[Document[Replanning]] = Document(
    name="replan",
    meaning="What `autoshard replan --json` prints: what changing a plan for today's access gains and costs.",
    make=Replanning,
    fields=lambda _: fields_of(Replanning, known={Estimate: ESTIMATE}),
)
