"""The curl lines of README.md and docs/quick-start.md, against a real service."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from autoshard.formats import plan_from_json, read_tables

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(shutil.which("curl") is None, reason="this machine has no curl")
@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_curl(page, service, tmp_path):
    (block,) = re.findall(r"```sh\n(curl .*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    command = block.replace("http://", "").replace("localhost:8000", service.url).replace("answer.json", "$ANSWER")
    answer = tmp_path / "answer.json"
    done = subprocess.run(
        ["sh", "-ec", command], cwd=ROOT, env={"PATH": "/usr/bin:/bin", "ANSWER": str(answer)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(answer.read_text(encoding="utf-8"))
    assert document["id"].startswith("sha256:")
    plan = plan_from_json(document["plan"])
    assert plan.tables == read_tables(ROOT / "examples/tables.json")
