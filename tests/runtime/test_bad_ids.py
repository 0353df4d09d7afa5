"""Ids in files that no table has a row for are clipped or left out, or end the job; they are counted."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from autoshard.core import DenseLayers, Feature
from autoshard.core.choices import BadIds, Engine
from autoshard.core.errors import InputError
from autoshard.core.optimizers import BadGradients
from autoshard.formats import write_plan
from autoshard.runtime import RunRequest
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.training.bad_ids import IdRepair
from autoshard.runtime.training.synthetic import Samples
from tests import builders as make
from tests.ranks import executed

NUM_SAMPLES = 128


def two_features():
    """Three samples of a table of 10 rows and one of 20; ids 10 of the first, -1 and 20 of the second are no rows."""
    tables = make.tables(make.table("a", 10, features=(Feature(name="a", pooling_factor=2.0),)), make.table("b", 20))
    lengths_FB, ids_L = torch.tensor([[2, 0, 1], [1, 3, 1]]), torch.tensor([10, 9, 0, 19, -1, 5, 20, 3])
    samples = Samples(
        BatchOfIds(lengths_FB, ids_L), torch.arange(6.0).view(3, 2), torch.tensor([0.0, 1, 1]), weight=1.5
    )
    return tables, samples


@pytest.mark.parametrize(
    ("policy", "lengths", "ids"),
    [
        (BadIds.CLIP, [[2, 0, 1], [1, 3, 1]], [9, 9, 0, 19, 0, 5, 19, 3]),
        (BadIds.IGNORE, [[1, 0, 1], [1, 1, 1]], [9, 0, 19, 5, 3]),
        (BadIds.SKIP, [[1], [1]], [0, 3]),
    ],
)
def test_batches_are_made_such_that_they_can_be_looked_up(policy, lengths, ids):
    tables, samples = two_features()
    repair = IdRepair(tables, policy)
    found = repair(samples)
    assert found.ids.lengths_FB.tolist() == lengths
    assert found.ids.ids_L.tolist() == ids
    assert repair.num_bad == 3
    is_left = policy is BadIds.SKIP
    assert found.labels_B.tolist() == ([1.0] if is_left else [0.0, 1.0, 1.0])
    assert found.dense_BN.tolist() == ([[4.0, 5.0]] if is_left else samples.dense_BN.tolist())
    assert found.weight == (0.5 if is_left else 1.5)
    assert repair(found) is found  # nothing is left to do
    assert repair.num_bad == 3


def test_an_error_is_left_to_the_lookup_which_names_the_feature():
    tables, samples = two_features()
    assert IdRepair(tables, BadIds.ERROR)(samples) is samples


@pytest.fixture
def job(tmp_path):
    """A request to train two tables on a file with an id that is no row, and one with a dense feature that is none."""
    dense = DenseLayers(num_dense_features=2, bottom_mlp=(8, 16), top_mlp=(8, 1))
    plan = make.table_wise_plan([make.table("a", 100), make.table("b", 100)], [0, 1], world_size=2, batch_size=32)
    write_plan(replace(plan, tables=replace(plan.tables, dense=dense)), tmp_path / "plan.json")
    rng = np.random.default_rng(0)
    columns = {"label": rng.integers(0, 2, NUM_SAMPLES), "int_0": rng.standard_normal(NUM_SAMPLES)}
    columns["int_1"] = rng.standard_normal(NUM_SAMPLES)
    columns |= {f"{name}_f": rng.integers(0, 100, NUM_SAMPLES) for name in "ab"}
    columns["b_f"][70] = 100
    columns["int_1"][40] = math.inf
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    return RunRequest(
        plan_path=str(tmp_path / "plan.json"),
        data_path=str(tmp_path / "clicks.parquet"),
        steps=None,
        warmup_steps=0,
        device="cpu",
        on_bad_gradients=BadGradients.SKIP,
    )


def test_a_job_goes_on_over_bad_values_and_counts_them(job):
    policies = (BadIds.CLIP, BadIds.IGNORE, BadIds.SKIP)
    results = executed([replace(job, on_bad_ids=policy) for policy in policies], 2)
    for policy, result in zip(policies, results, strict=True):
        assert (result.steps, result.bad_steps, result.bad_ids) == (4, 1, 1), policy
        assert math.isfinite(result.first_loss), policy
        assert math.isfinite(result.last_loss), policy


def test_a_job_ends_with_the_name_of_the_feature_or_of_the_process(job):
    with pytest.raises(Exception, match=r"feature 'b_f': table 'b' has rows 0 to 99, got id 100") as ended:
        executed([job], 2)
    assert InputError.__name__ in str(ended.value)
    with pytest.raises(Exception, match=r"step 2: gradients of the batch of process 0 are not finite"):
        executed([replace(job, on_bad_gradients=BadGradients.ERROR, on_bad_ids=BadIds.CLIP)], 2)


def test_an_id_beyond_32_bits_is_not_another_row_on_torchrecs_engine(job):
    table = pq.read_table(job.data_path)
    ids = [5, 2**32 + 5, *table["b_f"].to_pylist()[2:]]
    pq.write_table(table.set_column(table.column_names.index("b_f"), "b_f", [ids]), job.data_path)
    torchrecs = replace(job, engine=Engine.TORCHREC, on_bad_gradients=BadGradients.IGNORE)
    with pytest.raises(Exception, match=r"feature 'b_f': table 'b' has rows 0 to 99, got id 4294967301"):
        executed([torchrecs], 2)
