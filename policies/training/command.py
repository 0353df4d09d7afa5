"""Command `train policy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoshard import console
from autoshard.table import Table
from costmodel.registry.promotion import report_published, status_of
from costmodel.registry.publish_options import PublishOptions
from policies.training.run_options import PolicyRunOptions

if TYPE_CHECKING:
    from policies.training.runs import FinishedRun
    from policies.training.trainer import Evaluation


def train_policy(publishing: PublishOptions, options: PolicyRunOptions, as_json: console.JsonOption = False) -> None:
    """Trains the sharding policy of a device, and makes it the production version unless it is worse.

    The planner `policy` uses the production version for such items. On 20 held-out tasks, the trained policy is
    compared with `cost-greedy` and with the production version, or with the shipped one where the registry has none:
    if its slowest rank (its step, if that is the objective) takes longer in the mean by more than the standard error
    of the difference, and by more than 0.1%, it goes to the registry without an alias, and the exit code is 0. --force
    promotes it anyway, as `autoshard models promote` does. The cost model of this training predicts all these times.

    Rewards come from the device's cost model (`autoshard train cost`), so nothing is measured unless --reward says so.
    Seeds of training tasks lie above those that `--seed` takes, so the policy has not seen any task that you draw.

    With --accelerator cuda, the network and what it learns from are on the GPU, and --actors play on CPU cores. Under
    torchrun, all its processes train one policy together, each with actors and episodes of its own; the first saves
    checkpoints and publishes. A checkpoint of one device goes on on any other.

    Examples:
        autoshard train policy --registry registry --seconds 75

        autoshard train policy --updates 20 --alias candidate

        autoshard train policy --seconds 600 --actors 1 --checkpoint run --tensorboard logs

        autoshard train policy --objective step --memory-fill 0.9 --algorithm ppo --updates 200

        torchrun --nproc-per-node 4 --no-python autoshard train policy --accelerator cuda --actors 8 --seconds 600

        autoshard train policy --items tiers --objective step && autoshard plan ... --planner policy --set items=tiers
    """
    from autoshard.runtime.processes.learners import joined_learners
    from policies.training.runs import run_training

    with joined_learners(options.accelerator, mixed_precision=options.mixed_precision) as learners:

        def report(evaluation: Evaluation) -> None:
            if learners.is_first:
                console.log(f"{_described(evaluation)}; on {learners.description}, seed {options.seed}")

        with console.progress("Training", 1.0, is_shown=learners.is_first) as advance:
            finished = run_training(options, publishing, advance=advance, on_evaluated=report, learners=learners)
    if finished is None:
        return
    report_published(finished.published, finished.policy.kind, finished.policy.card.device)
    console.emit(_result(finished), _table(finished), as_json=as_json, kind="trained-policy")


def _described(evaluation: Evaluation) -> str:
    what = "slowest rank" if evaluation.policy.step_ms is None else "step"
    policy, greedy = evaluation.policy, evaluation.baselines.cost_greedy
    lookup = evaluation.baselines.lookup_greedy
    return (
        f"update {evaluation.num_updates}: balance {policy.balance:.3f}, {what} {policy.objective_ms:.3f} ms "
        f"(cost-greedy {greedy.balance:.3f}, {greedy.objective_ms:.3f} ms; "
        f"lookup-greedy {lookup.balance:.3f}, {lookup.objective_ms:.3f} ms); {evaluation.steps_per_s:,.0f} env steps/s"
    )


def _result(finished: FinishedRun) -> dict[str, Any]:
    return {
        "kind": finished.policy.kind,
        "name": finished.policy.card.device,
        **finished.published.to_json(),
        "cost_model": finished.policy.card.cost_model.id,
        "training": dict(finished.policy.card.training),
    }


def _table(finished: FinishedRun) -> Table:
    training = finished.policy.card.training
    has_steps = "step_ms" in training["test"]["policy"]
    return Table.of(
        training["test"].items(),
        [
            (f"on {training['num_test_tasks']} unseen tasks", lambda one: one[0]),
            ("balance", lambda one: f"{one[1]['balance']:.3f}"),
            ("slowest rank, predicted ms", lambda one: f"{one[1]['max_ms']:.3f}"),
            *([("step, predicted ms", lambda one: f"{one[1]['step_ms']:.3f}")] if has_steps else []),
        ],
        title=f"Policy of {finished.policy.card.device}, {status_of(finished.published)}",
        caption=f"{training['num_updates']} updates, {training['elapsed_s']:.0f} s: "
        + ", ".join(
            f"{name.removesuffix('_s')} {seconds:.0f} s" for name, seconds in training["times"].items() if seconds
        ),
        is_boxed=True,
    )
