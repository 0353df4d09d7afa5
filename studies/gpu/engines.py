"""Stage `engines`: steps of the thin engine beside those of TorchRec's DistributedModelParallel, one process."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from autoshard.core import AccessProfile, EmbeddingTable, Feature, TableSet
from autoshard.core.choices import Device, Engine
from autoshard.core.errors import AutoshardError
from autoshard.formats.files import atomic_write
from autoshard.report.images import Section
from autoshard.report.wording import write_ms
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.engines.layouts import Layout, plan_of
from studies.engines.side_by_side import measure
from studies.frame import Numbers
from studies.gpu.stages import Stage, Visit

#: Features, and samples of a step: the most telling first.
_RUNS: Final = ((100, 8192), (10, 512), (1000, 512), (10, 65_536), (100, 512), (1000, 8192), (100, 65_536))
_ROWS: Final = {"cuda": 100_000, "cpu": 1000}
_DIM: Final = 64
_POOLING_FACTOR: Final = 4.0
#: Divides batches on a CPU, which would take minutes a step.
_SMALLER: Final = {"cuda": 1, "cpu": 64}
_ROUNDS, _STEPS = 2, 10
_LEAST_S: Final = 40.0
_TRACES_FILE: Final = "traces.json.gz"
#: What the host calls to wait for the device, as CUDA's runtime names it.
_HOST_WAITS: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_MOST_TRACE_BYTES: Final = 12 << 20


def _run(visit: Visit) -> Numbers:
    kind = visit.device.device.type
    rows: list[dict[str, Any]] = []
    traces: dict[str, Any] = {}
    for num_features, batch_size in _RUNS:
        # A start of the process takes a good part of a minute where it compiles kernels.
        if rows and visit.seconds_left < (_LEAST_S if kind == "cuda" else _LEAST_S / 4):
            break
        try:
            rows.append(_measured(num_features, batch_size // _SMALLER[kind], kind, traces))
        except AutoshardError as error:
            rows.append({"num_features": num_features, "batch_size": batch_size, "failure": str(error)})
        visit.keep({"rows": rows})
    _write_traces(visit.folder / _TRACES_FILE, traces)
    return {"rows": rows}


def _measured(num_features: int, batch_size: int, kind: str, traces: dict[str, Any]) -> dict[str, Any]:
    """Both engines' steps on tables of one feature each, and how often they waited for the device in one."""
    table = {"num_embeddings": _ROWS[kind], "embedding_dim": _DIM, "access": AccessProfile.zipf(_ROWS[kind], 1.05)}
    tables = TableSet(
        batch_size=batch_size,
        tables=tuple(
            EmbeddingTable(
                name=f"t{number}",
                features=(Feature(name=f"f{number}", pooling_factor=_POOLING_FACTOR),),
                **table,  # type: ignore[arg-type]
            )
            for number in range(num_features)
        ),
    )
    plan = plan_of(Layout.TABLE_WISE, tables, local_topology(kind, 1, 1 << 40))
    with tempfile.TemporaryDirectory(prefix="autoshard-traces-") as folder:
        [steps] = measure(
            {Layout.TABLE_WISE: plan},
            batch_size,
            rounds=_ROUNDS,
            steps=_STEPS,
            nproc=1,
            device=Device(kind),
            traces=Path(folder),
        )
        waits = {}
        for engine in Engine:
            trace = json.loads(Path(folder, f"{Layout.TABLE_WISE}-{engine}.json").read_bytes())
            waits[engine.value] = _host_waits(trace)
            traces.setdefault(f"{engine}, {num_features} features, batch {batch_size}", trace)
    return {"num_features": num_features, "failure": None, "host_waits": waits, **asdict(steps)}


def _host_waits(trace: dict[str, Any]) -> float:
    """How often the host waited for the device in a step, of the two that are traced."""
    names = Counter(event.get("name") for event in trace["traceEvents"])
    return sum(names[name] for name in _HOST_WAITS) / 2


def _write_traces(path: Path, traces: dict[str, Any]) -> None:
    """The first traces, as many as a file of a run may hold: an object of Chrome traces by engine and size."""
    kept = dict(traces)
    while kept:
        packed = gzip.compress(json.dumps(kept).encode(), mtime=0)
        if len(packed) <= _MOST_TRACE_BYTES:
            atomic_write(path, packed)
            return
        kept.popitem()


def _show(numbers: Numbers) -> Sequence[Section]:
    done = [one for one in numbers["rows"] if one["failure"] is None]
    failed = [one for one in numbers["rows"] if one["failure"] is not None]
    table = Table.of(
        done,
        (
            ("features", lambda one: f"{one['num_features']:,}"),
            ("batch", lambda one: f"{one['batch_size']:,}"),
            ("step, ms", lambda one: write_ms(one["thin_ms"])),
            ("TorchRec's step, ms", lambda one: write_ms(one["torchrec_ms"])),
            ("TorchRec's over ours", lambda one: _ratio(one["ratio"])),
            ("of the embedding part", lambda one: _ratio(one["embedding_ratio"])),
            ("host waits a step, ours", lambda one: f"{one['host_waits']['thin']:g}"),
            ("TorchRec's", lambda one: f"{one['host_waits']['torchrec']:g}"),
        ),
        caption=f"Tables of {_DIM} columns, {_POOLING_FACTOR:g} ids a sample, "
        f"medians of {_ROUNDS} runs of {_STEPS} steps",
    )
    caption = f"One process, the same batches on both engines in turn; Chrome traces are in {_TRACES_FILE}."
    if failed:
        told = "; ".join(
            f"{one['num_features']} features, batch {one['batch_size']}: {one['failure']}" for one in failed
        )
        caption += f" Not run: {told}."
    return (Section(title="Engines", caption=caption, tables=(table,)),)


def _ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _headline(numbers: Numbers) -> str:
    done = [one for one in numbers["rows"] if one["failure"] is None]
    return f"TorchRec's step over ours {done[0]['ratio']['median']:.2f}" if done else ""


STAGE: Final = Stage(name="engines", share=0.14, run=_run, show=_show, headline=_headline)
