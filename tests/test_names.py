"""Names mean one thing: no two public classes of the product share one."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("autoshard", "bench", "costmodel", "env", "policies", "server")


def test_no_two_public_classes_share_a_name():
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    ]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, number in names.items() if number > 1 and not name.startswith("_")] == []
