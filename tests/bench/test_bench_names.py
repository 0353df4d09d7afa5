import subprocess
import sys

import pytest

import bench


@pytest.mark.parametrize("name", bench.__all__)
def test_every_public_name_is_there(name):
    assert getattr(bench, name).__name__ == name


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = bench.nonesuch


def test_commands_are_found_without_torch():
    code = "import bench.commands, bench.store.summary, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
