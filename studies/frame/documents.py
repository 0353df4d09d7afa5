"""JSON files of measured numbers, from which their figures can be drawn again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from autoshard.core.errors import FormatError
from autoshard.formats.documents.json_document import read_json
from studies.frame.options import command_line

if TYPE_CHECKING:
    from bench.measuring.devices import BenchDevice

_Data = TypeVar("_Data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine and software of a measurement.

    Attributes:
        device: Key of the device, such as `cpu`.
        device_name: Full name of the processor.
        num_cores: Cores that this process may use.
        load_average: Load average of the last minute, this process included.
        command: Command that measured.
        measured_at: End of the measurement.
    """

    device: str
    device_name: str
    num_cores: PositiveInt
    load_average: FiniteFloat
    torch_version: str
    fbgemm_version: str
    autoshard_version: str
    git_commit: str
    command: str
    measured_at: datetime

    @classmethod
    def this(cls, device: BenchDevice, command: str) -> Machine:
        """This machine, now."""
        # Imports torch, which studies without measurements do without: one of them measures its own memory.
        from bench.measuring.provenance import installed_software

        software = installed_software()
        return cls(
            device=device.key,
            device_name=device.name,
            num_cores=len(os.sched_getaffinity(0)),
            load_average=round(os.getloadavg()[0], 2),
            torch_version=software.torch_version,
            fbgemm_version=software.fbgemm_version,
            autoshard_version=software.autoshard_version,
            git_commit=software.git_commit,
            command=command,
            measured_at=datetime.now(UTC).replace(microsecond=0),
        )

    @classmethod
    def of(cls, study: str, options: object) -> Machine:
        """The CPUs of this machine, now, where a study has measured with these options."""
        from bench.measuring.devices import find_device

        return cls.this(find_device("cpu"), command_line(study, options))

    def to_json(self) -> dict[str, object]:
        """As a JSON object."""
        found: dict[str, object] = TypeAdapter(Machine).dump_python(self, mode="json")
        return found

    def document(self, found: object, schema: str) -> dict[str, object]:
        """What was found on it, as `to_document` has it, and the machine: the object of a JSON file."""
        return {**to_document(found, schema), "machine": self.to_json()}

    def described(self) -> tuple[tuple[str, str], ...]:
        """Labels and values for a page."""
        return (
            ("Command", self.command),
            ("Device", f"{self.device_name} ({self.device}), {self.num_cores} cores"),
            ("Load average of the machine", f"{self.load_average:.2f}"),
            (
                "Software",
                f"torch {self.torch_version}, FBGEMM {self.fbgemm_version}, autoshard {self.autoshard_version}",
            ),
            ("Commit", self.git_commit or "unknown"),
            ("Measured", f"{self.measured_at:%Y-%m-%d %H:%M} UTC"),
        )


def to_document(data: object, schema: str) -> dict[str, object]:
    """Data of one of these classes, or what JSON has by name, as the object of a JSON file, with its schema's name."""
    body = data if isinstance(data, Mapping) else TypeAdapter(type(data)).dump_python(data, mode="json")
    return {"schema": schema, **body}


def read_document(path: Path, kind: type[_Data], schema: str) -> _Data:
    """Reads what `to_document` made.

    Raises:
        FormatError: If the file cannot be read, or does not hold such data; the text names file and field.
    """
    document = read_json(path)
    found = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(document, dict) or found != schema:
        raise FormatError(f"must be {schema!r}, got {found!r}", field="schema", source=str(path))
    body = {name: value for name, value in document.items() if name != "schema"}
    return read_as(kind, body, str(path))


def read_as(kind: type[_Data], body: object, source: str) -> _Data:
    """Dataclass of a JSON object.

    Raises:
        FormatError: If the object does not hold such data; the text names source and field.
    """
    try:
        return TypeAdapter(kind).validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise FormatError(str(first["msg"]).removeprefix("Value error, "), field=field, source=source) from None
