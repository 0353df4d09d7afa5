"""Figures of the service's work, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import structlog
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from autoshard.api import RunAnswer
from autoshard.core.errors import AutoshardError, ModelError
from costmodel.registry.objects import RegistryObjects
from costmodel.registry.versions import default_registry, models_in_use
from server.access import Door, opened_to
from server.models.shadow import ShadowPricer
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.tasks.reply import Reply
from server.tasks.work import WorkKind
from server.web.openapi import problems

_log = structlog.get_logger()

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_RATIOS = (0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0)
_GAPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
#: Label of methods and endpoints that there are not: clients may make up any number of them.
_OTHER = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Metrics:
    """Counts requests and work, and asks the pool and the registry when it is read.

    Args:
        pool: The planning processes.
        settings: Name the registry.
    """

    def __init__(self, pool: WorkerPool, settings: ServerSettings) -> None:
        self.registry = CollectorRegistry()
        self._requests = Histogram(
            "autoshard_request_seconds",
            "Time to answer a request.",
            ("method", "endpoint", "status"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._work = Histogram(
            "autoshard_work_seconds",
            "Time in the queue and in a planning process.",
            ("kind", "planner", "status"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._gaps = Histogram(
            "autoshard_plan_floor_gap",
            "Kernel time of a plan's slowest rank over that of its costliest shard, minus 1: no placement of these "
            "shards is below 0.",
            ("planner",),
            buckets=_GAPS,
            registry=self.registry,
        )
        self._runs = Histogram(
            "autoshard_measured_over_predicted",
            "Median step of a run that was reported, over the predicted one.",
            ("is_drifted",),
            buckets=_RATIOS,
            registry=self.registry,
        )
        self._swept = Counter(
            "autoshard_swept",
            "Rows and files that were removed since they are kept no longer.",
            ("kind",),
            registry=self.registry,
        )
        for name, meaning, value in (
            ("waiting_requests", "Requests that wait for a planning process.", lambda: pool.num_waiting),
            ("running_requests", "Requests that a planning process works on.", lambda: pool.num_running),
            ("idle_workers", "Planning processes that have nothing to do.", lambda: pool.num_idle),
        ):
            Gauge(f"autoshard_{name}", meaning, registry=self.registry).set_function(value)
        self.registry.register(_ModelCollector(settings.registry))

    def show_shadow(self, shadow: ShadowPricer) -> None:
        """Shows how candidates price plans beside the models in use, from now on."""
        self.registry.register(_ShadowCollector(shadow))

    def count_run(self, run: RunAnswer) -> None:
        """Counts a run that was reported."""
        self._runs.labels(str(run.is_drifted).lower()).observe(run.measured_ms / run.predicted_ms)

    def count_swept(self, kind: str, number: int) -> None:
        """Counts what was removed since it is kept no longer."""
        self._swept.labels(kind).inc(number)

    def count_request(self, method: str, endpoint: str | None, status: int, seconds: float) -> None:
        """Counts an answered request; `endpoint` is the path of its route, None for what is nowhere."""
        known = method if method in _METHODS else _OTHER
        self._requests.labels(known, endpoint or _OTHER, status).observe(seconds)

    def count_work(self, kind: WorkKind, reply: Reply, seconds: float) -> None:
        """Counts a reply of a planning process."""
        self._work.labels(kind, reply.planner, reply.status).observe(seconds)
        if reply.floor_gap is not None:
            self._gaps.labels(reply.planner).observe(reply.floor_gap)


class _ModelCollector(Collector):
    """The versions of models in use."""

    def __init__(self, root: Path | None) -> None:
        self._root = root

    @override
    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("autoshard_model", "Models in production: always 1.", labels=("kind", "name", "id"))
        try:
            for kind, name, models in models_in_use(self._root):
                family.add_metric((kind, name, models.production_id(kind, name) or ""), 1)
        except ModelError as error:
            _log.warning("models unreadable", reason=str(error))
        yield family
        copied = RegistryObjects.of(self._root or default_registry())
        if copied.age_s is not None:
            yield GaugeMetricFamily(
                "autoshard_registry_age_seconds",
                "Time since the registry on object storage was last read; grows while it does not answer.",
                value=copied.age_s,
            )


class _ShadowCollector(Collector):
    """Prices of candidates beside those of the models in use."""

    def __init__(self, shadow: ShadowPricer) -> None:
        self._shadow = shadow

    @override
    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("name", "id")
        plans = GaugeMetricFamily(
            "autoshard_shadow_plans",
            "Different plans that a candidate and the model in use have priced.",
            labels=labels,
        )
        ratio = GaugeMetricFamily(
            "autoshard_shadow_ratio", "Median of a candidate's steps over those of the model in use.", labels=labels
        )
        try:
            for name, candidate, seen in self._shadow.summaries():
                plans.add_metric((name, candidate), seen.num_plans)
                if seen.median_ratio is not None:
                    ratio.add_metric((name, candidate), seen.median_ratio)
        except AutoshardError as error:
            _log.warning("prices of candidates unreadable", reason=str(error))
        yield from (plans, ratio)


def add_metrics(app: FastAPI, metrics: Metrics) -> None:
    """Adds the route."""

    @app.get(
        "/metrics",
        tags=["health"],
        summary="Figures of the service's work, for Prometheus",
        response_class=Response,
        responses={
            200: {"description": "Text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
            **problems(),
        },
    )
    @opened_to(Door.ANY_KEY)
    def read_metrics() -> Response:
        return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
