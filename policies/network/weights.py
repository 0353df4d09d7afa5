"""Weights and optimizers as arrays by name, which safetensors can hold."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.core.errors import ModelError
from autoshard.formats.documents.fields import from_source
from costmodel.registry.card_fields import check_tensor

Arrays = dict[str, NDArray[Any]]


def to_arrays(module: torch.nn.Module) -> Arrays:
    """Copies of a module's weights by name."""
    return {name: value.detach().cpu().numpy().copy() for name, value in module.state_dict().items()}


def load_arrays(module: torch.nn.Module, arrays: Mapping[str, NDArray[Any]], source: str) -> None:
    """Sets a module's weights.

    Raises:
        ModelError: If one is missing, unknown, or of another shape, dtype or range; the text names it.
    """
    wanted = module.state_dict()
    for name in sorted(wanted.keys() | arrays.keys()):
        shape = tuple(wanted[name].shape) if name in wanted else None
        got = arrays[name].shape if name in arrays else None
        if shape != got:
            raise ModelError(f"must be of shape {shape}, got {got}", field=name, source=source)
        from_source(source, partial(check_tensor, arrays[name], name))
    module.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})


def optimizer_arrays(optimizer: torch.optim.Optimizer) -> Arrays:
    """What an optimizer remembers of each weight, under names that begin with `optimizer.`."""
    return {
        f"optimizer.{index}.{name}": value.detach().cpu().numpy().copy()
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Gives an optimizer back what `optimizer_arrays` took, that prefix left out."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in arrays.items():
        index, label = name.split(".")
        state.setdefault(int(index), {})[label] = torch.from_numpy(np.array(value))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def with_prefix(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    """The arrays whose names begin with a prefix, which is cut off."""
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
