"""Documents that commands print hold what they held when they were recorded: names, nesting and kinds of values."""

import json

import pytest

from costmodel.registry.versions import REGISTRY_VARIABLE, SHIPPED_VARIABLE
from server.storage.location import DATABASE_VARIABLE
from tests.golden.answers import RECORDED, answers


@pytest.mark.slow
def test_documents_hold_what_is_recorded(tmp_path, monkeypatch):
    for name in (REGISTRY_VARIABLE, SHIPPED_VARIABLE, DATABASE_VARIABLE):
        monkeypatch.setenv(name, "")  # which puts back what the commands are given
    kept, found = json.loads(RECORDED.read_text(encoding="utf-8")), answers(tmp_path)
    assert found.keys() == kept.keys()
    for name, lines in kept.items():
        assert found[name] == lines, name
