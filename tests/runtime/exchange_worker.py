"""Saves TorchRec's tables, and loads what was imported: what each of some processes does."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autoshard.core import Optimizer
from autoshard.runtime.checkpoints import Checkpoint
from tests import builders as make
from tests.runtime.checkpoint_worker import laid_out, opened

NUM_ROWS, DIM = 10, 16
#: By how TorchRec shards them.
NAMES = ("table_wise", "row_wise", "column_wise", "data_parallel")


def tables(names=NAMES, optimizer=Optimizer.ROWWISE_ADAGRAD, num_rows=NUM_ROWS):
    return [make.table(name, num_rows, DIM, optimizer=optimizer, row_order=None) for name in names]


def save_of_torchrec(folder):
    """What DistributedModelParallel saves after a step, with its fused optimizer's state, by DCP."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import sharding_plan as ways
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    size = dist.get_world_size()
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[name])
        for name in NAMES
    ]
    collection = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1, "eps": 1e-8})
    sharder = EmbeddingBagCollectionSharder()
    ways_of = {
        "table_wise": ways.table_wise(rank=0),
        "row_wise": ways.row_wise(),
        "column_wise": ways.column_wise(ranks=list(range(size))),
        "data_parallel": ways.data_parallel(),
    }
    plan = ways.construct_module_sharding_plan(
        collection, ways_of, sharder=sharder, local_size=size, world_size=size, device_type="cpu"
    )
    model = DistributedModelParallel(
        torch.nn.ModuleDict({"sparse": collection}),
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan({"sparse": plan}),
        sharders=[sharder],
    )
    ids = KeyedJaggedTensor.from_lengths_sync(
        keys=list(NAMES),
        values=(torch.arange(4 * len(NAMES)) + dist.get_rank()) % NUM_ROWS,
        lengths=torch.ones(4 * len(NAMES), dtype=torch.int32),
    )
    weighted = torch.arange(DIM * len(NAMES)) / DIM
    (model.module["sparse"](ids).values() * weighted).sum().backward()
    dcp.save({"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}, checkpoint_id=folder)


def load_imported(folder, expected, layouts):
    """Loads an imported checkpoint under each of some layouts; weights and moments are what TorchRec saved."""
    for layout in layouts:
        plan, orders = laid_out(layout, dist.get_world_size(), tables(expected))
        embeddings = opened(plan, orders)
        Checkpoint(folder).load({"embeddings": embeddings})
        for name, (weights_ND, moments_ND) in expected.items():
            state = embeddings.table_state(name)
            assert torch.equal(state.weights_ND, weights_ND), (layout, name)
            if layout != "column_wise":  # whole rows: the mean over the parts
                moments_ND = moments_ND.view(NUM_ROWS, -1).mean(dim=1, keepdim=True).expand(-1, DIM)
                torch.testing.assert_close(state.expanded(), moments_ND, atol=0, rtol=1e-6)
            else:
                assert torch.equal(state.expanded(), moments_ND), (layout, name)
        assert embeddings.num_steps == 7, layout
        embeddings.close()
