"""Options, finished parts and results that all studies share."""

from studies.frame.documents import Machine, read_document, to_document
from studies.frame.options import (
    FromOption,
    OutputOptions,
    PartsOption,
    RegistryOption,
    command_line,
    names_in,
    numbers_in,
    options_without,
)
from studies.frame.parts import Numbers, PartStore
from studies.frame.results import StudyResult, Summary

__all__ = [
    "FromOption",
    "Machine",
    "Numbers",
    "OutputOptions",
    "PartStore",
    "PartsOption",
    "RegistryOption",
    "StudyResult",
    "Summary",
    "command_line",
    "names_in",
    "numbers_in",
    "options_without",
    "read_document",
    "to_document",
]
