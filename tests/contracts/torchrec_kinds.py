"""One of two processes that train every kind of table that `autoshard.torchrec.Planner` returns on CPUs.

Each kind is a model of one module. Its plan, or why there is none, is asked of the planner; a plan is carried out by
DistributedModelParallel and compared with the unsharded model, whose gradients are those of both processes.

Arguments: rank, file to meet at, file for the results.
"""

import copy
import datetime
import itertools
import json
import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.func import functional_call
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from autoshard.core.errors import AutoshardError
from autoshard.formats.torchrec import TorchRecType
from autoshard.torchrec import Planner
from tests import builders as make

WORLD_SIZE, BATCH_SIZE, NUM_STEPS, LEARNING_RATE, EPS = 2, 4, 3, 0.1, 1e-8
FUSED = {
    "sgd": torchrec.optim.SGD,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    "adagrad": torchrec.optim.Adagrad,
    "adam": torchrec.optim.Adam,
}
PLAIN = {
    "sgd": lambda parts: torch.optim.SGD(parts, lr=LEARNING_RATE),
    "rowwise_adagrad": lambda parts: RowWiseAdagrad(parts, lr=LEARNING_RATE, eps=EPS),
    "adagrad": lambda parts: torch.optim.Adagrad(parts, lr=LEARNING_RATE, eps=EPS),
}


def every_type(_, __):
    return [kind.value for kind in TorchRecType]


class Bags(EmbeddingBagCollectionSharder):
    sharding_types = every_type


class Rows(EmbeddingCollectionSharder):
    sharding_types = every_type


def case(name, *tables, optimizer="sgd", **settings):
    """Tables are a sharding type, a pooling and features; settings as `model_of` takes them."""
    return name, tables, optimizer, settings


def cases():
    dense, by_rows = "data_parallel", ("row_wise", "table_row_wise")
    for kind in map(str, TorchRecType):
        optimizer = None if kind == dense else "sgd"
        for pooling in ("sum", "mean"):
            yield case(f"{kind} {pooling}", (kind, pooling, "ab"), (kind, pooling, "c"), optimizer=optimizer)
        weighted = [(kind, "sum", "ab"), (kind, "sum", "c")]
        yield case(f"{kind} weighted", *weighted, optimizer=optimizer, is_weighted=True)
        yield case(f"{kind} sequence", (kind, "sequence", "ab"), (kind, "sequence", "c"), optimizer=optimizer)
    for kind, optimizer in itertools.product(
        ("table_wise", "column_wise", "row_wise"), ("rowwise_adagrad", "adagrad", "adam", None)
    ):
        for pooling in ("sum", "sequence"):
            yield case(f"{kind} {pooling} {optimizer}", (kind, pooling, "ab"), optimizer=optimizer)
    for one, other in itertools.combinations(map(str, TorchRecType), 2):
        yield case(f"{one} with {other}", (one, "sum", "ab"), (other, "sum", "ac"), optimizer=None)
    for one, other in itertools.product(by_rows, ("table_wise", "column_wise", dense, *by_rows)):
        yield case(f"mean {one} with {other}", (one, "mean", "ab"), (other, "sum", "c"), optimizer=None)
        yield case(f"mean {one} with mean {other}", (one, "mean", "ab"), (other, "mean", "c"), optimizer=None)
        yield case(f"sum {one} with mean {other}", (one, "sum", "ab"), (other, "mean", "c"), optimizer=None)
    yield case("shared means", ("row_wise", "mean", "ab"), ("row_wise", "mean", "ac"))
    yield case("shared mean and sum", ("row_wise", "mean", "ab"), ("row_wise", "sum", "ac"))
    yield case("shared whole mean and sum", ("table_wise", "mean", "ab"), ("table_wise", "sum", "ac"))
    for kind in ("table_wise", "row_wise", dense):
        yield case(f"{kind} of one row", (kind, "sum", "a"), optimizer=None, num_embeddings=1)
        yield case(f"{kind} of 6 columns", (kind, "sum", "a"), optimizer=None, embedding_dim=6)
        for data_type in ("FP16", "BF16"):
            yield case(f"{kind} {data_type}", (kind, "sum", "a"), optimizer=None, data_type=data_type)
    yield case("column_wise of 4 columns", ("column_wise", "sum", "a"), ("column_wise", "sum", "b"), embedding_dim=4)
    for kind in ("table_wise", "row_wise", "column_wise"):
        yield case(f"{kind} deduplicated", (kind, "sequence", "a"), use_index_dedup=True)


def model_of(tables, *, is_weighted=False, num_embeddings=12, embedding_dim=16, data_type="FP32"):
    common = [
        {
            "name": f"t{index}",
            "num_embeddings": num_embeddings,
            "embedding_dim": embedding_dim,
            "feature_names": list(features),
            "data_type": DataType[data_type],
        }
        for index, (_, _, features) in enumerate(tables)
    ]
    if tables[0][1] == "sequence":
        return EmbeddingCollection(tables=[EmbeddingConfig(**one) for one in common])
    poolings = [PoolingType(pooling.upper()) for _, pooling, _ in tables]
    configs = [EmbeddingBagConfig(**one, pooling=pooling) for one, pooling in zip(common, poolings, strict=True)]
    return EmbeddingBagCollection(tables=configs, is_weighted=is_weighted)


def draw(step, rank, features, settings):
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (len(features) * BATCH_SIZE,), generator=generator)
    count = int(lengths.sum())
    ids = torch.randint(0, settings.get("num_embeddings", 12), (count,), generator=generator)
    weights = torch.rand(count, generator=generator) + 0.5 if settings.get("is_weighted") else None
    return KeyedJaggedTensor(keys=features, values=ids, lengths=lengths, weights=weights)


def embedded(output):
    """What a module returns, by name."""
    output = output.wait() if hasattr(output, "wait") else output
    if isinstance(output, dict):
        return {name: rows.values() for name, rows in output.items()}
    return {name: output[name] for name in output.keys()}  # noqa: SIM118 (a KeyedTensor has no iterator)


def loss_of(outputs):
    """Of every output alike, so that no order of names matters."""
    scales = [torch.linspace(0.5, 1.5, rows.shape[1]) for rows in outputs.values()]
    return sum((rows * scale).square().sum() for rows, scale in zip(outputs.values(), scales, strict=True)) / BATCH_SIZE


class Unsharded:
    """The model, its weights in parts that have moments of their own: the column shards of a plan."""

    def __init__(self, model, plan, optimizer):
        self._model = model
        self._parts = {}
        for path, weights in model.named_parameters():
            spec = plan[path.split(".")[-2]].sharding_spec
            shards = spec.shards if spec else []
            width = shards[0].shard_sizes[1] if shards else weights.shape[1]
            self._parts[path] = [part.detach().clone().requires_grad_() for part in weights.split(width, dim=1)]
        every = [part for parts in self._parts.values() for part in parts]
        self._optimizer = PLAIN[optimizer](every)

    def __call__(self, features):
        weights = {path: torch.cat(parts, dim=1) for path, parts in self._parts.items()}
        return embedded(functional_call(self._model, weights, (features,)))

    def train(self, batches):
        self._optimizer.zero_grad()
        sum(loss_of(self(batch)) / WORLD_SIZE for batch in batches).backward()
        self._optimizer.step()


def copy_weights(sharded, state):
    for path, value in sharded.state_dict().items():
        if not hasattr(value, "local_shards"):
            value.detach().copy_(state[path])
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.detach().copy_(state[path][row : row + rows, column : column + columns])


def outcome(tables, optimizer, settings, rank, machine):
    """`equal`, how far from it, or why the planner refuses the model."""
    torch.manual_seed(0)
    settings = dict(settings)
    dedup = settings.pop("use_index_dedup", False)
    model = model_of(tables, **settings)
    plain, state = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
    if optimizer is not None:
        fused_params = {}
        eps = {} if optimizer == "sgd" else {"eps": EPS}
        apply_optimizer_in_backward(FUSED[optimizer], model.parameters(), {"lr": LEARNING_RATE, **eps})
    sharders = [Bags(fused_params=fused_params), Rows(fused_params=fused_params, use_index_dedup=dedup)]
    constraints = {
        f"t{index}": ParameterConstraints(sharding_types=[kind]) for index, (kind, _, _) in enumerate(tables)
    }
    planner = Planner(
        machine,
        batch_size=BATCH_SIZE,
        constraints=constraints,
        timeout_seconds=0.1,
        planners=("auto",),
    )
    try:
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    except AutoshardError as error:
        return f"refused: {error}"
    held = [plan.plan[""][f"t{index}"].sharding_type for index in range(len(tables))]
    assert held == [kind for kind, _, _ in tables], held
    unsharded = Unsharded(plain, plan.plan[""], optimizer or "sgd")
    sharded = DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))
    copy_weights(sharded, state)
    dense = [weights for _, weights in in_backward_optimizer_filter(sharded.named_parameters())]
    dense_optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE) if dense else None
    features = sorted(set("".join(names for _, _, names in tables)))
    # fp16 rounds weights, outputs not.
    tolerance, worst = 1e-2 if settings.get("data_type") == "FP16" else 1e-5, 0.0
    for step in range(NUM_STEPS + 1):
        outputs = embedded(sharded(draw(step, rank, features, settings)))
        wanted = unsharded(draw(step, rank, features, settings))
        assert set(outputs) == set(wanted)
        assert all(outputs[name].shape == wanted[name].shape for name in wanted)
        errors = [(outputs[name] - wanted[name]).abs().max().item() for name in wanted if wanted[name].numel()]
        worst = max(worst, *errors)
        if dense_optimizer is not None:
            dense_optimizer.zero_grad()
        loss_of(outputs).backward()
        if dense_optimizer is not None:
            dense_optimizer.step()
        unsharded.train([draw(step, one, features, settings) for one in range(WORLD_SIZE)])
    return "equal" if worst < tolerance else f"differs by {worst:.4f}"


def main(rank, rendezvous, output):
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(LOCAL_WORLD_SIZE=str(WORLD_SIZE), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=30),
    )
    machine = make.topology(WORLD_SIZE)
    results = {}
    for name, tables, optimizer, settings in cases():
        try:
            found = outcome(tables, optimizer, settings, rank, machine)
        except Exception as error:  # noqa: BLE001 (whatever TorchRec raises is the result)
            found = f"fails: {type(error).__name__}: {error}"
        results[name] = [None] * WORLD_SIZE
        dist.all_gather_object(results[name], found)
    if rank == 0:
        with open(output, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    dist.barrier()
    # TorchRec's modules hold the group, and abort with it.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
