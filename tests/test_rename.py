"""`scripts/rename` changes a name, or a module's place, wherever it is written."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "rename"


@pytest.fixture
def rename(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "old.py").write_text("class Thing:\n    things = 1\n", encoding="utf-8")
    (tmp_path / "use.py").write_text("from room import old\nfrom room.old import Thing\n", encoding="utf-8")
    (tmp_path / "map.json").write_text('["room/old.py", "Thing"]\n', encoding="utf-8")
    git = shutil.which("git")
    for arguments in (["init", "-q"], ["add", "."]):
        subprocess.run([git, *arguments], cwd=tmp_path, check=True)

    def run(*arguments):
        done = subprocess.run([sys.executable, SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stderr

    return run


def test_a_name_changes_everywhere_as_a_whole_word(rename, tmp_path):
    assert rename("Thing", "Item")[0] == 0
    assert "Thing" in (tmp_path / "use.py").read_text(), "only --apply writes"
    assert rename("Thing", "Item", "--apply")[0] == 0
    assert (tmp_path / "room" / "old.py").read_text() == "class Item:\n    things = 1\n"
    assert (tmp_path / "use.py").read_text() == "from room import old\nfrom room.old import Item\n"
    assert (tmp_path / "map.json").read_text() == '["room/old.py", "Item"]\n'


def test_a_module_moves_with_its_names(rename, tmp_path):
    assert rename("room/old.py", "room/new.py", "--apply")[0] == 0
    assert (tmp_path / "room" / "new.py").is_file()
    assert (tmp_path / "use.py").read_text().splitlines() == ["from room import new", "from room.new import Thing"]
    assert "room/new.py" in (tmp_path / "map.json").read_text()


@pytest.mark.parametrize(("names", "word"), [(("Thing", "old"), "is used"), (("Nothing", "New"), "nowhere")])
def test_what_cannot_be_told_apart_is_refused(names, word, rename):
    code, said = rename(*names)
    assert code == 2
    assert word in said
