"""What a store of samples holds (`autoshard.store/1`): what `autoshard samples --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    ANY_TEXT,
    TEXT,
    Field,
    by_name,
    list_of,
    number_in,
    or_null,
    record,
    tuple_of,
    whole_number,
)

_COUNT: Final = whole_number()
_DEVICE: Final = record(
    dict,
    Field("device", TEXT, "Key of the device."),
    Field("device_names", list_of(ANY_TEXT), "Full names; more than one means that unlike machines were mixed."),
    Field("software", list_of(ANY_TEXT), "Versions of torch and FBGEMM."),
    Field("num_samples", _COUNT, "Samples of kernels."),
    Field("num_tables", _COUNT, "Different shards among them."),
    Field("schema", TEXT, "Version of the files."),
    Field("num_duplicates", _COUNT, "Copies of samples, which count once."),
    Field("num_noisy", _COUNT, "Samples whose runs disagreed; cost models are not trained on them."),
    Field("num_measured_again", _COUNT, "Samples that took more than one attempt."),
    Field("num_throttled", _COUNT, "Samples measured while the device held its clock back."),
    Field("sources", by_name(_COUNT), "Samples per way of choosing sets."),
    Field("first", TEXT, "When the first was collected, as ISO 8601."),
    Field("last", TEXT, "When the last was collected."),
    Field("set_sizes", tuple_of(_COUNT, _COUNT, _COUNT), "Smallest, median and largest number of shards."),
    Field(
        "kernel_ms",
        tuple_of(number_in(), number_in(), number_in()),
        "Smallest, median and largest latency, forward plus backward.",
    ),
    Field("reference_ms", number_in(), "Median latency of the reference set, forward plus backward."),
    Field("num_repeated", _COUNT, "Sets that were measured more than once."),
    Field(
        "repeatability",
        or_null(number_in()),
        "Standard deviation over mean of their latencies, drift divided out; null without repeated sets.",
    ),
    parts=dict,
)
STORE: Final[Document[Mapping[str, Any]]] = Document(
    name="store",
    meaning="What `autoshard samples --json` prints: what a store of samples holds.",
    make=dict,
    fields=lambda _: (
        Field("store", ANY_TEXT, "Folder of the samples."),
        Field("devices", list_of(_DEVICE, 0), "Samples of kernels, by device."),
        Field("dense", by_name(_COUNT), "Samples of dense layers, by device."),
        Field("collectives", by_name(_COUNT), "Samples of collectives, by device."),
        Field("html", or_null(ANY_TEXT), "Page that was written; null without."),
    ),
    parts=dict,
)
