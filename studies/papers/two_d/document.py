"""Tables 1 and 2 beside the paper's, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.core.plan import Provenance
from autoshard.table import Table
from studies.papers.two_d.results import Outcome, Run

SCHEMA = "autoshard.papers.two-d/1"
#: Fig. 2 by GPUs, as Sec. 2.2 has it in words: computation, all-to-all and memory of lookups.
FIG2_PAPER: Mapping[int, tuple[str, str, str]] = {
    256: ("100", "-", "less than 4"),
    1024: ("200", "more than 600", "almost 15"),
}


def table1(outcomes: Sequence[Outcome]) -> Table:
    """Efficiency by number of groups, for one model."""
    run = outcomes[0].run
    return Table.of(
        outcomes,
        (
            ("groups", lambda one: str(one.run.num_groups)),
            ("QPS", lambda one: _qps(one.qps)),
            ("paper", lambda one: _qps(one.run.paper_qps)),
            ("imbalance", lambda one: f"{one.imbalance:.2f}"),
            ("paper", lambda one: f"{one.run.paper_imbalance:.2f}"),
            ("sync, ms", lambda one: f"{one.group_sync_ms:.0f}"),
            ("peak / mean memory", lambda one: f"{_share(one.peak)} / {_share(one.mean)}"),
            ("paper", lambda one: f"{_share(one.run.paper_peak)} / {_share(one.run.paper_mean)}"),
            ("tables and lookups, GB", lambda one: f"{one.peak_bytes / 1e9:.1f} / {one.mean_bytes / 1e9:.1f}"),
        ),
        caption=f"Table 1, {run.model.name}: {run.world_size:,} GPUs, {run.local_batch:,} samples each",
    )


def table2(full: Sequence[Outcome], grouped: Sequence[Outcome]) -> Table:
    """Scaling of ExFM: full model parallelism, and groups of 256 GPUs."""
    base = full[0]
    lines = []
    for one, other in zip(full, grouped, strict=True):
        lines.append((f"{one.run.world_size:,}", *_scaling(one, base), *_scaling(other, base)))
    return Table(
        caption="Table 2, ExFM: 1,152 samples per GPU; full model parallelism, then groups of 256 GPUs",
        columns=("GPUs", "QPS", "scaling", "paper", "QPS in groups", "scaling", "paper"),
        rows=tuple(lines),
    )


def memory_table(full: Sequence[Outcome], grouped: Sequence[Outcome]) -> Table:
    """Table 2's peaks."""
    lines = zip(full, grouped, strict=True)
    return Table(
        caption="Table 2: peak memory; full model parallelism, then groups of 256 GPUs",
        columns=("GPUs", "peak", "paper", "peak in groups", "paper"),
        rows=tuple((f"{one.run.world_size:,}", *_peaks(one), *_peaks(other)) for one, other in lines),
    )


def fig2_table(full: Sequence[Outcome]) -> Table:
    """Fig. 2's three curves, as far as they fit."""
    return Table.of(
        [one for one in full if not one.out_of_memory],
        (
            ("GPUs", lambda one: f"{one.run.world_size:,}"),
            ("computation, ms", lambda one: f"{one.kernels_ms:.0f}"),
            ("paper", lambda one: FIG2_PAPER.get(one.run.world_size, ("-", "-", "-"))[0]),
            ("all-to-all, ms", lambda one: f"{one.all_to_all_ms:.0f}"),
            ("paper", lambda one: FIG2_PAPER.get(one.run.world_size, ("-", "-", "-"))[1]),
            ("lookups, GB", lambda one: f"{one.lookup_bytes / 1e9:.1f}"),
            ("paper", lambda one: FIG2_PAPER.get(one.run.world_size, ("-", "-", "-"))[2]),
        ),
        caption="Fig. 2: full model parallelism, slowest and fullest ranks",
    )


def choice_table(name: str, provenance: Provenance) -> Table:
    """The planner's remark on every number of groups that it tried."""
    remarks = {
        label: text for label, text in provenance.models.items() if label.endswith("group") or " groups " in label
    }
    return Table(
        caption=f"Choice of `replica-groups` for {name} (stages one after the other)",
        columns=("groups", "predicted, or why not"),
        rows=tuple((label, text) for label, text in remarks.items()),
    )


def document(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, object]:
    """The numbers behind the tables and images."""
    return {"schema": SCHEMA, **{name: [_outcome(one) for one in found] for name, found in outcomes.items()}}


def _scaling(one: Outcome, base: Outcome) -> tuple[str, str, str]:
    published = "-" if one.run.paper_factor is None else f"{100 * one.run.paper_factor:.1f}%"
    if one.out_of_memory:
        return "out of memory", "-", "out of memory" if one.run.paper_qps is None else published
    return _qps(one.qps), f"{100 * one.factor(base):.1f}%", published


def _peaks(one: Outcome) -> tuple[str, str]:
    published = "out of memory" if one.run.paper_peak is None else _share(one.run.paper_peak)
    return "out of memory" if one.out_of_memory else _share(one.peak), published


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _qps(value: float | None) -> str:
    return "out of memory" if not value else f"{value:.3g}"


def _outcome(one: Outcome) -> dict[str, object]:
    run: Run = one.run
    return {
        "model": run.model.name,
        "world_size": run.world_size,
        "num_groups": run.num_groups,
        "layout": run.layout.value,
        "local_batch": run.local_batch,
        "paper": {
            "qps": run.paper_qps,
            "imbalance": run.paper_imbalance,
            "scaling_factor": run.paper_factor,
            "peak": run.paper_peak,
            "mean": run.paper_mean,
        },
        "out_of_memory": one.out_of_memory,
        "step_ms": one.step_ms,
        "qps": one.qps,
        "parts_ms": {part.value: value for part, value in one.parts_ms.items()},
        "group_sync_ms": one.group_sync_ms,
        "imbalance": one.imbalance,
        "peak_bytes": one.peak_bytes,
        "mean_bytes": one.mean_bytes,
        "lookup_bytes": one.lookup_bytes,
        "other_bytes": run.model.other_bytes,
        "pricing_s": one.pricing_s,
    }
