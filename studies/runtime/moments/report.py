"""Tables, figures and document of the study of moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, in_house_style
from autoshard.table import Table
from studies.runtime.moments.results import Gaps, MomentResults, Pairs, best_rate
from studies.runtime.moments.setting import Setting

SCHEMA = "autoshard.moments/1"
#: Groups of 2D's Fig. 5.
FIG5_GROUPS = 4
_HEIGHT = 480
_COLOURS = (BLUE, GREEN, ORANGE, GREY)


def document(results: MomentResults, setting: Setting, machine: Mapping[str, object]) -> dict[str, Any]:
    """The numbers behind tables and figures."""
    return {
        "schema": SCHEMA,
        "setting": asdict(setting),
        "learning_rate": best_rate(results.tuning),
        "tuning": [asdict(one) for one in results.tuning],
        "verifications": [asdict(one) for one in results.verifications],
        "growth": [asdict(one) for one in results.growth()],
        "pairs": [asdict(one) for one in results.pairs()],
        "gaps": [{**asdict(one), "last": asdict(one.last)} for one in results.all_gaps()],
        "runs": [asdict(one) for one in results.runs],
        "machine": dict(machine),
    }


def tables(results: MomentResults) -> tuple[Table, ...]:
    """Checks of the engine, the tuned learning rate, and gaps by groups and moment scale."""
    return _checks(results), _tuning(results), _gaps(results)


def figures(results: MomentResults, setting: Setting) -> dict[str, go.Figure]:
    """2D's Fig. 4 and 5, by the ends of their files' names."""
    samples = [step * setting.batch_size for step in setting.evaluated_steps]
    found = {"-fig4": _fig4(results, samples)}
    if FIG5_GROUPS in results.groups:
        found["-fig5"] = _fig5(results, samples)
    return found


def _checks(results: MomentResults) -> Table:
    identical = {
        groups: all(one.is_identical for one in results.runs if one.run.num_groups == groups)
        for groups in results.groups
    }
    return Table.of(
        list(zip(results.groups, results.verifications, results.growth(), strict=True)),
        (
            ("groups", lambda one: str(one[0])),
            ("steps compared", lambda one: str(one[1].steps)),
            ("largest error of weights", lambda one: f"{one[1].weight_error:.1e}"),
            ("of moments", lambda one: f"{one[1].moment_error:.1e}"),
            ("moments over one group's", lambda one: f"{one[2].ratio:.3f}"),
            ("states before and after a sync", lambda one: ", ".join(map(str, one[2].num_states))),
            ("bit-identical after training", lambda one: "yes" if identical[one[0]] else "no"),
        ),
        caption="The engine: errors against unsharded tables with c = M, and moments on gradients that are noise",
    )


def _tuning(results: MomentResults) -> Table:
    return Table.of(
        results.tuning,
        (
            ("learning rate", lambda one: f"{one.run.learning_rate:g}"),
            ("normalised entropy", lambda one: f"{one.entropies[-1]:.5f}"),
        ),
        caption="Learning rate of the tables, chosen for one group on data of its own",
    )


def _gaps(results: MomentResults) -> Table:
    pairs = {(one.num_groups, one.num_groups): one for one in results.pairs()}

    def share(gaps: Gaps, count: Callable[[Pairs], int]) -> str:
        found = pairs.get((gaps.num_groups, gaps.moment_scale))
        return "" if found is None else f"{count(found)} of {found.num_seeds}"

    return Table.of(
        results.all_gaps(),
        (
            ("groups", lambda one: str(one.num_groups)),
            ("c", lambda one: str(one.moment_scale)),
            ("mean gap", lambda one: f"{one.last.mean:+.3f}"),
            ("deviation over seeds", lambda one: f"{one.last.deviation:.3f}"),
            ("smaller than with c = 1", lambda one: share(one, lambda pairs: pairs.num_smaller)),
            ("nearer to 0", lambda one: share(one, lambda pairs: pairs.num_nearer)),
        ),
        caption="Gap of normalised entropy to one group, in per cent, after the last step",
    )


def _fig4(results: MomentResults, samples: Sequence[int]) -> go.Figure:
    figure = make_subplots(1, 2, horizontal_spacing=0.12)
    in_house_style(figure, height=_HEIGHT)
    for num_groups, colour in zip(results.groups[1:], _COLOURS, strict=False):
        name = f"{num_groups} groups"
        figure.add_trace(_over_samples(results.gaps(num_groups, 1), samples, name, colour), row=1, col=1)
        scales = results.scales(num_groups)
        last = [results.gaps(num_groups, scale).last for scale in scales]
        figure.add_scatter(
            name=name,
            x=scales,
            y=[one.mean for one in last],
            error_y={"array": [one.deviation for one in last]},
            mode="lines+markers",
            line={"color": colour, "width": 3},
            showlegend=False,
            row=1,
            col=2,
        )
    figure.update_xaxes(title_text="(a) samples, c = 1", row=1, col=1)
    figure.update_xaxes(title_text="(b) moment scale c", type="log", dtick=0.30103, row=1, col=2)
    figure.update_yaxes(title_text="gap of normalised entropy, %")
    return figure


def _fig5(results: MomentResults, samples: Sequence[int]) -> go.Figure:
    figure = in_house_style(go.Figure(), height=_HEIGHT)
    for scale, colour in ((1, ORANGE), (FIG5_GROUPS, BLUE)):
        gaps = results.gaps(FIG5_GROUPS, scale)
        figure.add_trace(_over_samples(gaps, samples, f"{FIG5_GROUPS} groups, c = {scale}", colour))
    figure.update_xaxes(title_text="samples")
    figure.update_yaxes(title_text="gap of normalised entropy, %")
    return figure


def _over_samples(gaps: Gaps, samples: Sequence[int], name: str, colour: str) -> go.Scatter:
    summaries = [gaps.at(evaluation) for evaluation in range(len(samples))]
    return go.Scatter(
        name=name,
        x=list(samples),
        y=[one.mean for one in summaries],
        error_y={"array": [one.deviation for one in summaries]},
        mode="lines+markers",
        line={"color": colour, "width": 3},
    )
