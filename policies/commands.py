"""Command `train policy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard import console

if TYPE_CHECKING:
    from rich.table import Table

    from policies.runs import FinishedRun
    from policies.training import Evaluation

_DEFAULT_SECONDS = 60.0


def train_policy(
    registry: Annotated[
        Path | None,
        typer.Option(
            help="Folder of trained models. [default: $AUTOSHARD_REGISTRY or ~/.local/share/autoshard/registry]"
        ),
    ] = None,
    tables: Annotated[
        str, typer.Option(help="Pool that tasks are drawn from: a file, or the name of a bundled one.")
    ] = "metasyn",
    scale: Annotated[
        int, typer.Option(help="Divides rows and batch of the pool; the cost model must cover that batch.")
    ] = 64,
    num_tasks: Annotated[int, typer.Option(help="Tasks to train on.")] = 90,
    num_tables: Annotated[int, typer.Option(help="Tables per task.")] = 80,
    num_ranks: Annotated[int, typer.Option(help="Ranks per task.")] = 8,
    updates: Annotated[int | None, typer.Option(help="Ends after so many updates.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help=f"Ends after so many seconds. [default: {_DEFAULT_SECONDS:g}, without --updates]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the tasks and what is tried.")] = 0,
    joint: Annotated[
        bool, typer.Option("--joint", help="Train the cost model along with the policy, from samples in --store.")
    ] = False,
    store: Annotated[Path | None, typer.Option(help="Folder with samples, for --joint.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints; training goes on from the one that is there.")
    ] = None,
    device: Annotated[str, typer.Option(help="Key of the device that plans are for.")] = "cpu",
    as_json: console.JsonOption = False,
) -> None:
    """Trains the sharding policy of a device, and makes it the one that the planner `policy` uses.

    It learns on the device's cost model, so nothing is measured; `autoshard train cost` makes that model first.
    Seeds of tasks are out of reach of `--seed` of other commands, so any task that you draw is new to the policy.

    Example:
        autoshard train policy --registry registry --seconds 75
    """
    from policies.runs import RunOptions, run_training
    from policies.training import Budget

    if updates is None and seconds is None:
        seconds = _DEFAULT_SECONDS
    options = RunOptions(
        tables=tables,
        scale=scale,
        num_tasks=num_tasks,
        num_tables=num_tables,
        num_ranks=num_ranks,
        seed=seed,
        device=device,
        joint_store=_joint_store(joint, store),
        budget=Budget(num_updates=updates, seconds=seconds),
        folder=checkpoint,
    )
    with console.progress("Training", 1.0) as advance:
        finished = run_training(options, registry, advance=advance, on_evaluated=_report)
    console.emit(_result(finished), _table(finished), as_json=as_json)


def _joint_store(joint: bool, store: Path | None) -> Path | None:
    from autoshard.core.errors import InvalidOptionError

    if joint and store is None:
        raise InvalidOptionError("needs the folder of samples that the cost model is trained from", field="--store")
    if store is not None and not joint:
        raise InvalidOptionError("goes with --joint only", field="--store")
    return store


def _report(evaluation: Evaluation) -> None:
    policy, greedy = evaluation.policy, evaluation.baselines.cost_greedy
    lookup = evaluation.baselines.lookup_greedy
    console.log(
        f"update {evaluation.num_updates}: balance {policy.balance:.3f}, slowest rank {policy.max_ms:.3f} ms "
        f"(cost-greedy {greedy.balance:.3f}, {greedy.max_ms:.3f} ms; "
        f"lookup-greedy {lookup.balance:.3f}, {lookup.max_ms:.3f} ms)"
    )


def _result(finished: FinishedRun) -> dict[str, Any]:
    return {
        "kind": "policy",
        "name": finished.policy.cost.card.device,
        "id": finished.id,
        "registry": str(finished.registry),
        "cost_model": finished.policy.cost.id,
        "training": dict(finished.policy.training),
    }


def _table(finished: FinishedRun) -> Table:
    from rich.table import Table

    training = finished.policy.training
    table = Table(
        title=f"Policy of {finished.policy.cost.card.device}, version {finished.id}",
        title_justify="left",
        caption=f"{training['num_updates']} updates, {training['elapsed_s']:.0f} s",
        caption_justify="left",
    )
    table.add_column(f"on {training['num_test_tasks']} unseen tasks")
    table.add_column("balance", justify="right")
    table.add_column("slowest rank, predicted ms", justify="right")
    for name, score in training["test"].items():
        table.add_row(name, f"{score['balance']:.3f}", f"{score['max_ms']:.3f}")
    return table
