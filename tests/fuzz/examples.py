"""Valid examples of every file that a command reads, small, and written by the library where it can write them."""

import gzip
import json
import shutil
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from autoshard.cli import main
from autoshard.core import DType, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.dense import DenseKind, DenseShape
from autoshard.core.step import PART_FEATURES, Overlap
from autoshard.formats import read_plan
from autoshard.formats.stores.collective_samples import (
    COLLECTIVE_SAMPLES,
    CollectiveSample,
    GroupLevel,
    MeasuredCollective,
    Operator,
)
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES, DenseSample
from autoshard.formats.stores.samples import MeasuredShard, Sample, write_samples
from autoshard.report.replay_json import REPLAY, ReplayedRank, ReplayResult
from costmodel import CostModelCard, FeatureScaling, HeldOutMetrics, Registry, TrainedCoverage, weight_shapes
from costmodel.kernel.card import Interval
from costmodel.kernel.features import NUM_FEATURES
from costmodel.kernel.learned import LearnedCostModel
from costmodel.step.collective_training import train_collective_model
from costmodel.step.dense_training import train_dense_model
from costmodel.step.model import CalibratedStep, StepCard
from policies.network import first_weights
from policies.planning.trained import TrainedPolicy
from tests.builders import held

NUM_ROWS = 40
#: As few as training accepts; of dense layers, four more of another kind.
NUM_KERNELS, NUM_DENSE = 50, 14
MEASURED = {
    "collected_at": datetime(2026, 11, 1, tzinfo=UTC),
    "device": "cpu",
    "device_name": "test",
    "torch_version": "2.13",
    "autoshard_version": "0.1",
    "git_commit": "",
}
KERNEL = {
    "num_threads": 1,
    "fbgemm_version": "1.8",
    "source": "random",
    "forward_ms": 0.5,
    "backward_ms": 1.0,
    "forward_spread": 0.01,
    "backward_spread": 0.01,
    "reference_forward_ms": 1.0,
    "reference_backward_ms": 2.0,
    "num_rounds": 9,
}

#: All kinds of kernels, which the model says it has seen.
KINDS = tuple(map("/".join, product(Update, MemoryLevel, DType, Optimizer, [*Pooling, "rows"])))


def _table(name, access, **changes):
    table = {"name": name, "num_embeddings": NUM_ROWS, "embedding_dim": 8, "dtype": "fp32", "pooling": "sum"}
    features = [{"name": f"f_{name}", "pooling_factor": 3.0, "pooling_variance": 1.0, "pooling_p99": 6}]
    return {**table, "features": features, "access": access, **changes}


TABLES = {
    "schema": "autoshard.tables/1",
    "batch_size": 64,
    "tables": [
        _table("uniform", {"kind": "uniform", "accessed_fraction": 0.5}, optimizer="adam"),
        _table("zipf", {"kind": "zipf", "alpha": 1.05, "shift": 2.0}, constraints={"pinned_ranks": [0, 1]}),
        _table("curve", {"kind": "curve", "knots": [[0, 0], [1, 0.5], [NUM_ROWS, 1]]}, dtype="fp16"),
        _table("bins", {"kind": "reuse_bins", "of": "rows", "batch_size": 64, "bins": [0.5, 0.25, *[0.01] * 15]}),
        _table("counts", {"kind": "counts", "file": "counts.parquet"}, pooling="mean", optimizer="sgd"),
    ],
    "dense": {"num_dense_features": 4, "bottom_mlp": [16, 8], "top_mlp": [16, 1], "interaction": "dot"},
}


def _level(name, size, bytes_per_s):
    link = {"bytes_per_s": bytes_per_s, "latency_s": 1e-5}
    return {"name": name, "size": size, "all_to_all": link, "all_reduce": link}


TOPOLOGY = {
    "schema": "autoshard.topology/1",
    "world_size": 4,
    "device": "cpu",
    "memory_bytes": {"hbm": 1 << 28, "ddr": 1 << 30, "ssd": 0},
    "memory_bandwidth_bytes_per_s": {"ddr": 2.4e10, "ssd": 3e9},
    "levels": [_level("node", 2, 1e9), _level("cluster", 4, 1e8)],
    "overrides": [{"ranks": [0], "memory_bytes": {"hbm": 1 << 27}}],
    "fetch_ms": [[0, 1, 2.5, 2.5], [1, 0, 2.5, 2.5], [2.5, 2.5, 0, 1], [2.5, 2.5, 1, 0]],
}
TBE = {
    "T": 2,
    "E": 40,
    "Es": [40, 30],
    "D": 8,
    "Ds": [8, 4],
    "mixed_dim": True,
    "weighted": False,
    "use_cpu": False,
    "embedding_specs": None,
    "feature_table_map": None,
    "indices_params_list": None,
    "max_indices": None,
    "batch_params": {"B": 64, "Bs": None, "sigma_B": None, "vbe_distribution": "normal", "vbe_num_ranks": None},
    "indices_params": {
        "heavy_hitters": [0.2, 0.1],
        "index_dtype": "torch.int64",
        "offset_dtype": "torch.int64",
        "zipf_q": 10.0,
        "zipf_s": 1.2,
    },
    "pooling_params": {"L": 3, "Ls": [1.5, 4.0], "length_distribution": "normal", "sigma_L": 2},
}

#: A model of HugeCTR, one of NVIDIA's list of models, and a command line of DLRM.
HUGECTR = {
    "solver": {"batchsize": 64},
    "optimizer": {"type": "Adam"},
    "layers": [
        {
            "type": "Data",
            "slot_size_array": [40, 30],
            "sparse": [{"top": "deep", "nnz_per_slot": [1, 3], "slot_num": 2}],
        },
        {
            "type": "LocalizedSlotSparseEmbeddingHash",
            "bottom": "deep",
            "top": "embedding",
            "sparse_embedding_hparam": {"embedding_vec_size": 8, "combiner": "mean"},
        },
    ],
}
MODELS = """
model = ModelConfig(name="Tiny", embedding_configs=[
    EmbeddingConfig(1, [1, 10], 100, 8, True), EmbeddingConfig(2, nnz=[1, 2], num_rows=10, width=4, shared=False),
], mlp_sizes=[256, 128], num_numerical_features=10, interact_stride=None)
models = {"tiny": model}
"""
DLRM = """python dlrm_s_pytorch.py --arch-sparse-feature-size=16 --arch-mlp-bot=13-64-16 --arch-mlp-top=512-256-1 \\
  --arch-embedding-size='1000-1-40' --num-indices-per-lookup 4 --mini-batch-size=2048 --optimizer sgd
"""
LIST = """name,num_embeddings,embedding_dim,pooling,dtype,optimizer,features,pooling_factor,zipf_alpha
user,1000,64,mean,fp16,sgd,user; friend,2.5,1.1
item,50,8,,,,,,
"""
#: TorchRec's plan of TABLES on TOPOLOGY, a table on each rank in turn: `autoshard export --format torchrec` wrote it.
STORED_PLAN = Path(__file__).with_name("plan.pt")

#: All that there is, for a command to find.
EVERYTHING = (
    *("tables.json", "topology.json", "plan.json", "flex.json", "replay.json", "tbe.json", "counts.parquet"),
    *("ids.parquet", "ids.pt", "batch.pt", "batch.pt.gz", "store", "registry"),
    *("tables.yaml", "topology.yaml", "list.csv", "hugectr.json", "models.py", "dlrm.sh", "plan.pt"),
)
#: Plans by file, and the planner that makes each.
PLANS = {
    "plan.json": ("cost-greedy",),
    "flex.json": ("flexshard",),
}


def write_examples(folder):
    """Writes all of them into a folder."""
    (folder / "tables.json").write_text(json.dumps(TABLES), encoding="utf-8")
    (folder / "topology.json").write_text(json.dumps(TOPOLOGY), encoding="utf-8")
    (folder / "tbe.json").write_text(json.dumps(TBE), encoding="utf-8")
    for name, document in (("tables", TABLES), ("topology", TOPOLOGY)):
        apart = json.loads(json.dumps(document))  # objects that are there twice would be references, which are refused
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(apart, sort_keys=False), encoding="utf-8")
    (folder / "hugectr.json").write_text(json.dumps(HUGECTR), encoding="utf-8")
    for name, text in (("models.py", MODELS), ("dlrm.sh", DLRM), ("list.csv", LIST)):
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copy(STORED_PLAN, folder)
    counts = np.random.default_rng(0).zipf(1.5, NUM_ROWS).clip(max=1000)
    pq.write_table(pa.table({"count": counts}), folder / "counts.parquet")
    ids = {"clicks": [[3, 3, 5], [], None, [1]], "user": [0, None, 7, 7]}
    pq.write_table(pa.table(ids), folder / "ids.parquet")
    _write_archives(folder)
    _write_stores(folder / "store")
    _write_registry(folder / "registry", folder / "store")
    for name, planner in PLANS.items():
        _write_plan(folder, name, planner)
    REPLAY.write(_replayed(read_plan(folder / "plan.json")), folder / "replay.json")


def _replayed(plan):
    return ReplayResult(
        device="cpu",
        device_name="a processor",
        num_rounds=3,
        num_groups=1,
        ceiling_balance=0.9,
        predicted_max_kernel_ms=1.25,
        cost_model="analytic:cpu",
        ranks=tuple(
            ReplayedRank(rank=rank, num_shards=len(shards), forward_ms=0.5, backward_ms=1.0, predicted_ms=1.25)
            for rank, shards in enumerate(plan.local_shards())
        ),
    )


def _write_plan(folder, name, planner):
    files = (str(folder / "tables.json"), "--topology", str(folder / "topology.json"), "-o", str(folder / name))
    assert main(["plan", *files, "--time-limit", "0.01", "--planner", *planner]) == 0, planner


def _write_archives(folder):
    lengths = torch.tensor([[2, 0, 1], [1, 1, 1]])
    indices = torch.tensor([0, 1, 2, 5, 6, 5])
    offsets = torch.tensor([0, 2, 2, 3, 4, 5, 6])
    torch.save((indices, offsets, lengths), folder / "batch.pt")
    torch.save((indices, lengths), folder / "ids.pt")
    (folder / "batch.pt.gz").write_bytes(gzip.compress((folder / "batch.pt").read_bytes()))


def _write_stores(folder):
    rng = np.random.default_rng(0)
    write_samples(folder, [_kernel_sample(rng, number) for number in range(NUM_KERNELS)])
    DENSE_SAMPLES.write(folder, list(map(_dense_sample, range(NUM_DENSE))))
    kinds = product(Operator, (GroupLevel.NODE, GroupLevel.ACROSS_NODES), [4**power for power in range(5, 10)], (4, 8))
    COLLECTIVE_SAMPLES.write(folder, [_collective_sample(*kind) for kind in kinds])


def _kernel_sample(rng, number):
    shard = held(f"t{number}", 100 + number, 8, num_bags=16)
    measured = MeasuredShard(shard=shard, num_lookups=32, num_distinct=20, reuse_bins=(1.0, *(0.0,) * 16))
    times = {"forward_ms": float(rng.uniform(0.1, 1)), "backward_ms": float(rng.uniform(0.1, 1))}
    return Sample(**MEASURED | KERNEL | times, shards=(measured,))


def _dense_sample(number):
    batch_size = 64 + 16 * number
    if number < NUM_DENSE - 4:
        shape = DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=batch_size, widths=(8, 16 + number, 1))
    else:
        shape = DenseShape.interaction(batch_size, 5, 8, kind=DenseKind.DOT)
    return DenseSample(**MEASURED | KERNEL, shape=shape)


def _collective_sample(operator, level, num_bytes, nproc):
    group, nodes = (nproc // 2, 1) if level is GroupLevel.NODE else (2, 2)
    sent = num_bytes * (1 - 1 / group) * (2 if operator is Operator.ALL_REDUCE else 1)
    return CollectiveSample(
        **MEASURED,
        backend="gloo",
        num_hosts=1,
        nproc=nproc,
        node_size=nproc // 2,
        collective=MeasuredCollective(level=level, operator=operator, dtype=DType.FP32, bytes_per_rank=num_bytes),
        group_size=group,
        num_nodes=nodes,
        mean_sent_bytes=sent,
        max_sent_bytes=int(np.ceil(sent)),
        max_received_bytes=int(np.ceil(sent)),
        latency_ms=0.1 + 1e-6 * sent,
        spread=0.01,
        reference_ms=1.0,
        num_rounds=9,
    )


def _write_registry(folder, store):
    registry = Registry(folder, author="test")
    collectives = train_collective_model(COLLECTIVE_SAMPLES.read(store)).model
    collectives.publish(registry)
    dense = train_dense_model(DENSE_SAMPLES.read(store)).model
    dense.publish(registry)
    rng = np.random.default_rng(0)
    hidden = (8,)
    weights = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in weight_shapes(hidden).items()}
    card = CostModelCard(
        device="cpu",
        coverage=TrainedCoverage(
            kinds=KINDS,
            num_tables=(1, 5),
            ranges=dict.fromkeys(("num_bags", "embedding_dim", "num_embeddings", "pooling_factor"), (1.0, 1e6)),
        ),
        encoder_hidden=hidden,
        scaling=FeatureScaling(mean_F=(0.5,) * NUM_FEATURES, std_F=(2.0,) * NUM_FEATURES),
        scale_ms=1.0,
        metrics=HeldOutMetrics(num_samples=9, mae_ms=0.1, mse_ms2=0.2, relative_error=0.03, kendall_tau=0.9),
        interval=Interval(low=-1.5, high=2.0, coverage=0.9, half_width=0.05),
        training={"num_samples": 10},
    )
    registry.publish(LearnedCostModel.kind, "cpu", weights, card.to_json())
    TrainedPolicy(weights=first_weights(0), training={}).publish(registry)
    fitted = {(part, "learned:cpu"): (1.0,) * len(names) for part, names in PART_FEATURES.items()}
    said = {"engine": "thin", "overlap": Overlap.NONE, "interval_scale": 1.0, "metrics": {}, "training": {}}
    step = CalibratedStep(fitted, StepCard(device="cpu", **said))
    step.publish(registry)
