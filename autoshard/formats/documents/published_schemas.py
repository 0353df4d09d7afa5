"""The published JSON Schemas of this package's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any


@lru_cache(maxsize=1)
def json_schemas() -> Mapping[str, dict[str, Any]]:
    """JSON Schemas (draft 2020-12) by the name that files say in their `schema` field, such as `autoshard.plan/1`.

    The plan's refers to the other two by their `$id`. What a schema accepts can still contradict itself (names used
    twice, a curve that is not concave, shards that overlap); the readers check that too.
    """
    folder = resources.files("autoshard.formats") / "schemas"
    schemas = [json.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir()]
    return {schema["properties"]["schema"]["const"]: schema for schema in schemas}
