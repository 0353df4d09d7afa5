"""Models that price plans for a test cluster: measured and trained on the cluster itself.

A study's folder holds `kernels`, the registry with the model of kernels, and for each rate `links-MBIT`, samples of
collectives, and `models-MBIT`, the registry with all models of the cluster. Dense layers are priced analytically;
the calibration corrects them as it does all parts of a step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.core import AccessProfile, DenseLayers, EmbeddingTable, Pooling, TableSet, Topology
from autoshard.formats import load_tables, topology_from_json, topology_to_json
from autoshard.formats.stores.samples import read_samples
from autoshard.whatif.trials import LOPSIDED, plan_task
from costmodel.kernel.comparison import kernel_version
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.training import CostTrainingOptions, train_cost_model
from costmodel.registry.promotion import TrainedVersion, publish_version
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import Registry
from costmodel.step.calibration import calibrate_step, run_calibration
from costmodel.step.collective_training import train_collective_model
from costmodel.step.comparison import collective_version, step_version
from studies.cluster.links import fit_links, link_samples, measured_topology
from studies.cluster.network import Cluster

#: Pool of the tables. Rows are divided, so that eight processes hold 80 tables and some copies of them.
POOL, SCALE = "metasyn", 256
_MOST_TABLES, _FEWEST_TABLES = 80, 20
#: Zipf exponents of skewed tables.
_ALPHAS = (0.8, 1.3)
#: Share of tables that are sequences in tasks that have some.
_SEQUENCE_SHARE = 0.3
#: Sequences send a row per lookup, all else a sum per bag, so that their batches are smaller.
_BATCHES, _SEQUENCE_BATCHES = (256, 512, 1024), (64, 128)
_DENSE = DenseLayers(num_dense_features=13, bottom_mlp=(64, 16), top_mlp=(64, 1))


class TaskKind(StrEnum):
    """What the ids of a task's tables look like."""

    UNIFORM = "uniform"
    SKEWED = "skewed"
    SEQUENCES = "sequences"
    """Skewed, and some tables are sequences."""


def drawn_task(number: int, seed: int, *, most_tables: int = _MOST_TABLES) -> tuple[TaskKind, TableSet]:
    """One task: kinds take turns, all else is random.

    Args:
        number: Of the task.
        seed: Same seed, same tasks.
        most_tables: Most tables of a task, at least 20.
    """
    rng = np.random.default_rng([seed, number])
    kind = tuple(TaskKind)[number % len(TaskKind)]
    num_tables = round(float(np.exp(rng.uniform(np.log(_FEWEST_TABLES), np.log(most_tables)))))
    batch_size = int(rng.choice(_SEQUENCE_BATCHES if kind is TaskKind.SEQUENCES else _BATCHES))
    pool = load_tables(POOL).scaled(SCALE).sample(num_tables, int(rng.integers(2**31)))
    tables = tuple(map(partial(_as_kind, kind, rng), pool.tables))
    return kind, replace(pool, tables=tables, batch_size=batch_size, dense=_DENSE)


def _as_kind(kind: TaskKind, rng: np.random.Generator, table: EmbeddingTable) -> EmbeddingTable:
    if kind is TaskKind.UNIFORM:
        return replace(table, access=AccessProfile.uniform(table.num_embeddings))
    access = AccessProfile.zipf(table.num_embeddings, float(rng.uniform(*_ALPHAS)))
    is_sequence = kind is TaskKind.SEQUENCES and rng.random() < _SEQUENCE_SHARE
    return replace(table, access=access, pooling=Pooling.SEQUENCE if is_sequence else table.pooling)


DEVICE = "cpu"
#: Sizes of collectives are powers of 2 from here on, as many as their models need (8) up to 1 MiB.
_SMALLEST_BYTES = 2**13
#: Planners of calibration runs: all kinds of layouts, bad ones among them.
CALIBRATION_PLANNERS = ("auto", "flexshard", "cost-greedy", "oper", "neo", "random", "replica-groups", LOPSIDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How much is measured for the models.

    Attributes:
        kernel_samples: Store of kernel samples of this machine.
        kernel_updates: Updates of the training of the model of kernels.
        max_bytes: Bytes per rank of the largest collective.
        calibration_runs: Runs that steps are calibrated on.
        calibration_tables: Most tables of such a run.
        steps: Measured steps of such a run.
        seed: Of these runs.
    """

    kernel_samples: Path
    kernel_updates: int = 5000
    max_bytes: int = 2**22
    calibration_runs: int = 24
    calibration_tables: int = 80
    steps: int = 5
    seed: int = 2_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModels:
    """What prices plans for a cluster.

    Attributes:
        topology: With measured links, as a JSON object.
        metrics: Of each model.
    """

    topology: Mapping[str, Any]
    metrics: Mapping[str, Mapping[str, Any]]

    def read_topology(self) -> Topology:
        """The topology."""
        return topology_from_json(dict(self.topology))


def train_kernels(folder: Path, settings: ModelSettings) -> dict[str, Any]:
    """Trains the model of kernels; returns its metrics."""
    dataset = CostDataset.from_samples(read_samples(settings.kernel_samples, DEVICE))
    training = CostTrainingOptions(num_updates=settings.kernel_updates)
    version = kernel_version(train_cost_model(dataset, device=DEVICE, options=training))
    return published(version, emptied(folder / "kernels"))


def train_cluster(
    folder: Path, cluster: Cluster, settings: ModelSettings, advance: Callable[[int], None]
) -> ClusterModels:
    """Measures a cluster's links, trains its models, and calibrates steps on runs of plans.

    Args:
        folder: With the model of kernels.
        cluster: The cluster, which is up.
        settings: How much is measured.
        advance: Told how many calibration runs have just ended.
    """
    registry = cluster_registry(folder, cluster)
    emptied(registry)
    shutil.copytree(folder / "kernels", registry)
    spec = cluster.spec
    samples = link_samples(
        emptied(folder / f"links-{_rate(cluster)}"), spec, doubled_sizes(settings.max_bytes), cluster
    )
    topology = measured_topology(spec.topology(), fit_links(samples))
    collectives = published(collective_version(train_collective_model(samples)), registry)
    drawn = [_calibration_task(number, settings) for number in range(settings.calibration_runs)]
    planned = (plan_task(planner, tables, topology, seed, registry) for planner, tables, seed in drawn)
    seeds = [seed for *_, seed in drawn]
    runs = run_calibration(planned, seeds, registry=registry, steps=settings.steps, advance=advance, launcher=cluster)
    step = published(step_version(calibrate_step(runs, DEVICE), runs), registry)
    return ClusterModels(topology=topology_to_json(topology), metrics={"collectives": collectives, "step": step})


def _calibration_task(number: int, settings: ModelSettings) -> tuple[str, TableSet, int]:
    """Planner, tables and seed of a calibration run: tasks of the study's kinds, planners in turn."""
    # Each task has two planners: kinds of tasks take turns, too, and would always meet the same ones.
    _, tables = drawn_task(number // 2, settings.seed, most_tables=settings.calibration_tables)
    return CALIBRATION_PLANNERS[number % len(CALIBRATION_PLANNERS)], tables, settings.seed + number


def cluster_registry(folder: Path, cluster: Cluster) -> Path:
    """Registry of a cluster's models."""
    return folder / f"models-{_rate(cluster)}"


def doubled_sizes(max_bytes: int) -> tuple[int, ...]:
    """Bytes per rank of the collectives that are measured, each twice the one before."""
    return tuple(_SMALLEST_BYTES << power for power in range((max_bytes // _SMALLEST_BYTES).bit_length()))


def _rate(cluster: Cluster) -> str:
    return f"{cluster.spec.bits_per_s / 1e6:g}"


def published(version: TrainedVersion, registry: Path) -> dict[str, Any]:
    """Publishes a model; returns its metrics."""
    publish_version(Registry(registry), version, PublishOptions(registry=registry, force=True))
    metrics = version.card["metrics"]
    assert isinstance(metrics, Mapping), "cards have metrics"
    return dict(metrics)


def emptied(folder: Path) -> Path:
    """A folder's path, without what a run that was stopped left there."""
    if folder.exists():
        shutil.rmtree(folder)
    return folder
