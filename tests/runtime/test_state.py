"""Tables are saved and restored with their moments, and follow schedules: on two processes, then on one."""

from dataclasses import replace

import pytest
import torch

from autoshard.core import PlacedShard, Shard
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from tests.contracts.drawn_layouts import drawn_plan
from tests.ranks import on_ranks
from tests.runtime.state_worker import SEEDS, check_all


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What the first random plan's tables were after two steps, once both processes have passed all their checks."""
    folder = tmp_path_factory.mktemp("state")
    on_ranks(check_all, 2, folder)
    return torch.load(folder / "saved.pt")


@pytest.mark.usefixtures("one_process")
def test_two_processes_restore_and_one_takes_what_they_saved(saved):
    plan, _ = drawn_plan(SEEDS[0], 1, 1)
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), 0) for table in plan.tables.tables)
    embeddings = ShardedEmbeddings(replace(plan, shards=shards), FusedSettings(learning_rate=0.1))
    embeddings.load_state_dict(saved)
    found = embeddings.state_dict()
    assert found.keys() == saved.keys()
    assert embeddings.num_steps == 2
    for key, tensor in saved.items():
        # Of a table that was cut by columns, moments are those of its parts.
        if tensor.shape == found[key].shape:
            assert torch.equal(found[key], tensor), key
