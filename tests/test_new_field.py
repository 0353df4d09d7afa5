"""A new field of a table is declared in one place: all that has to know of it does, or refuses it by name."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.test_doc_blocks import ROOT


def declared_in_contributing():
    """The lines that CONTRIBUTING.md shows."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Add a field to a table\n")[2].partition("\n## ")[0]
    return section.partition("```python\n")[2].partition("```")[0]


@pytest.mark.slow
def test_a_new_field_of_a_table_is_declared_once(tmp_path):
    copy = tmp_path / "package"
    shutil.copytree(ROOT / "autoshard", copy / "autoshard")
    tables = copy / "autoshard" / "core" / "tables.py"
    before, mark, after = tables.read_text(encoding="utf-8").partition("\n\n\ndef traits_of")
    tables.write_text(f"{before}\n{declared_in_contributing()}{mark}{after}", encoding="utf-8")
    found = subprocess.run(
        [sys.executable, ROOT / "tests" / "new_field.py", tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (copy, ROOT)))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    places = json.loads(found.stdout)
    lines = {
        "range": "tables[0].weight_decay: must be a finite number in [0, 1], got 2.0",
        "executed": ["tables.tables[0].weight_decay"],
        "features": "user_id has another weight_decay than the learned model was trained on",
        "samples": "shards.weight_decay: has no column in samples",
        "measured": "user_id.weight_decay: the benchmark does not measure it, got 0.25",
    }
    assert places == {**dict.fromkeys(places, True), **lines}
