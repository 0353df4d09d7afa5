"""Requests that studies of the service send."""

from __future__ import annotations

import json
from typing import Final

from autoshard.formats import tables_to_json
from autoshard.formats.metasyn import metasyn

#: MetaSyn's rows and batch are divided by this for CPUs.
_SCALE: Final = 64
_NUM_TABLES, _TOPOLOGY = 80, "cpu-8"
_LONG: Final = 16 << 20
JSON_HEADERS: Final = {"content-type": "application/json"}


def large_tasks(count: int) -> list[bytes]:
    """Bodies that ask `auto` for plans of 80 tables on 8 ranks within 0.1 s; each draws other tables."""
    pool = metasyn().scaled(_SCALE)
    fixed = {"topology": _TOPOLOGY, "planner": "auto", "time_limit_s": 0.1}
    drawn = (tables_to_json(pool.redrawn(_NUM_TABLES, seed)) for seed in range(count))
    return [json.dumps({"tables": tables, **fixed}).encode() for tables in drawn]


def small_task(seed: int) -> bytes:
    """A body that asks for a plan of 26 tables, which takes little; the plan of each seed has an id of its own."""
    task = {"tables": "criteo-kaggle", "topology": _TOPOLOGY, "planner": "cost-greedy", "seed": seed}
    return json.dumps({**task, "time_limit_s": 0.1}).encode()


def job_task(limit_s: float, seed: int) -> bytes:
    """A body of a job that searches for so many seconds, whatever it finds."""
    task = {"tables": "criteo-kaggle", "topology": _TOPOLOGY, "planner": "auto", "seed": seed}
    return json.dumps({**task, "time_limit_s": limit_s}).encode()


def long_bodies() -> dict[str, bytes]:
    """Bodies of 16 MiB, by what they are: a small task, a table list that is a text, and what makes no task."""
    task = {"topology": _TOPOLOGY, "planner": "cost-greedy", "time_limit_s": 0.1}
    small = json.dumps({**task, "tables": "criteo-kaggle"}).encode()
    rows = "name,rows,dim\n" + "".join(f"table {number},1000,64\n" for number in range(200))
    text = json.dumps({**task, "tables": {"text": f"{rows}{' ' * (_LONG - 8192)}", "batch_size": 8192}}).encode()
    return {"blanks": small.ljust(_LONG), "a table list": text.ljust(_LONG), "no task": b"[" + b"{}," * (_LONG // 3)}
