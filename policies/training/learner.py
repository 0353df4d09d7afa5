"""What a policy learns by: labels of long searches, its own best placements, and V-trace over its own episodes.

Shape suffixes: B tasks, N items, J items of all tasks, O options of all items, Z options of an item, Y sites that were
chosen, S sites, T decisions, E episodes, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from autoshard.planners.space.ways import NUM_PRICES
from policies.network import START_CONTEXT, PolicyNetwork
from policies.planning.playing import Played
from policies.training.labels import Label
from policies.training.returns import vtrace_returns

#: How much more an option may cost, over the mean of what items cost, to be thought as good.
_TEMPERATURE = 0.05
#: Weight of what the search took, beside what options cost.
_TAKEN_WEIGHT = 0.3
#: Regrets above this count as this.
_MOST_REGRET = 4.0
#: Least weight of an item whose options cost alike.
_LEAST_WEIGHT = 0.02
#: Of V-trace: what a unit of reward counts, and weights of the value's error and of the entropy.
_REWARD_SCALE, _VALUE_WEIGHT, _ENTROPY_WEIGHT = 10.0, 0.5, 1e-3


class Learner:
    """A network with its optimizer.

    Args:
        weights: To begin with.
        learning_rate: Of Adam.
        device: Where it learns.
    """

    def __init__(
        self, weights: Mapping[str, NDArray[np.float32]], learning_rate: float, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.parameters = {
            name: torch.from_numpy(value.copy()).to(self.device).requires_grad_() for name, value in weights.items()
        }
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=learning_rate)
        self.network = PolicyNetwork(self.parameters)

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """The weights now."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.parameters.items()}

    def imitate(self, labels: Sequence[Label]) -> float:
        """One update towards what labels say; returns the loss."""
        return self._update(imitation_loss(self.network, labels, self.device))

    def reinforce(self, played: Played) -> float:
        """One update by V-trace from recorded episodes of a task; returns the loss."""
        return self._update(vtrace_loss(self.network, played, self.device))

    def loss(self, labels: Sequence[Label]) -> float:
        """The loss of what labels say, without learning from it; in parts, since all of them take much memory."""
        with torch.no_grad():
            parts = [float(imitation_loss(self.network, [label], self.device)) for label in labels]
        return float(np.mean(parts))

    def set_rate(self, learning_rate: float) -> None:
        """Sets the learning rate from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def replace_weights(self, weights: Mapping[str, NDArray[np.float32]], learning_rate: float) -> None:
        """Goes on with other weights, of which the optimizer remembers nothing."""
        with torch.no_grad():
            for name, value in weights.items():
                self.parameters[name].copy_(torch.from_numpy(value.copy()))
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=learning_rate)

    def optimizer_arrays(self) -> dict[str, NDArray[np.float32]]:
        """What the optimizer remembers of each weight, by the weight's number and its name there."""
        return {
            f"{index}.{name}": value.detach().cpu().numpy().copy()
            for index, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }

    def restore_optimizer(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Gives the optimizer back what `optimizer_arrays` took."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in arrays.items():
            index, label = name.split(".")
            state.setdefault(int(index), {})[label] = torch.from_numpy(np.array(value))
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def _update(self, loss: Tensor) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        return float(loss.detach())


def imitation_loss(network: PolicyNetwork, labels: Sequence[Label], device: torch.device) -> Tensor:
    """How far a network's choices are from those that cost least, each item counted by what its options differ in.

    Options are scored twice: with their prices, and without any, before anything is placed, as where the policy names
    those that are worth pricing.
    """
    states_JH = _states(network, labels, device)
    first_B = np.cumsum([0, *(len(label.count_N) for label in labels)])[:-1]
    count_J = np.concatenate([label.count_N for label in labels])
    item_O = np.repeat(np.arange(len(count_J)), count_J)
    number_O = np.arange(len(item_O)) - np.repeat(np.cumsum(count_J) - count_J, count_J)
    target_JZ, weight_J = _targets(labels, count_J, item_O, number_O)
    options_OF = _tensor(np.concatenate([label.options_OF for label in labels]), device)
    context_JF = _tensor(np.concatenate([label.context_NF for label in labels]), device)
    of_state_JU, item = network.of_state("option", states_JH), torch.from_numpy(item_O).to(device)
    start_1F = _tensor(START_CONTEXT[None], device)
    unpriced_OF = torch.cat([options_OF[:, :-NUM_PRICES], torch.zeros_like(options_OF[:, -NUM_PRICES:])], dim=1)
    loss = torch.zeros((), device=device)
    for seen_OF, of_context_JU in (
        (options_OF, network.of_context("option", context_JF)),
        (unpriced_OF, network.of_context("option", start_1F).expand(len(count_J), -1)),
    ):
        score_O = network.option_scores(seen_OF, of_state_JU[item], of_context_JU[item])
        score_JZ = score_O.new_full(target_JZ.shape, -1e9)
        score_JZ = score_JZ.index_put((item, torch.from_numpy(number_O).to(device)), score_O)
        cross_J = -(target_JZ.to(device) * functional.log_softmax(score_JZ, dim=1)).sum(dim=1)
        loss = loss + (weight_J.to(device) * cross_J).sum() / weight_J.sum()
    return loss + _place_loss(network, labels, states_JH, first_B, device)


def _states(network: PolicyNetwork, labels: Sequence[Label], device: torch.device) -> Tensor:
    """States of the items of all tasks, one task after the other, shape (J, H)."""
    num_items = [len(label.count_N) for label in labels]
    items_NBF = np.zeros((max(num_items), len(labels), labels[0].items_NF.shape[1]), dtype=np.float32)
    for index, label in enumerate(labels):
        items_NBF[: num_items[index], index] = label.items_NF
    task_BF = _tensor(np.stack([label.task_F for label in labels]), device)
    states_NBH = network.states(task_BF, _tensor(items_NBF, device))
    return torch.cat([states_NBH[:number, index] for index, number in enumerate(num_items)])


def _targets(
    labels: Sequence[Label], count_J: NDArray[np.int64], item_O: NDArray[np.int64], number_O: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """What options should be chosen how often, shape (J, Z), and how much each item counts, (J,)."""
    regret_JZ = np.full((len(count_J), int(count_J.max())), np.inf)
    regret_JZ[item_O, number_O] = np.concatenate([label.regret_O for label in labels])
    shares_JZ = np.exp(-regret_JZ / _TEMPERATURE)
    shares_JZ /= shares_JZ.sum(axis=1, keepdims=True)
    taken_JZ = np.zeros_like(shares_JZ)
    taken_JZ[np.arange(len(count_J)), np.concatenate([label.chosen_N for label in labels])] = 1.0
    target_JZ = _TAKEN_WEIGHT * taken_JZ + (1 - _TAKEN_WEIGHT) * shares_JZ
    known_JZ = np.isfinite(regret_JZ)
    weight_J = np.minimum(np.where(known_JZ, regret_JZ, 0.0), _MOST_REGRET).sum(axis=1) / known_JZ.sum(axis=1)
    return _tensor(target_JZ, "cpu"), _tensor(weight_J + _LEAST_WEIGHT, "cpu")


def _place_loss(
    network: PolicyNetwork,
    labels: Sequence[Label],
    states_JH: Tensor,
    first_B: NDArray[np.int64],
    device: torch.device,
) -> Tensor:
    """How far sites are from those that were taken; sites that look alike count as one."""
    loss, number = torch.zeros((), device=device), 0
    of_state_JU = network.of_state("place", states_JH)
    for label, first in zip(labels, first_B.tolist(), strict=True):
        if not len(label.site_Y):
            continue
        taken_Y1F = np.take_along_axis(label.places_YSF, label.site_Y[:, None, None], axis=1)
        alike_YS = (np.abs(label.places_YSF - taken_Y1F) < 1e-5).all(axis=2) & label.may_YS
        of_context = network.of_context("place", _tensor(label.place_context_YF, device))
        of_state = of_state_JU[torch.from_numpy(first + label.place_at_Y).to(device)]
        score_YS = network.place_scores(_tensor(label.places_YSF, device), of_state[:, None], of_context[:, None])
        score_YS = score_YS.masked_fill(~torch.from_numpy(label.may_YS).to(device), -1e9)
        target_YS = _tensor(alike_YS / alike_YS.sum(axis=1, keepdims=True), device)
        loss = loss - (target_YS * functional.log_softmax(score_YS, dim=1)).sum()
        number += len(label.site_Y)
    return loss / max(number, 1)


def vtrace_loss(network: PolicyNetwork, played: Played, device: torch.device) -> Tensor:
    """V-trace's loss of recorded episodes: of the policy, of the values, and less the entropy.

    Rewards are compared with the mean of the task's episodes, so that easy and hard tasks count alike.

    Source:
        AutoShard Eq. 2 and 3, after IMPALA (Espeholt et al. 2018) Sec. 4.1.
    """
    states_NH = network.states(_tensor(played.seen.task_F, device), _tensor(played.seen.items_NF, device))
    of_state = {head: network.of_state(head, states_NH) for head in ("option", "place")}
    options = [_tensor(options_OF, device) for options_OF in played.seen.options()]
    log_probs, values, entropies = [], [], []
    for one in played.decisions:
        context_EF = _tensor(one.context_EF, device)
        head = "place" if one.is_place else "option"
        of_context = network.of_context(head, context_EF)[:, None]
        if one.places_ESF is not None:
            score_EA = network.place_scores(_tensor(one.places_ESF, device), of_state[head][one.at], of_context)
        else:
            score_EA = network.option_scores(options[one.at], of_state[head][one.at], of_context)
        score_EA = score_EA.masked_fill(~torch.from_numpy(one.mask_EA).to(device), -1e9)
        log_EA = functional.log_softmax(score_EA, dim=1)
        log_probs.append(log_EA.gather(1, torch.from_numpy(one.choice_E).to(device)[:, None])[:, 0])
        entropies.append(-(log_EA.exp() * log_EA).sum(dim=1))
        values.append(network.values(states_NH[one.at].expand(len(context_EF), -1), context_EF))
    log_probs_TE, values_TE, entropy_TE = torch.stack(log_probs), torch.stack(values), torch.stack(entropies)
    counts_TE = _tensor(np.array([one.counts_E for one in played.decisions]), device)
    before_TE = _tensor(np.array([one.log_probs_E for one in played.decisions]), device)
    rewards_TE = torch.zeros_like(values_TE)
    rewards_TE[-1] = _REWARD_SCALE * _tensor(played.rewards_E - 1.0, device)
    discounts_TE = torch.ones_like(values_TE)
    discounts_TE[-1] = 0.0
    log_ratios_TE = ((log_probs_TE - before_TE) * counts_TE).detach()
    returns = vtrace_returns(
        log_ratios_TE, discounts_TE, rewards_TE, values_TE.detach(), torch.zeros_like(values_TE[0])
    )
    advantages_TE = returns.advantages_TB - returns.advantages_TB.mean(dim=1, keepdim=True)
    advantages_TE = advantages_TE / advantages_TE.std().clamp(min=1e-4)
    number = counts_TE.sum().clamp(min=1)
    policy_loss = -(counts_TE * log_probs_TE * advantages_TE).sum() / number
    value_loss = 0.5 * (counts_TE * (returns.targets_TB - values_TE).square()).sum() / number
    entropy_loss = -(counts_TE * entropy_TE).sum() / number
    return policy_loss + _VALUE_WEIGHT * value_loss + _ENTROPY_WEIGHT * entropy_loss


def _tensor(values: NDArray[np.generic], device: torch.device | str) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.float32), device=device)
