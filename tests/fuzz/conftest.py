"""Valid examples of all files, and the process that runs commands."""

import pytest

from tests.fuzz.examples import write_examples
from tests.fuzz.harness import ForkServer


@pytest.fixture(scope="session")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    write_examples(folder)
    return folder


@pytest.fixture(scope="session")
def fork_server(examples, tmp_path_factory):
    with ForkServer(tmp_path_factory.mktemp("fuzz"), examples) as server:
        yield server
