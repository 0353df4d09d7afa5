"""`autoshard diff`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.console import JsonOption, emit
from autoshard.table import Column, Table, texts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoshard.results.plan_diff import PlanDiff, ValueChange

#: Tables and ranks that are listed without `--json`.
_MAX_LINES = 64


def diff(
    before: Annotated[Path, typer.Argument(help="First plan.", metavar="A")],
    after: Annotated[Path, typer.Argument(help="Second plan.", metavar="B")],
    as_json: JsonOption = False,
) -> None:
    """Compares two plans: tasks, predicted times, tables held differently, bytes that would have to move.

    Example:
        autoshard diff plan.json other.json
    """
    from autoshard.formats import read_plan
    from autoshard.report.plan_diff import diff_plans
    from autoshard.results.plan_diff import DIFF

    found = diff_plans(read_plan(before), read_plan(after))
    emit(DIFF.to_json(found), _rendered(found), as_json=as_json)


def _rendered(found: PlanDiff) -> RenderableType:
    from rich.console import Group

    if found.is_empty:
        return f"The plans hold all {found.num_alike:,} tables alike, at the same price."
    blocks: list[RenderableType] = [*_lines(found), ""]
    for heading, changes in (("task", found.task), ("part of the step, ms", found.parts)):
        if changes:
            blocks += [_values(heading, changes), ""]
    if found.tables:
        blocks += [_tables(found), ""]
    if found.ranks:
        blocks.append(_ranks(found))
    return Group(*blocks)


def _lines(found: PlanDiff) -> list[str]:
    from autoshard.report.wording import write_bytes, write_interval, write_ms, write_percent

    lines = []
    first, second = found.step_ms_before, found.step_ms_after
    if first is not None and second is not None:
        change = f", {write_percent(second.value / first.value - 1, signed=True)}" if first.value else ""
        unsure = "; the intervals overlap" if found.is_within_intervals else ""
        lines.append(
            f"Predicted step {write_ms(first.value)} ms ({write_interval(first)}) before, {write_ms(second.value)} ms "
            f"({write_interval(second)}) after{change}{unsure}"
        )
    lines.append(
        f"Tables that differ: {len(found.tables):,}, held alike: {found.num_alike:,}; ranks would receive "
        f"{write_bytes(found.received_bytes)}"
    )
    return lines


def _values(heading: str, changes: Iterable[ValueChange]) -> Table:
    rows = [(change.name.replace("_", " "), _word(change.before), _word(change.after)) for change in changes]
    return Table(columns=texts(heading, "before", "after"), rows=rows)


def _word(value: object) -> str:
    from autoshard.report.wording import write_ms

    if value is None:
        return ""
    return write_ms(value) if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _tables(found: PlanDiff) -> RenderableType:
    from rich.console import Group

    from autoshard.report.wording import write_bytes

    rows = [
        (change.table, change.change.value, change.before, change.after, write_bytes(change.received_bytes))
        for change in found.tables[:_MAX_LINES]
    ]
    table = Table(columns=texts("table", "change", "before", "after", "to receive"), rows=rows)
    return Group(table, *_left_out(len(found.tables), "tables"))


def _ranks(found: PlanDiff) -> RenderableType:
    from rich.console import Group

    from autoshard.report.wording import write_bytes, write_ms

    columns = (
        *(Column("rank"), Column("kernel ms before", text=write_ms), Column("after", text=write_ms)),
        *(Column("memory before", text=write_bytes), Column("after", text=write_bytes)),
    )
    rows = [
        (one.rank, one.kernel_ms_before, one.kernel_ms_after, one.hbm_bytes_before, one.hbm_bytes_after)
        for one in found.ranks[:_MAX_LINES]
    ]
    return Group(Table(columns=columns, rows=rows), *_left_out(len(found.ranks), "ranks"))


def _left_out(count: int, what: str) -> list[str]:
    left = count - _MAX_LINES
    return [f"{left:,} more {what}; --json lists all"] if left > 0 else []
