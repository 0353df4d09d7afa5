"""The learning rate of tables, for torch's schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from autoshard.core.accepted import FINITE_AT_LEAST_0
from autoshard.core.errors import InputError
from autoshard.core.quoting import shown


class TableOptimizer(torch.optim.Optimizer):
    """Holds the learning rate of tables, which the backward pass updates; what `torch.optim.lr_scheduler` sets it on.

    It has one parameter group without parameters, whose `lr` is used from the next lookup on, and has to be the same on
    all processes. Its `state_dict` has the learning rate; weights and moments are in that of the module.

    Args:
        learning_rate: Learning rate, at least 0.
    """

    def __init__(self, learning_rate: float) -> None:
        super().__init__([{"params": []}], {"lr": learning_rate})

    @property
    def learning_rate(self) -> float:
        """The learning rate that is set.

        Raises:
            InputError: If it is negative or no number.
        """
        given = self.param_groups[0]["lr"]
        try:
            value = float(given)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: torch's, of tensors
            raise InputError(f"must be {FINITE_AT_LEAST_0}, got {shown(given)}", field="learning_rate") from None
        FINITE_AT_LEAST_0.check(value, "learning_rate", InputError)
        return value

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Nothing: the backward pass has updated the tables. Returns what the closure does."""
        return None if closure is None else closure()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, into the same group: optimizers of TorchRec around this one set the learning rate there."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        groups[0] |= self.param_groups[0]
        self.param_groups = groups

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses parameters and further groups: tables are no parameters, and have one learning rate."""
        if self.param_groups or param_group["params"]:
            raise InputError("takes no parameters: tables are updated in the backward pass", field="param_groups")
        super().add_param_group(param_group)
