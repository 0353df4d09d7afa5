"""TorchRec's DLRM, its batches, and its weights, which do not depend on how it is sharded.

Shape suffixes: B samples of a local batch, N rows or dense features, D embedding dim.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.types import ShardedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from autoshard.core import TableSet
from autoshard.formats.torchrec.configs import table_config
from autoshard.runtime.training.synthetic import draw_samples
from studies.engines.dlrm.setting import DlrmSetting


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples of a process."""

    dense_BN: torch.Tensor
    ids: KeyedJaggedTensor
    labels_B: torch.Tensor


class Dlrm(torch.nn.Module):
    """TorchRec's DLRM with the loss of clicks; its tables are updated in the backward pass.

    Args:
        setting: Sizes, learning rate and seed.
    """

    def __init__(self, setting: DlrmSetting) -> None:
        super().__init__()
        torch.manual_seed(setting.seed)
        tables = setting.table_set().tables
        configs = [table_config(table, name=table.name, features=[table.features[0].name]) for table in tables]
        self.dlrm = DLRM(
            EmbeddingBagCollection(tables=configs),
            dense_in_features=setting.num_dense,
            dense_arch_layer_sizes=[*setting.dense_layers, tables[0].embedding_dim],
            over_arch_layer_sizes=list(setting.over_layers),
        )
        bags = self.dlrm.sparse_arch.embedding_bag_collection
        fill(bags, setting)
        apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": setting.learning_rate})

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean loss of a batch."""
        logits_B = self.dlrm(batch.dense_BN, batch.ids).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels_B)


def draw_batches(setting: DlrmSetting, rank: int) -> list[Batch]:
    """All batches of a process: warm-up, then measured steps."""
    tables = setting.table_set()
    return [_batch(setting, tables, (setting.seed, step, rank)) for step in range(setting.warmup + setting.steps)]


def _batch(setting: DlrmSetting, tables: TableSet, key: tuple[int, ...]) -> Batch:
    drawn = draw_samples(tables, setting.num_dense, setting.local_batch_size, key)
    keys = [table.features[0].name for table in tables.tables]
    ids = KeyedJaggedTensor(keys=keys, values=drawn.ids.ids_L, lengths=drawn.ids.lengths_FB.reshape(-1))
    return Batch(drawn.dense_BN, ids, drawn.labels_B)


def initial_weights(setting: DlrmSetting, name: str, num_rows: int, dim: int) -> torch.Tensor:
    """A table's first weights, even in +-1 / sqrt(rows), the same for all ways of sharding it."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{setting.seed} {name}".encode()))
    limit = num_rows**-0.5
    return torch.rand(num_rows, dim, generator=generator).mul_(2 * limit).sub_(limit)


@torch.no_grad()
def fill(model: torch.nn.Module, setting: DlrmSetting) -> None:
    """Gives the tables of a model their first weights, whole tables and the parts of sharded ones.

    TorchRec draws the weights of sharded tables anew, each process its own.
    """
    shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in setting.table_set().tables}
    for path, value in model.state_dict().items():
        name = path.split(".")[-2] if "." in path else ""
        if name not in shapes:
            continue
        weights_ND = initial_weights(setting, name, *shapes[name])
        if not isinstance(value, ShardedTensor):
            value.copy_(weights_ND)
            continue
        for part in value.local_shards():
            (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
            part.tensor.copy_(weights_ND[row : row + rows, column : column + columns])
