"""DreamShard: a cost network that is learned from measured plans, and a policy that is learned inside of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from studies.planners.reinforced.games import (
    LATENT,
    Game,
    Played,
    Scaling,
    ShardCosts,
    drawn_game,
    head,
    held_before,
    play,
    shard_sums,
    table_encoder,
)

#: As published: of an iteration, plans that are measured, batches of costs and of episodes, and their sizes.
_MEASURED, _COST_BATCHES, _COST_BATCH, _RL_BATCHES, _EPISODES = 10, 300, 64, 10, 10
_ITERATIONS, _LEARNING_RATE, _ENTROPY = 10, 5e-4, 1e-3
#: Shards that are remembered: all of them.
_MOST_SHARDS = 1 << 20


class DreamShard(nn.Module):
    """Its networks, and how they place tables.

    Source:
        DreamShard (Zha et al., NeurIPS 2022), Sec. 3, and train.py, training.py and models.py of its published code,
        whose sizes and rates these are. Differs: features are scaled over all tables that are trained on; a shard
        without tables has no representation instead of that of zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost_tables, self.policy_tables = table_encoder(), table_encoder()
        self.parts = nn.ModuleList([head() for _ in range(3)])
        self.overall = head()
        self.cost_features = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, LATENT), nn.ReLU())
        self.score = nn.Linear(2 * LATENT, 1)
        self._cost_NL = self._policy_NL = torch.zeros(0, LATENT)

    def learn(self, games: Sequence[Game], scaling: Scaling, effort: int, rng: np.random.Generator) -> None:
        """See `Chooser`."""
        optimizer = torch.optim.Adam(self.parameters(), lr=_LEARNING_RATE)
        iterations = effort * _ITERATIONS
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - number / iterations)
        shards, plans = ShardCosts(_MOST_SHARDS), _Plans()
        for _ in range(iterations):
            for _ in range(_MEASURED):
                played = play(self, drawn_game(games, rng), scaling, 1)
                measured = played.measured(0)
                shards.add(played.features_NF, played.chosen_EN[0], measured.parts_R3)
                plans.add(played, measured.step_ms)
            for _ in range(_COST_BATCHES):
                optimizer.zero_grad()
                self._cost_loss(shards, plans, rng).backward()
                optimizer.step()
            for _ in range(_RL_BATCHES):
                played = play(self, drawn_game(games, rng), scaling, _EPISODES)
                optimizer.zero_grad()
                self._policy_loss(played).backward()
                optimizer.step()
            rate.step()

    @torch.no_grad()
    def order(self, features_NF: Tensor) -> Tensor:
        """Tables by falling cost, as the cost network sees each alone."""
        return self._costs(self.cost_tables(features_NF)).sum(dim=-1).argsort(descending=True, stable=True)

    def start(self, features_NF: Tensor) -> None:
        """See `Chooser`."""
        self._cost_NL, self._policy_NL = self.cost_tables(features_NF).detach(), self.policy_tables(features_NF)

    def logits(self, number: int, held_ENR: Tensor, filled_ER: Tensor) -> Tensor:
        """See `Chooser`; what is placed next is not looked at, as published."""
        del filled_ER
        of_policy = torch.einsum("enr,nl->erl", held_ENR, self._policy_NL[:number])
        return self._scores(of_policy, torch.einsum("enr,nl->erl", held_ENR, self._cost_NL[:number]))

    def _scores(self, policy_ERL: Tensor, cost_ERL: Tensor) -> Tensor:
        costs = self.cost_features(self._costs(cost_ERL).detach())
        return self.score(torch.cat([policy_ERL, costs], dim=-1))[..., 0]

    def _costs(self, sums_L: Tensor) -> Tensor:
        return torch.cat([part(sums_L) for part in self.parts], dim=-1)

    def _cost_loss(self, shards: ShardCosts, plans: _Plans, rng: np.random.Generator) -> Tensor:
        of_shards, cost_B3 = shards.drawn(_COST_BATCH, rng)
        parts = ((self._costs(shard_sums(self.cost_tables, of_shards)) - cost_B3) ** 2).mean(dim=0).sum()
        step_B, target_B = plans.drawn(self, _COST_BATCH, rng)
        return parts + ((step_B - target_B) ** 2).mean()

    def _step_ms(self, latent_NL: Tensor, held_XNR: Tensor) -> Tensor:
        """What the cost network expects of plans, shape (X,)."""
        sums_XRL = torch.einsum("xnr,nl->xrl", held_XNR, latent_NL)
        return self.overall(sums_XRL.max(dim=1).values)[:, 0]

    def _policy_loss(self, played: Played) -> Tensor:
        chosen_EN, num_ranks = played.chosen_EN, played.game.num_ranks
        self.start(played.features_NF)
        with torch.no_grad():
            reward_E = -self._step_ms(self._cost_NL, nn.functional.one_hot(chosen_EN, num_ranks).float())
        held_ENMR = held_before(chosen_EN, num_ranks)
        policy_ENRL = torch.einsum("enmr,ml->enrl", held_ENMR, self._policy_NL)
        cost_ENRL = torch.einsum("enmr,ml->enrl", held_ENMR, self._cost_NL)
        logs = self._scores(policy_ENRL, cost_ENRL).log_softmax(dim=-1)
        advantage_E = (reward_E - reward_E.mean()) / (reward_E.std() + 1e-8)
        of_chosen_EN = logs.gather(-1, chosen_EN[..., None])[..., 0]
        entropy = -(logs.exp() * logs).sum(dim=-1).mean()
        return -(of_chosen_EN * advantage_E[:, None]).mean() - _ENTROPY * entropy


class _Plans:
    """Measured plans and their steps."""

    def __init__(self) -> None:
        self._played: list[Played] = []
        self._steps_ms: list[float] = []

    def add(self, played: Played, step_ms: float) -> None:
        """Takes in the plan of the one episode."""
        self._played.append(played)
        self._steps_ms.append(step_ms)

    def drawn(self, net: DreamShard, number: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """What the cost network expects of some, and what was measured, shape (B,)."""
        picked = rng.integers(len(self._played), size=number).tolist()
        plans, num_ranks = [self._played[index] for index in picked], self._played[0].game.num_ranks
        sizes = torch.tensor([len(one.order_N) for one in plans])
        place = torch.arange(number).repeat_interleave(sizes) * num_ranks
        place += torch.cat([one.chosen_EN[0] for one in plans])
        latent = net.cost_tables(torch.cat([one.features_NF for one in plans]))
        sums = torch.zeros(number * num_ranks, LATENT).index_add(0, place, latent).view(number, num_ranks, LATENT)
        return net.overall(sums.max(dim=1).values)[:, 0], torch.tensor([self._steps_ms[index] for index in picked])
