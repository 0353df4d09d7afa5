"""What all tests share: tests marked `gpu` skip themselves, saying why, where there is no CUDA device."""

import hypothesis
import pytest

# Examples are timed by nobody: other work on the machine would fail them.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU: torch finds no CUDA device on this machine")
        for item in marked:
            item.add_marker(skip)
