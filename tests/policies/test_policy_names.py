import subprocess
import sys

import pytest

import policies


@pytest.mark.parametrize("name", policies.__all__)
def test_a_public_name_is_there(name):
    assert getattr(policies, name) is not None


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        policies.nothing  # noqa: B018


@pytest.mark.parametrize("module", ["policies.training.command", "policies.planning.planner"])
def test_commands_and_lists_of_planners_do_not_wait_for_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
