"""What cannot be executed is an error on every process, before any step: row orders."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.core import Exchange, PlacedShard, RowRange, RowsBy, Shard, Split, Tier
from autoshard.core.errors import InputError
from autoshard.formats import read_plan, write_plan
from autoshard.formats.row_orders import write_row_order
from autoshard.runtime import RunRequest
from autoshard.runtime.processes.session import make_engine, resumed_sharding
from tests import builders as make
from tests.ranks import on_ranks

NUM_PROCESSES = 2


@pytest.fixture
def tiered_plan():
    """A table whose hottest rows both processes hold."""
    table = make.table("t", 50, 8)
    plan = make.table_wise_plan([table], [0], world_size=NUM_PROCESSES)
    hot, rest = (
        Shard(table=table, rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK), columns=(0, 8))
        for start, stop in ((0, 10), (10, 50))
    )
    everywhere = PlacedShard(
        shard=hot, tier=Tier.DATA_PARALLEL, replicas=((0,), (1,)), exchange=Exchange.PARTIAL_SUMS, grad_sync="sparse"
    )
    split = PlacedShard(
        shard=rest, tier=Tier.ROW_WISE, replicas=((0, 1),), split=Split.CYCLIC, exchange=Exchange.PARTIAL_SUMS
    )
    return replace(plan, shards=(everywhere, split))


def refusal(path):
    """What the plan's engine is refused with: type, source, field and message; None for nothing."""
    request = RunRequest(plan_path=path, device="cpu")
    try:
        make_engine(request, resumed_sharding(request, read_plan(path), 2), torch.device("cpu"))
    except InputError as found:
        return type(found).__name__, found.source, found.field, found.message


def written(plan, folder, ids):
    """The plan with a row order."""
    order = write_row_order(folder / "t.parquet", np.array(ids))
    write_plan(replace(plan, row_orders={"t": order}), folder / "plan.json")
    return folder / "plan.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "cannot be read: no such file or directory"),
        pytest.param("digest", "is another file than was planned with: sha256:", marks=pytest.mark.slow),
        pytest.param("range", "must hold different rows from 0 to 49", marks=pytest.mark.slow),
        pytest.param("twice", "must hold different rows from 0 to 49", marks=pytest.mark.slow),
    ],
)
def test_a_row_order_is_refused_before_the_first_step(tmp_path, tiered_plan, damage, message):
    ids = {"range": [3, 50], "twice": [3, 4, 3]}.get(damage, [3, 4])
    path = written(tiered_plan, tmp_path, ids)
    if damage == "missing":
        (tmp_path / "t.parquet").unlink()
    if damage == "digest":
        write_row_order(tmp_path / "t.parquet", np.array([4, 3]))
    errors = on_ranks(refusal, NUM_PROCESSES, str(path))
    assert errors[0] == errors[1]
    kind, source, field, text = errors[0]
    assert (kind, source, field) == ("FormatError", str(tmp_path / "t.parquet"), "row_orders.t")
    assert text.startswith(message)
