"""The service's description without its sentences: `python -m tests.golden.openapi` records it anew."""

import json
import tempfile
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("openapi.txt")
#: What explains, and may be said better any time.
_SENTENCES = {"description", "summary", "title", "example", "examples", "operationId", "tags"}


def without_sentences(value: object, *, are_names: bool = False) -> object:
    """A description without what explains it.

    Args:
        value: A part of it.
        are_names: Whether keys of the part are names of fields, which are all kept.
    """
    if isinstance(value, list):
        return [without_sentences(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_sentences(item, are_names=key in ("properties", "schemas", "paths") and not are_names)
        for key, item in sorted(value.items())
        if are_names or key not in _SENTENCES
    }


def lines_of(document: dict[str, dict[str, Any]]) -> list[str]:
    """A description as it is kept: a line for each path, and for each schema."""
    parts = {**document["paths"], **document["components"]["schemas"]}
    kept = {name: without_sentences(part) for name, part in sorted(parts.items())}
    return [f"{name} {json.dumps(part, separators=(',', ':'))}" for name, part in kept.items()]


def record() -> None:
    """Asks a service of its own."""
    from tests.server.conftest import start_service

    with tempfile.TemporaryDirectory() as folder:
        service = start_service(Path(folder))
        try:
            with service.client() as client:
                document = client.get("/openapi.json").json()
                RECORDED.write_text("\n".join(lines_of(document)) + "\n", encoding="utf-8")
        finally:
            service.stop()


if __name__ == "__main__":
    record()
