"""Every plan of every planner is valid and has a price, whatever the task: random tasks by seed.

`pytest -m slow tests/contracts/test_every_planner.py` does 1,000 tasks, and as many as AUTOSHARD_RANDOM_TASKS says
(100,000 take hours), in blocks that can be run one by one
(`-k "oper and block7]"`), so that what was interrupted goes on with the block it was in. A failure names planner and
seed: `attempt(name, seed, registry, check_prediction)` does it again.

Shape suffixes: R ranks.
"""

import json
import os
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import (
    AccessProfile,
    Constraints,
    DType,
    Feature,
    MemoryBytes,
    Optimizer,
    Pooling,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError, InvalidTableError
from autoshard.evaluation import evaluate
from autoshard.formats import plan_from_json, plan_to_json
from autoshard.planners.registry import get_planner, planner_names
from autoshard.validator import validate_plan
from tests import builders as make

#: Tasks of the ordinary test for planners that take a tenth of a second and more for each.
SLOW = {"torchrec": 2, "auto": 8, "oper": 10, "replica-groups": 8}
NUM_TASKS = 250
NUM_SLOW_TASKS = int(os.environ.get("AUTOSHARD_RANDOM_TASKS", 1_000))
#: Tasks of one block of the slow test.
BLOCK = 500
SLOW_BLOCK = 50
#: Others' planners cannot keep to constraints, and say so.
GUESTS = {"torchrec"}
#: What planners end by, so that their time does not count, and what they are asked for besides their defaults.
ALWAYS = {"auto": {"steps": 20}, "cp-sat": {"effort": 0.002, "refinements": 1}}
CHOICES = {
    "auto": {
        "objective": ["step", "step", "step", "kernel"],
        "sharding_types": ["all", "table_wise"],
        "reserved_bytes": [0, 10_000],
        "count_activations": [True, False],
        "policy": [True, False],
    },
    "flexshard": {
        "tiers": [1, 2, 3],
        "rule": ["frontier", "paper"],
        "memory_multiplier": [0.0, 1.0, 6.0],
        "memory_budget_bytes": [0, 10_000, 10**9, -1000],
        "exchange": ["auto", "rows", "partial_sums"],
        "table_wise_below_rows": [0, 1000],
        "count_activations": [True, False],
    },
    "oper": {
        "mode": ["training", "inference"],
        "method": ["oper", "mg", "ag"],
        "exchange": ["rows", "partial_sums", "auto"],
        "threshold": [0.001, 0.05, 1.0],
        "extra_memory_ratio": [0.0, 0.05, 1.0],
    },
    "neo": {
        "sharding_types": [
            "table_wise",
            "row_wise,column_wise",
            "data_parallel,table_row_wise",
            "grid,table_wise",
            "table_column_wise,row_wise,table_wise",
        ],
        "placement": ["greedy", "karmarkar_karp"],
        "memory": ["hbm", "ddr", "ssd"],
        "memory_share": [0.5, 1.0],
        "cache_policy": ["lru", "lfu"],
    },
    "neuroshard": {"beam_width": [1, 3], "candidates": [2, 10], "steps": [0, 3, 10], "caps": [1, 11]},
    "policy": {"num_samples": [1, 4], "bursts": [0, 3], "count_activations": [True, False]},
    "replica-groups": {
        "base": ["cost-greedy", "neo", "flexshard", "oper"],
        "layout": ["auto", "across_nodes", "within_nodes"],
        "sync_every": [1, 4],
        "sync_rows": ["auto", "all", "touched"],
        "count_activations": [True, False],
    },
}
#: Sizes of levels.
WORLDS = [(1,), (2,), (3,), (4,), (1, 3), (2, 4), (2, 6), (4, 8), (2, 4, 8)]


def drawn_topology(rng, total_bytes):
    """Ranks with memory from less than the tables need to a hundred times as much, even or not."""
    sizes = WORLDS[rng.integers(len(WORLDS))]
    world_size = sizes[-1]
    room = total_bytes * float(rng.choice([0.7, 1.2, 2.0, 8.0, 100.0])) / world_size
    if rng.random() < 0.3:
        room += 10**11  # for inputs and outputs of any batch, which some planners count
    even = MemoryBytes(hbm=int(room), ddr=int(rng.choice([0, 4 * total_bytes])), ssd=int(rng.choice([0, 10**12])))
    overrides = ()
    if rng.random() < 0.3:
        share_R = rng.choice([0.0, 0.5, 1.0, 2.0], world_size)
        overrides = tuple(
            (rank, MemoryBytes(hbm=int(share * room), ddr=even.ddr, ssd=even.ssd)) for rank, share in enumerate(share_R)
        )
    # Of each level, speed and latency of its all-to-all and of its all-reduce.
    drawn = [(10.0 ** rng.uniform(8, 11), float(rng.choice([0.0, 1e-5]))) for _ in range(2 * len(sizes))]
    (speeds, latencies), (reduce_speeds, reduce_latencies) = (zip(*drawn[start::2], strict=True) for start in (0, 1))
    return make.topology(
        *sizes,
        device=str(rng.choice(["cpu", "a100"])),
        memory_bytes=even,
        overrides=overrides,
        bytes_per_s=speeds,
        latency_s=latencies,
        reduce_bytes_per_s=reduce_speeds,
        reduce_latency_s=reduce_latencies,
    )


def drawn_access(rng, num_rows):
    kind = rng.integers(4)
    if kind == 0:
        return AccessProfile.uniform(num_rows, float(rng.choice([1.0, 0.3])))
    if kind == 1:
        return make.profile_of(rng.pareto(1, min(num_rows, 200)) + 1e-9).thinned(num_rows)
    return AccessProfile.zipf(num_rows, float(rng.choice([0.0, 0.8, 1.05, 2.0])), float(rng.choice([0.0, 50.0])))


def drawn_features(rng, name):
    factors = rng.lognormal(1, 1.2, rng.choice([1, 1, 1, 2, 3])) * (rng.random() > 0.05)
    return tuple(
        Feature(
            name=f"{name}_f{index}",
            pooling_factor=float(factor),
            pooling_variance=float(factor * rng.choice([0.0, 2.0])),
            pooling_p99=None if rng.random() < 0.5 else float(factor * 3),
        )
        for index, factor in enumerate(factors)
    )


def drawn_tables(rng):
    """Without constraints."""
    plain = rng.random() < 0.3
    tables = []
    for index in range(rng.integers(1, 9)):
        num_rows = 1 if rng.random() < 0.05 else int(rng.lognormal(7, 2)) + 1
        tables.append(
            make.table(
                f"t{index}",
                num_rows,
                int(rng.choice([1, 4, 6, 16, 64, 128])),
                features=drawn_features(rng, f"t{index}"),
                access=drawn_access(rng, num_rows),
                dtype=DType.FP32 if plain else list(DType)[rng.integers(4)],
                pooling=Pooling.SUM if plain else list(Pooling)[rng.integers(3)],
                optimizer=Optimizer.ROWWISE_ADAGRAD if plain else list(Optimizer)[rng.integers(4)],
            )
        )
    return tables


def constrained(rng, tables, world_size):
    """The tables with constraints, among them some that contradict each other."""
    names = [table.name for table in tables]

    def constraints():
        pinned = rng.choice(world_size, rng.integers(1, world_size + 1), replace=False) if rng.random() < 0.2 else ()
        forbidden = rng.choice(len(Tier), rng.integers(1, 4), replace=False) if rng.random() < 0.15 else ()
        return Constraints(
            pinned_ranks=tuple(int(rank) for rank in pinned),
            colocate_with=(str(rng.choice(names)),) if rng.random() < 0.2 else (),
            forbidden_tiers=tuple(list(Tier)[tier] for tier in forbidden),
        )

    return [replace(table, constraints=constraints()) for table in tables]


def drawn_request(name, seed, registry):
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    tables = drawn_tables(rng)
    topology = drawn_topology(rng, sum(table.storage_bytes for table in tables))
    if rng.random() < 0.3:
        tables = constrained(rng, tables, topology.world_size)
    options = {key: values[rng.integers(len(values))] for key, values in CHOICES.get(name, {}).items()}
    if options.get("objective") == "kernel":
        del options["reserved_bytes"]  # goes with steps only
    return make.request(
        make.tables(*tables, batch_size=int(rng.choice([1, 7, 64, 4096]))),
        topology,
        seed=seed,
        time_limit_s=30.0,
        options={**ALWAYS.get(name, {}), **(options if rng.random() < 0.7 else {})},
        registry=registry,
    )


def is_loose(request):
    """Whether a planner must find a plan: ranks could all hold everything, and neither tables nor options forbid it."""
    if request.options.get("sharding_types", "all") != "all" or request.options.get("memory_budget_bytes", 0) < 0:
        return False
    tables = request.tables.tables
    batch_bytes = request.tables.batch_size * sum(
        (1 + table.pooling_factor + 3 * len(table.features)) * (table.embedding_dim * 4 + 16) for table in tables
    )
    needed = sum(table.storage_bytes for table in tables) + 10 * batch_bytes
    least = min(request.topology.memory_of(rank).hbm for rank in range(request.topology.world_size))
    least -= request.options.get("reserved_bytes", 0)
    return least >= needed and all(table.constraints == Constraints() for table in tables)


def planned(name, request):
    """The plan, or the error of a task that the planner cannot do."""
    try:
        return get_planner(name).plan(request), None
    except (InfeasiblePlanError, InvalidTableError) as error:
        return None, error


def attempt(name, seed, registry, check_prediction):
    """What came of a task: a plan or no plan. Anything else is a failure."""
    request = drawn_request(name, seed, registry)
    plan, failure = planned(name, request)
    if isinstance(failure, InfeasiblePlanError):
        assert str(failure)
        assert "\n" not in str(failure)
        assert not is_loose(request), f"there is room for everything everywhere, yet: {failure}"
        return "infeasible"
    if failure is not None:
        assert name in GUESTS, failure
        assert "constraints" in str(failure)
        assert any(table.constraints != Constraints() for table in request.tables.tables), failure
        return "refused"
    assert (plan.tables, plan.topology) == (request.tables, request.topology)
    validate_plan(plan)
    check_prediction(plan, evaluate(plan, request.costs))
    if seed % 10 == 0:
        # As a file would have it.
        written = json.loads(json.dumps(plan_to_json(plan)))
        assert plan_from_json(written) == plan
    return "planned"


def attempt_all(name, seeds, *fixtures):
    """How often each outcome was met."""
    outcomes = Counter()
    for seed in seeds:
        try:
            outcomes[attempt(name, seed, *fixtures)] += 1
        except (Exception, AssertionError) as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"planner {name}, seed {seed}: {kind}{error}") from error
    return outcomes


def shares(total, slow_size):
    """How many tasks each planner gets, `total` together."""
    names = planner_names()
    shares = {name: min(slow_size * SLOW[name] // SLOW["torchrec"], total) for name in names if name in SLOW}
    others = [name for name in names if name not in SLOW]
    left = total - sum(shares.values())
    return shares | {name: left // len(others) + (index < left % len(others)) for index, name in enumerate(others)}


@pytest.mark.parametrize("name", planner_names())
def test_every_plan_is_valid_and_priced(name, registry, check_prediction):
    num_tasks = shares(NUM_TASKS, SLOW["torchrec"])[name]
    outcomes = attempt_all(name, range(num_tasks), registry, check_prediction)
    assert outcomes.total() == num_tasks
    # Many tasks have a plan, and some none: else this would test little.
    assert num_tasks / 4 < outcomes["planned"] < num_tasks


@pytest.mark.parametrize(("name", "seed"), [("auto", 1_000_108), ("flexshard", 173), ("neo", 150)])
def test_tasks_that_once_failed(name, seed, registry, check_prediction):
    assert attempt(name, seed, registry, check_prediction) == "planned"


def blocks():
    return [
        pytest.param(name, range(start, min(start + size, total)), id=f"{name}-block{start // size}")
        for name, total in shares(NUM_SLOW_TASKS, NUM_SLOW_TASKS // 200).items()
        for size in [SLOW_BLOCK if name in SLOW else BLOCK]
        for start in range(0, total, size)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seeds"), blocks())
def test_every_plan_of_very_many_tasks_is_valid_and_priced(name, seeds, registry, check_prediction):
    # Other tasks than those of the quick test.
    assert attempt_all(name, [10**6 + seed for seed in seeds], registry, check_prediction)["planned"]


def test_there_are_as_many_tasks_as_promised():
    assert sum(shares(NUM_TASKS, SLOW["torchrec"]).values()) == NUM_TASKS
    assert sum(len(block.values[1]) for block in blocks()) == NUM_SLOW_TASKS
