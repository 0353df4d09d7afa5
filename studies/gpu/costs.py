"""Stage `costs`: the cost model from scratch, calibrated from another machine's, and AutoShard's Table 3.

Source:
    AutoShard, Table 3: 100 sets of 10 seen tables and 100 of unseen ones; mean absolute and squared errors.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
import torch

from autoshard.formats.stores.samples import Sample, SampleTable
from autoshard.report.figures import BLUE, GRID, INK, in_house_style
from autoshard.report.images import Section
from autoshard.report.wording import write_ms, write_percent
from autoshard.runtime.processes.learners import Learners
from autoshard.table import Table
from costmodel.kernel.calibrate_command import known_models
from costmodel.kernel.calibration import CalibrationOptions, calibrate, nearest_base, uncalibrated
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import MsArray, PricedSamples, held_out_metrics
from costmodel.kernel.training import MIN_SAMPLES, CostTrainingOptions, train_cost_model
from costmodel.registry.versions import Registry, shipped_models
from studies.cost_models.baselines import PaperOptions, fit_paper_network
from studies.frame import Numbers
from studies.gpu.samples import SEEN, SEEN_TEST, UNSEEN_TEST, read_samples
from studies.gpu.stages import Stage, Visit

#: A registry with the model that all samples made.
MODELS_FILE: Final = "models.zip"
#: Samples that models are made from, as well as all of them.
_SIZES: Final = (50, 200)
_HELD_OUT: Final = 0.2
#: Updates by which it is found out how long one takes, and most updates of a network.
_TRIED, _MOST = 30, 5_000
#: Of fewer samples, a fifth says nothing.
_FEWEST: Final = 3 * MIN_SAMPLES
#: Dots of the picture.
_MOST_DOTS: Final = 500
_PAPER: Final = ("AutoShard's paper", "1.321", "3.408", "3.061", "10.835")
#: The machine whose shipped model is calibrated.
_BASE_DEVICE: Final = "cpu"


@dataclass(frozen=True, slots=True)
class _Pace:
    """How long updates take."""

    update_s: float

    def updates(self, seconds: float) -> int:
        """Updates in so many seconds."""
        return int(min(max(seconds / self.update_s, _TRIED), _MOST))


def _run(visit: Visit) -> Numbers:
    samples = read_samples(visit.folder)
    learners = Learners(device=visit.device.device)
    if len(samples) < _FEWEST:
        return {"reason": f"models need {_FEWEST} samples or more, there are {len(samples)}"}
    dataset = _dataset([one for one in samples if one.source not in (SEEN_TEST, UNSEEN_TEST)])
    train, held_out = dataset.split(_HELD_OUT, seed=0)
    pace = {str(device): _pace(dataset, Learners(device=device)) for device in {torch.device("cpu"), learners.device}}
    numbers: dict[str, Any] = {
        "num_samples": len(dataset),
        "updates_per_s": {name: 1 / one.update_s for name, one in pace.items()},
    }
    visit.keep(numbers)
    scratch = pace[str(learners.device)]
    numbers["table_3"] = _table_3(samples, learners, scratch, visit.share(0.4))
    visit.keep(numbers)
    base = nearest_base(known_models(shipped_models(), _BASE_DEVICE), train)
    arms = numbers["arms"] = [_arm("the CPU's, as it is", 0, uncalibrated(base), held_out)]
    sizes = [size for size in _SIZES if size < len(train)] + [len(train)]
    for place, size in enumerate(sizes):
        seconds = visit.seconds_left / (2 * (len(sizes) - place)) * 0.9
        some = train.take(np.random.default_rng(0).permutation(len(train))[:size])
        calibrated = calibrate(
            base,
            some,
            device=visit.device.key,
            options=CalibrationOptions.of_updates(pace["cpu"].updates(seconds / 2.6)),  # four folds of 0.4 and one
        )
        arms.append(_arm("calibrated from the CPU's", size, calibrated.model, held_out))
        if len(some) >= MIN_SAMPLES:
            model = _from_scratch(some, visit.device.key, learners, scratch.updates(seconds))
            arms.append(_arm("from scratch", size, model, held_out))
        visit.keep(numbers)
    _keep_model(model, visit.folder)
    return {**numbers, "dots": _dots(model, held_out)}


def _keep_model(model: LearnedCostModel, folder: Path) -> None:
    """Writes a registry with the model as one file; `--registry` takes it where it is unpacked."""
    with tempfile.TemporaryDirectory() as registry:
        model.publish(Registry(Path(registry)))
        shutil.make_archive(str(folder / Path(MODELS_FILE).stem), "zip", registry)


def _dataset(samples: Sequence[Sample]) -> CostDataset:
    return CostDataset.from_samples(SampleTable(samples=tuple(samples)))


def _pace(dataset: CostDataset, learners: Learners) -> _Pace:
    _from_scratch(dataset, _BASE_DEVICE, learners, 1)  # what runs first is slow
    started = time.monotonic()
    _from_scratch(dataset, _BASE_DEVICE, learners, _TRIED)
    return _Pace((time.monotonic() - started) / _TRIED)


def _from_scratch(dataset: CostDataset, device: str, learners: Learners, updates: int) -> LearnedCostModel:
    options = CostTrainingOptions(num_updates=updates, held_out_share=0.05)
    return train_cost_model(dataset, device=device, options=options, learners=learners).model


def _arm(name: str, num_samples: int, model: LearnedCostModel, held_out: CostDataset) -> dict[str, object]:
    found = PricedSamples.of(model.predictor, held_out).metrics()
    return {
        "arm": name,
        "num_samples": num_samples,
        "num_held_out": found.num_samples,
        "relative_error": found.relative_error,
        "mae_ms": found.mae_ms,
        "kendall_tau": found.kendall_tau,
    }


def _table_3(samples: Sequence[Sample], learners: Learners, pace: _Pace, seconds: float) -> list[dict[str, object]]:
    """Errors of both networks on sets of seen and of unseen tables; none where there are too few samples."""
    parts = {name: [one for one in samples if one.source == name] for name in (SEEN, SEEN_TEST, UNSEEN_TEST)}
    if len(parts[SEEN]) < MIN_SAMPLES or not parts[SEEN_TEST] or not parts[UNSEEN_TEST]:
        return []
    train, *tests = (_dataset(part[:100] if name != SEEN else part) for name, part in parts.items())
    updates = pace.updates(seconds / 2)
    model = _from_scratch(train, _BASE_DEVICE, learners, updates)
    paper = fit_paper_network(train, 0, PaperOptions(num_updates=updates))
    priced: dict[str, Callable[[CostDataset], MsArray]] = {
        "kernel model": lambda dataset: PricedSamples.of(model.predictor, dataset).kernel_ms_S,
        "AutoShard's network as printed": paper,
    }
    return [
        {
            "method": name,
            "num_train": len(train),
            "num_updates": updates,
            **{half: _errors(price, test) for half, test in zip((SEEN_TEST, UNSEEN_TEST), tests, strict=True)},
        }
        for name, price in priced.items()
    ]


def _errors(price: Callable[[CostDataset], MsArray], test: CostDataset) -> dict[str, float]:
    found = held_out_metrics(price(test), test.kernel_ms)
    return {
        "num_sets": found.num_samples,
        "mae_ms": found.mae_ms,
        "mse_ms2": found.mse_ms2,
        "relative_error": found.relative_error,
        "mean_ms": float(test.kernel_ms.mean()),
    }


def _dots(model: LearnedCostModel, held_out: CostDataset) -> dict[str, list[float]]:
    some = PricedSamples.of(model.predictor, held_out.take(np.arange(min(len(held_out), _MOST_DOTS))))
    return {"measured_ms": some.dataset.kernel_ms.tolist(), "predicted_ms": some.kernel_ms_S.tolist()}


def _show(numbers: Numbers) -> Sequence[Section]:
    return list(_sections(numbers))


def _sections(numbers: Numbers) -> Iterator[Section]:
    if "reason" in numbers:
        return
    speeds = ", ".join(f"{speed:,.0f} on {name}" for name, speed in numbers["updates_per_s"].items())
    if "arms" in numbers:
        table = Table.of(
            numbers["arms"],
            (
                ("cost model", lambda one: one["arm"]),
                ("samples", lambda one: str(one["num_samples"])),
                ("relative error", lambda one: write_percent(one["relative_error"])),
                ("MAE, ms", lambda one: write_ms(one["mae_ms"])),
                ("Kendall's tau", lambda one: f"{one['kendall_tau']:.3f}"),
            ),
            caption="On sets kept from training",
        )
        yield Section(
            title="The cost model",
            caption=f"Predicted beside measured milliseconds of {numbers['arms'][0]['num_held_out']} sets that no "
            f"model was trained on. Updates a second: {speeds}.",
            figure=dots_figure(numbers["dots"]) if "dots" in numbers else None,
            tables=(table,),
        )
    if numbers.get("table_3"):
        yield Section(
            title="Seen and unseen tables",
            caption="AutoShard's Table 3 by its protocol: trained on sets of one half of the tables, tried on sets of "
            f"ten of either half; {numbers['table_3'][0]['num_train']} sets to train on.",
            tables=(_table_3_table(numbers["table_3"]),),
        )


def _table_3_table(rows: Sequence[dict[str, Any]]) -> Table:
    lines = [
        (
            row["method"],
            *(
                text
                for half in (SEEN_TEST, UNSEEN_TEST)
                for text in (write_ms(row[half]["mae_ms"]), write_ms(row[half]["mse_ms2"]))
            ),
            *(write_percent(row[half]["relative_error"]) for half in (SEEN_TEST, UNSEEN_TEST)),
        )
        for row in rows
    ]
    columns = ("cost model", "MAE (seen), ms", "MSE (seen), ms²", "MAE (unseen), ms", "MSE (unseen), ms²")
    first = rows[0]
    return Table(
        columns=(*columns, "relative (seen)", "relative (unseen)"),
        rows=(*lines, (*_PAPER, "", "")),
        caption=f"{first[SEEN_TEST]['num_sets']} and {first[UNSEEN_TEST]['num_sets']} sets, which take "
        f"{write_ms(first[SEEN_TEST]['mean_ms'])} and {write_ms(first[UNSEEN_TEST]['mean_ms'])} ms on average",
    )


def dots_figure(dots: dict[str, list[float]]) -> go.Figure:
    """Predicted over measured milliseconds, both axes logarithmic."""
    measured, predicted = dots["measured_ms"], dots["predicted_ms"]
    ends = [0.9 * min(*measured, *predicted), 1.1 * max(*measured, *predicted)]
    figure = go.Figure()
    in_house_style(figure, height=420)
    figure.add_scatter(name="equal", x=ends, y=ends, mode="lines", line={"color": INK, "dash": "dot", "width": 1.5})
    figure.add_scatter(
        name="sets kept from training",
        x=measured,
        y=predicted,
        mode="markers",
        marker={"color": BLUE, "size": 7, "opacity": 0.6},
        hovertemplate="measured %{x:.3g} ms, predicted %{y:.3g} ms<extra></extra>",
    )
    axis = {"type": "log", "gridcolor": GRID}
    figure.update_xaxes(title_text="measured, ms", **axis)
    figure.update_yaxes(title_text="predicted, ms", **axis)
    return figure


def _headline(numbers: Numbers) -> str:
    if "arms" not in numbers:
        return str(numbers.get("reason", ""))
    best = min(numbers["arms"], key=lambda one: one["relative_error"])
    return f"{write_percent(best['relative_error'])} off on held-out sets, {best['arm']}"


STAGE: Final = Stage(name="costs", share=0.15, run=_run, show=_show, headline=_headline)
