"""The study `neo`, and Neo's Fig. 9, 10 and 11: `python -m studies neo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import plotly.graph_objects as go

from autoshard.commands.options import command_options
from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, in_house_style
from studies.frame import OutputOptions, PartStore, StudyResult
from studies.frame.options import PartsOption
from studies.papers.neo.document import NeoResults, Priced, chosen_numbers, results_document, results_tables, scaling
from studies.papers.neo.models import MODEL_A, MODEL_I
from studies.papers.neo.results import (
    FIG11_GAINS,
    Outcome,
    Run,
    optimisation_runs,
    outcome,
    scaling_runs,
    throughput_runs,
)

#: Height of the images in pixels.
HEIGHT = 480
_COLOURS = {
    "host to device": GREY,
    "input all-to-all": SKY,
    "embedding all-to-all": GREEN,
    "all-reduce": PINK,
    "embeddings": BLUE,
    "perceptrons": ORANGE,
    "dense parameters": YELLOW,
}


def fig9_figure(by_planner: Mapping[str, Mapping[str, Priced]]) -> go.Figure:
    """Throughput over that of one node, with the paper's efficiencies on 16."""
    figure = in_house_style(go.Figure(), height=HEIGHT)
    for planner, by_model in by_planner.items():
        for (model, runs), colour in zip(by_model.items(), (BLUE, ORANGE), strict=True):
            nodes = [count // 8 for count in scaling(runs)]
            values = [count * share for count, share in zip(nodes, scaling(runs).values(), strict=True)]
            figure.add_scatter(
                name=f"model {model}, {planner}",
                x=nodes,
                y=values,
                mode="lines+markers" if len(nodes) > 2 else "markers",
                line={"color": colour, "width": 3},
                marker={"color": colour, "size": 8 if len(nodes) > 2 else 12, "symbol": "diamond"},
            )
    for paper_model, colour in ((MODEL_A, BLUE), (MODEL_I, ORANGE)):
        figure.add_scatter(
            name=f"model {paper_model.name}, paper",
            x=[16],
            y=[16 * (paper_model.paper_scaling or 0.0)],
            mode="markers",
            marker={"color": colour, "size": 12, "symbol": "circle-open", "line": {"width": 2}},
        )
    figure.add_scatter(name="linear", x=[1, 16], y=[1, 16], mode="lines", line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(title_text="nodes of 8 GPUs", type="log", tickvals=[1, 2, 4, 8, 16])
    figure.update_yaxes(title_text="throughput over that of one node", type="log", tickvals=[1, 2, 4, 8, 16])
    return figure


def fig10_figure(runs: Priced) -> go.Figure:
    """Serialised and exposed time by operator, of one node and of all."""
    figure = in_house_style(go.Figure(), height=HEIGHT)
    ends = (runs[0], runs[-1])
    bars = [
        [f"{run.num_ranks} GPUs" for run, _ in ends for _ in range(2)],
        ["serialised", "exposed"] * len(ends),
    ]
    for name, colour in _COLOURS.items():
        values = [ms for _, found in ends for ms in found.operators()[name]]
        figure.add_bar(name=name, x=bars, y=values, marker_color=colour)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title_text="ms per step")
    return figure


def fig11_figure(by_planner: Mapping[str, Priced]) -> go.Figure:
    """Throughput of model A, one optimisation after the other, beside the paper's."""
    figure = in_house_style(go.Figure(), height=HEIGHT)
    first = next(iter(by_planner.values()))
    names = [run.name for run, _ in first]
    for (planner, runs), colour in zip(by_planner.items(), (BLUE, SKY), strict=False):
        figure.add_bar(name=planner, x=names, y=[found.qps(run) / 1e6 for run, found in runs], marker_color=colour)
    figure.add_scatter(
        name="paper",
        x=names,
        y=[qps / 1e6 for qps in published_qps()],
        mode="markers",
        marker={"color": ORANGE, "size": 12, "symbol": "diamond"},
    )
    figure.update_layout(barmode="group")
    figure.update_yaxes(title_text="million samples per second")
    return figure


def published_qps() -> list[float]:
    """Fig. 11's throughputs: 1.2 MQPS with 64K samples (Table 3), the others by the gains in the text."""
    published = [MODEL_A.paper_qps]
    for gain in reversed(FIG11_GAINS[1:-1]):
        published.insert(0, published[0] / (1 + gain))
    return [*published, published[-1] * (1 + FIG11_GAINS[-1])]


#: Planners whose plans are priced; the first one's are drawn in Fig. 10.
_PLANNERS = ("auto", "neo")


@command_options()
class NeoStudyOptions:
    """Options of the study `neo`."""

    parts: PartsOption = None


def main(options: NeoStudyOptions, output: OutputOptions) -> None:
    """Plans and prices Neo's models on ZionEX, prints its Table 3, and draws its Fig. 9, 10 and 11.

    Example:
        python -m studies neo --parts neo-parts -o docs/figures
    """
    results = _results(options.parts)
    output.write(
        StudyResult(
            name="neo",
            document=results_document(results),
            tables=results_tables(results),
            images={
                "-fig9": fig9_figure(results.scaling),
                "-fig10": fig10_figure(results.scaling[_PLANNERS[0]][MODEL_A.name]),
                "-fig11": fig11_figure(results.optimisations),
            },
        )
    )


def _results(folder: Path | None) -> NeoResults:
    throughput = {planner: throughput_runs(planner) for planner in _PLANNERS}
    scaling = {
        planner: {model.name: scaling_runs(model, planner) for model in (MODEL_A, MODEL_I)} for planner in _PLANNERS
    }
    optimisations = {planner: optimisation_runs(planner) for planner in _PLANNERS}
    curves = [runs for of in scaling.values() for runs in of.values()]
    wanted = [run for runs in (*throughput.values(), *curves, *optimisations.values()) for run in runs]
    store = PartStore(folder)
    store.check_identity({"chosen": chosen_numbers()})
    found = _outcomes(wanted, store)

    def with_prices(runs: tuple[Run, ...]) -> Priced:
        return [(run, found[_key(run)]) for run in runs]

    return NeoResults(
        throughput={planner: with_prices(runs) for planner, runs in throughput.items()},
        scaling={planner: {model: with_prices(runs) for model, runs in of.items()} for planner, of in scaling.items()},
        optimisations={planner: with_prices(runs) for planner, runs in optimisations.items()},
    )


def _outcomes(runs: list[Run], store: PartStore) -> dict[str, Outcome]:
    """Prices by `_key`; runs that the tables share are planned once."""
    distinct = {_key(run): run for run in runs}
    makers = {
        f"{number:02d}-{run.planner}-{run.model.name}-{run.num_ranks}": partial(outcome, run)
        for number, run in enumerate(distinct.values())
    }
    return dict(zip(distinct, store.find_all("Planning", Outcome, makers), strict=True))


def _key(run: Run) -> str:
    """All that a price depends on."""
    settings = asdict(run)
    del settings["name"], settings["paper_qps"]
    return repr(settings)
