"""The published JSON Schemas of this package's files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from autoshard.formats.documents.kinds import Schema
from autoshard.formats.documents.plan_json import PLAN
from autoshard.formats.documents.tables_json import TABLES
from autoshard.formats.documents.topology_json import TOPOLOGY


@lru_cache(maxsize=1)
def json_schemas() -> Mapping[str, Schema]:
    """JSON Schemas (draft 2020-12) by the name that files say in their `schema` field, such as `autoshard.plan/1`.

    The plan's refers to the other two by their `$id`. What a schema accepts can still contradict itself (names used
    twice, a curve that is not concave, shards that overlap); the readers check that too.
    """
    return {one.schema_name: one.json_schema() for one in (TABLES, TOPOLOGY, PLAN)}
