"""AutoShard's Table 2: the policy without parts of its network, without learning, and on costs without features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from autoshard.core import KernelCosts, LocalShard
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.errors import InvalidOptionError
from autoshard.formats.stores.samples import read_samples
from autoshard.planners.space.placement import PlacementProblem, RankArray
from autoshard.report.images import Section
from autoshard.table import Table
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import shard_features
from costmodel.kernel.predictor import CostPredictor
from costmodel.kernel.training import CostTrainingOptions, train_cost_model
from env import PlacementTask
from policies.planning.decoding import decode
from policies.planning.tasks import whole_tables
from policies.training.scores import score_placements
from studies.cost_models.evaluation import FULL, REMOVALS, without
from studies.frame import Numbers
from studies.policies.charts import Panel, bar_chart
from studies.policies.figures.heuristics import compare_seed
from studies.policies.lab import COST_GREEDY, POLICY, RANDOM, EvaluationSettings, Figure, Found, Lab, Part
from studies.policies.scores import PlannerScores, planner_scores, write_factor, write_share, write_time
from studies.policies.trained import NetworkPart, train_network

WHOLE: Final = "whole"
_WITHOUT_RL: Final = "without learning: greedy on the cost model"
#: Groups of features that the paper removes, with its names and results: balance in percent, speed-up over random.
_PAPER_FEATURES: Final[Mapping[str, tuple[str, str]]] = {
    "dimension": ("dimension", "87.6% ± 1.5, 1.706 ± 0.056"),
    "rows (hash size)": ("hash size", "87.8% ± 0.9, 1.702 ± 0.047"),
    "pooling factor": ("pooling factor", "45.9% ± 1.9, 1.271 ± 0.035"),
    "table size": ("size", "87.0% ± 1.1, 1.683 ± 0.049"),
    "access distribution": ("distribution", "84.3% ± 1.3, 1.688 ± 0.035"),
}
_PAPER_WHOLE: Final = "88.6% ± 1.2, 1.712 ± 0.027"
#: Without any cost model; the nearest here is a policy whose network reads no prices.
_PAPER_NO_COSTS: Final = "61.3% ± 12.9, 1.420 ± 0.203"


class FeaturelessCostModel:
    """Prices whole tables of a pool with a network that was trained without some of their features.

    Args:
        predictor: The network.
        codes: Codes of the tables, by what a rank that holds them alone runs.
        removed: The features.
    """

    def __init__(self, predictor: CostPredictor, codes: Mapping[LocalShard, CodeArray], removed: str) -> None:
        self._predictor = predictor
        self._codes = codes
        self.name = f"learned, without {removed}"

    @classmethod
    def train(cls, lab: Lab, removed: str, seed: int) -> FeaturelessCostModel:
        """Trains one on the samples of the lab's store."""
        if lab.settings.store is None:
            raise InvalidOptionError("needs the folder of samples that cost models are trained from", field="--store")
        tables = whole_tables(lab.pool, lab.settings.device)
        dataset = CostDataset.from_samples(read_samples(lab.settings.store, lab.settings.device))
        # Samples and tables lose features together, so that both get the same values instead.
        blind = without(_with_tables(dataset, tables), removed)
        options = CostTrainingOptions(num_updates=lab.settings.cost_updates)
        trained = train_cost_model(blind, device=lab.settings.device, options=options, seed=seed)
        predictor = trained.model.predictor
        codes_UH = predictor.encode(blind.features_UF[-len(tables) :])
        return cls(predictor, dict(zip(tables, codes_UH, strict=True)), removed)

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of whole tables of the pool; shape (N, H)."""
        return np.stack([self._codes[shard] for shard in shards])

    def predict_ms(self, codes_SH: CodeArray) -> MsArray:
        """Kernel time in milliseconds, forward plus backward."""
        kernel_ms_S: MsArray = self._predictor.predict(codes_SH).sum(axis=1)
        return kernel_ms_S

    def predict_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """As `predict_ms`, with forward and backward apart, without an interval."""
        parts_SO = self._predictor.predict(codes_SH)
        kernel_ms_S = parts_SO.sum(axis=1)
        return KernelCosts(
            forward_ms_S=parts_SO[:, 0], backward_ms_S=parts_SO[:, 1], low_ms_S=kernel_ms_S, high_ms_S=kernel_ms_S
        )


def _with_tables(dataset: CostDataset, tables: Sequence[LocalShard]) -> CostDataset:
    """The dataset with shards that no sample holds, at the end."""
    return CostDataset(
        shards_U=(*dataset.shards_U, *tables),
        features_UF=np.concatenate([dataset.features_UF, shard_features(tables)]),
        shard_N=dataset.shard_N,
        num_shards_S=dataset.num_shards_S,
        set_S=dataset.set_S,
        latency_ms_SO=dataset.latency_ms_SO,
    )


def _run_network(part: NetworkPart | None, seed: int, lab: Lab) -> Numbers:
    """Placements by a policy without a part of its network; None for a whole one."""
    registry = lab.policy_registry(seed, name=_slug(part) if part else WHOLE, without=part)
    problems = lab.problems(lab.test_seeds(seed))
    placements = decode(lab.network(registry), [PlacementTask.of(problem) for problem in problems])
    return {"tasks": _scored(lab, seed, problems, placements.ranks)}


def _run_features(removed: str, seed: int, lab: Lab) -> Numbers:
    """Placements by a policy trained on a cost model without some features; priced with all of them."""
    model = FeaturelessCostModel.train(lab, removed, seed)

    def blind(problems: Sequence[PlacementProblem]) -> list[PlacementProblem]:
        return [PlacementProblem.table_wise(problem.tables, problem.topology, model) for problem in problems]

    network = train_network(
        blind(lab.problems(lab.train_seeds(seed))),
        blind(lab.problems(lab.validation_seeds())),
        seed=seed,
        num_updates=lab.settings.num_updates,
        folder=lab.checkpoints(f"{_slug(f'features {removed}')}-{seed}"),
    )
    problems = lab.problems(lab.test_seeds(seed))
    placements = decode(network, [PlacementTask.of(problem) for problem in blind(problems)])
    return {"tasks": _scored(lab, seed, problems, placements.ranks)}


def _scored(
    lab: Lab, seed: int, problems: Sequence[PlacementProblem], placements: Sequence[RankArray]
) -> list[Numbers]:
    """Scores by the whole cost model, beside those of planners on the same tasks."""
    tasks: list[Numbers] = []
    known = compare_seed(lab, seed)["tasks"]
    for numbers, problem, ranks_N in zip(known, problems, placements, strict=True):
        own = score_placements([problem], [ranks_N]).to_json()
        tasks.append({RANDOM: numbers[RANDOM], COST_GREEDY: numbers[COST_GREEDY], POLICY: own})
    return tasks


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower()).strip("-")


def _variants(settings: EvaluationSettings) -> dict[str, partial[Numbers]]:
    """Runs of each seed, by name."""
    found: dict[str, partial[Numbers]] = {WHOLE: partial(_run_network, None)}
    found |= {f"network {part}": partial(_run_network, part) for part in NetworkPart}
    if settings.store is not None:
        assert set(_PAPER_FEATURES) <= set(REMOVALS)
        found |= {f"features {removed}": partial(_run_features, removed) for removed in (FULL, *_PAPER_FEATURES)}
    return found


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return [
        Part(f"{_slug(name)}-{seed}", partial(run, seed))
        for name, run in _variants(settings).items()
        for seed in range(settings.num_seeds)
    ]


def _show(found: Found, settings: EvaluationSettings) -> Section:
    scores: dict[str, PlannerScores] = {}
    paper: dict[str, str] = {}
    for name in _variants(settings):
        parts = [found[f"{_slug(name)}-{seed}"] for seed in range(settings.num_seeds)]
        title, theirs = _described(name)
        for planner, written in ((POLICY, title), *([(COST_GREEDY, _WITHOUT_RL)] if name == WHOLE else [])):
            one = planner_scores(parts, planner)
            if one is not None:
                scores[written] = one
        paper[title] = theirs
    bars = {"balance": {name: one.balance for name, one in scores.items()}}
    speedups = {"speedup": {name: one.speedup for name, one in scores.items() if one.speedup}}
    lines = tuple(
        (name, write_share(one.balance), write_time(one.max_ms), write_factor(one.speedup), paper.get(name, ""))
        for name, one in scores.items()
    )
    table = Table(
        columns=("policy", "balance", "slowest rank, ms", f"speed-up over {RANDOM}", "AutoShard's paper"),
        rows=lines,
        caption="Without parts; means and deviations over seeds",
    )
    features = (
        "Costs without features: a cost model is trained on samples that lack them, a policy on that model; "
        f"{settings.cost_updates:,} updates for each cost model, also where no feature is left out."
        if settings.store is not None
        else "Cost models without features need --store, which was not given."
    )
    return Section(
        title=FIGURE.title,
        caption=f"Test tasks of Fig. 8; every plan is priced by the whole cost model. {features} Networks without a "
        "part are trained anew, with that part's weights at zero. Without prices of the ranks, their codes remain, "
        "from which a network can learn the cost model's prices; the paper's policy without a cost model has neither.",
        figure=bar_chart(
            [
                Panel(title="degree of balance", bars=bars, is_percent=True),
                Panel(title="speed-up over random", bars=speedups),
            ]
        ),
        tables=(table,),
    )


def _described(name: str) -> tuple[str, str]:
    """Name of a variant in tables, and its result in the paper."""
    kind, _, part = name.partition(" ")
    if name == WHOLE:
        return "whole", _PAPER_WHOLE
    if kind == "network":
        return f"without {part}", _PAPER_NO_COSTS + " (no cost model)" if part == NetworkPart.RANK_COSTS else ""
    if part == FULL:
        return "costs trained anew, with all features", ""
    return f"costs without {_PAPER_FEATURES[part][0]}", _PAPER_FEATURES[part][1]


FIGURE = Figure(name="table2", title="Without parts (AutoShard, Table 2)", parts=_parts, show=_show)
