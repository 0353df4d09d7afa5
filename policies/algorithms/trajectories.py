"""Trajectories as the learner reads them: time first, then episodes.

Shape suffixes: T steps, E episodes, S width of a state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.network.network import LstmState

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectories:
    """T steps of E episodes; an episode may end and the next begin within them.

    All lie on the learner's device, except for what decides how a learner goes over them: that is read on the CPU.

    Attributes:
        observations: What was seen at each of T steps; (T, E, ...).
        last_observation: What is seen after them; (E, ...).
        actions_TE: What was done.
        log_probs_TE: Log-probability of doing so, by the policy that did.
        rewards_TE: What came of it.
        starts_TE: Whether the step is the first of an episode; on the CPU.
        dones_TE: Whether the step ended an episode.
        tasks_TE: Which task the step belongs to; on the CPU.
        before: What the LSTM knew before the first step.
    """

    observations: Tensors
    last_observation: Tensors
    actions_TE: Tensor
    log_probs_TE: Tensor
    rewards_TE: Tensor
    starts_TE: Tensor
    dones_TE: Tensor
    tasks_TE: Tensor
    before: LstmState

    @property
    def slabs(self) -> tuple[slice, ...]:
        """Spans of steps within which no episode begins, so that the LSTM may run over each at once."""
        is_edge_T: NDArray[np.bool_] = np.any(self.starts_TE.numpy(), axis=1)
        is_edge_T[0] = True
        edges = [*np.flatnonzero(is_edge_T).tolist(), len(is_edge_T)]
        return tuple(slice(start, stop) for start, stop in pairwise(edges))


@dataclass(slots=True, kw_only=True)
class TrajectoryRecorder:
    """Collects trajectories step by step.

    Attributes:
        before: What the LSTM knew before the first step.
    """

    before: LstmState
    _observations: list[Tensors] = field(default_factory=list)
    _columns: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, observation: Tensors, **columns: Tensor | NDArray[np.generic]) -> None:
        """Adds a step: what was seen, and the other columns of Trajectories, each of shape (E,)."""
        self._observations.append(observation)
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(torch.as_tensor(column))

    def finish(self, last_observation: Tensors) -> Trajectories:
        """The trajectories of all steps added."""
        observations = {key: torch.stack([step[key] for step in self._observations]) for key in self._observations[0]}
        columns = {f"{name}_TE": torch.stack(steps) for name, steps in self._columns.items()}
        return Trajectories(observations=observations, last_observation=last_observation, before=self.before, **columns)
