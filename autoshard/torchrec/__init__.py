"""autoshard for users of TorchRec: their modules, their planner's place, their training loop.

- `tables_of` reads the tables of a model; `record` counts its traffic and gives the tables their access profiles.
- `Planner` stands where `EmbeddingShardingPlanner` does; `DistributedModelParallel` trains its plans.
- `to_torchrec`, `parameter_constraints` and `from_torchrec` turn plans into TorchRec's and back; `changes` and
  `refusals` name what TorchRec does otherwise, and what it cannot say.
- `shard` stands where `DistributedModelParallel` does, and runs every plan on autoshard's own engine.
"""

from autoshard.formats.torchrec import (
    ExportedDifference,
    NotInTorchRecError,
    Place,
    as_executed,
    changes,
    from_torchrec,
    parameter_constraints,
    refusals,
    to_torchrec,
)
from autoshard.formats.torchrec.modules import ModelTables, read_model
from autoshard.torchrec.planner import Planner
from autoshard.torchrec.recording import Recorder, record
from autoshard.torchrec.sharded import ShardedModel, shard
from autoshard.torchrec.tables import tables_of

__all__ = [
    "ExportedDifference",
    "ModelTables",
    "NotInTorchRecError",
    "Place",
    "Planner",
    "Recorder",
    "ShardedModel",
    "as_executed",
    "changes",
    "from_torchrec",
    "parameter_constraints",
    "read_model",
    "record",
    "refusals",
    "shard",
    "tables_of",
    "to_torchrec",
]
