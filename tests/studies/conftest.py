"""How tests run a study as users do. Tests of studies are `slow`, but for a quick one of each, marked `smoke`."""

from pathlib import Path

import pytest

from studies.__main__ import main


@pytest.fixture
def run_study():
    """Runs `python -m studies` with arguments; returns the exit code."""
    return lambda *arguments: main([str(argument) for argument in arguments])


def pytest_collection_modifyitems(items):
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents and item.get_closest_marker("smoke") is None:
            item.add_marker("slow")
