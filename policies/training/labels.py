"""What a long search says of a task: for every option of every item, what it costs more than the best one.

Which of two options that cost the same a search takes is chance: searches that differ in their seed agree on two thirds
of the tables that they cut. So options are learned by what they cost around the layout that was found, not by whether
they were taken.

Shape suffixes: N items in falling price, O options of all items in that order, Y sites that were chosen, S sites, F
features, Z options that are counted for an item.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from autoshard.core.errors import FormatError
from autoshard.formats.files import atomic_write, read_bytes
from autoshard.planners.hybrid.starts import balanced_starts
from autoshard.planners.hybrid.successive_halving import improve
from autoshard.planners.space.cost_gradient import CostGradient, shard_costs
from autoshard.planners.space.layout import Layout
from env.game import NUM_PLACE, FloatArray, GameTask
from policies.planning.playing import SeenTask, follow, options_in_order

_MAX_BYTES = 1 << 28
#: Shares of a rank's mean that a part may add to it before its excess counts.
_MOST_LUMP = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Label:
    """A task, and the steps that lead to a layout that was found for it.

    Attributes:
        task_F: Features of the task.
        items_NF: Of its items.
        options_OF: Of their options.
        count_N: Number of options of each item.
        regret_O: What each costs more than the best of its item, over the mean of what items cost.
        chosen_N: Number of the option that the layout has.
        context_NF: What was placed before each item.
        place_at_Y: Item of each site that was chosen.
        place_context_YF: What was placed before.
        places_YSF: What told sites apart.
        may_YS: Sites that were allowed.
        site_Y: The site that was chosen.
        step_ms: The layout's step, that of the task's witness; shape (2,).
    """

    task_F: NDArray[np.float32]
    items_NF: NDArray[np.float32]
    options_OF: NDArray[np.float32]
    count_N: NDArray[np.int64]
    regret_O: NDArray[np.float32]
    chosen_N: NDArray[np.int64]
    context_NF: NDArray[np.float32]
    place_at_Y: NDArray[np.int64]
    place_context_YF: NDArray[np.float32]
    places_YSF: NDArray[np.float32]
    may_YS: NDArray[np.bool_]
    site_Y: NDArray[np.int64]
    step_ms: NDArray[np.float64]

    @classmethod
    def of(cls, task: GameTask, layout: Layout) -> Label:
        """What a layout of the task's space says."""
        seen = SeenTask.of(task)
        decisions = follow(task, layout)
        options = [one for one in decisions if not one.is_place]
        sites = [one for one in decisions if one.is_place]
        return cls(
            task_F=seen.task_F,
            items_NF=seen.items_NF,
            options_OF=seen.options_OF,
            count_N=seen.count_N,
            regret_O=regrets(task, layout)[options_in_order(task)].astype(np.float32),
            chosen_N=np.array([int(one.choice_E[0]) for one in options]),
            context_NF=np.array([one.context_EF[0] for one in options], dtype=np.float32),
            place_at_Y=np.array([one.at for one in sites], dtype=np.int64),
            place_context_YF=_rows([one.context_EF[0] for one in sites], len(decisions[0].context_EF[0])),
            places_YSF=np.array(
                [one.places_ESF[0] for one in sites if one.places_ESF is not None], dtype=np.float32
            ).reshape(-1, task.num_ranks, NUM_PLACE),
            may_YS=np.array([one.mask_EA[0] for one in sites], dtype=np.bool_).reshape(-1, task.num_ranks),
            site_Y=np.array([int(one.choice_E[0]) for one in sites], dtype=np.int64),
            step_ms=np.array([layout.step_ms(), task.witness_ms]),
        )

    def save(self, path: Path) -> None:
        """Writes it to a file."""
        atomic_write(path, save({one.name: np.ascontiguousarray(getattr(self, one.name)) for one in fields(self)}))

    @classmethod
    def read(cls, path: Path) -> Label:
        """Reads a file that `save` wrote.

        Raises:
            FormatError: If it is another one; the text names it.
        """
        arrays: Mapping[str, Any] = load(read_bytes(path, max_bytes=_MAX_BYTES))
        if arrays.keys() != {one.name for one in fields(cls)}:
            raise FormatError("must hold the arrays of a label", source=str(path))
        return cls(**arrays)


def _rows(rows: list[FloatArray], width: int) -> NDArray[np.float32]:
    return np.array(rows, dtype=np.float32).reshape(-1, width)


def searched(task: GameTask, seconds: float, seed: int) -> Layout:
    """The best layout of a task that a search of some seconds finds among its options."""
    now_s = time.perf_counter()
    starts = balanced_starts(task.space, task.limits, now_s)
    starts.sort(key=lambda start: start.layout.step_ms())
    return improve(starts, seed=seed, deadline_s=now_s + seconds).layout


def regrets(task: GameTask, layout: Layout) -> FloatArray:
    """What options cost more than the best one of their item around a layout, as if ranks were alike; shape (O,).

    Parts that alone are above half of what ranks have in the mean count their excess besides, since the slowest rank
    has it. Over the mean of what items cost. The option that the layout has costs nothing more.
    """
    flat, rates = task.flat, CostGradient.of(task.space, layout)
    cost_O = flat.sums(shard_costs(flat, rates, task.num_ranks))
    lump_O = flat.largest(np.where(flat.is_shared_E, 0.0, rates.served_VP[flat.kind_E].sum(axis=1)))
    now_O = flat.first_I + layout.numbers_I
    limit_ms = _MOST_LUMP * float(cost_O[now_O].sum())
    cost_O = cost_O + np.maximum(lump_O - limit_ms, 0.0)
    least_I = np.minimum.reduceat(cost_O, flat.first_I)
    regret_O = (cost_O - least_I[flat.item_O]) * (len(least_I) / max(float(least_I.sum()), 1e-30))
    regret_O[now_O] = 0.0
    return np.asarray(regret_O)
