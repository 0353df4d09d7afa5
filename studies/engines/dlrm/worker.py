"""One process of the trainings: `torchrun -m studies.engines.dlrm.worker FOLDER`, started by `study`.

The folder holds `job.json`. The process of rank 0 prints what each way found as a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.optimizers import in_backward_optimizer_filter

from autoshard.core import ShardingPlan
from autoshard.planning import PlanRequest, make_costs, make_plan
from autoshard.runtime.processes.job import JOB_FILE
from autoshard.runtime.processes.worker import run_worker
from autoshard.torchrec import Planner, shard
from studies.engines.dlrm.model import Batch, Dlrm, draw_batches, fill
from studies.engines.dlrm.setting import DlrmSetting, TrainedWay, Way
from studies.frame.documents import read_as


def main() -> None:
    """Does what the job in the folder that the command line names asks for."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    run_worker(lambda: _work(folder, rank), folder, rank)


def _work(folder: Path, rank: int) -> None:
    job = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    setting = read_as(DlrmSetting, job["setting"], JOB_FILE)
    warnings.simplefilter("ignore")  # of TorchRec's modules on import and first use
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = draw_batches(setting, rank)
    for name in job["ways"]:
        found = trained(setting, Way(name), batches)
        if rank == 0:
            print(json.dumps({"result": asdict(found)}), flush=True)
    dist.destroy_process_group()


def trained(setting: DlrmSetting, way: Way, batches: list[Batch]) -> TrainedWay:
    """Plans, shards and trains the model in one way. All processes call it."""
    model = Dlrm(setting)
    started_s = time.perf_counter()
    if way is Way.TORCHREC:
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=setting.num_processes, compute_device="cpu"),
            batch_size=setting.local_batch_size,
        )
        plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
        types = (entry.sharding_type for tables in plan.plan.values() for entry in tables.values())
        return _by_torchrec(setting, way, model, plan, batches, types, started_s)
    if way is Way.FREE_PLAN:
        return _by_engine(setting, way, model, _free_plan(setting), batches, started_s)
    planner = Planner(
        topology=setting.topology(),
        batch_size=setting.local_batch_size,
        timeout_seconds=setting.plan_s,
        seed=setting.seed,
    )
    plan = planner.collective_plan(model, get_default_sharders())
    assert planner.chosen is not None
    if way is Way.OUR_ENGINE:
        return _by_engine(setting, way, model, planner.chosen, batches, started_s)
    types = (str(one.tier) for one in planner.chosen.shards)
    return _by_torchrec(setting, way, model, plan, batches, types, started_s)


def _free_plan(setting: DlrmSetting) -> ShardingPlan:
    """A plan of `auto` by the first process, for all; it knows which rows are looked up, as a recorder tells."""
    plan: list[Any] = [None]
    if dist.get_rank() == 0:
        tables, topology = setting.table_set(), setting.topology()
        costs = make_costs(tables, topology)
        request = PlanRequest(
            tables=tables, topology=topology, costs=costs, seed=setting.seed, time_limit_s=setting.plan_s
        )
        plan[0] = make_plan("auto", request)
    dist.broadcast_object_list(plan)
    found = plan[0]
    assert isinstance(found, ShardingPlan)
    return found


def _by_torchrec(
    setting: DlrmSetting,
    way: Way,
    model: Dlrm,
    plan: Any,
    batches: list[Batch],
    types: Iterable[str],
    started_s: float,
) -> TrainedWay:
    plan_s = time.perf_counter() - started_s
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)
    fill(sharded, setting)
    # As TorchRec's examples choose them: all that no optimizer updates in the backward pass.
    dense = [value for _, value in in_backward_optimizer_filter(sharded.named_parameters())]
    samples_per_s, losses = _steps(setting, sharded, dense, batches, lambda: None)
    return TrainedWay(way=way, layout=_counted(types), plan_s=plan_s, samples_per_s=samples_per_s, losses=losses)


def _by_engine(
    setting: DlrmSetting, way: Way, model: Dlrm, plan: ShardingPlan, batches: list[Batch], started_s: float
) -> TrainedWay:
    plan_s = time.perf_counter() - started_s
    sharded = shard(model, plan)
    samples_per_s, losses = _steps(setting, sharded, list(model.parameters()), batches, sharded.end_step)
    sharded.close()
    layout = _counted(str(one.tier) for one in plan.shards)
    return TrainedWay(way=way, layout=layout, plan_s=plan_s, samples_per_s=samples_per_s, losses=losses)


def _counted(types: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(types).items()))


def _steps(
    setting: DlrmSetting,
    model: torch.nn.Module,
    dense: list[torch.nn.Parameter],
    batches: list[Batch],
    end_step: Callable[[], None],
) -> tuple[float, tuple[float, ...]]:
    """Samples per second of the measured steps, by the slowest process, and the losses of all steps."""
    optimizer = torch.optim.SGD(dense, lr=setting.learning_rate)
    losses = []
    started_s = 0.0
    for number, batch in enumerate(batches):
        if number == setting.warmup:
            dist.barrier()
            started_s = time.perf_counter()
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_step()
        losses.append(loss.detach())
    seconds = torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    total = torch.stack(losses)
    dist.all_reduce(total)
    rate = setting.batch_size * setting.steps / float(seconds)
    return rate, tuple((total / dist.get_world_size()).tolist())


if __name__ == "__main__":
    main()
