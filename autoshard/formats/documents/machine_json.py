"""The machine that something was measured on, as a JSON object."""

from __future__ import annotations

from typing import Final

from autoshard.core.machine import MeasuredMachine
from autoshard.formats.documents.kinds import ANY_TEXT, Field, number_in, optional, record, whole_number

#: Megahertz, and bytes per second.
_MAX_CLOCK, _MAX_BANDWIDTH = 1e12, 1e15

#: As cards of models and records of runs have it.
MACHINE: Final = record(
    MeasuredMachine,
    Field("device_name", ANY_TEXT, "Full name of the device."),
    Field("core_cache_bytes", whole_number(), "Cache of one core."),
    Field("cache_bytes", whole_number(), "Largest cache."),
    Field("memory_bytes", whole_number(), "Memory."),
    Field("clock_mhz", number_in(0, _MAX_CLOCK), "Clock; 0 if it is not known."),
    Field("driver_version", ANY_TEXT, "Version of the driver; empty on a CPU."),
    Field("torch_version", ANY_TEXT, "Version of torch."),
    Field("fbgemm_version", ANY_TEXT, "Version of FBGEMM."),
    optional("core", ANY_TEXT, "Design of a core.", default=""),
    optional("core_threads", whole_number(), "Hardware threads of a core.", default=0),
    optional("cache_threads", whole_number(), "Hardware threads that share the largest cache.", default=0),
    optional("memory_bytes_per_s", number_in(0, _MAX_BANDWIDTH), "Bandwidth of a copy by one thread.", default=0.0),
)
