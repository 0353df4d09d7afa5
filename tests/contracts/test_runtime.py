"""Every way of executing a plan equals the unsharded reference: pooled outputs, and weights and moments after steps."""

import json
from dataclasses import dataclass

import pytest

from autoshard.core.errors import InvalidPlanError
from autoshard.evaluation import plan_traffic
from autoshard.evaluation.traffic import Stream, sync_bytes
from autoshard.formats import plan_from_json
from autoshard.runtime import RunRequest, run_requests
from tests.ranks import executed

NUM_STEPS = 4
#: fp32 sums in another order: measured up to 5e-7 on these plans.
TOLERANCE = 5e-6


def table(name, rows, dim, *, features=1, pooling="sum", optimizer="rowwise_adagrad"):
    return {
        "name": name,
        "num_embeddings": rows,
        "embedding_dim": dim,
        "dtype": "fp32",
        "pooling": pooling,
        "optimizer": optimizer,
        "features": [{"name": f"{name}.{index}", "pooling_factor": 1.5 + index} for index in range(features)],
        "access": {"kind": "zipf", "alpha": 1.05},
    }


def whole(item, rank):
    return {
        "table": item["name"],
        "rows": {"by": "index", "start": 0, "stop": item["num_embeddings"]},
        "columns": [0, item["embedding_dim"]],
        "tier": "table_wise",
        "replicas": [[rank]],
        "deduplicate": False,
    }


def split(item, ranks, tier, by="cyclic"):
    """Rows dealt to several ranks."""
    return [whole(item, 0) | {"tier": tier, "replicas": [ranks], "split": by}]


def summed(item, ranks, by="cyclic"):
    """Rows dealt to all ranks, whose sums are added up on the way."""
    return [shard | {"collective": "reduce_scatter"} for shard in split(item, ranks, "row_wise", by)]


def replicas(item, grad_sync, tier="data_parallel", ranks=((0,), (1,), (2,), (3,))):
    """Copies on several ranks."""
    return [whole(item, 0) | {"tier": tier, "replicas": ranks, "grad_sync": grad_sync}]


def columns(item, ranks):
    """Equal columns, a shard for each of the ranks."""
    width = item["embedding_dim"] // len(ranks)
    return [whole(item, rank) | {"columns": [place * width, (place + 1) * width]} for place, rank in enumerate(ranks)]


def plan(tables, shards, world_size, dense=None, node_size=None):
    """A plan; its shards are ranks of whole tables, or written out."""
    link = {"bytes_per_s": 1e9, "latency_s": 1e-5}
    sizes = {"node": node_size or world_size, "cluster": world_size}
    if node_size is None:
        del sizes["cluster"]
    table_set = {"schema": "autoshard.tables/1", "batch_size": 32, "tables": tables}
    return {
        "schema": "autoshard.plan/1",
        "tables": table_set | ({"dense": dense} if dense else {}),
        "topology": {
            "schema": "autoshard.topology/1",
            "world_size": world_size,
            "device": "cpu",
            "memory_bytes": {"hbm": 2**30, "ddr": 0, "ssd": 0},
            "levels": [
                {"name": name, "size": size, "all_to_all": link, "all_reduce": link} for name, size in sizes.items()
            ],
        },
        "replica_groups": {"num_groups": 1, "layout": "across_nodes", "sync_every": 1, "moment_scale": 1.0},
        "payload": {"forward": "fp32", "backward": "fp32"},
        "shards": [
            shard
            for item, placed in zip(tables, shards, strict=True)
            for shard in (placed if isinstance(placed, list) else [whole(item, placed)])
        ],
    }


MIXED = [
    table("a", 90, 16),
    table("b", 40, 8, features=2),
    table("c", 300, 32, pooling="mean"),
    table("d", 1, 4),
    table("e", 70, 16, features=3, pooling="mean"),
    table("f", 25, 8),
]
SPLIT = [
    table("a", 90, 16),
    table("b", 41, 8, features=2, pooling="mean"),
    table("c", 300, 32, pooling="mean", optimizer="adagrad"),
    table("d", 10, 4, optimizer="sgd"),
    table("e", 2, 8, features=3, pooling="mean"),
]
PLANS = {
    # Dims, poolings, several features per table, neighbours on different ranks; nothing on rank 2.
    "mixed": plan(MIXED, [3, 0, 1, 0, 3, 1], 4),
    # Eight ranks, so that processes run several; one dim, so that features interact by dot products.
    "eight ranks": plan(
        [table(f"t{index}", 50 + index, 16) for index in range(10)],
        [7, 2, 6, 0, 5, 1, 3, 4, 6, 0],
        8,
        {"num_dense_features": 4, "bottom_mlp": [8, 16], "top_mlp": [8, 1], "interaction": "dot"},
    ),
    "row_wise": plan(
        SPLIT,
        [
            split(SPLIT[0], [0, 1, 2, 3], "row_wise"),
            split(SPLIT[1], [0, 1, 2, 3], "row_wise", "hash"),
            2,
            split(SPLIT[3], [0, 1, 2, 3], "row_wise", "block"),
            3,
        ],
        4,
    ),
    # Two rows for four ranks, several kernels, and neighbours whose sums travel by all-to-all.
    "reduce_scatter": plan(
        SPLIT,
        [
            summed(SPLIT[0], [0, 1, 2, 3]),
            split(SPLIT[1], [0, 1, 2, 3], "row_wise", "hash"),
            2,
            summed(SPLIT[3], [0, 1, 2, 3], "block"),
            summed(SPLIT[4], [3, 2, 1, 0]),
        ],
        4,
    ),
    "no all-to-all of sums": plan(SPLIT, [summed(item, [0, 1, 2, 3]) for item in SPLIT], 4),
    "column_wise": plan(
        SPLIT, [columns(SPLIT[0], [3, 1]), columns(SPLIT[1], [2, 2]), columns(SPLIT[2], [1, 0, 3, 2]), 0, 0], 4
    ),
    "table_row_wise": plan(
        SPLIT,
        [
            split(SPLIT[0], [2, 3], "table_row_wise"),
            split(SPLIT[1], [0, 1], "table_row_wise"),
            3,
            split(SPLIT[3], [2, 3], "table_row_wise"),
            0,
        ],
        4,
        node_size=2,
    ),
    # One table in each way, and means beside sums in all of them.
    "all layouts": plan(
        [*SPLIT[:4], *MIXED[4:]],
        [
            split(SPLIT[0], [2, 3], "table_row_wise"),
            split(SPLIT[1], [0, 1, 2, 3], "row_wise"),
            columns(SPLIT[2], [1, 3]),
            0,
            2,
            split(MIXED[5], [0, 1, 2, 3], "row_wise"),
        ],
        4,
        node_size=2,
    ),
    "optimizers": plan(
        [
            table("s", 60, 16, optimizer="sgd"),
            table("r", 60, 16),
            table("g", 60, 8, optimizer="adagrad"),
            table("h", 60, 8, optimizer="sgd", pooling="mean"),
        ],
        [1, 0, 3, 2],
        4,
    ),
}


#: Gradients of replicas meet in each of the ways, in batches large enough for the bytes to be near their mean.
REPLICATED = [table(f"t{index}", rows, dim) for index, (rows, dim) in enumerate(((300, 4), (2000, 16), (4000, 8)))]
for way in ("dense", "sparse", "all_gather"):
    PLANS[f"gradients {way}"] = plan(
        REPLICATED,
        [
            replicas(REPLICATED[0], way),
            replicas(REPLICATED[1], way),
            replicas(REPLICATED[2], way, "flex", ((0, 1), (2, 3))),
        ],
        4,
        node_size=2,
    )
#: The second copy lies on ranks that do not rise, and some tables have rows in the first part alone. On two processes,
#: each holds both parts.
RENUMBERED = {
    way: [table(f"{way}.{rows}", rows, dim, features=features) for rows, features in ((40, 1), (1, 2), (3, 1))]
    for way, dim in (("dense", 4), ("sparse", 8), ("all_gather", 16))
}
PLANS["nodes renumbered"] = plan(
    [item for items in RENUMBERED.values() for item in items],
    [
        [shard | {"fetch": [0, 1, 1, 1]} for shard in replicas(item, way, "flex", ((0, 1), (3, 2)))]
        for way, items in RENUMBERED.items()
        for item in items
    ],
    4,
    node_size=2,
)


@dataclass(frozen=True)
class Path:
    """A way of executing a plan."""

    plan: str
    num_processes: int
    engine: str

    @property
    def batch_size(self):
        return 2048 if self.plan.startswith("gradients") else 32


PATHS = [
    Path("mixed", 4, "thin"),
    Path("mixed", 4, "torchrec"),
    Path("eight ranks", 4, "thin"),
    Path("eight ranks", 4, "torchrec"),
    Path("optimizers", 4, "thin"),
    Path("optimizers", 4, "torchrec"),
    Path("reduce_scatter", 4, "thin"),
    Path("no all-to-all of sums", 4, "thin"),
    *(
        Path(layout, 4, engine)
        for layout in ("row_wise", "column_wise", "table_row_wise", "all layouts")
        for engine in ("thin", "torchrec")
    ),
    *(Path(name, 4, "thin") for name in PLANS if name.startswith("gradients")),
    *(Path("nodes renumbered", num_processes, "thin") for num_processes in (4, 2)),
]

#: Layouts that TorchRec's engine executes side by side in the plan "all layouts", and one by one in slow tests.
ALONE = ("row_wise", "column_wise", "table_row_wise")
QUICK = [path for path in PATHS if path.engine == "thin" or path.plan not in ALONE]


@pytest.fixture(scope="module", params=[QUICK, pytest.param(PATHS, marks=pytest.mark.slow)], ids=["quick", "all"])
def results(request, tmp_path_factory):
    """Paths, with one start of processes per number of them; as `run` starts them in `test_launch`."""
    folder = tmp_path_factory.mktemp("plans")
    for name, document in PLANS.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    found = {}
    for num_processes in sorted({path.num_processes for path in request.param}):
        paths = [path for path in request.param if path.num_processes == num_processes]
        requests = [
            RunRequest(
                plan_path=str(folder / f"{path.plan}.json"),
                engine=path.engine,
                steps=1,
                warmup_steps=0,
                verify_steps=NUM_STEPS,
                batch_size=path.batch_size,
                device="cpu",
            )
            for path in paths
        ]
        found |= dict(zip(paths, executed(requests, num_processes), strict=True))
    return found


def test_a_path_equals_the_unsharded_reference(results):
    for path, result in results.items():
        verification = result.verification
        assert verification.steps == NUM_STEPS, path
        for name in ("output_error", "weight_error", "moment_error", "dense_error"):
            assert getattr(verification, name) <= TOLERANCE, (path, name)


def test_a_result_says_how_the_plan_was_executed(results):
    for path, result in results.items():
        world_size = PLANS[path.plan]["topology"]["world_size"]
        assert (result.engine, result.num_processes, result.backend) == (path.engine, path.num_processes, "gloo"), path
        assert result.plan_world_size == world_size, path
        assert result.folded == (path.num_processes != world_size), path
        assert sorted(rank for timing in result.ranks for rank in timing.plan_ranks) == list(range(world_size)), path
        held = {
            (shard["table"], rank % path.num_processes)
            for shard in PLANS[path.plan]["shards"]
            for replica in shard["replicas"]
            for rank in replica[: shard["rows"]["stop"]]  # fewer rows than ranks leave the last ones none
        }
        assert sum(timing.num_tables for timing in result.ranks) == len(held), path
        assert result.interaction == ("dot" if path.plan == "eight ranks" else "concat"), path
        for timing in result.ranks:
            assert (timing.kernel_ms > 0) == (timing.num_tables > 0 or path.engine == "torchrec"), path


def test_processes_send_the_bytes_that_evaluation_counts(results):
    for name in ("row_wise", "reduce_scatter", "no all-to-all of sums"):
        traffic = plan_traffic(plan_from_json(PLANS[name]))
        ranks = results[Path(name, 4, "thin")].ranks
        for stream in (Stream.FORWARD, Stream.BACKWARD):
            pairs_RR = traffic.pairs_RR(stream)
            sent_R = pairs_RR.sum(axis=1) - pairs_RR.diagonal() + traffic.scattered_bytes(stream) * 3 / 4
            assert [rank.sent_bytes[stream] for rank in ranks] == pytest.approx(sent_R.tolist()), (name, stream)


def test_gradients_of_replicas_take_the_bytes_that_are_priced(results):
    for way in ("dense", "sparse", "all_gather"):
        path = Path(f"gradients {way}", 4, "thin")
        shards = plan_from_json(json.loads(json.dumps(PLANS[path.plan]))).shards
        # A holder puts its part of the rows into an all-reduce, and of an all-gather the rows that its replica hits.
        priced = sum(
            (reduced + gathered / len(placed.replicas)) / len(placed.replicas[0])
            for placed, (reduced, gathered) in zip(shards, sync_bytes(shards, path.batch_size).tolist(), strict=True)
        )
        # Messages padded to the longest are 2.8% more, and rows that two readers of a copy hit, which both tell, 0.5%.
        sent = [timing.sent_bytes["sync"] for timing in results[path].ranks]
        assert sent == pytest.approx([priced] * 4, rel=0.04), way


def test_all_ways_of_summing_gradients_train_the_same_model(results):
    losses = [results[Path(f"gradients {way}", 4, "thin")].last_loss for way in ("dense", "sparse", "all_gather")]
    assert losses == pytest.approx([losses[0]] * 3, abs=TOLERANCE)


def test_the_same_seed_trains_the_same_model_on_every_path(results):
    losses = {}
    for path, result in results.items():  # batches depend on the number of processes
        losses.setdefault((path.plan, path.num_processes), []).append(result.first_loss)
    assert {name for name, _ in losses} == set(PLANS)
    for name, same in losses.items():
        assert same == pytest.approx([same[0]] * len(same), abs=TOLERANCE), name


def test_rows_in_host_memory_equal_the_unsharded_reference(tmp_path, any_device):
    requests = []
    for cache_bytes in (0, 6_400):
        far = plan([table(f"t{index}", 500 + index, 16) for index in range(4)], [0, 0, 0, 0], 1)
        far["topology"]["memory_bytes"]["ddr"] = 2**30
        for shard in far["shards"][1:]:
            shard["memory"] = {"level": "ddr", "cache_bytes": cache_bytes}
        path = tmp_path / f"{cache_bytes}.json"
        path.write_text(json.dumps(far), encoding="utf-8")
        requests.append(RunRequest(plan_path=str(path), steps=4, verify_steps=NUM_STEPS, device=any_device))
    for result in executed(requests, 1):
        assert result.verification.max_error <= TOLERANCE, result.plan_path


def test_rows_on_disks_are_refused_by_name(tmp_path):
    far = plan([table("t0", 500, 16), table("t1", 500, 16)], [0, 1], 2)
    far["topology"]["memory_bytes"]["ssd"] = 2**30
    far["shards"][1]["memory"] = {"level": "ssd", "cache_bytes": 6_400}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(far), encoding="utf-8")
    with pytest.raises(InvalidPlanError, match=r"shards\[1\]\.memory\.level: must be hbm or ddr: FBGEMM"):
        run_requests([RunRequest(plan_path=str(path), steps=4, device="cpu")], 2)


def test_one_process_equals_the_unsharded_reference(tmp_path, any_device):
    path, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    path.write_text(json.dumps(PLANS["eight ranks"]), encoding="utf-8")
    values = {"plan_path": str(path), "steps": 4, "verify_steps": NUM_STEPS, "device": any_device}
    ways = [{"trace_path": str(trace)}, {"overlap": "pipelined"}, {"engine": "torchrec"}]
    for result in executed([RunRequest(**values, **way) for way in ways], 1):
        assert result.backend == {"cpu": "gloo", "cuda": "nccl"}[any_device]
        assert result.verification.max_error <= TOLERANCE
    names = {event.get("name", "") for event in json.loads(trace.read_bytes())["traceEvents"]}
    assert any("embedding" in name for name in names)
