"""How tests run a study as users do."""

import pytest

from studies.__main__ import main


@pytest.fixture
def run_study():
    """Runs `python -m studies` with arguments; returns the exit code."""
    return lambda *arguments: main([str(argument) for argument in arguments])
