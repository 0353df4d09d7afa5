"""Trains a small DLRM in a loop of your own; its embedding tables are sharded as a plan says.

autoshard plan examples/tables.json --topology examples/topology.json -o plan.json
torchrun --nproc-per-node 4 examples/train_dlrm.py plan.json

Shape suffixes: B samples of a local batch, N dense features, C columns of all embeddings.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from autoshard.formats import read_plan
from autoshard.formats.row_orders import read_row_orders
from autoshard.runtime.embeddings import ShardedEmbeddings, StartedLookup
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.step import FeatureVectors
from autoshard.runtime.training.synthetic import Samples, draw_samples

NUM_DENSE = 13


class DenseLayers(nn.Module):
    """The part of the model that every process has whole: it makes a logit of dense features and embeddings."""

    def __init__(self, num_columns: int, vectors: FeatureVectors) -> None:
        super().__init__()
        self.vectors = vectors
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + num_columns, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Samples, started: StartedLookup) -> torch.Tensor:
        """Logits, shape (B,)."""
        bottom_BH = self.bottom(batch.dense_BN)  # Embeddings travel meanwhile.
        embedded_BC = self.vectors(started.wait(), batch.ids)
        return self.top(torch.cat([bottom_BH, embedded_BC], dim=1)).squeeze(1)


def train(plan_path: str, num_steps: int, learning_rate: float, device: torch.device) -> None:
    """Trains on generated batches, and prints loss and samples per second of every step."""
    plan = read_plan(plan_path)
    embeddings = ShardedEmbeddings(
        plan,
        FusedSettings(learning_rate=learning_rate),
        device=device,
        # Tables that are cut by how often rows are accessed come with the order of their rows.
        row_orders={name: torch.from_numpy(ids) for name, ids in read_row_orders(plan, plan_path).items()},
    )
    dense = DistributedDataParallel(DenseLayers(sum(embeddings.feature_dims), FeatureVectors(plan.tables)).to(device))
    optimizer = torch.optim.SGD(dense.parameters(), lr=learning_rate)
    # A loader of your own gives a BatchOfIds, or a KeyedJaggedTensor; this draws ids as the plan's tables expect.
    keys = ((0, step, dist.get_rank()) for step in range(num_steps))
    loader = (draw_samples(plan.tables, NUM_DENSE, embeddings.local_batch_size, key).to(device) for key in keys)
    begun = time.perf_counter()
    # The ids of the next batch travel while one is trained on.
    for step, (batch, started) in enumerate(embeddings.pipelined(loader, lambda one: one.ids)):
        labels_B = (batch.dense_BN[:, 0] > 0).float()  # Something that can be learned.
        loss = binary_cross_entropy_with_logits(dense(batch, started), labels_B)
        optimizer.zero_grad()
        loss.backward()  # Updates the tables, too.
        embeddings.end_step()
        optimizer.step()
        mean_loss = loss.detach()
        dist.all_reduce(mean_loss)
        if dist.get_rank() == 0:
            samples_per_s = plan.tables.batch_size / (time.perf_counter() - begun)
            print(f"step {step}: loss {mean_loss.item() / dist.get_world_size():.4f}, {samples_per_s:,.0f} samples/s")
        begun = time.perf_counter()
    embeddings.close()


def main() -> None:
    """Reads the command line, and joins the processes that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", help="File of the plan.")
    parser.add_argument("--steps", type=int, default=10, help="Training steps.")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="Learning rate of tables and dense layers.")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    train(options.plan, options.steps, options.learning_rate, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
