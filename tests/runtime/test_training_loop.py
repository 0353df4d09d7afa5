"""Training jobs: files of samples, checkpoints, and going on from them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.core import DenseLayers, ReplicaGroups
from autoshard.core.errors import InputError, InvalidOptionError
from autoshard.formats import read_plan, write_plan
from autoshard.runtime import RunRequest, run_requests
from autoshard.runtime.checkpoints.manifest import MANIFEST, MANIFEST_NAME
from tests import builders as make
from tests.ranks import executed

NUM_SAMPLES = 1_003


@pytest.fixture
def job(tmp_path):
    """A request to train a plan of 4 ranks on a file, 16 steps an epoch."""
    dense = DenseLayers(num_dense_features=2, bottom_mlp=(8, 16), top_mlp=(8, 1))
    tables = [make.table(f"t{index}", 100) for index in range(5)]
    plan = make.table_wise_plan(tables, [0, 1, 2, 3, 3], world_size=4, batch_size=64)
    plan = replace(plan, tables=replace(plan.tables, dense=dense))
    write_plan(plan, tmp_path / "plan.json")
    rng = np.random.default_rng(0)
    columns = {"label": rng.integers(0, 2, NUM_SAMPLES)}
    columns |= {f"int_{index}": rng.standard_normal(NUM_SAMPLES) for index in range(2)}
    columns |= {f"t{index}_f": rng.integers(0, 100, NUM_SAMPLES) for index in range(5)}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet", row_group_size=90)
    return RunRequest(
        plan_path=str(tmp_path / "plan.json"),
        data_path=str(tmp_path / "clicks.parquet"),
        shuffle=300,
        epochs=2,
        steps=None,
        warmup_steps=0,
        device="cpu",
        checkpoints_path=str(tmp_path / "job"),
        checkpoint_every=5,
    )


def trained(request, num_processes):
    (result,) = executed([request], num_processes)
    return result


def last_files(folder):
    """Step of the last checkpoint, and the hashes of its files."""
    last = max(folder.glob("step-*"))
    manifest = MANIFEST.read(last / MANIFEST_NAME)
    # torch's metadata names when it was written.
    return manifest.step, {file.name: file.sha256 for file in manifest.files if file.name.startswith("__")}


@pytest.mark.parametrize("overlap", ["none", "pipelined"])
def test_a_job_that_goes_on_ends_with_the_same_bits_as_one_in_one_go(job, tmp_path, overlap):
    job = replace(job, overlap=overlap)
    whole = trained(replace(job, checkpoints_path=str(tmp_path / "whole")), 2)
    assert (whole.job.trained_steps, whole.steps, whole.job.resumed_from) == (32, 32, None)
    for steps in (7, 16, 17):  # the end of an epoch among them
        assert trained(replace(job, steps=steps), 2).job.trained_steps == steps
    rest = trained(job, 2)
    assert (rest.job.trained_steps, rest.steps, rest.job.resumed_from) == (32, 15, 17)
    assert rest.last_loss == whole.last_loss
    assert last_files(tmp_path / "job") == last_files(tmp_path / "whole")
    assert len(list((tmp_path / "job").glob("step-*"))) == 3
    again = trained(job, 2)
    assert (again.job.trained_steps, again.steps, again.step_ms) == (32, 0, 0.0)


def test_a_job_that_goes_on_with_other_processes_has_the_loss_of_one_process(job, tmp_path):
    whole = trained(replace(job, checkpoints_path=str(tmp_path / "whole")), 1)
    for num_processes, steps in ((4, 6), (3, 20)):
        trained(replace(job, steps=steps), num_processes)
    rest = trained(job, 2)
    assert rest.job.resumed_from == 20
    assert rest.last_loss == pytest.approx(whole.last_loss, abs=1e-6)


def test_replica_groups_are_saved_when_they_have_met(job, tmp_path):
    plan = read_plan(job.plan_path)
    groups = ReplicaGroups(num_groups=2, sync_every=3)
    shards = make.table_wise(plan.tables.tables, [0, 1, 1, 0, 1])
    write_plan(replace(plan, shards=shards, replica_groups=groups), job.plan_path)
    trained(replace(job, steps=10), 4)
    assert [path.name[-2:] for path in sorted((tmp_path / "job").glob("step-*"))] == ["06"]
    assert trained(replace(job, steps=12), 4).job.resumed_from == 6


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data_path": None}, "steps: must be told: generated samples have no end"),
        ({"drift_every": 3}, "drift_every: must be 0: samples of files are as they are"),
        ({"verify_steps": 1}, "verify_steps: must be 0 where checkpoints are kept or files are trained on"),
        ({"engine": "torchrec"}, "engine: must be thin where checkpoints are kept, got torchrec"),
        ({"epochs": 0}, "epochs: must be a whole number of at least 1, got 0"),
        ({"shuffle": -1}, "shuffle: must be a whole number of at least 0, got -1"),
        ({"keep": 0}, "keep: must be a whole number of at least 1, got 0"),
    ],
)
def test_what_does_not_go_together_is_refused(job, change, text):
    with pytest.raises(InvalidOptionError, match=f"^{text}$"):
        replace(job, **change)


def test_a_missing_column_is_refused_before_a_process_starts(job, tmp_path):
    table = pq.read_table(job.data_path).drop_columns("t3_f")
    pq.write_table(table, job.data_path)
    with pytest.raises(InputError, match=r'^.*clicks.parquet: data: has no column "t3_f"$'):
        run_requests([job], 2)
    assert not (tmp_path / "job").exists()


def test_generated_samples_are_gone_on_with(job, tmp_path):
    job = replace(job, data_path=None, drift_every=4, steps=12)
    whole = trained(replace(job, checkpoints_path=str(tmp_path / "whole")), 2)
    trained(replace(job, steps=5), 2)
    assert trained(job, 2).last_loss == whole.last_loss
    assert last_files(tmp_path / "job") == last_files(tmp_path / "whole")
