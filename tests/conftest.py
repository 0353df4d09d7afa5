"""What all tests share: tests marked `gpu` skip themselves, saying why, where there is no CUDA device."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU: torch finds no CUDA device on this machine")
        for item in marked:
            item.add_marker(skip)
