"""What readers should know of a plan or a comparison before they trust its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.core import ShardingPlan
from autoshard.core.machine import device_family
from autoshard.core.quoting import write_bytes
from autoshard.evaluation.batch_memory import rank_memory
from autoshard.report.comparison import within_noise
from autoshard.report.wording import write_percent
from autoshard.results.comparison import ComparedPlan

#: Share of a rank's device memory above which little is left for what plans do not count.
CLOSE_TO_FULL = 0.9
#: Notes that plans carry, in the order in which they are shown.
_NOTES = ("kernel_notes", "machine_notes", "row_orders", "unknown_orders", "execution_notes")


def plan_warnings(plan: ShardingPlan) -> tuple[str, ...]:
    """Sentences about a plan: tables outside the trained range, another machine's model, memory close to its limit."""
    carried = plan.provenance.models if plan.provenance is not None else {}
    notes = [carried[name] for name in _NOTES if name in carried]
    return tuple(f"{_capitalised(note)}." for note in notes) + memory_warnings(plan)


def _capitalised(note: str) -> str:
    """A note as a sentence; names of models at its start, such as `learned:cpu@08051e83:`, stay as they are."""
    first, _, rest = note.partition(" ")
    return note if not first.isalpha() else f"{first[:1].upper()}{first[1:]} {rest}"


def comparison_warnings(rows: Sequence[ComparedPlan]) -> tuple[str, ...]:
    """Sentences about a comparison: a winner within noise, and what the plans carry, each once."""
    found = [warning for row in rows if row.plan is not None for warning in plan_warnings(row.plan)]
    return noise_warnings(rows) + tuple(dict.fromkeys(found))


def noise_warnings(rows: Sequence[ComparedPlan]) -> tuple[str, ...]:
    """Says which planners cannot be told from the best one; nothing where one has won."""
    level = within_noise(rows)
    return (f"Within noise: {', '.join(level)}.",) if len(level) > 1 else ()


def device_warnings(measured_on: str, plan: ShardingPlan) -> tuple[str, ...]:
    """Says that a plan's kernels were measured on another device than it is for; nothing where they were not.

    Args:
        measured_on: Key of the device, such as `cpu`.
        plan: The plan.
    """
    device = plan.topology.device
    is_alike = measured_on == device_family(device)
    return () if is_alike else (f"Measured on {measured_on}, but the plan is for {device}.",)


def memory_warnings(plan: ShardingPlan) -> tuple[str, ...]:
    """Says that ranks are close to their memory's limit; nothing where none is."""
    memory = rank_memory(plan)
    num_close = sum(one.share > CLOSE_TO_FULL for one in memory)
    if num_close == 0:
        return ()
    fullest = max(memory, key=lambda one: one.share)
    ranks = "1 rank is" if num_close == 1 else f"{num_close:,} ranks are"
    full = "; tables fit, training on a batch does not" if fullest.share > 1 else ""
    return (
        f"Close to the memory limit: {ranks} above {write_percent(CLOSE_TO_FULL)}; rank {fullest.rank} uses "
        f"{write_percent(fullest.share)}, {write_bytes(fullest.used_bytes)}{full}.",
    )
