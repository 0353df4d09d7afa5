"""Episodes of the game, played by a network or after a layout that is known, and what a learner needs of them.

Plans are made by the compiled game, see `decoding.py`, which chooses alike.

Shape suffixes: N items in falling price, E episodes, O options, S sites, F features, H width of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.planners.space.layout import Layout
from env.game import BoolArray, FloatArray, Game, GameTask, IntArray
from policies.network import PolicyNetwork


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """One step of all episodes.

    Attributes:
        at: Place of the item in falling price.
        is_place: Whether a site is chosen.
        context_EF: What was placed.
        places_ESF: What told sites apart; None where an option was chosen.
        mask_EA: What was allowed.
        choice_E: What was chosen.
        counts_E: Whether there was anything to choose in that episode.
        log_probs_E: Logarithm of the probability of the choice.
    """

    at: int
    is_place: bool
    context_EF: NDArray[np.floating]
    places_ESF: NDArray[np.floating] | None
    mask_EA: BoolArray
    choice_E: IntArray
    counts_E: BoolArray
    log_probs_E: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenTask:
    """What a network sees of a task whatever is done.

    Attributes:
        task_F: Features of the task.
        items_NF: Of its items.
        options_OF: Of their options, item after item.
        count_N: Number of options of each item.
    """

    task_F: NDArray[np.float32]
    items_NF: NDArray[np.float32]
    options_OF: NDArray[np.float32]
    count_N: IntArray

    @classmethod
    def of(cls, task: GameTask) -> SeenTask:
        """Reads a task."""
        return cls(
            task_F=task.features.task_F.astype(np.float32),
            items_NF=task.features.items_IF[task.order_I].astype(np.float32),
            options_OF=task.ways_OF[options_in_order(task)].astype(np.float32),
            count_N=task.flat.options_I[task.order_I],
        )

    def options(self) -> list[NDArray[np.float32]]:
        """Features of the options of each item."""
        return np.split(self.options_OF, np.cumsum(self.count_N)[:-1])


def options_in_order(task: GameTask) -> IntArray:
    """All options of a task, item after item in falling price; shape (O,)."""
    return np.concatenate([np.arange(len(task.flat.item_O))[task.options_of(item)] for item in task.order_I.tolist()])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """Episodes of one task.

    Attributes:
        seen: What was seen of the task.
        layouts: What each episode ended with.
        step_ms_E: Their steps.
        rewards_E: Their rewards.
        decisions: Their steps.
    """

    seen: SeenTask
    layouts: tuple[Layout, ...]
    step_ms_E: FloatArray
    rewards_E: FloatArray
    decisions: tuple[Decision, ...]


def play(
    network: PolicyNetwork,
    task: GameTask,
    num_episodes: int = 1,
    *,
    rng: np.random.Generator | None = None,
) -> Played:
    """Plays episodes of a task side by side.

    Args:
        network: Chooses; of numpy's weights.
        task: What is played.
        num_episodes: E.
        rng: Source of all choices, by their probabilities; None for the likeliest choices in all episodes.
    """
    game = Game(task, num_episodes)
    seen = SeenTask.of(task)
    options = seen.options()
    states_NH = network.states(seen.task_F, seen.items_NF)
    states = {head: network.of_state(head, states_NH) for head in ("option", "place")}
    decisions: list[Decision] = []
    while not game.is_done:
        at, is_place = game.at, game.part >= 0
        context_EF = game.context().astype(np.float32)
        places_ESF, counts_E = None, np.ones(num_episodes, dtype=np.bool_)
        mask_EA = game.mask()
        if is_place:
            places_ESF, counts_E = game.places().astype(np.float32), game.is_placing
            of_context = network.of_context("place", context_EF)[:, None]
            scores_EA = network.place_scores(places_ESF, states["place"][at], of_context)
        else:
            of_context = network.of_context("option", context_EF)[:, None]
            scores_EA = network.option_scores(options[at], states["option"][at], of_context)
        scores_EA = np.where(mask_EA, scores_EA, -np.inf)
        drawn_EA = scores_EA
        if rng is not None:
            # Exponential races draw from a softmax.
            drawn_EA = scores_EA - np.log(rng.exponential(size=scores_EA.shape))
        choice_E = drawn_EA.argmax(axis=1)
        decisions.append(
            Decision(
                at=at,
                is_place=is_place,
                context_EF=context_EF,
                places_ESF=places_ESF,
                mask_EA=mask_EA,
                choice_E=choice_E,
                counts_E=counts_E,
                log_probs_E=_log_probs(scores_EA, choice_E),
            )
        )
        game.step(choice_E)
    finished = game.finished()
    return Played(
        seen=seen,
        layouts=finished.layouts,
        step_ms_E=finished.step_ms_E,
        rewards_E=finished.rewards_E,
        decisions=tuple(decisions),
    )


def follow(task: GameTask, layout: Layout) -> tuple[Decision, ...]:
    """The steps that lead to a layout.

    Args:
        task: What is played.
        layout: Of the task's space; it fits, with what training needs counted as the game does.
    """
    game = Game(task, 1, layout)
    decisions: list[Decision] = []
    while not game.is_done:
        item, is_place = game.item, game.part >= 0
        number, sites = layout.choice(item)
        choice = sites[game.number_of_part] if is_place else number
        mask_EA = game.mask()
        decisions.append(
            Decision(
                at=game.at,
                is_place=is_place,
                context_EF=game.context(),
                places_ESF=game.places() if is_place else None,
                mask_EA=mask_EA,
                choice_E=np.array([choice], dtype=np.int64),
                counts_E=np.ones(1, dtype=np.bool_),
                log_probs_E=np.zeros(1),
            )
        )
        game.step(decisions[-1].choice_E)
    return tuple(decisions)


def _log_probs(scores_EA: NDArray[np.floating], choice_E: IntArray) -> FloatArray:
    """Logarithms of the probabilities of choices, shape (E,)."""
    most_E1 = scores_EA.max(axis=1, keepdims=True)
    sums_E = np.log(np.exp(scores_EA - most_E1).sum(axis=1))
    return np.asarray(np.take_along_axis(scores_EA - most_E1, choice_E[:, None], axis=1)[:, 0] - sums_E)
