"""Tasks as both algorithms play them: whole tables in falling cost, each to be put on a rank.

Shape suffixes: E episodes, N tables in their order, R ranks, F features, L width of a table's representation, B shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from autoshard.core import CostModels
from autoshard.evaluation.evaluate import evaluate
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.placement import PlacementProblem

#: Dimension, rows, pooling factor, size, and 17 reuse bins.
NUM_FEATURES = 21
#: Of what both papers call table features and costs.
_HIDDEN, LATENT = 128, 32
#: Keeps ranks without room from being chosen.
_NO_ROOM = -1e9


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What the oracle says of a finished plan, in milliseconds.

    Attributes:
        parts_R3: Forward kernels, backward kernels and backward exchange of each rank.
        step_ms: The whole step.
    """

    parts_R3: Tensor
    step_ms: float

    @property
    def kernel_ms(self) -> Tensor:
        """Both kernels of each rank, shape (R,)."""
        return self.parts_R3[:, :2].sum(dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class Game:
    """A task.

    Attributes:
        problem: Its tables, all of which are items of their own.
        costs: The oracle's models.
        features_NF: As published; scaled by `Scaling`.
        share_N: Of a rank's memory that each table takes.
    """

    problem: PlacementProblem
    costs: CostModels
    features_NF: Tensor
    share_N: Tensor

    @classmethod
    def of(cls, request: PlanRequest) -> Game:
        """The game of a request; its tables may not have to share ranks."""
        problem = PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel)
        rows = []
        for shard in problem.shards:
            table = shard.table
            lookups = max(1.0, table.pooling_factor * request.tables.batch_size)
            bins = table.access.reuse_bins(lookups, of="lookups")
            size = table.num_embeddings * table.embedding_dim
            rows.append([table.embedding_dim, table.num_embeddings, table.pooling_factor, size, *bins])
        return cls(
            problem=problem,
            costs=request.costs,
            features_NF=torch.tensor(np.array(rows), dtype=torch.float32),
            share_N=torch.tensor(problem.bytes_N / problem.capacity_R.min(), dtype=torch.float32),
        )

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.problem.num_ranks

    def measured(self, ranks_N: Tensor) -> Measured:
        """What the oracle says of tables on ranks."""
        found = evaluate(self.problem.to_plan(ranks_N.numpy()), self.costs)
        parts = [(one.forward_kernel_ms, one.backward_kernel_ms, one.backward_exchange_ms) for one in found.ranks]
        return Measured(parts_R3=torch.tensor(parts, dtype=torch.float32), step_ms=found.step_ms.value)


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """Mean and spread of the features but the bins, over the tables that are trained on."""

    mean_F: Tensor
    spread_F: Tensor

    @classmethod
    def of(cls, games: Sequence[Game]) -> Scaling:
        """That of some tasks."""
        every = torch.cat([game.features_NF for game in games])
        mean, spread = every.mean(dim=0), every.std(dim=0).clamp(min=1e-6)
        mean[4:], spread[4:] = 0.0, 1.0
        return cls(mean_F=mean, spread_F=spread)

    def __call__(self, features_NF: Tensor) -> Tensor:
        """Scaled features."""
        return (features_NF - self.mean_F) / self.spread_F


class Chooser(Protocol):
    """One algorithm."""

    def learn(self, games: Sequence[Game], scaling: Scaling, effort: int, rng: np.random.Generator) -> None:
        """Learns from tasks.

        Args:
            games: The tasks.
            scaling: Of their features.
            effort: Times as much as published.
            rng: Draws tasks and what is learned from; choices are drawn by torch.
        """

    def order(self, features_NF: Tensor) -> Tensor:
        """Tables by falling cost, as it expects the cost of each alone."""

    def start(self, features_NF: Tensor) -> None:
        """Looks at the tables of a task, in their order."""

    def logits(self, number: int, held_ENR: Tensor, filled_ER: Tensor) -> Tensor:
        """Scores of the ranks for table `number`, shape (E, R).

        Args:
            number: The table; those before it are placed.
            held_ENR: 1 where one of these is on a rank.
            filled_ER: Shares of the ranks' memory that they take.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Episodes of one task.

    Attributes:
        game: The task.
        order_N: Index in the task of each table, in the order in which they are placed.
        features_NF: Scaled features, in this order.
        share_N: Of a rank's memory that each takes, in this order.
        chosen_EN: Their ranks.
    """

    game: Game
    order_N: Tensor
    features_NF: Tensor
    share_N: Tensor
    chosen_EN: Tensor

    def measured(self, episode: int) -> Measured:
        """What the oracle says of an episode's plan."""
        ranks_N = torch.empty_like(self.order_N)
        ranks_N[self.order_N] = self.chosen_EN[episode]
        return self.game.measured(ranks_N)


def table_encoder() -> nn.Sequential:
    """Both papers': two layers."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, LATENT), nn.ReLU())


def head(width: int = LATENT) -> nn.Sequential:
    """A cost of a representation: two layers."""
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))


@torch.no_grad()
def play(chooser: Chooser, game: Game, scaling: Scaling, episodes: int, *, greedy: bool = False) -> Played:
    """Plays a task; a table that fits nowhere goes where the memory is filled least.

    Args:
        chooser: Scores ranks.
        game: The task.
        scaling: Of features.
        episodes: How often.
        greedy: Whether to choose the best score, else by chance.
    """
    features_NF = scaling(game.features_NF)
    order_N = chooser.order(features_NF)
    features_NF, share_N = features_NF[order_N], game.share_N[order_N]
    held_ENR = torch.zeros(episodes, len(order_N), game.num_ranks)
    filled_ER = torch.zeros(episodes, game.num_ranks)
    chosen_EN = torch.zeros(episodes, len(order_N), dtype=torch.int64)
    every = torch.arange(episodes)
    chooser.start(features_NF)
    for number in range(len(order_N)):
        logits_ER = chooser.logits(number, held_ENR[:, :number], filled_ER)
        logits_ER = torch.where(filled_ER + share_N[number] <= 1, logits_ER, _NO_ROOM * (1 + filled_ER))
        rank_E = logits_ER.argmax(dim=1) if greedy else torch.multinomial(logits_ER.softmax(dim=1), 1)[:, 0]
        chosen_EN[:, number] = rank_E
        held_ENR[every, number, rank_E] = 1
        filled_ER[every, rank_E] += share_N[number]
    return Played(game, order_N, features_NF, share_N, chosen_EN)


def held_before(chosen_EN: Tensor, num_ranks: int) -> Tensor:
    """Whether table m is on a rank when table n is placed, shape (E, N, M, R)."""
    held_EMR = nn.functional.one_hot(chosen_EN, num_ranks).float()
    number_of = chosen_EN.shape[1]
    before_NM = torch.ones(number_of, number_of).tril(diagonal=-1)
    return held_EMR[:, None] * before_NM[None, :, :, None]


class ShardCosts:
    """Shards whose costs were measured, of which costs are learned."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._features: list[Tensor] = []
        self._costs: list[Tensor] = []

    def add(self, features_NF: Tensor, chosen_N: Tensor, cost_RX: Tensor) -> None:
        """Takes in the shards of a plan; those without tables are none."""
        for rank in chosen_N.unique().tolist():
            self._features.append(features_NF[chosen_N == rank])
            self._costs.append(cost_RX[rank])
        del self._features[: -self._most], self._costs[: -self._most]

    def drawn(self, number: int, rng: np.random.Generator) -> tuple[list[Tensor], Tensor]:
        """Features of the tables of some shards, and their costs, shape (B, X)."""
        picked = rng.integers(len(self._costs), size=number).tolist()
        return [self._features[index] for index in picked], torch.stack([self._costs[index] for index in picked])


def shard_sums(latent: nn.Module, shards: Sequence[Tensor]) -> Tensor:
    """Sums of the representations of each shard's tables, shape (B, L)."""
    sizes = torch.tensor([len(one) for one in shards])
    of_tables = latent(torch.cat(list(shards)))
    sums = torch.zeros(len(shards), of_tables.shape[1])
    return sums.index_add(0, torch.arange(len(shards)).repeat_interleave(sizes), of_tables)


def drawn_game(games: Sequence[Game], rng: np.random.Generator) -> Game:
    """One of them."""
    return games[int(rng.integers(len(games)))]
