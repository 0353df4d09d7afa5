"""Training jobs: files of samples, checkpoints, and going on from them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from autoshard.cli import main
from autoshard.commands.run import RunOptions, _headline, _predicted, _written
from autoshard.core import DenseLayers, Feature, ReplicaGroups
from autoshard.core.errors import InputError, InvalidOptionError
from autoshard.evaluation import evaluate
from autoshard.formats import read_plan, write_plan
from autoshard.planning import make_costs
from autoshard.runtime import RunRequest, run_requests
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.checkpoints.manifest import MANIFEST, MANIFEST_NAME
from autoshard.runtime.run_store import read_runs
from autoshard.runtime.timing import Span, StepTimer, Timings
from autoshard.runtime.training.loop import TrainedStep
from autoshard.runtime.training.step import StepOutcome
from autoshard.runtime.training.synthetic import Samples
from tests import builders as make
from tests.ranks import executed, on_ranks

CPU = torch.device("cpu")

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


@pytest.mark.parametrize(
    ("overlap", "stops"),
    [
        ("pipelined", (17,)),
        # The end of an epoch among them.
        *(pytest.param(overlap, (7, 16, 17), marks=pytest.mark.slow) for overlap in ("none", "pipelined")),
    ],
)
def test_a_job_that_goes_on_ends_with_the_same_bits_as_one_in_one_go(job, tmp_path, overlap, stops):
    job = replace(job, overlap=overlap)
    first, *others = (replace(job, steps=steps) for steps in stops)
    whole, stopped = executed([replace(job, checkpoints_path=str(tmp_path / "whole")), first], 2)
    assert (whole.job.trained_steps, whole.steps, whole.job.resumed_from) == (32, 32, None)
    assert [stopped.job.trained_steps, *(trained(other, 2).job.trained_steps for other in others)] == list(stops)
    rest, again = executed([job, replace(job, learning_rate=0.01)], 2)
    assert (rest.job.trained_steps, rest.steps, rest.job.resumed_from) == (32, 15, 17)
    assert rest.last_loss == whole.last_loss
    assert last_files(tmp_path / "job") == last_files(tmp_path / "whole")
    assert len(list((tmp_path / "job").glob("step-*"))) == 3
    assert rest.job.resumed_learning_rate is None
    assert (again.job.trained_steps, again.steps, again.step_ms) == (32, 0, 0.0)
    assert again.job.resumed_learning_rate == job.learning_rate == 0.05
    assert (again.first_loss, again.last_loss) == (None, None)
    assert "loss" not in " ".join(_headline(again))


def test_a_job_at_its_end_leaves_the_files_of_the_steps_before_and_names_none(job, tmp_path):
    job = replace(job, steps=3)
    options = RunOptions(
        plan=Path(job.plan_path),
        html=tmp_path / "page.html",
        **{name: tmp_path / f"{name}.json" for name in ("trace", "profile", "write_access")},
    )
    files = [options.trace, options.profile, options.write_access]
    for file in files:
        file.write_text("of the steps before", encoding="utf-8")
    trace, profile, access = map(str, files)
    whole, again = executed([job, replace(job, trace_path=trace, profile_path=profile, access_path=access)], 2)
    assert (again.job.trained_steps, again.steps) == (3, 0)
    assert {file.read_text(encoding="utf-8") for file in files} == {"of the steps before"}
    assert _written(options, again) == []
    assert set(_written(options, whole)) == {options.html, *files}
    stopped = replace(whole, job=replace(whole.job, is_stopped=True))
    assert set(_written(options, stopped)) == {options.html, options.profile, options.write_access}


@pytest.mark.slow
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
    _, resumed = executed([replace(job, steps=10), replace(job, steps=12)], 4)
    # The first end is no multiple of 3: groups are averaged once more for its checkpoint.
    assert [path.name[-2:] for path in sorted((tmp_path / "job").glob("step-*"))] == ["06", "10", "12"]
    assert resumed.job.resumed_from == 10


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data_path": None}, "steps: must be told: generated samples have no end"),
        (
            {"data_path": None, "steps": 5, "balance": True},
            "balance: is for files of samples: generated batches are even",
        ),
        ({"drift_every": 3}, "drift_every: must be 0: samples of files are as they are"),
        (
            {"verify_steps": 1},
            "verify_steps: must be 0 where checkpoints are kept, files are trained on or plans are changed",
        ),
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


def test_a_plan_without_dense_layers_takes_the_dense_features_of_its_files(job, tmp_path):
    plan = read_plan(job.plan_path)
    write_plan(replace(plan, tables=replace(plan.tables, dense=None)), job.plan_path)
    job = replace(job, checkpoints_path=None, shuffle=0, epochs=1, batch_size=256)
    table = pq.read_table(job.data_path)
    gap = tmp_path / "gap.parquet"  # which is trained on what comes before it
    pq.write_table(table.rename_columns({"int_1": "int_2"}), gap)
    for result in executed([job, replace(job, data_path=str(gap))], 1):
        assert math.isfinite(result.last_loss), result
    pq.write_table(table.drop_columns("t3_f"), job.data_path)
    with pytest.raises(InputError, match=r'clicks\.parquet: data: has no column "t3_f"$'):
        run_requests([job], 1)


def test_generated_samples_are_gone_on_with(job, tmp_path):
    job = replace(job, data_path=None, drift_every=4, steps=12)
    whole, _ = executed([replace(job, checkpoints_path=str(tmp_path / "whole")), replace(job, steps=5)], 2)
    assert trained(job, 2).last_loss == whole.last_loss
    assert last_files(tmp_path / "job") == last_files(tmp_path / "whole")


def test_metrics_are_those_of_all_samples_and_go_on_where_the_job_does(job, tmp_path):
    folder = tmp_path / "metrics"
    job = replace(job, checkpoints_path=None, metrics_path=str(folder), metrics_every=4, epochs=1, shuffle=0)
    trained(job, 2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["step"], line["samples"]) for line in lines] == [(4, 256), (8, 256), (12, 256), (16, 235)]
    labels = pq.read_table(job.data_path)["label"].to_numpy()
    for line, of in zip(lines, np.split(labels, [256, 512, 768]), strict=True):
        share = of.mean()
        entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
        assert line["normalised_entropy"] == pytest.approx(line["loss"] / entropy)
        assert 0 < line["auc"] < 1
        assert line["sent_bytes"]["forward"] > 0 < line["memory_planned_bytes"]
        assert line["collectives"]["input"]["exposed_ms"] > 0 < line["input_ms"] < line["step_ms"]
    whole = [line["loss"] for line in lines]
    trained(replace(job, checkpoints_path=str(tmp_path / "job"), steps=10, metrics_every=2), 2)
    trained(replace(job, checkpoints_path=str(tmp_path / "job"), metrics_every=4), 3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12, 16]
    assert lines[-1]["loss"] == pytest.approx(whole[-1], abs=1e-6)
    assert list(folder.glob("events.out.tfevents.*"))


def predict_and_measure(folder, mean_logits):
    """Predictions that are made on two processes, and labels, by what the predictions are moved by."""
    return [predictions_of(folder / str(mean_logit), mean_logit) for mean_logit in mean_logits]


def predictions_of(folder, mean_logit):
    """Predictions and labels of this process, of which the metrics are written to a folder."""
    from autoshard.runtime.training.metrics import JobMetrics  # torchmetrics warns of what itself imports

    rank = dist.get_rank()
    metrics = JobMetrics(folder, 1, CPU, StepTimer(CPU), dict, 0, lambda: 0, 0)
    rng = np.random.default_rng(rank)
    logits = torch.from_numpy(rng.standard_normal(500 + 100 * rank))
    labels = (logits + torch.from_numpy(rng.standard_normal(len(logits))) > 0).float()
    ids = BatchOfIds(torch.zeros(1, len(labels), dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    samples = Samples(ids, torch.zeros(len(labels), 1), labels)
    outcome = StepOutcome(torch.tensor(0.5), logits + mean_logit, torch.zeros(1))
    timings = Timings([], [])
    metrics(TrainedStep(1, samples, outcome, Span(0.0, 1.0), 0.0, timings))
    metrics.close()
    return logits.tolist(), labels.tolist()


def test_the_area_under_the_curve_is_that_of_all_processes(tmp_path):
    mean_logits = (0.0, -7.0, 7.0)  # of labels that are even, rare and common
    for mean_logit, *found in zip(mean_logits, *on_ranks(predict_and_measure, 2, tmp_path, mean_logits), strict=True):
        logits, labels = (np.concatenate(of) for of in zip(*found, strict=True))
        order = np.argsort(np.argsort(logits)) + 1
        positives = labels.sum()
        area = (order[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))
        (line,) = (tmp_path / str(mean_logit) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert json.loads(line)["auc"] == pytest.approx(area, abs=2e-3), mean_logit
        assert json.loads(line)["samples"] == 1100, mean_logit


def test_a_trace_names_the_phases_of_a_step(job, tmp_path):
    traces = {overlap: tmp_path / f"{overlap}.json" for overlap in ("none", "pipelined")}
    job = replace(job, checkpoints_path=None, epochs=1)
    executed([replace(job, overlap=overlap, trace_path=str(trace)) for overlap, trace in traces.items()], 2)
    phases = {"bottom layers", "forward_kernel", "interaction and top layers", "backward", "backward_kernel"}
    for overlap, trace in traces.items():
        names = {event.get("name") for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]}
        assert {f"autoshard: {phase}" for phase in (*phases, "dense optimizer")} <= names, overlap


def test_a_run_tells_how_uneven_samples_are_that_are_dealt_at_random(job):
    result = trained(replace(job, checkpoints_path=None, epochs=1), 2)
    plan = read_plan(job.plan_path)
    plan = plan.with_predicted(evaluate(plan, make_costs(plan.tables, plan.topology)))
    # 32 samples of 5 features, each of mean 4 and variance 36: the sum deviates by 12% of its mean.
    tables = [
        replace(one, features=(Feature(name=one.name, pooling_factor=4.0, pooling_variance=36.0),))
        for one in plan.tables.tables
    ]
    plan = replace(plan, tables=replace(plan.tables, tables=tuple(tables)))
    told = "samples are dealt at random, and the price is of means: of 2 processes one has about 7% more lookups"
    told = f"{told} (--balance)"
    assert told in _predicted(plan, result, is_random=True).reasons
    assert told not in _predicted(plan, result, is_random=False).reasons


def test_the_command_trains_on_files_and_keeps_the_run(job, tmp_path, capsys):
    table = pq.read_table(job.data_path)
    labels = table["label"].to_pylist()
    pq.write_table(table.set_column(0, "label", [[*labels[:-1], 7]]), job.data_path)
    words = ["run", job.plan_path, "--data", job.data_path, "--nproc", "1", "--device", "cpu", "--balance"]
    page = tmp_path / "page.html"
    words += ["--checkpoints", str(tmp_path / "job"), "--append-to", str(tmp_path / "runs"), "--html", str(page)]
    assert main(words) == 0
    assert page.exists()
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("Trained 16 steps. Lines that are no samples and were left out: 1; the first: /")
    assert "clicks.parquet: row 1002: label must be 0 or 1, got 7.0 13 steps of 64 samples" in said
    page.write_text("of the steps before", encoding="utf-8")
    assert main(words) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("runs: no step was measured.")
    assert page.read_text(encoding="utf-8") == "of the steps before"
    (record,) = read_runs(tmp_path / "runs")
    assert (record.result.job.trained_steps, record.result.steps) == (16, 13)
    with pytest.raises(
        ProcessRaisedException, match=r"shuffle: the checkpoint is of another: it was 0, this job has 5$"
    ):
        trained(replace(job, balance=True, epochs=1, shuffle=5), 1)
