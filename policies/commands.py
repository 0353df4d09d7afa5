"""Command `train policy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard import console
from autoshard.commands.arguments import check_needed, positive_option, seed_option, share_option
from autoshard.core.quoting import shown
from costmodel.publishing import (
    Alias,
    AliasOption,
    ForceOption,
    PublishOption,
    RegistryOption,
    publish_options,
    report_published,
    status_of,
)
from policies.choices import Algorithm, Items, RewardSource

if TYPE_CHECKING:
    from rich.table import Table

    from costmodel.promotion import PublishOptions
    from env import Objective
    from policies.runs import FinishedRun, RunOptions
    from policies.training import Evaluation
    from policies.training_options import Budget

_DEFAULT_SECONDS = 60.0
#: Evaluations without progress after which a training of more than a minute ends, if not told otherwise.
_DEFAULT_PATIENCE = 60

_TASKS, _LEARNING, _ENDING, _FILES = "Tasks", "Learning", "When to end", "Files"


def train_policy(
    context: typer.Context,
    registry: RegistryOption = None,
    alias: AliasOption = Alias.PRODUCTION,
    publish: PublishOption = True,
    force: ForceOption = False,
    tables: Annotated[
        str,
        typer.Option(
            help="Pool that tasks are drawn from: a file, or the name of a bundled one.", rich_help_panel=_TASKS
        ),
    ] = "metasyn",
    scale: Annotated[
        int,
        typer.Option(
            min=1,
            help="Divides rows and batch of the pool; the cost model must cover that batch.",
            rich_help_panel=_TASKS,
        ),
    ] = 64,
    num_tasks: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tasks to train on.", rich_help_panel=_TASKS)] = 90,
    num_tables: Annotated[int, typer.Option(min=1, help="Tables per task.", rich_help_panel=_TASKS)] = 80,
    num_ranks: Annotated[int, typer.Option(min=1, help="Ranks per task.", rich_help_panel=_TASKS)] = 8,
    items: Annotated[
        Items,
        typer.Option(
            help="What is placed: whole tables, ranges of rows, or tables whose hot rows may be cut off and shared "
            "by all ranks.",
            rich_help_panel=_TASKS,
        ),
    ] = Items.TABLES,
    objective: Annotated[
        str,
        typer.Option(
            help="What is optimised: `balance` or `max_kernel` of kernel times, or `step`, with exchanges.",
            rich_help_panel=_TASKS,
        ),
    ] = "balance",
    memory_fill: Annotated[
        float | None,
        share_option(
            "Share of all memory that a task's tables take. [default: unlimited memory]", rich_help_panel=_TASKS
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Key of the device that plans are for.", rich_help_panel=_TASKS)] = "cpu",
    algorithm: Annotated[
        Algorithm, typer.Option(help="Training algorithm; both train the same network.", rich_help_panel=_LEARNING)
    ] = Algorithm.VTRACE,
    actors: Annotated[
        int,
        typer.Option(
            min=0,
            help="Processes that play episodes while this one learns, with V-trace; 0: this one does both in turns.",
            rich_help_panel=_LEARNING,
        ),
    ] = 0,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run the actors on a Ray cluster.", rich_help_panel=_LEARNING)
    ] = False,
    ray_address: Annotated[
        str,
        typer.Option(
            help="Address of the cluster: `auto`, HOST:PORT, or `local` to start one here.", rich_help_panel=_LEARNING
        ),
    ] = "auto",
    reward: Annotated[
        RewardSource,
        typer.Option(
            help="Where rewards come from: predicted, measured on this machine, or measured in a share of the updates.",
            rich_help_panel=_LEARNING,
        ),
    ] = RewardSource.MODEL,
    measured_share: Annotated[
        float,
        share_option("With --reward mixed: share of the updates with measured rewards.", rich_help_panel=_LEARNING),
    ] = 0.1,
    joint: Annotated[
        bool,
        typer.Option(
            "--joint",
            help="Train the cost model along with the policy, from samples in --store.",
            rich_help_panel=_LEARNING,
        ),
    ] = False,
    store: Annotated[
        Path | None, typer.Option(help="Folder with samples, for --joint.", rich_help_panel=_LEARNING)
    ] = None,
    seed: Annotated[int, seed_option("Seed of the weights, the tasks and the actions.", rich_help_panel=_LEARNING)] = 0,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Ends after so many updates.", rich_help_panel=_ENDING)
    ] = None,
    seconds: Annotated[
        float | None,
        positive_option(
            f"Ends after so many seconds. [default: {_DEFAULT_SECONDS:g}, without --updates]", rich_help_panel=_ENDING
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Ends after so many evaluations in a row, one every 10 updates, that are not at least 0.05% better; "
            f"0 for never. [default: {_DEFAULT_PATIENCE} with --seconds above {_DEFAULT_SECONDS:g}, else never]",
            rich_help_panel=_ENDING,
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoints; training goes on from the one that is there.", rich_help_panel=_FILES
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(help="Folder for TensorBoard's logs; goes on from those that are there.", rich_help_panel=_FILES),
    ] = None,
    as_json: console.JsonOption = False,
) -> None:
    """Trains the sharding policy of a device, and makes it the production version unless it is worse.

    The planner `policy` uses the production version for such items. On 20 held-out tasks, the trained policy is
    compared with `cost-greedy` and with the production version, or with the shipped one where the registry has none:
    if its slowest rank (its step, if that is the objective) takes longer in the mean by more than the standard error
    of the difference, and by more than 0.1%, it goes to the registry without an alias, and the exit code is 0. --force
    promotes it anyway, as `autoshard models promote` does. The cost model of this training predicts all these times.

    Rewards come from the device's cost model (`autoshard train cost`), so nothing is measured unless --reward says so.
    Seeds of training tasks lie above those that `--seed` takes, so the policy has not seen any task that you draw.

    Examples:
        autoshard train policy --registry registry --seconds 75

        autoshard train policy --updates 20 --alias candidate

        autoshard train policy --seconds 600 --actors 1 --checkpoint run --tensorboard logs

        autoshard train policy --objective step --memory-fill 0.9 --algorithm ppo --updates 200

        autoshard train policy --items tiers --objective step && autoshard plan ... --planner policy --set items=tiers
    """
    from policies.runs import RunOptions, TaskOptions
    from policies.training_options import TrainingOptions

    check_needed(context, "--ray", ray, "--ray-address")
    check_needed(context, "--reward mixed", reward is RewardSource.MIXED, "--measured-share")
    check_needed(context, "--publish", publish, "--alias")
    options = RunOptions(
        tasks=TaskOptions(
            tables=tables,
            scale=scale,
            num_tasks=num_tasks,
            num_tables=num_tables,
            num_ranks=num_ranks,
            device=device,
            items=items,
            objective=_objective(objective),
            memory_fill=memory_fill,
        ),
        training=TrainingOptions(algorithm=algorithm, num_actors=actors, reward=reward, measured_share=measured_share),
        budget=_budget(updates, seconds, patience, joint=joint),
        seed=seed,
        joint_store=_joint_store(joint, store),
        folder=checkpoint,
        tensorboard=tensorboard,
        ray_address=ray_address if ray else None,
    )
    _train(options, registry, publish_options(publish=publish, alias=alias, force=force), as_json=as_json)


def _train(options: RunOptions, registry: Path | None, publishing: PublishOptions, *, as_json: bool) -> None:
    from policies.runs import run_training

    with console.progress("Training", 1.0) as advance:
        finished = run_training(options, registry, publishing=publishing, advance=advance, on_evaluated=_report)
    report_published(finished.published, finished.policy.items.policy_kind, finished.policy.cost.card.device)
    console.emit(_result(finished), _table(finished), as_json=as_json)


def _objective(name: str) -> Objective:
    from autoshard.core.errors import InvalidOptionError
    from env import Objective

    try:
        return Objective(name)
    except ValueError as error:
        raise InvalidOptionError(
            f"must be any of {', '.join(Objective)}, got {shown(name)}", field="--objective"
        ) from error


def _budget(updates: int | None, seconds: float | None, patience: int | None, *, joint: bool) -> Budget:
    from policies.training_options import Budget

    if updates is None and seconds is None:
        seconds = _DEFAULT_SECONDS
    # Scores that a cost model in training gives go up and down with it, and say little about progress.
    if patience is None and seconds is not None and seconds > _DEFAULT_SECONDS and not joint:
        patience = _DEFAULT_PATIENCE
    return Budget(num_updates=updates, seconds=seconds, patience=patience or None)


def _joint_store(joint: bool, store: Path | None) -> Path | None:
    from autoshard.core.errors import InvalidOptionError

    if joint and store is None:
        raise InvalidOptionError("needs the folder of samples that the cost model is trained from", field="--store")
    if store is not None and not joint:
        raise InvalidOptionError("goes with --joint only", field="--store")
    return store


def _report(evaluation: Evaluation) -> None:
    what = "slowest rank" if evaluation.policy.step_ms is None else "step"
    policy, greedy = evaluation.policy, evaluation.baselines.cost_greedy
    lookup = evaluation.baselines.lookup_greedy
    console.log(
        f"update {evaluation.num_updates}: balance {policy.balance:.3f}, {what} {policy.objective_ms:.3f} ms "
        f"(cost-greedy {greedy.balance:.3f}, {greedy.objective_ms:.3f} ms; "
        f"lookup-greedy {lookup.balance:.3f}, {lookup.objective_ms:.3f} ms)"
    )


def _result(finished: FinishedRun) -> dict[str, Any]:
    return {
        "kind": finished.policy.items.policy_kind,
        "name": finished.policy.cost.card.device,
        **finished.published.to_json(),
        "cost_model": finished.policy.cost.id,
        "training": dict(finished.policy.training),
    }


def _table(finished: FinishedRun) -> Table:
    from rich.table import Table

    training = finished.policy.training
    times = training["times"]
    table = Table(
        title=f"Policy of {finished.policy.cost.card.device}, {status_of(finished.published)}",
        title_justify="left",
        caption=f"{training['num_updates']} updates, {training['elapsed_s']:.0f} s: "
        + ", ".join(f"{name.removesuffix('_s')} {seconds:.0f} s" for name, seconds in times.items() if seconds),
        caption_justify="left",
    )
    with_steps = "step_ms" in training["test"]["policy"]
    table.add_column(f"on {training['num_test_tasks']} unseen tasks")
    table.add_column("balance", justify="right")
    table.add_column("slowest rank, predicted ms", justify="right")
    if with_steps:
        table.add_column("step, predicted ms", justify="right")
    for name, score in training["test"].items():
        step = [f"{score['step_ms']:.3f}"] if with_steps else []
        table.add_row(name, f"{score['balance']:.3f}", f"{score['max_ms']:.3f}", *step)
    return table
