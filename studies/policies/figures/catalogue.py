"""All figures of the evaluation, in the order of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from autoshard.core.errors import UnknownNameError
from studies.policies.figure import Figure
from studies.policies.figures import (
    ablations,
    blind_costs,
    heuristics,
    inference,
    joint_training,
    random_search,
    steps,
    targets,
    training_curves,
    transfer,
    unseen_tables,
)

FIGURES: Final[Mapping[str, Figure]] = {
    module.FIGURE.name: module.FIGURE
    for module in (
        *(heuristics, random_search, ablations, blind_costs, unseen_tables, transfer, training_curves),
        *(inference, joint_training, targets, steps),
    )
}


def choose(names: str | None) -> Sequence[Figure]:
    """The figures of a list of names with commas; all of them when left out.

    Raises:
        UnknownNameError: If there is no such figure.
    """
    if names is None:
        return list(FIGURES.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in FIGURES]
    if unknown or not chosen:
        named = f"no figure is named {unknown[0]!r}" if unknown else "needs at least one name"
        raise UnknownNameError(f"{named}; there are: {', '.join(FIGURES)}", field="--figures")
    return [FIGURES[name] for name in FIGURES if name in chosen]
