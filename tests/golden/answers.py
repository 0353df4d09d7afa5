"""What `--json` of commands and the service's description hold: `python -m tests.golden.answers` records them anew.

Kept is what clients rely on: names, nesting and kinds of values, each path on a line, for every kind of document.
Figures and words are for other tests, since models are trained anew and machines differ. Of the service's description,
all but its sentences is kept.
"""

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path

from autoshard.cli import main
from costmodel.registry.versions import REGISTRY_VARIABLE, SHIPPED_VARIABLE
from server.storage.location import DATABASE_VARIABLE
from tests.fuzz.examples import write_examples
from tests.fuzz.targets import READERS

RECORDED = Path(__file__).with_name("answers.json")
#: Commands that read none of the examples' files, or none that the fuzzer spoils.
OTHERS = (
    ("list", "tables", "--json"),
    ("list", "topologies", "--json"),
    ("list", "planners", "--json"),
    ("plan", "tables.json", "--topology", "topology.json", "--planner", "auto", "--set", "steps=3", "--json"),
    ("diff", "plan.json", "flex.json", "--json"),
    ("plan", "tables.json", "--topology", "topology.json", "--planner", "random", "-o", "whole.json", "--json"),
    ("keys", "list", "--json"),
)


def commands() -> list[tuple[str, ...]]:
    """Command lines whose answers are JSON."""
    read = [arguments for lines in READERS.values() for arguments in lines if "--json" in arguments]
    return list(dict.fromkeys([*read, *OTHERS]))


def kinds_of(value: object, path: str = "") -> dict[str, set[str]]:
    """The kinds of all values of a document by their paths; items of lists share one."""
    found: dict[str, set[str]] = {path: {_kind(value)}}
    inner: list[tuple[str, object]] = []
    if isinstance(value, dict):
        inner = [(f"{path}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[]", item) for item in value]
    for place, item in inner:
        for name, kinds in kinds_of(item, place).items():
            found.setdefault(name, set()).update(kinds)
    return found


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "flag"
    return {int: "number", float: "number", str: "text", list: "list", dict: "object"}[type(value)]


def answers(folder: Path) -> dict[str, list[str]]:
    """What all commands answer, by the kind of document, a line for each path: run in a folder, on examples."""
    before = Path.cwd()
    found: dict[str, dict[str, set[str]]] = {}
    variables = {name: str(folder / "none") for name in (REGISTRY_VARIABLE, SHIPPED_VARIABLE)}
    variables[DATABASE_VARIABLE] = f"sqlite:///{folder}/service.sqlite"
    os.chdir(folder)
    try:
        os.environ.update(variables)
        write_examples(folder)
        for arguments in commands():
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                code = main(list(arguments))
            assert code == 0, arguments
            document = json.loads(out.getvalue())
            kept = found.setdefault(document["schema"], {})
            for path, kinds in kinds_of(document).items():
                kept.setdefault(path, set()).update(kinds)
    finally:
        os.chdir(before)
    return {
        name: [f"{path}: {', '.join(sorted(kinds))}" for path, kinds in sorted(paths.items())]
        for name, paths in sorted(found.items())
    }


def record() -> None:
    """Runs all commands on fresh examples, and keeps what they answer."""
    with tempfile.TemporaryDirectory() as folder:
        found = answers(Path(folder))
    RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
