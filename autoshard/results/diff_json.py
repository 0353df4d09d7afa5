"""Differences of two plans (`autoshard.diff/1`): what `autoshard diff --json` prints."""

from __future__ import annotations

from typing import Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    ANY_TEXT,
    FLAG,
    TEXT,
    Field,
    in_context,
    list_of,
    number_in,
    one_of,
    or_null,
    record,
    whole_number,
)
from autoshard.formats.documents.prediction_json import ESTIMATE
from autoshard.results.plan_diff import Change, PlanDiff, RankChange, TableChange, ValueChange

#: A figure, a word or a flag: options of planners are of any of these kinds.
_ANY_VALUE: Final = in_context({"oneOf": [{"type": kind} for kind in ("string", "number", "boolean", "null")]})
_BEFORE_AFTER: Final = (
    Field("before", _ANY_VALUE, "In the first plan; null where it has none."),
    Field("after", _ANY_VALUE, "In the second plan, likewise."),
)
_VALUE: Final = record(ValueChange, Field("name", TEXT, "What differs."), *_BEFORE_AFTER)
_TABLE: Final = record(
    TableChange,
    Field("table", TEXT, "Name of the table."),
    Field("change", one_of(Change), "How it differs."),
    Field("before", ANY_TEXT, "How the first plan holds it; empty without it."),
    Field("after", ANY_TEXT, "How the second plan holds it, likewise."),
    Field("received_bytes", number_in(), "Bytes that ranks hold of it after and not before."),
)
_MS: Final = or_null(number_in())
_BYTES: Final = or_null(whole_number())
_RANK: Final = record(
    RankChange,
    Field("rank", whole_number(), "Rank of a replica group."),
    Field("kernel_ms_before", _MS, "Predicted kernel time in the first plan; null without one."),
    Field("kernel_ms_after", _MS, "The same in the second plan."),
    Field("hbm_bytes_before", _BYTES, "Device memory for weights and states in the first plan, likewise."),
    Field("hbm_bytes_after", _BYTES, "The same in the second plan."),
)
_WITHIN: Final = "Whether the 90% intervals of both steps overlap; null without both."
DIFF: Final[Document[PlanDiff]] = Document(
    name="diff",
    meaning="What `autoshard diff --json` prints: how two plans differ.",
    make=PlanDiff,
    fields=lambda _: (
        Field("task", list_of(_VALUE, 0), "Batch, ranks, device, planner, options and the like that differ."),
        Field("step_ms_before", or_null(ESTIMATE), "Predicted step of the first plan; null without a prediction."),
        Field("step_ms_after", or_null(ESTIMATE), "That of the second plan."),
        Field("is_within_intervals", or_null(FLAG), _WITHIN),
        Field("parts", list_of(_VALUE, 0), "Parts of the step that differ, at their slowest ranks, in ms."),
        Field("tables", list_of(_TABLE, 0), "Tables that differ, those with the most bytes to receive first."),
        Field("num_alike", whole_number(), "Tables that both plans hold alike."),
        Field("ranks", list_of(_RANK, 0), "Ranks that differ."),
        Field("received_bytes", number_in(), "Bytes that ranks would have to receive, all together."),
    ),
)
