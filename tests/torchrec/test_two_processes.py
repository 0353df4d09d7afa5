"""What `shard` makes of models whose processes differ: in weights, and in the layers that a step uses."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from autoshard.core import GradSync, ReplicaGroups, Tier
from autoshard.torchrec import shard, tables_of
from tests import builders as make
from tests.ranks import on_ranks

#: By name: tier, replicas, what is read, replica groups, and of which process each of the table's rows is.
LAYOUTS = {
    "table_wise": (Tier.TABLE_WISE, ((1,),), None, 1, [1] * 6),
    "row_wise": (Tier.ROW_WISE, ((0, 1),), None, 1, [0] * 3 + [1] * 3),
    "data_parallel": (Tier.DATA_PARALLEL, ((0,), (1,)), None, 1, [0] * 6),
    "replicated": (Tier.REPLICATED, ((1,), (0,)), (0, 1), 1, [1] * 6),
    "replica groups": (Tier.TABLE_WISE, ((0,),), None, 2, [0] * 6),
}


class Model(torch.nn.Module):
    """A table and a dense layer, and another one that not every batch goes through."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        config = EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])
        self.tables = EmbeddingBagCollection(tables=[config])
        self.bottom, self.top = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, ids, dense=None):
        found = self.tables(ids).values()
        return self.top(found if dense is None else found + self.bottom(dense)).sum()


def sharded(model, tier=Tier.TABLE_WISE, replicas=((0,),), fetch=None, num_groups=1, **options):
    tables = tables_of(model, batch_size=4)
    plan = make.plan(
        make.placed(tables.tables[0], tier, replicas, fetch=fetch),
        tables=tables,
        topology=make.topology(2),
        replica_groups=ReplicaGroups(num_groups=num_groups),
    )
    return shard(model, plan, learning_rate=0.1, **options)


def batch(*ids):
    return KeyedJaggedTensor(keys=["f"], values=torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def weights_of_layouts():
    """By layout, what each process has drawn, and the table that it looks up then."""
    found = {}
    for name, (*layout, _) in LAYOUTS.items():
        model = Model(seed=dist.get_rank())
        drawn = model.tables.embedding_bags["t"].weight.detach().clone()
        table = sharded(model, *layout)
        with torch.no_grad():
            found[name] = drawn, table.collections["tables"](batch(*range(6))).values()
        table.close()
    return found


def test_copies_of_rows_are_as_the_first_where_processes_have_drawn_other_weights():
    of_processes = on_ranks(weights_of_layouts, 2)
    for name, (*_, owners) in LAYOUTS.items():
        drawn = [of[name][0] for of in of_processes]
        expected = torch.stack([drawn[owner][row] for row, owner in enumerate(owners)])
        for of in of_processes:
            assert torch.equal(of[name][1], expected), name
