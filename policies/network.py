"""The policy's network: an LSTM over the items, a score for each option and each site, and the value of a placement.

The same lines compute it with numpy, where plans are made and torch takes longer to import than a plan takes, and with
torch, where it is trained: weights decide which.

Shape suffixes: N items in their order, B tasks, O options, S sites, E episodes, F features, H width of a state, U
hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core.errors import ModelError
from autoshard.planners.space.ways import NUM_ITEM, NUM_PRICES, NUM_TASK, NUM_WAY
from env.game import NUM_CONTEXT, NUM_PLACE

#: Arrays of numpy or tensors of torch.
Array = Any
Weights = Mapping[str, Array]

STATE_WIDTH = 48
#: What is seen before anything is placed.
START_CONTEXT = np.array([0.0] * (NUM_CONTEXT - 4) + [1.0] * 4, dtype=np.float32)
_OPTION_HIDDEN, _OPTION_LAST, _PLACE_HIDDEN, _VALUE_HIDDEN = 64, 32, 24, 32
_GATES = 4
#: Shapes of the weights by name; those of vectors are biases, but for the last layers of heads.
SHAPES: dict[str, tuple[int, ...]] = {
    "item.weight": (NUM_TASK + NUM_ITEM, STATE_WIDTH),
    "item.bias": (STATE_WIDTH,),
    "lstm.of_item": (STATE_WIDTH, _GATES * STATE_WIDTH),
    "lstm.of_state": (STATE_WIDTH, _GATES * STATE_WIDTH),
    "lstm.bias": (_GATES * STATE_WIDTH,),
    "option.of_option": (NUM_WAY + NUM_PRICES, _OPTION_HIDDEN),
    "option.of_state": (2 * STATE_WIDTH, _OPTION_HIDDEN),
    "option.of_context": (NUM_CONTEXT, _OPTION_HIDDEN),
    "option.bias": (_OPTION_HIDDEN,),
    "option.second": (_OPTION_HIDDEN, _OPTION_LAST),
    "option.second_bias": (_OPTION_LAST,),
    "option.last": (_OPTION_LAST, 1),
    "place.of_place": (NUM_PLACE, _PLACE_HIDDEN),
    "place.of_state": (2 * STATE_WIDTH, _PLACE_HIDDEN),
    "place.of_context": (NUM_CONTEXT, _PLACE_HIDDEN),
    "place.bias": (_PLACE_HIDDEN,),
    "place.last": (_PLACE_HIDDEN, 1),
    "value.of_state": (2 * STATE_WIDTH, _VALUE_HIDDEN),
    "value.of_context": (NUM_CONTEXT, _VALUE_HIDDEN),
    "value.bias": (_VALUE_HIDDEN,),
    "value.last": (_VALUE_HIDDEN, 1),
    "value.last_bias": (1,),
}


def first_weights(seed: int) -> dict[str, NDArray[np.float32]]:
    """Random weights to begin with."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            np.zeros(shape, dtype=np.float32)
            if len(shape) == 1
            else (rng.standard_normal(shape) / math.sqrt(shape[0])).astype(np.float32)
        )
        for name, shape in SHAPES.items()
    }


def check_weights(weights: Weights, source: str) -> None:
    """Raises ModelError unless all weights are there, of their shapes, and finite."""
    for name in sorted(SHAPES.keys() | weights.keys()):
        wanted = SHAPES.get(name)
        found = tuple(weights[name].shape) if name in weights else None
        if wanted != found:
            raise ModelError(f"must be of shape {wanted}, got {found}", field=name, source=source)
        if weights[name].dtype != np.float32 or not np.isfinite(weights[name]).all():
            raise ModelError(f"must be finite float32 numbers, got {weights[name].dtype}", field=name, source=source)


class PolicyNetwork:
    """Scores options and sites, and values placements.

    Every item's features, with the task's, go through one layer and an LSTM, in falling price. Heads score an option,
    or a site, from its own features, the item's state and what is placed so far; so any number of items, options and
    ranks will do, and renumbering ranks renumbers the scores. The value head sees what is placed so far, too.

    Args:
        weights: By name, see `SHAPES`: numpy's or torch's.

    Source:
        AutoShard Sec. 4.4 (an LSTM over the items, one score for each choice, and a value). Differs: options of tables
        are chosen before places, inputs have no units, and the value depends on what is placed.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    @cached_property
    def _math(self) -> Any:
        if isinstance(self.weights["item.bias"], np.ndarray):
            return np
        import torch

        return torch

    def states(self, task_F: Array, items_NF: Array) -> Array:
        """States of items in their order, shape (N, 2 H): each with what came before it. They depend on no choice.

        Any axes may stand between N and F, alike in `task_F`, such as one of tasks.
        """
        weights, lib = self.weights, self._math
        seen_NH, gates_NG = self.gates(task_F, items_NF)
        state_H = cell_H = 0 * seen_NH[0]
        found = []
        for gates_G in gates_NG:
            now_G = gates_G + state_H @ weights["lstm.of_state"]
            # A sigmoid is half of a tanh and a half: three gates in one call.
            half_G = 0.5 * lib.tanh(0.5 * now_G[..., : 3 * STATE_WIDTH]) + 0.5
            keep_H, take_H = half_G[..., :STATE_WIDTH], half_G[..., STATE_WIDTH : 2 * STATE_WIDTH]
            cell_H = keep_H * cell_H + take_H * lib.tanh(now_G[..., 3 * STATE_WIDTH :])
            state_H = half_G[..., 2 * STATE_WIDTH :] * lib.tanh(cell_H)
            found.append(state_H)
        return lib.concatenate([seen_NH, lib.stack(found)], axis=-1)

    def gates(self, task_F: Array, items_NF: Array) -> tuple[Array, Array]:
        """What is seen of each item by itself, shape (N, H), and what it adds to the gates of the LSTM, (N, 4 H)."""
        weights = self.weights
        of_task = task_F @ weights["item.weight"][:NUM_TASK] + weights["item.bias"]
        seen_NH = _positive(items_NF @ weights["item.weight"][NUM_TASK:] + of_task)
        return seen_NH, seen_NH @ weights["lstm.of_item"] + weights["lstm.bias"]

    def option_scores(self, options_OF: Array, of_state_OU: Array, of_context_OU: Array) -> Array:
        """Scores of options, shape (O,); of any shape that the arguments broadcast to.

        Args:
            options_OF: Their features; prices may be zeros, where they are not known.
            of_state_OU: See `of_state`.
            of_context_OU: See `of_context`.
        """
        weights = self.weights
        hidden = _positive(options_OF @ weights["option.of_option"] + of_state_OU + of_context_OU)
        hidden = _positive(hidden @ weights["option.second"] + weights["option.second_bias"])
        return (hidden @ weights["option.last"])[..., 0]

    def place_scores(self, places_SF: Array, of_state_SU: Array, of_context_SU: Array) -> Array:
        """Scores of sites, shape (S,), as `option_scores`."""
        weights = self.weights
        hidden = _positive(places_SF @ weights["place.of_place"] + of_state_SU + of_context_SU)
        return (hidden @ weights["place.last"])[..., 0]

    def values(self, states_EH: Array, context_EF: Array) -> Array:
        """Rewards that are expected, shape (E,)."""
        weights = self.weights
        hidden = _positive(self.of_state("value", states_EH) + self.of_context("value", context_EF))
        return (hidden @ weights["value.last"] + weights["value.last_bias"])[..., 0]

    def of_state(self, head: str, states_NH: Array) -> Array:
        """The part of a head's first layer (`option`, `place` or `value`) that depends on the item, shape (N, U)."""
        return states_NH @ self.weights[f"{head}.of_state"] + self.weights[f"{head}.bias"]

    def of_context(self, head: str, context_EF: Array) -> Array:
        """The part of a head's first layer that depends on what is placed so far, shape (E, U)."""
        return context_EF @ self.weights[f"{head}.of_context"]


def _positive(values: Array) -> Array:
    return values.clip(0)
