"""Command `train policy`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from autoshard import console
from autoshard.table import Table
from costmodel.registry.promotion import publish_version, report_published, status_of
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import Registry
from policies.training.run_options import PolicyRunOptions

if TYPE_CHECKING:
    from costmodel.registry.promotion import Published
    from policies.planning.trained import TrainedPolicy
    from policies.training.runs import Progress


def train_policy(publishing: PublishOptions, options: PolicyRunOptions, as_json: console.JsonOption = False) -> None:
    """Trains the sharding policy, and makes it the production version unless it is worse.

    The policy chooses a sharding option for each table, and a place for each of its parts. It is trained on tasks that
    are drawn over machines, links, memory, tables and batch sizes: first on what a search of some seconds says of each
    option, then on its own best placements after bursts of the search, then by V-trace with the predicted step as the
    reward. One policy serves any device; with --device, a policy of that device is trained, and --fine-tune begins with
    the one in use.

    The planner `policy` uses the production version, and `auto` asks it which options are worth pricing. On 20 held-out
    tasks, the trained policy is compared with `cost-greedy` and with the production version, or with the shipped one
    where the registry has none: if its predicted step takes longer in the mean by more than the standard error of the
    difference, and by more than 0.1%, it goes to the registry without an alias, and the exit code is 0. --force
    promotes it anyway, as `autoshard models promote` does.

    Examples:
        autoshard train policy --registry registry --actors 2 --checkpoint run

        autoshard train policy --num-tasks 40 --search-seconds 0.5 --updates 200 --alias candidate

        autoshard train policy --device a100 --fine-tune --seconds 300
    """
    from policies.planning.trained import TrainedPolicy
    from policies.training.comparison import TestTasks, policy_version
    from policies.training.drawn_tasks import TaskKind, machines_of, warnings_once
    from policies.training.runs import PolicyTraining

    device = options.tasks.device
    kind = TaskKind(machines=machines_of(device), registry=publishing.registry)
    with ExitStack() as stack:
        stack.enter_context(warnings_once())
        folder = options.checkpoint or Path(stack.enter_context(TemporaryDirectory()))
        begin = None
        if options.learning.fine_tune:
            begin = TrainedPolicy.for_device(publishing.registry, device).network.weights
        training = PolicyTraining(
            options,
            kind,
            folder,
            begin=None if begin is None else dict(begin),
            device=_torch_device(options),
            report=progress_lines(),
        )
        weights = training.run()
        tasks = TestTasks(kind)
        steps_ms_P = tasks.steps_ms(TrainedPolicy(weights=weights, device=device, training={}))
        policy = TrainedPolicy(
            weights=weights,
            device=device,
            training={
                **training.record(),
                "test": {
                    "num_tasks": len(steps_ms_P),
                    "over_greedy": float((steps_ms_P / tasks.greedy_ms_P - 1).mean()),
                },
            },
            ranges=training.ranges,
        )
        version = policy_version(policy, tasks, steps_ms_P)
        published = publish_version(Registry(publishing.registry), version, publishing)
    report_published(published, policy.kind, device)
    console.emit(_result(policy, published), _table(policy, published), as_json=as_json, kind="trained-policy")


def _torch_device(options: PolicyRunOptions) -> Any:
    from autoshard.runtime.processes.devices import choose_device

    return choose_device({options.learning.accelerator})


def progress_lines() -> Callable[[Progress], None]:
    """Prints progress, a line for each that says something else than the last one."""
    last = ""

    def report(progress: Progress) -> None:
        nonlocal last
        loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
        line = f"{progress.stage}: {progress.done:.0%}{loss}"
        if line != last:
            console.log(line)
        last = line

    return report


def _result(policy: TrainedPolicy, published: Published) -> dict[str, Any]:
    return {
        "kind": policy.kind,
        "name": policy.card.device,
        **published.to_json(),
        "training": dict(policy.card.training),
    }


def _table(policy: TrainedPolicy, published: Published) -> Table:
    training = policy.card.training
    return Table.of(
        [training["test"]],
        [
            ("unseen tasks", lambda one: f"{one['num_tasks']}"),
            ("predicted step over cost-greedy's", lambda one: f"{one['over_greedy']:+.2%}"),
        ],
        title=f"Policy of {policy.card.device}, {status_of(published)}",
        caption=f"{training['num_updates']} updates on {training['num_labels']} tasks, {training['elapsed_s']:.0f} s",
        is_boxed=True,
    )
