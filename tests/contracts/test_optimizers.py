"""Every optimizer trains every layout as it trains unsharded tables, with every setting that it has."""

import pytest
import torch

from autoshard.core import DType, Optimizer, ReplicaGroups, SyncRows
from autoshard.core.errors import InvalidOptionError
from autoshard.formats import write_plan
from autoshard.runtime import RunRequest, run_requests
from tests.contracts.drawn_layouts import drawn_plan, with_optimizers
from tests.ranks import executed

#: fp32 sums in another order, relative to the largest value.
TOLERANCE = 2e-5
DECAYING = tuple(one for one in Optimizer if one.has_decaying_moments)
ALL = tuple(one for one in Optimizer if one is not Optimizer.NONE)
#: Settings, and the optimizers that have them.
SETTINGS = {
    "plain": (DECAYING, {}),
    "betas and decay": (
        (*DECAYING, Optimizer.ROWWISE_ADAGRAD),
        {"beta1": 0.5, "beta2": 0.8, "weight_decay": 0.3},
    ),
    "clipped gradients": (ALL, {"max_gradient": 1e-4}),
    "l2": ((Optimizer.ROWWISE_ADAGRAD,), {"weight_decay": 0.3, "weight_decay_mode": "l2"}),
    "norms": ((Optimizer.ROWWISE_ADAGRAD,), {"max_norm": 0.2, "weight_decay": 0.1}),
}


def requests_of(folder, seeds, cluster, optimizers, settings, groups=None, device="cpu", dtype=DType.FP32):
    """Runs of drawn plans, tables trained with some optimizers."""
    _, world_size, node_size = cluster
    found = []
    folder.mkdir(exist_ok=True)
    for seed in seeds:
        plan, _ = drawn_plan(seed, world_size, node_size, replica_groups=groups)
        turned = (*optimizers[seed % len(optimizers) :], *optimizers[: seed % len(optimizers)])
        path = folder / f"{seed}.json"
        write_plan(with_optimizers(plan, turned, dtype), path)
        found.append(
            RunRequest(
                plan_path=str(path),
                steps=1,
                warmup_steps=0,
                verify_steps=4,
                eps=1e-3,
                seed=seed,
                device=device,
                **settings,
            )
        )
    return found


def check(results):
    for result in results:
        assert result.verification.max_error <= TOLERANCE, f"{result.plan_path}: {result.verification}"


@pytest.mark.parametrize(
    "cluster", [(2, 2, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in ((4, 4, 2), (1, 4, 2)))], ids=str
)
def test_optimizers_equal_the_unsharded_reference_in_every_layout(tmp_path, cluster, any_device):
    if any_device == "cuda" and cluster[0] > torch.cuda.device_count():
        pytest.skip(f"needs {cluster[0]} GPUs")
    requests = []
    for number, (name, (optimizers, settings)) in enumerate(SETTINGS.items()):
        seeds = range(40 + 10 * number, 43 + 10 * number)
        requests += requests_of(tmp_path / name, seeds, cluster, optimizers, settings, device=any_device)
    check(executed(requests, cluster[0]))


def test_fp16_weights_are_as_near_as_rounding_lets_them_be(tmp_path):
    requests = requests_of(tmp_path, range(40, 42), (2, 2, 1), DECAYING, {}, dtype=DType.FP16)
    for result in executed(requests, 2):
        found = result.verification
        assert 0 < found.weight_error <= found.weight_rounding, f"{result.plan_path}: {found}"


@pytest.mark.parametrize(
    ("optimizer", "settings", "told"),
    [
        (
            "sgd",
            {"weight_decay": 0.1},
            r"^weight_decay: must be 0 but for tables of rowwise_adagrad, Adam and LAMB, got",
        ),
        ("adagrad", {"weight_decay": 0.1}, r"^weight_decay: must be 0 but"),
        ("adam", {"weight_decay": 0.1, "weight_decay_mode": "l2"}, r"^weight_decay_mode: must be decoupled but for"),
        ("adam", {"max_norm": 1.0}, r"^max_norm: is of tables of rowwise_adagrad only, got one of adam$"),
    ],
)
def test_settings_that_an_optimizer_does_not_have_are_refused_before_anything_starts(
    tmp_path, optimizer, settings, told
):
    [request] = requests_of(tmp_path, [40], (2, 2, 1), [Optimizer(optimizer)], settings)
    with pytest.raises(InvalidOptionError, match=told):
        run_requests([request], 2)


@pytest.mark.slow
def test_replica_groups_average_all_moments(tmp_path):
    requests = []
    for sync_rows in SyncRows:
        groups = ReplicaGroups(num_groups=2, sync_every=2, sync_rows=sync_rows, moment_scale=1.0)
        requests += requests_of(tmp_path / sync_rows, range(80, 83), (2, 2, 2), ALL, {"max_gradient": 1e-4}, groups)
    check(executed(requests, 4))
