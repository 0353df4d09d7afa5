"""A figure of the evaluation: parts that are computed one by one, and a section that shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.report.images import Section
from studies.frame import Numbers
from studies.policies.lab import Lab
from studies.policies.settings import EvaluationSettings

#: Numbers by the names of parts.
Found = Mapping[str, Numbers]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of work whose numbers are kept: its name, and what makes them."""

    name: str
    make: Callable[[Lab], Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure or table of the evaluation.

    Attributes:
        name: Name in `--figures` and in files.
        title: Its heading.
        parts: Pieces of work.
        show: The section made of the numbers of all parts.
    """

    name: str
    title: str
    parts: Callable[[EvaluationSettings], Sequence[Part]]
    show: Callable[[Found, EvaluationSettings], Section]

    def part_name(self, part: Part) -> str:
        """A part's name among those of all figures."""
        return f"{self.name}/{part.name}"

    def run(self, lab: Lab, on_part: Callable[[str], None] = lambda _: None) -> None:
        """Computes all parts that are not finished; `on_part` receives the name of each finished part."""
        for part in self.parts(lab.settings):
            lab.parts.find(self.part_name(part), lambda part=part: part.make(lab))  # type: ignore[misc]
            on_part(self.part_name(part))

    def section(self, lab: Lab) -> Section | None:
        """The figure as far as finished parts go; None unless all are finished."""
        parts = self.parts(lab.settings)
        if not parts or not all(lab.parts.has(self.part_name(part)) for part in parts):
            return None
        found = {part.name: lab.parts.read(self.part_name(part)) for part in parts}
        return self.show(found, lab.settings)
