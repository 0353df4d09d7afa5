"""AutoShard: an LSTM actor and critic that is rewarded for the balance of the ranks' kernels."""

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

#: As published: placements in all, episodes of an update, batches of costs after it and their size, shards remembered.
_PLACEMENTS, _EPISODES, _COST_BATCHES, _COST_BATCH, _MOST_SHARDS = 100_000, 8, 20, 512, 5_000
_LEARNING_RATE, _ENTROPY, _BASELINE, _MOST_NORM = 1e-3, 1e-3, 0.5, 40.0
_STATE = 2 * LATENT


class AutoShard(nn.Module):
    """Its network, and how it places tables.

    Source:
        AutoShard (Zha et al., KDD 2022), Sec. 4, and run_autoshard.py, training.py and bench.py of its published code,
        whose sizes and rates these are. Differs: actors and learner take turns, so that V-trace's returns are those of
        the episodes, and an unroll is an episode; tables are never placed where they do not fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.progress = table_encoder(), nn.Sequential(nn.Linear(1, LATENT), nn.ReLU())
        self.core = nn.LSTM(_STATE, _STATE, 2, batch_first=True)
        self.of_rank = nn.Sequential(nn.Linear(2, LATENT), nn.ReLU())
        layers = [nn.Linear(3 * _STATE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()]
        self.score = nn.Sequential(*layers, nn.Linear(64, 1))
        self.value, self.cost = head(_STATE), head()
        self._latent_NL, self._state_NS = torch.zeros(0, LATENT), torch.zeros(0, _STATE)

    def learn(self, games: Sequence[Game], scaling: Scaling, effort: int, rng: np.random.Generator) -> None:
        """See `Chooser`."""
        optimizer = torch.optim.Adam(self.parameters(), lr=_LEARNING_RATE)
        placements = effort * _PLACEMENTS
        updates = max(1, placements // (_EPISODES * len(games[0].share_N)))
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - min(number, updates - 1) / updates)
        shards = ShardCosts(_MOST_SHARDS)
        for _ in range(updates):
            played = play(self, drawn_game(games, rng), scaling, _EPISODES)
            kernel_ms = [played.measured(episode).kernel_ms for episode in range(_EPISODES)]
            balance_E = torch.stack([one.min() / one.max() for one in kernel_ms])
            self._learn(optimizer, self._loss(played, balance_E))
            rate.step()
            for chosen_N, kernel_ms_R in zip(played.chosen_EN, kernel_ms, strict=True):
                shards.add(played.features_NF, chosen_N, kernel_ms_R)
            for _ in range(_COST_BATCHES):
                drawn, cost_B = shards.drawn(_COST_BATCH, rng)
                self._learn(optimizer, ((self.cost(shard_sums(self.tables, drawn))[:, 0] - cost_B) ** 2).mean())

    @torch.no_grad()
    def order(self, features_NF: Tensor) -> Tensor:
        """See `Chooser`."""
        return self.cost(self.tables(features_NF))[:, 0].argsort(descending=True, stable=True)

    def start(self, features_NF: Tensor) -> None:
        """See `Chooser`. What the LSTM reads is the tables in their order, wherever they are put."""
        self._latent_NL = self.tables(features_NF)
        share_N1 = torch.arange(len(features_NF))[:, None] / len(features_NF)
        self._state_NS = self.core(torch.cat([self._latent_NL, self.progress(share_N1)], dim=1)[None])[0][0]

    def logits(self, number: int, held_ENR: Tensor, filled_ER: Tensor) -> Tensor:
        """See `Chooser`."""
        sums_ERL = torch.einsum("enr,nl->erl", held_ENR, self._latent_NL[:number])
        return self._scores(sums_ERL, filled_ER, self._state_NS[number])

    def _scores(self, sums_XRL: Tensor, filled_XR: Tensor, state_XS: Tensor) -> Tensor:
        with torch.no_grad():
            cost_XR = self.cost(sums_XRL)[..., 0]
        other = self.of_rank(torch.stack([cost_XR, filled_XR], dim=-1))
        actions = torch.cat([sums_XRL, other], dim=-1)
        state = state_XS[..., None, :].expand_as(actions)
        return self.score(torch.cat([state, actions, state * actions], dim=-1))[..., 0]

    def _loss(self, played: Played, reward_E: Tensor) -> Tensor:
        self.start(played.features_NF)
        held_ENMR = held_before(played.chosen_EN, played.game.num_ranks)
        sums_ENRL = torch.einsum("enmr,ml->enrl", held_ENMR, self._latent_NL)
        filled_ENR = torch.einsum("enmr,m->enr", held_ENMR, played.share_N)
        logs = self._scores(sums_ENRL, filled_ENR, self._state_NS[None].expand(len(reward_E), -1, -1)).log_softmax(-1)
        of_chosen_EN = logs.gather(-1, played.chosen_EN[..., None])[..., 0]
        ahead_EN = reward_E[:, None] - self.value(self._state_NS)[None, :, 0]
        entropy = -(logs.exp() * logs).sum()
        gained = -(of_chosen_EN * ahead_EN.detach()).sum()
        return gained + _BASELINE * 0.5 * (ahead_EN**2).sum() - _ENTROPY * entropy

    def _learn(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), _MOST_NORM)
        optimizer.step()
