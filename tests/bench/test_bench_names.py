import subprocess
import sys


def test_commands_are_found_without_torch():
    code = "import bench.commands, bench.store.summary, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
