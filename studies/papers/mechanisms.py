"""What the five papers say, mechanism by mechanism, and where it is here: read from `mechanisms.json`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from studies.frame.documents import read_document

SCHEMA: Final = "autoshard.papers.mechanisms/1"
FILE: Final = Path(__file__).parent / "mechanisms.json"


class Paper(StrEnum):
    """The papers, by the names that the file has for them."""

    AUTOSHARD = "autoshard"
    FLEXSHARD = "flexshard"
    OPER = "oper"
    TWO_D = "two_d"
    NEO = "neo"


class State(StrEnum):
    """How much of what a paper says is here."""

    SAME = "same"
    """As printed, but for errata."""
    PARTLY = "partly"
    """With other data, on another machine, or only in part."""
    ABSENT = "absent"
    """Not here, or not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """One thing that a paper says, and what there is of it.

    Attributes:
        paper: Which paper.
        at: Section, equation, table or figure.
        mechanism: What the paper says there.
        state: How much of it is here.
        code: Functions and classes, as `module:name`.
        tests: Tests, as `file::name` or `file::class::name`.
        theirs: The paper's figures; empty where it prints none.
        ours: Figures of this project; empty where there are none.
        differs: What differs, and why.
    """

    paper: Paper
    at: str
    mechanism: str
    state: State
    code: tuple[str, ...]
    tests: tuple[str, ...]
    theirs: str
    ours: str
    differs: str

    def __post_init__(self) -> None:
        if not self.at or not self.mechanism:
            raise ValueError("needs `at` and `mechanism`")
        if self.state is not State.ABSENT and not self.code:
            raise ValueError(f"{self.at}: needs the code of what is here")
        if self.state is not State.SAME and not self.differs:
            raise ValueError(f"{self.at}: needs what differs, and why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanisms:
    """The content of the file."""

    rows: tuple[Mechanism, ...]

    def of(self, paper: Paper) -> tuple[Mechanism, ...]:
        """Rows of one paper, in the order of the file."""
        return tuple(row for row in self.rows if row.paper is paper)


def read_mechanisms(path: Path = FILE) -> Mechanisms:
    """Reads the file.

    Raises:
        FormatError: If it does not hold such rows; the text names file and field.
    """
    return read_document(path, Mechanisms, SCHEMA)
