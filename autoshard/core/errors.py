"""Every error that autoshard raises on purpose.

AutoshardError
├── InputError (also a ValueError)      bad input; the command line exits with 2
│   ├── FormatError                     a file or body that does not follow its schema
│   ├── InvalidTableError               a table, feature or access profile that makes no sense
│   ├── InvalidTopologyError
│   ├── InvalidPlanError
│   ├── InvalidOptionError              an option of a command, planner or trainer
│   └── UnknownNameError                a bundled table list, topology, planner or model that is not there
├── InfeasiblePlanError                 no plan fits the limits; the command line exits with 3
├── ModelError                          a trained model that is missing, damaged or made for something else
├── SampleStoreError                    a store of samples that cannot be read or written
├── DeviceError                         a device that is missing, busy or out of memory
└── ExecutionError                      a plan that could not be executed to its end
    └── DivergedError                   training whose numbers are not finite; it fails again if it is repeated
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from autoshard.core.quoting import shortened

#: Characters of a file's or a field's name that an error has room for, and of its message.
_NAME_ROOM, _MESSAGE_ROOM = 255, 1200


class AutoshardError(Exception):
    """Base of all errors of this package; its text is one line made for the user.

    Args:
        message: What is wrong and what would be accepted; lists of names of the user's own may make it long, and it is
            cut.
        field: Dotted path of the offending field (`tables[3].num_embeddings`), if there is one.
        source: File name, option or request part that held it, if known.
    """

    kind = "error"
    exit_code = 1

    def __init__(self, message: str, *, field: str | None = None, source: str | None = None) -> None:
        self.message = message if len(message) <= _MESSAGE_ROOM else message[: _MESSAGE_ROOM - 1] + "…"
        self.field = field
        self.source = source
        super().__init__(message)

    def __str__(self) -> str:
        names = [shortened(name, _NAME_ROOM) for name in (self.source, self.field) if name]
        return ": ".join([*names, self.message] if self.message else names)

    def in_source(self, source: str) -> AutoshardError:
        """The same error, naming the file or request part that it came from."""
        return type(self)(self.message, field=self.field, source=source)


class InputError(AutoshardError, ValueError):
    """Input that cannot be used."""

    kind = "invalid-input"
    exit_code = 2


class FormatError(InputError):
    """A file or request body that does not follow its schema.

    Args:
        message: As of all errors.
        field: Likewise.
        source: Likewise.
        faults: What is wrong, one by one, where a reader found more than one fault; the message names them all.
    """

    kind = "invalid-format"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        source: str | None = None,
        faults: Sequence[FormatError] = (),
    ) -> None:
        super().__init__(message, field=field, source=source)
        self.faults = tuple(faults)

    @override
    def in_source(self, source: str) -> FormatError:
        faults = [fault.in_source(source) for fault in self.faults]
        return FormatError(self.message, field=self.field, source=source, faults=faults)


class InvalidTableError(InputError):
    """A table, feature or access profile with impossible values."""

    kind = "invalid-table"


class InvalidTopologyError(InputError):
    """A topology with impossible values."""

    kind = "invalid-topology"


class InvalidPlanError(InputError):
    """A plan that does not place its tables exactly, or not within its topology."""

    kind = "invalid-plan"


class InvalidOptionError(InputError):
    """An option with a value that is not accepted."""

    kind = "invalid-option"


class UnknownNameError(InputError):
    """A name that nothing is registered or bundled under."""

    kind = "unknown-name"


class InfeasiblePlanError(AutoshardError):
    """No plan satisfies the limits; the text says by how many bytes and on what."""

    kind = "infeasible"
    exit_code = 3


class ModelError(AutoshardError):
    """A trained model that is missing, damaged, or made for another device or schema."""

    kind = "model"


class SampleStoreError(AutoshardError):
    """A sample store that cannot be read or written."""

    kind = "sample-store"


class DeviceError(AutoshardError):
    """A device that is missing, busy or out of memory."""

    kind = "device"


class ExecutionError(AutoshardError):
    """A plan whose execution failed."""

    kind = "execution"


class DivergedError(ExecutionError):
    """Training whose losses, gradients or weights are not finite: repeating it would fail again."""

    kind = "diverged"
