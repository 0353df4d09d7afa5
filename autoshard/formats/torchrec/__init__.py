"""TorchRec's modules as tables, and its sharding plans as plans; both ways."""

from autoshard.formats.torchrec.places import Place, Places, usual_places
from autoshard.formats.torchrec.plans import (
    ExportedDifference,
    as_executed,
    changes,
    from_torchrec,
    parameter_constraints,
    refusals,
    to_torchrec,
)
from autoshard.formats.torchrec.sharding import NotInTorchRecError, TorchRecType

__all__ = [
    "ExportedDifference",
    "NotInTorchRecError",
    "Place",
    "Places",
    "TorchRecType",
    "as_executed",
    "changes",
    "from_torchrec",
    "parameter_constraints",
    "refusals",
    "to_torchrec",
    "usual_places",
]
