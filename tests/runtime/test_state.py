"""Tables are saved and restored with their moments, and follow schedules: on two processes, then on one."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from autoshard.core import PlacedShard, Shard
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from tests.contracts.drawn_layouts import drawn_plan
from tests.ranks import on_ranks
from tests.runtime.state_worker import SEEDS, check_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have saved the first random plan's tables after two steps, all their checks passed."""
    folder = tmp_path_factory.mktemp("state")
    on_ranks(check_all, 2, folder)
    return folder


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("is_whole", [False, True])
def test_two_processes_restore_and_one_takes_what_they_saved(folder, is_whole):
    whole = torch.load(folder / "saved.pt")
    plan, _ = drawn_plan(SEEDS[0], 1, 1)
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), 0) for table in plan.tables.tables)
    embeddings = ShardedEmbeddings(replace(plan, shards=shards), FusedSettings(learning_rate=0.1))
    saved = whole
    if not is_whole:
        # Moments of tables that were cut by columns are of another shape, which a checkpoint's reader has to give.
        saved = {key: torch.empty_like(tensor) for key, tensor in whole.items()}
        dcp.load(saved, checkpoint_id=folder / "saved")
    embeddings.load_state_dict(saved)
    found = embeddings.state_dict()
    assert found.keys() == {key for key in whole if not key.endswith("moment_columns")}
    assert embeddings.num_steps == 2
    for key, tensor in found.items():
        # Of a table that was cut by columns, moments are those of its parts.
        if tensor.shape == whole[key].shape:
            assert torch.equal(whole[key], tensor), key
