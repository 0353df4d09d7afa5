"""A small model of TorchRec, and its training: `torchrun --nproc-per-node 2 examples/torchrec_model.py plan.json`.

`make` is what `autoshard import examples.torchrec_model:make --format torchrec` calls.
"""

import sys

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import autoshard.torchrec
from autoshard.formats import read_plan

BATCH_SIZE, NUM_DENSE, DIM = 256, 13, 16
ROWS = {"user": 50_000, "item": 200_000, "shop": 2_000, "city": 500, "device": 20}


def make() -> DLRM:
    """The model; its tables are updated in the backward pass."""
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"{name}_id"])
        for name, rows in ROWS.items()
    ]
    bags = EmbeddingBagCollection(tables=configs)
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    return DLRM(bags, NUM_DENSE, dense_arch_layer_sizes=[64, DIM], over_arch_layer_sizes=[64, 1])


def batch(step: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """Random clicks of this process: mostly of few rows, as real ones are."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    ids = [(rows * torch.rand(BATCH_SIZE, generator=generator) ** 4).long() for rows in ROWS.values()]
    lengths = torch.ones(len(ROWS) * BATCH_SIZE, dtype=torch.long)
    features = KeyedJaggedTensor(keys=[f"{name}_id" for name in ROWS], values=torch.cat(ids), lengths=lengths)
    return torch.rand(BATCH_SIZE, NUM_DENSE, generator=generator), features, (ids[1] % 3 == 0).float()


def main(plan_path: str, steps: int = 100) -> None:
    """Trains on autoshard's engine, in place of DistributedModelParallel, and records which rows are looked up."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make()
    plan = read_plan(plan_path)
    recorder = autoshard.torchrec.record(model, batch_size=plan.tables.batch_size, every=10)
    sharded = autoshard.torchrec.shard(model, plan)
    for collection in sharded.collections.values():
        recorder.watch(collection)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        dense, features, clicks = batch(step)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(sharded(dense, features).squeeze(1), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sharded.end_step()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        recorder.write("recorded.json")
    sharded.close()
    dist.barrier()  # A process that leaves while others are at work may be aborted by gloo's threads.
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
