"""Whatever the validator accepts runs, and equals the unsharded reference: embeddings, weights and moments."""

import os
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import DType, GroupLayout, ReplicaGroups
from autoshard.formats import write_plan
from autoshard.formats.row_orders import write_row_order
from autoshard.runtime import RunRequest, run_requests
from tests.contracts.drawn_layouts import drawn_plan

#: fp32 sums in another order, relative to the largest value.
TOLERANCE = 2e-5
#: Processes, ranks of the plans, ranks of a node, plans.
CLUSTERS = [(1, 1, 1, 15), (2, 2, 1, 50), (4, 4, 2, 15), (3, 6, 3, 10)]
NUM_PLANS_SLOW = int(os.environ.get("AUTOSHARD_RANDOM_PLANS", "400"))


def executed(folder, seeds, cluster, payloads=(DType.FP32,), groups=None, verify_steps=3):
    num_processes, world_size, node_size = cluster
    requests = []
    for seed, payload in ((seed, payload) for payload in payloads for seed in seeds):
        plan, orders = drawn_plan(seed, world_size, node_size, payload, groups)
        folder.mkdir(exist_ok=True)
        written = {
            name: write_row_order(folder / f"{seed}.{payload}.{name}.parquet", np.asarray(ids))
            for name, ids in orders.items()
        }
        write_plan(replace(plan, row_orders=written), folder / f"{seed}.{payload}.json")
        requests.append(
            RunRequest(
                plan_path=str(folder / f"{seed}.{payload}.json"),
                steps=1,
                warmup_steps=0,
                verify_steps=verify_steps,
                eps=1e-3,
                seed=seed,
                device="cpu",
            )
        )
    return run_requests(requests, num_processes * (groups.num_groups if groups else 1))


def assert_equal(results, tolerance=TOLERANCE):
    for result in results:
        assert result.verification.steps == 3
        assert result.verification.max_error <= tolerance, f"{result.plan_path}: {result.verification}"


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda one: "{} processes, {} ranks, nodes of {}".format(*one))
def test_random_plans_equal_the_unsharded_reference(tmp_path, cluster):
    *cluster, num_plans = cluster
    results = executed(tmp_path, range(num_plans), cluster)
    assert len(results) == num_plans
    assert_equal(results)


@pytest.mark.parametrize("layout", GroupLayout, ids=str)
def test_replica_groups_equal_copies_that_are_averaged(tmp_path, layout):
    groups = ReplicaGroups(num_groups=2, layout=layout, sync_every=2, moment_scale=1.5)
    assert_equal(executed(tmp_path, range(700, 705), (2, 2, 2), groups=groups))


def test_narrow_payloads_are_near_the_reference(tmp_path):
    tolerances = {DType.FP16: 3e-3, DType.BF16: 3e-2, DType.INT8: 5e-2}
    results = executed(tmp_path, range(500, 504), (2, 2, 1), tuple(tolerances))
    for number, tolerance in enumerate(tolerances.values()):
        errors = [result.verification.output_error for result in results[4 * number : 4 * number + 4]]
        assert 0 < max(errors) <= tolerance


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("cluster", [(2, 2, 2), (4, 4, 2), (8, 8, 4), (4, 8, 4)], ids=str)
def test_many_random_plans_equal_the_unsharded_reference(tmp_path, cluster):
    num_plans = NUM_PLANS_SLOW // 4
    for start in range(1000, 1000 + num_plans, 100):
        seeds = range(start, min(start + 100, 1000 + num_plans))
        assert_equal(executed(tmp_path / str(start), seeds, cluster))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_plans_on_8_processes_stay_equal_over_20_steps(tmp_path):
    results = executed(tmp_path, range(3100, 3100 + NUM_PLANS_SLOW // 10), (8, 8, 4), verify_steps=20)
    for result in results:
        found = result.verification
        assert found.steps == 20
        # rtol 1e-5, atol 1e-6: absolute errors keep to atol alone, those of moments are relative to the largest.
        assert max(found.output_error, found.weight_error, found.dense_error) <= 1e-6, f"{result.plan_path}: {found}"
        assert found.moment_error <= 1e-5, f"{result.plan_path}: {found}"
