"""The page of docs/reference that holds the five papers beside this project, from `studies/papers/mechanisms.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from scripts.generated import ROOT
from studies.papers.mechanisms import Mechanism, Paper, State, read_mechanisms

_UP: Final = "../.."
_TITLES: Final[Mapping[Paper, str]] = {
    Paper.AUTOSHARD: "AutoShard (Zha et al., KDD 2022)",
    Paper.FLEXSHARD: "FlexShard (Sethi et al., 2023)",
    Paper.OPER: "OPER (Wang et al., USENIX ATC 2024)",
    Paper.TWO_D: "2D sparse parallelism (Zhang et al., 2025)",
    Paper.NEO: "Neo and ZionEX (Mudigere et al., ISCA 2022)",
}
_PAGES: Final[Mapping[Paper, tuple[str, ...]]] = {
    Paper.AUTOSHARD: ("policy", "cost-models", "benchmarking"),
    Paper.FLEXSHARD: ("flexshard", "slow-links"),
    Paper.OPER: ("oper", "slow-links"),
    Paper.TWO_D: ("replica-groups", "slow-links"),
    Paper.NEO: ("neo", "payloads", "slow-links"),
}
_STATES: Final[Mapping[State, str]] = {State.SAME: "as printed", State.PARTLY: "in part", State.ABSENT: "no"}
_HEADS: Final = (
    "where",
    "what the paper says",
    "here",
    "code",
    "tests",
    "its figures",
    "ours",
    "what differs, and why",
)

_OPENING: Final = (
    "Five papers, mechanism by mechanism: what each says and where, what there is of it here, the paper's figures "
    "beside ours, and what differs. *As printed* is the paper's mechanism but for errata; *in part* is a part of it, "
    "or its figures with other data or on another machine; *no* is not here, or not compared. Nothing has run on a "
    "GPU: where a paper measured GPUs, our figures are predicted, or of CPUs. A test checks that the code and the "
    "tests named here exist."
)


def paper_blocks() -> Iterator[str]:
    """Blocks of the page, without its first heading."""
    mechanisms = read_mechanisms()
    yield _OPENING
    counts = Counter((row.paper, row.state) for row in mechanisms.rows)
    lines = [
        f"| [{title}](#{_anchor(title)}) | {' | '.join(str(counts[paper, state]) for state in State)} |"
        for paper, title in _TITLES.items()
    ]
    heads = " | ".join(("paper", *_STATES.values()))
    yield "\n".join((f"| {heads} |", "| --- " + "| ---: " * len(State) + "|", *lines))
    for paper, title in _TITLES.items():
        yield f"## {title}"
        pages = ", ".join(f"[{name}](../results/{name}.md)" for name in _PAGES[paper])
        yield f"Results: {pages}."
        yield "\n".join(_lines(mechanisms.of(paper)))


def _lines(rows: tuple[Mechanism, ...]) -> Iterator[str]:
    yield f"| {' | '.join(_HEADS)} |"
    yield "|" + " --- |" * len(_HEADS)
    for row in rows:
        code = ", ".join(f"[`{name.partition(':')[2]}`]({_UP}/{code_file(name)})" for name in row.code)
        tests = ", ".join(f"[`{name.split('::')[-1]}`]({_UP}/{name.partition('::')[0]})" for name in row.tests)
        cells = (row.at, row.mechanism, _STATES[row.state], code, tests, row.theirs, row.ours, row.differs)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def code_file(name: str) -> str:
    """Path of the file of a `module:name`, below the repository's root."""
    path = Path(*name.partition(":")[0].split("."))
    return f"{path}.py" if (ROOT / f"{path}.py").is_file() else str(path / "__init__.py")


def _anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
