"""States of random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autoshard.core.errors import InputError


class RandomState:
    """The global generators of Python, NumPy and torch (of a GPU, too) on each process, as a part of a job's state.

    Where fewer processes load it than saved it, each gets the state of the process of its rank. Processes that were not
    there have theirs derived from it: those of rank r % saved, drawn on, so that no two are alike.

    Args:
        group: The processes; None for all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def state_dict(self) -> dict[str, Any]:
        """The states of all processes, the same on each; all of them have to call it."""
        own = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": _bytes(torch.get_rng_state())}
        if torch.cuda.is_available():
            own["cuda"] = _bytes(torch.cuda.get_rng_state())
        everybody: list[Any] = [own]
        if dist.is_initialized():
            everybody = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(everybody, own, group=self._group)
        return {"processes": everybody}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the generators of this process.

        Raises:
            InputError: If it holds no such states.
        """
        saved = state_dict.get("processes")
        if not saved:
            raise InputError("must hold the states of at least one process", field="processes")
        rank = dist.get_rank(self._group) if dist.is_initialized() else 0
        round_of, own = divmod(rank, len(saved))
        state = saved[own]
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(state["cuda"]))
        if round_of:
            seed = [random.getrandbits(32), round_of]
            random.seed(repr(seed))
            np.random.seed(seed)
            torch.manual_seed(random.getrandbits(63))


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
