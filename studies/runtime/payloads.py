"""What narrow payloads cost in quality: `python -m studies payloads`.

A DLRM is trained on planted clicks with every number format on the wire, forward, backward and both ways, and its
normalised entropy on held-out clicks is compared with that of fp32, seed by seed.

Shape suffixes: B samples of a local batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import plotly.graph_objects as go
import torch
import torch.distributed as dist
import typer

from autoshard.commands.options import command_options
from autoshard.core import (
    DType,
    Exchange,
    Level,
    Link,
    MemoryBytes,
    Payload,
    PlacedShard,
    Shard,
    ShardingPlan,
    Split,
    Tier,
    Topology,
)
from autoshard.formats import read_plan
from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, in_house_style
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.dense import DenseModel
from autoshard.runtime.training.step import distributed_step
from autoshard.table import Table
from studies.frame import Machine, OutputOptions, PartsOption, PartStore, StudyResult, Summary
from studies.frame.jobs import do_job, run_job
from studies.runtime.clicks import ClickModel, Purpose, batches, entropy_of, held_out_entropy, planted


def _trained(
    model: ClickModel,
    *,
    plan_path: str,
    seed: int,
    weights_seed: int,
    steps: int,
    held_out: int,
    learning_rate: float,
) -> dict[str, Any]:
    plan = read_plan(plan_path)
    assert plan.tables.dense is not None, "clicks come with dense layers"
    settings = FusedSettings(learning_rate=learning_rate, seed=weights_seed)
    embeddings = ShardedEmbeddings(plan, settings)
    dense = DenseModel(plan.tables.dense, embeddings.feature_dims, weights_seed)
    training = distributed_step(embeddings, plan.tables, dense, learning_rate)
    B = embeddings.local_batch_size
    for samples in batches(model, seed, B, Purpose.TRAINING, steps):
        training(samples)
    own_bytes = torch.tensor([value / steps for value in embeddings.sent_bytes().values()], dtype=torch.float64)
    dist.all_reduce(own_bytes)
    tested = batches(model, seed, B, Purpose.HELD_OUT, held_out)
    found = held_out_entropy(embeddings, dense, tested)
    sent_bytes = dict(zip(embeddings.sent_bytes(), own_bytes.tolist(), strict=True))
    embeddings.close()
    best_B = torch.cat([planted(model, seed).logits(samples) for samples in tested])
    return {"normalised_entropy": found, "best_entropy": entropy_of(best_B, tested), "sent_bytes": sent_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickRun:
    """One training.

    Attributes:
        plan: Its tables are those of the clicks' model; its batch is the global batch.
        seed: Of the planted model and of all batches.
        weights_seed: Of the initial weights.
        steps: Training steps.
        held_out: Batches that the trained model is tested on, of the same size.
        learning_rate: Of tables and dense layers.
    """

    plan: ShardingPlan
    seed: int
    weights_seed: int
    steps: int
    held_out: int
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickResult:
    """What came of a training.

    Attributes:
        normalised_entropy: Of the trained model on held-out clicks.
        best_entropy: Of the planted model on the same clicks.
        sent_bytes: Bytes that all processes send to others in a step, by exchange.
    """

    normalised_entropy: float
    best_entropy: float
    sent_bytes: dict[str, float]


def train_runs(model: ClickModel, runs: Sequence[ClickRun], nproc: int) -> tuple[ClickResult, ...]:
    """Trains all runs, one after the other on the same processes.

    Args:
        model: Sizes of the trained and of the planted model.
        runs: The runs; those of one seed in a row share their batches.
        nproc: Processes, at most the ranks of each plan.

    Raises:
        ExecutionError: If a process fails.
    """
    names = ("seed", "weights_seed", "steps", "held_out", "learning_rate")
    job = {"model": asdict(model), "runs": [{name: getattr(run, name) for name in names} for run in runs]}
    results = run_job("studies.runtime.payloads", job, [run.plan for run in runs], nproc)
    return tuple(ClickResult(**result) for result in results)


#: Name of the runs that only differ in their initial weights, which shows what differences mean.
CONTROL = "fp32, other initial weights"
_HEIGHT = 460
#: What is added to seeds for those weights.
_OTHER_WEIGHTS = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRuns:
    """Runs of one planted model, by the name of their payload."""

    results: dict[str, ClickResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Quality of a payload against fp32.

    Attributes:
        payload: Name of the payload.
        more: Mean over seeds of the normalised entropy over that of fp32, less 1; above 0 is worse.
        error: Standard error of that mean; None with one seed.
        sent: Bytes of embeddings and gradients that are sent, over those of fp32.
    """

    payload: str
    more: float
    error: float | None
    sent: float


def payloads() -> tuple[Payload, ...]:
    """fp32, and every narrower format forward, backward and both ways."""
    narrow = [dtype for dtype in DType if dtype is not DType.FP32]
    ways = [
        Payload(forward=forward, backward=backward)
        for dtype in narrow
        for forward, backward in ((dtype, DType.FP32), (DType.FP32, dtype), (dtype, dtype))
    ]
    return (Payload(), *ways)


def plan_of(model: ClickModel, batch_size: int, num_ranks: int, payload: Payload) -> ShardingPlan:
    """A plan with whole tables on ranks in turn, and every other table split by rows over all of them."""
    tables = model.tables(batch_size)
    link = Link(bytes_per_s=1e9)
    topology = Topology(
        world_size=num_ranks,
        device="cpu",
        memory_bytes=MemoryBytes(hbm=1 << 40),
        levels=(Level(name="node", size=num_ranks, all_to_all=link, all_reduce=link),),
    )
    shards = [
        PlacedShard.table_wise(Shard.whole(table), index % num_ranks) for index, table in enumerate(tables.tables)
    ]
    everywhere = (tuple(range(num_ranks)),)
    shards[1::2] = [
        replace(one, tier=Tier.ROW_WISE, replicas=everywhere, split=Split.CYCLIC, exchange=Exchange.PARTIAL_SUMS)
        for one in shards[1::2]
    ]
    return ShardingPlan(tables=tables, topology=topology, shards=tuple(shards), payload=payload)


@command_options()
class PayloadOptions:
    """Options of the study `payloads`."""

    seeds: Annotated[int, typer.Option(min=1, help="Planted models, each with every payload.")] = 5
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 200
    held_out: Annotated[int, typer.Option(min=1, help="Batches that a trained model is tested on.")] = 40
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step over all processes.")] = 1024
    nproc: Annotated[int, typer.Option(min=2, help="Processes (gloo).")] = 4
    rows: Annotated[int, typer.Option(min=1, help="Rows of each of the 8 tables.")] = 2_000
    learning_rate: Annotated[float, typer.Option(help="Of tables (row-wise AdaGrad) and dense layers (SGD).")] = 0.1
    parts: PartsOption = None

    @property
    def model(self) -> ClickModel:
        """The model that is trained, and the clicks."""
        return ClickModel(num_rows=self.rows)

    def settings(self) -> dict[str, Any]:
        """Settings that runs must share to be summed up."""
        names = ("steps", "held_out", "batch_size", "nproc", "learning_rate")
        return {**{name: getattr(self, name) for name in names}, "model": asdict(self.model)}


def run_seed(seed: int, options: PayloadOptions) -> SeedRuns:
    """Trains with every payload, and once with fp32 and other initial weights.

    Raises:
        ExecutionError: If a process fails.
    """
    shared = {"seed": seed, "steps": options.steps, "held_out": options.held_out}
    make_plan = partial(plan_of, options.model, options.batch_size, options.nproc)
    runs = {
        str(payload): ClickRun(
            plan=make_plan(payload), weights_seed=seed, learning_rate=options.learning_rate, **shared
        )
        for payload in payloads()
    }
    runs[CONTROL] = replace(runs["fp32"], weights_seed=_OTHER_WEIGHTS + seed)
    results = train_runs(options.model, list(runs.values()), options.nproc)
    return SeedRuns(results=dict(zip(runs, results, strict=True)))


def losses(found: Sequence[SeedRuns]) -> tuple[Loss, ...]:
    """Quality of all payloads against fp32, pair by pair of the same seed."""
    losses = []
    for name in found[0].results:
        pairs = [(one.results[name], one.results["fp32"]) for one in found]
        more = Summary.of([mine.normalised_entropy / wide.normalised_entropy - 1 for mine, wide in pairs])
        error = more.deviation / (len(pairs) - 1) ** 0.5 if len(pairs) > 1 else None
        sent = sum(map(_answered, (mine for mine, _ in pairs))) / sum(map(_answered, (wide for _, wide in pairs)))
        losses.append(Loss(payload=name, more=more.mean, error=error, sent=sent))
    return tuple(losses)


def main(options: PayloadOptions, output: OutputOptions) -> None:
    """Trains a DLRM on planted clicks with every payload, and compares how well it predicts held-out clicks.

    Example:
        python -m studies payloads --seeds 5 --parts payload-runs -o docs/figures
    """
    settings = options.settings()
    parts = PartStore.of(options.parts, settings)
    makers = {f"seed-{seed}": partial(run_seed, seed, options) for seed in range(options.seeds)}
    found = parts.find_all("Training", SeedRuns, makers)
    summary = losses(found)
    numbers = {
        "settings": {"seeds": options.seeds, **settings},
        "summary": [asdict(one) for one in summary],
        "seeds": [asdict(one)["results"] for one in found],
    }
    document = Machine.of("payloads", options).document(numbers, "autoshard.payload-quality/1")
    output.write(
        StudyResult(
            name="payload-quality",
            document=document,
            tables=(loss_table(found, summary),),
            images={"": loss_figure(summary)},
        )
    )


def _answered(result: ClickResult) -> float:
    """Bytes of embeddings and gradients that are sent."""
    return result.sent_bytes["forward"] + result.sent_bytes["backward"]


def loss_table(found: Sequence[SeedRuns], summary: Sequence[Loss]) -> Table:
    """A line for each payload."""
    wide = Summary.of([one.results["fp32"].normalised_entropy for one in found])
    best = Summary.of([one.results["fp32"].best_entropy for one in found])
    caption = (
        f"Normalised entropy on held-out clicks, {len(found)} seeds: fp32 {wide.mean:.4f} (planted model "
        f"{best.mean:.4f}); others against fp32, mean and standard error over seeds, above 0 is worse"
    )
    lines = tuple(
        (one.payload, f"{one.more:+.3%}", "" if one.error is None else f"{one.error:.3%}", f"{one.sent:.0%}")
        for one in summary
        if one.payload != "fp32"
    )
    return Table(columns=("payload", "against fp32", "standard error", "bytes sent"), rows=lines, caption=caption)


def loss_figure(summary: Sequence[Loss]) -> go.Figure:
    """Changes of the normalised entropy, with two standard errors to both sides."""
    figure = in_house_style(go.Figure(), height=_HEIGHT)
    ways: Mapping[str, tuple[str, list[Loss]]] = {
        "forward": (BLUE, []),
        "backward": (ORANGE, []),
        "both ways": (GREEN, []),
        "other initial weights": (GREY, []),
    }
    for one in summary:
        if one.payload != "fp32":
            ways[_way(one.payload)][1].append(one)
    for name, (colour, shown) in ways.items():
        figure.add_scatter(
            name=name,
            x=[one.payload.split(",")[0] for one in shown],
            y=[100 * one.more for one in shown],
            error_y={"type": "data", "array": [200 * (one.error or 0.0) for one in shown], "color": colour},
            mode="markers",
            marker={"color": colour, "size": 11},
        )
    figure.add_hline(y=0.0, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(title_text="payload, forward/backward", type="category")
    figure.update_yaxes(title_text="normalised entropy against fp32, %")
    return figure


def _way(payload: str) -> str:
    if payload == CONTROL:
        return "other initial weights"
    forward, slash, _ = payload.partition("/")
    if not slash:
        return "both ways"
    return "backward" if forward == "fp32" else "forward"


if __name__ == "__main__":
    do_job(
        lambda job: [
            _trained(ClickModel(**job["model"]), plan_path=path, **run)
            for path, run in zip(job["plan_paths"], job["runs"], strict=True)
        ]
    )
