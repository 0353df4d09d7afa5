"""Where the tables of a plan are in a TorchRec model: the path of their module, and their name in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from autoshard.core import Pooling, TableSet


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A table in a model.

    Attributes:
        path: Path of the module that holds it, as `named_modules` has it; empty for the model itself.
        name: The table's name in that module.
    """

    path: str
    name: str


#: Places of tables by the tables' names.
Places: TypeAlias = Mapping[str, Place]

#: Where tables are taken to be that come without a model.
POOLED_PATH, SEQUENCE_PATH = "embedding_bag_collection", "embedding_collection"


def usual_places(tables: TableSet) -> Places:
    """Places of tables that come without a model: pooled tables in one module, sequence tables in another."""
    return {
        table.name: Place(SEQUENCE_PATH if table.pooling is Pooling.SEQUENCE else POOLED_PATH, table.name)
        for table in tables.tables
    }
