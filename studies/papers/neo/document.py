"""Neo's numbers beside ours, as tables and as a JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from autoshard.core.step import Overlap
from autoshard.table import Table
from studies.papers.neo.models import (
    DIMS_DEVIATION,
    MODEL_A,
    MODEL_F,
    MODEL_I,
    NUM_DENSE_FEATURES,
    POOLING_DEVIATION,
    ROWS_DEVIATION,
)
from studies.papers.neo.results import (
    AUTO_STEPS,
    DENSE_PARAMETER_BYTES,
    FIG11_GAINS,
    FIG11_TOTAL,
    MEMORY_SHARE,
    Outcome,
    Run,
)

SCHEMA = "autoshard.papers.neo/1"
#: Runs with their prices.
Priced = Sequence[tuple[Run, Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeoResults:
    """All that is computed, by planner.

    Attributes:
        throughput: Table 3.
        scaling: Fig. 9 by model.
        optimisations: Fig. 11.
    """

    throughput: Mapping[str, Priced]
    scaling: Mapping[str, Mapping[str, Priced]]
    optimisations: Mapping[str, Priced]


def results_tables(results: NeoResults) -> tuple[Table, ...]:
    """Table 3, Fig. 9 to 11, the roofline and the overlaps."""
    return (
        _throughput_table(results.throughput),
        _scaling_table(results.scaling),
        *(_operator_table(planner, of["A"]) for planner, of in results.scaling.items()),
        *(_optimisation_table(planner, runs) for planner, runs in results.optimisations.items()),
        _overlap_table(results.throughput),
    )


def _lines(by_planner: Mapping[str, Priced]) -> list[tuple[str, Run, Outcome]]:
    return [(planner, run, found) for planner, runs in by_planner.items() for run, found in runs]


def _throughput_table(by_planner: Mapping[str, Priced]) -> Table:
    return Table.of(
        _lines(by_planner),
        (
            ("model", lambda one: one[1].name),
            ("planner", lambda one: f"`{one[0]}`"),
            ("here", lambda one: f"{one[2].qps(one[1]) / 1e6:.2f}"),
            ("paper", lambda one: _million(one[1].paper_qps)),
            ("error", lambda one: _error(one[2].qps(one[1]), one[1].paper_qps)),
            ("step, ms", lambda one: f"{one[2].step_ms:.1f}"),
            ("roofline, ms", lambda one: f"{one[2].roofline_ms:.1f}"),
            ("paper's throughput over the roofline's", lambda one: _share_of_roofline(one[1], one[2])),
        ),
        caption="Table 3: million samples per second on 128 GPUs",
    )


def _scaling_table(by_planner: Mapping[str, Mapping[str, Priced]]) -> Table:
    lines = [(planner, model, runs) for planner, of in by_planner.items() for model, runs in of.items()]
    ranks = sorted({run.num_ranks for *_, runs in lines for run, _ in runs})
    return Table(
        caption="Fig. 9: throughput per GPU over that of one node, by number of GPUs",
        columns=("model", "planner", *map(str, ranks), "paper, 128"),
        rows=tuple(
            (
                model,
                f"`{planner}`",
                *(_percent(scaling(runs).get(count)) for count in ranks),
                f"about {100 * (runs[-1][0].model.paper_scaling or 0):.0f}%",
            )
            for planner, model, runs in lines
        ),
    )


def scaling(runs: Priced) -> dict[int, float]:
    """Throughput per rank over that of the first run, by number of ranks."""
    base_ms = runs[0][1].step_ms
    return {run.num_ranks: base_ms / found.step_ms for run, found in runs}


def gains(runs: Priced) -> list[float]:
    """Throughput over that of the run before, less one; 0 for the first."""
    qps = [found.qps(run) for run, found in runs]
    return [0.0, *(after / before - 1 for before, after in pairwise(qps))]


def total_gain(runs: Priced) -> float:
    """Throughput of Fig. 11's run before the larger batch over that of its baseline, less one."""
    qps = [found.qps(run) for run, found in runs]
    return qps[-2] / qps[0] - 1


def _operator_table(planner: str, runs: Priced) -> Table:
    (first, few), (last, many) = runs[0], runs[-1]
    return Table(
        caption=f"Fig. 10, model A, `{planner}`: serialised and exposed milliseconds by operator",
        columns=(
            "operator",
            *(f"{run.num_ranks} GPUs, {kind}" for run in (first, last) for kind in ("serialised", "exposed")),
        ),
        rows=tuple(
            (name, *(f"{ms:.1f}" for found in (few, many) for ms in found.operators()[name]))
            for name in few.operators()
        ),
    )


def _optimisation_table(planner: str, runs: Priced) -> Table:
    steps = zip(runs, gains(runs), FIG11_GAINS, strict=True)
    lines = [
        (
            run.name,
            f"{found.qps(run) / 1e6:.2f}",
            f"{found.step_ms:.1f}",
            f"{found.imbalance:.2f}",
            f"{100 * gain:+.0f}%" if number else "-",
            f"{100 * published:+.0f}%" if number else "-",
        )
        for number, ((run, found), gain, published) in enumerate(steps)
    ]
    lines.append(("all but the last", "", "", "", f"{100 * total_gain(runs):+.0f}%", f"{100 * FIG11_TOTAL:+.0f}%"))
    return Table(
        caption=f"Fig. 11, model A, `{planner}`: one optimisation after the other",
        columns=("run", "million samples/s", "step, ms", "kernels, max/mean", "gain", "paper"),
        rows=tuple(lines),
    )


def _overlap_table(by_planner: Mapping[str, Priced]) -> Table:
    return Table.of(
        _lines(by_planner),
        (
            ("model", lambda one: one[1].name),
            ("planner", lambda one: f"`{one[0]}`"),
            ("nothing", lambda one: f"{one[2].step_with(Overlap.NONE):.1f}"),
            ("Eq. 1", lambda one: f"{one[2].step_with(Overlap.NEO):.1f}"),
            ("Eq. 1 and Sec. 4.2", lambda one: f"{one[2].step_ms:.1f}"),
            ("input behind all", lambda one: f"{one[2].step_with(Overlap.PIPELINED):.1f}"),
        ),
        caption="Steps of Table 3 by what overlaps, ms",
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _million(qps: float | None) -> str:
    return "-" if qps is None else f"{qps / 1e6:.2f}"


def _error(qps: float, paper_qps: float | None) -> str:
    return "-" if paper_qps is None else f"{100 * (qps / paper_qps - 1):+.0f}%"


def _share_of_roofline(run: Run, found: Outcome) -> str:
    return "-" if run.paper_qps is None else f"{100 * run.paper_qps * found.roofline_ms / 1e3 / run.batch_size:.0f}%"


def chosen_numbers() -> dict[str, object]:
    """What the paper leaves open, as in `models` and `results`."""
    return {
        "num_tables": {model.name: model.num_tables for model in (MODEL_A, MODEL_F, MODEL_I)},
        "rows_deviation": ROWS_DEVIATION,
        "pooling_deviation": POOLING_DEVIATION,
        "dims_deviation": DIMS_DEVIATION,
        "num_dense_features": NUM_DENSE_FEATURES,
        "memory_share": MEMORY_SHARE,
        "dense_parameter_bytes": DENSE_PARAMETER_BYTES,
        "auto_steps": AUTO_STEPS,
    }


def results_document(results: NeoResults) -> dict[str, object]:
    """The numbers, as JSON."""
    return {
        "schema": SCHEMA,
        "chosen": chosen_numbers(),
        "throughput": {planner: [_run(*one) for one in runs] for planner, runs in results.throughput.items()},
        "scaling": {
            planner: {model: [_run(*one) for one in runs] for model, runs in of.items()}
            for planner, of in results.scaling.items()
        },
        "optimisations": {planner: [_run(*one) for one in runs] for planner, runs in results.optimisations.items()},
    }


def _run(run: Run, found: Outcome) -> dict[str, object]:
    return {
        "name": run.name,
        "model": run.model.name,
        "num_tables": run.model.num_tables,
        "planner": run.planner,
        "num_ranks": run.num_ranks,
        "batch_size": run.batch_size,
        "table_dtype": run.dtype.value,
        "payload": str(run.payload),
        "sharding_types": run.sharding_types,
        "paper_qps": run.paper_qps,
        "qps": found.qps(run),
        "step_ms": found.step_ms,
        "roofline_ms": found.roofline_ms,
        "imbalance": found.imbalance,
        "upload_ms": found.upload_ms,
        "parts_ms": asdict(found.times),
        "operators_ms": {
            name: {"serialised": serialised, "exposed": exposed}
            for name, (serialised, exposed) in found.operators().items()
        },
    }
