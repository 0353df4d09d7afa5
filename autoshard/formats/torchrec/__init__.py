"""TorchRec's modules as tables, and its sharding plans as plans; both ways."""

from autoshard.formats.torchrec.places import Place, Places, usual_places
from autoshard.formats.torchrec.plans import (
    Change,
    as_executed,
    changes,
    from_torchrec,
    parameter_constraints,
    refusals,
    to_torchrec,
)
from autoshard.formats.torchrec.sharding import NotInTorchRecError, ShardingType

__all__ = [
    "Change",
    "NotInTorchRecError",
    "Place",
    "Places",
    "ShardingType",
    "as_executed",
    "changes",
    "from_torchrec",
    "parameter_constraints",
    "refusals",
    "to_torchrec",
    "usual_places",
]
