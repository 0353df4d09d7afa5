"""Placements of a task as a network chooses them, played by the compiled game: as `play` does, in a tenth of the time.

Shape suffixes: N items in falling price, E episodes, I items, U hidden units, H width of a state, F features, G gates,
Y sites of all items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.planners.hybrid.compiled.library import Decode, library
from autoshard.planners.space.layout import Layout
from env.game import FloatArray, GameTask
from policies.network import STATE_WIDTH, PolicyNetwork

#: Weights that the compiled game takes as they are.
_WEIGHTS = (
    *("option.of_context", "option.second", "option.second_bias", "option.last"),
    *("place.of_place", "place.of_context", "place.last"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoded:
    """Episodes that have ended.

    Attributes:
        task: What was played.
        option_EI: Option of each item, among all.
        site_EY: Sites of their shards.
    """

    task: GameTask
    option_EI: NDArray[np.int32]
    site_EY: NDArray[np.int32]

    def layout(self, episode: int) -> Layout:
        """What an episode ended with."""
        return self.task.linear.layout(self.option_EI[episode], self.site_EY[episode])


def decoded(network: PolicyNetwork, task: GameTask, num_episodes: int = 1, *, seed: int = 0) -> Decoded:
    """Plays episodes of a task; the first takes the likeliest choices, the others draw options by their probabilities.

    Args:
        network: Chooses; of numpy's weights.
        task: What is played.
        num_episodes: E.
        seed: Source of all chance.

    Raises:
        MemoryError: If there is none left.
    """
    weights, features = network.weights, task.features
    states_NH = states(network, features.task_F, features.items_IF[task.order_I])
    fixed, num_items = task.linear.fixed, len(task.order_I)
    witness_option_i, witness_site = task.linear.choices(task.witness)
    arrays = {
        **{name: fixed[name] for name in ("first_option_i", "first_shard_o", "holders_e", "allowed_e", "first_site_i")},
        **{name: fixed[name] for name in ("is_shared_e", "in_node_e", "allowed")},
        "order_i": task.order_I.astype(np.int32),
        "witness_option_i": witness_option_i,
        "witness_site": witness_site,
        "own_em": task.memory.own_XM,
        "all_e": task.memory.all_X,
        "load_ep": task.load_XP,
        "sync_e": task.sync_X,
        "capacity_rm": task.capacity_RM,
        "room_rm": task.room_RM,
        "mean_p": task.mean_P,
        "weight_p": task.weight_P,
        "left_n": task.left_I,
        "option_ou": task.ways_OF.astype(np.float32) @ weights["option.of_option"],
        "option_state_nu": network.of_state("option", states_NH),
        "place_state_nu": network.of_state("place", states_NH),
        **{name.replace(".of_context", "_context").replace(".", "_"): weights[name] for name in _WEIGHTS},
        "option_ei": np.zeros((num_episodes, num_items), dtype=np.int32),
        "site_ey": np.zeros((num_episodes, len(witness_site)), dtype=np.int32),
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    game = Decode.of(
        arrays,
        num_episodes=num_episodes,
        num_items=num_items,
        num_ranks=task.num_ranks,
        num_levels=task.room_RM.shape[1],
        node_size=task.space.topology.local_world_size,
        max_shards=int(task.flat.count_O.max()),
        option_hidden=len(weights["option.second"]),
        option_last_width=len(weights["option.last"]),
        place_hidden=len(weights["place.last"]),
        unit_ms=task.unit_ms,
        seed=seed,
    )
    if library().autoshard_decode(game) < 0:
        raise MemoryError
    return Decoded(task=task, option_EI=arrays["option_ei"], site_EY=arrays["site_ey"])


def states(network: PolicyNetwork, task_F: FloatArray, items_NF: FloatArray) -> NDArray[np.float32]:
    """What `PolicyNetwork.states` computes of one task, of numpy's weights."""
    seen_NH, gates_NG = network.gates(task_F.astype(np.float32), items_NF.astype(np.float32))
    gates_NG, of_state_HG = np.ascontiguousarray(gates_NG), np.ascontiguousarray(network.weights["lstm.of_state"])
    state_NH = np.empty((len(gates_NG), STATE_WIDTH), dtype=np.float32)
    library().autoshard_states(
        gates_NG.ctypes.data, of_state_HG.ctypes.data, len(gates_NG), STATE_WIDTH, state_NH.ctypes.data
    )
    return np.concatenate([seen_NH, state_NH], axis=1)
