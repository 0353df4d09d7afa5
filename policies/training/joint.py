"""Training of policy and cost model together, with one encoder for both.

Shape suffixes: T steps, E episodes, P tasks, N items, M tables, R ranks, H width of a code, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from autoshard.core import Tier
from autoshard.core.costs import CodeArray, MsArray
from autoshard.planners.refine import MeasurePlans
from autoshard.planners.space.placement import PlacementProblem, RankArray
from costmodel.kernel.features import FeatureArray, shard_features
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.updates.batches import uploaded
from env import CHOICE_CODES, ITEM_CODE, PlacementTask
from policies.algorithms.training_options import TrainingOptions, VTraceSettings
from policies.algorithms.trajectories import Tensors, Trajectories
from policies.algorithms.vtrace import VTrace
from policies.network.actor_critic import PlacementPolicy
from policies.network.weights import with_prefix
from policies.training.checkpoint import PolicyCheckpoint
from policies.training.joint_cost import JointCost
from policies.training.scores import Baselines
from policies.training.trainer import Evaluation, PolicyTrainer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskTables:
    """Features of a problem's tables, from which codes are made anew whenever the encoder has changed.

    Attributes:
        features_MF: Not scaled.
        item_M: Item that each table belongs to.
    """

    features_MF: FeatureArray
    item_M: NDArray[np.int64]

    @classmethod
    def of(cls, problem: PlacementProblem) -> TaskTables:
        """Those of a problem."""
        item_M = np.empty(len(problem.shards), dtype=np.int64)
        for item, members in enumerate(problem.members):
            item_M[list(members)] = item
        return cls(features_MF=shard_features(problem.locals_by(Tier.TABLE_WISE)), item_M=item_M)

    def repriced(self, problem: PlacementProblem, model: LearnedCostModel, codes_MH: CodeArray) -> PlacementProblem:
        """The problem with the codes that another model has for its tables."""
        codes_NH = np.zeros((problem.num_items, codes_MH.shape[1]), dtype=np.float32)
        np.add.at(codes_NH, self.item_M, codes_MH)
        return replace(problem, codes_WNH=codes_NH[None], kernel_ms_N=model.predict_ms(codes_NH), model=model)


class JointVTrace(VTrace):
    """V-trace whose gradients reach the encoder: the learner makes the codes that it reads from features.

    Source:
        AutoShard Sec. 4.5. Prices are inputs, through which no gradient flows.
    """

    trainer: JointTrainer

    def learner_observations(self, data: Trajectories) -> Tensors:
        """The observations, with codes that the cost model makes anew, so that gradients reach it."""
        assert not data.starts_TE.numpy()[1:].any(), "rank codes are sums from the start of an episode"
        tasks_P, place_E = np.unique(data.tasks_TE.numpy()[0], return_inverse=True)
        tasks = [self.trainer.train_tasks[task] for task in tasks_P.tolist()]
        assert tasks[0].num_actions == tasks[0].num_ranks, "codes of other choices would have to be made anew too"
        codes_PNH = torch.stack([self.trainer.codes(task) for task in tasks_P.tolist()])
        device = codes_PNH.device
        codes_TEH = codes_PNH[uploaded(place_E, device)].swapaxes(0, 1)
        num_ranks = data.observations[CHOICE_CODES].shape[2]
        chosen_TER = functional.one_hot(data.actions_TE, num_ranks).to(codes_TEH.dtype)
        placed_TERH = chosen_TER[..., None] * codes_TEH[:, :, None]
        before_TERH = placed_TERH.cumsum(dim=0) - placed_TERH
        scales_E2 = [(tasks[place].item_scale, tasks[place].rank_scale) for place in place_E]
        item_scale_E, rank_scale_E = uploaded(np.array(scales_E2, dtype=np.float32), device).unbind(dim=1)
        return {
            **data.observations,
            ITEM_CODE: codes_TEH / item_scale_E[:, None],
            CHOICE_CODES: before_TERH / rank_scale_E[:, None, None],
        }


class JointTrainer(PolicyTrainer):
    """Trains a network and the cost model that it reads, as AutoShard's Algorithm 1.

    Every update of the policy also changes the encoder, and is followed by updates of the cost model; then all
    tasks are encoded and priced anew. Scores of different cost models cannot be compared, so the last weights are
    kept, not the best. A cost model that begins with nothing prices tables at random until the first placements are
    measured.

    Args:
        train: As for PolicyTrainer, encoded by `cost.model()`, as are those for validation.
        validation: As for PolicyTrainer.
        cost: The cost model in training, on the same device as the policy.
        options: How to train.
        seed: As for PolicyTrainer.
        measure: As for PolicyTrainer; every rank's measurement becomes a sample.

    Raises:
        InvalidOptionError: If `options` name what cannot train a cost model along: PPO, or actors of other processes;
            or if several processes are to train.

    Source:
        AutoShard Sec. 4.5, Algorithm 1 and C.2.
    """

    algorithm: JointVTrace
    _is_joint = True

    def __init__(
        self,
        train: Sequence[PlacementProblem],
        validation: Sequence[PlacementProblem],
        *,
        cost: JointCost,
        options: TrainingOptions | None = None,
        seed: int = 0,
        measure: MeasurePlans | None = None,
    ) -> None:
        self.cost = cost
        self._train_tables = [TaskTables.of(problem) for problem in train]
        self._validation_tables = [TaskTables.of(problem) for problem in validation]
        super().__init__(train, validation, options=options, seed=seed, measure=measure, learners=cost.learners)
        self.algorithm.trainer = self
        self.algorithm.policy.optimizer.add_param_group({"params": list(cost.encoder.parameters())})

    def _make_algorithm(self, settings: VTraceSettings) -> VTrace:
        device = self.cost.learners.device
        return JointVTrace(PlacementPolicy, self.measured or self.env, settings, seed=self.seed, device=device)

    def codes(self, task: int) -> Tensor:
        """Codes of a training task's items in the order in which they are placed, with gradients; shape (N, H)."""
        tables, order_N = self._train_tables[task], self.train_tasks[task].order_N
        position_N = np.argsort(order_N)
        device = self.cost.learners.device
        learned_MH = self.cost.encoder(uploaded(self.cost.scaling.apply(tables.features_MF), device))
        # The last numbers of a code count tables, and those unlike all that were measured, as in CostPredictor.
        count_M1 = learned_MH.new_ones((len(learned_MH), 1))
        codes_MH = torch.cat([learned_MH, count_M1, torch.zeros_like(count_M1)], dim=1)
        position_M = uploaded(position_N[tables.item_M], device)
        return codes_MH.new_zeros((len(order_N), codes_MH.shape[1])).index_add(0, position_M, codes_MH)

    def update(self) -> None:
        """Updates the policy, then the cost model."""
        super().update()
        self.cost.train()
        self._reprice()

    def _reprice(self) -> None:
        model, predictor = self.cost.model(), self.cost.predictor()
        tables = [*self._train_tables, *self._validation_tables]
        ends = np.cumsum([len(task.features_MF) for task in tables])
        codes = np.split(predictor.encode(np.concatenate([task.features_MF for task in tables])), ends[:-1])
        tasks = [
            PlacementTask.of(task_tables.repriced(task.problem, model, codes_MH))
            for task_tables, task, codes_MH in zip(
                tables, [*self.train_tasks, *self.validation_tasks], codes, strict=True
            )
        ]
        self.train_tasks = tasks[: len(self.train_tasks)]
        self.validation_tasks = tasks[len(self.train_tasks) :]
        self.algorithm.begin_episodes(self.env.replace_tasks(self.train_tasks))

    def _on_measured(self, problem: PlacementProblem, ranks_N: RankArray, cost_ms_R: MsArray) -> None:
        tables = TaskTables.of(problem)
        rank_M = ranks_N[tables.item_M]
        for rank, cost_ms in enumerate(cost_ms_R):
            if (rank_M == rank).any():
                self.cost.add_measured(tables.features_MF[rank_M == rank], float(cost_ms))

    @override
    def _is_best(self, evaluation: Evaluation) -> bool:
        return True

    def _baselines(self) -> Baselines:
        return Baselines.of_tasks(self.validation_tasks)

    def checkpoint(self) -> PolicyCheckpoint:
        """As PolicyTrainer, with the cost model; measured samples are not kept."""
        mine, cost = super().checkpoint(), self.cost.checkpoint()
        tensors = {**mine.tensors, **{f"cost.{name}": value for name, value in cost.tensors.items()}}
        return PolicyCheckpoint(state={**mine.state, "cost": cost.state}, tensors=tensors)

    def restore(self, checkpoint: PolicyCheckpoint, source: str) -> None:
        """As PolicyTrainer, with the cost model."""
        super().restore(checkpoint, source)
        rng = torch.get_rng_state()
        cost = PolicyCheckpoint(state=checkpoint.state["cost"], tensors=with_prefix(checkpoint.tensors, "cost."))
        self.cost.restore(cost, source)
        self._reprice()
        torch.set_rng_state(rng)

    def _identity(self) -> dict[str, Any]:
        # Prices change as the cost model does, so they identify nothing here.
        return {**super()._identity(), "total_ms": None, "even_objective_ms": None, "num_samples": self.cost.num_stored}
