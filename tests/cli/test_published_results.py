"""What commands print with `--json` is what its published schema says, and reads back as it was."""

import json

import jsonschema
import pytest

from autoshard.cli import main
from autoshard.commands.printed import CATALOGUE, DOCTOR, EXPORTED, IMPORTED


def printed(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def check(document, kind):
    assert document["schema"] == kind.schema_name
    jsonschema.validate(document, kind.json_schema())
    assert kind.to_json(kind.from_json(document)) == document


@pytest.mark.parametrize("what", ["tables", "topologies", "planners"])
def test_lists(what, capsys):
    document = printed(capsys, "list", what)
    check(document, CATALOGUE)
    assert document[what]


def test_what_is_installed(capsys):
    check(printed(capsys, "doctor"), DOCTOR)


def test_imports_and_exports(tmp_path, capsys):
    tables, plan = tmp_path / "tables.json", tmp_path / "plan.json"
    document = printed(capsys, "import", "metasyn", "--num-tables", 8, "--scale", 64, "-o", tables)
    check(document, IMPORTED)
    assert (document["num_tables"], document["num_tables_in_source"]) == (8, 856)
    main(["plan", str(tables), "--topology", "cpu-4", "--planner", "size-greedy", "-o", str(plan)])
    capsys.readouterr()
    output = tmp_path / "constraints.json"
    check(printed(capsys, "export", plan, "--format", "torchrec-constraints", "-o", output), EXPORTED)
