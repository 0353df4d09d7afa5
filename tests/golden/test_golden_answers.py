"""Documents that commands print hold what they held when they were recorded: names, nesting and kinds of values."""

import json

import pytest

from tests.fuzz.examples import write_examples
from tests.golden.answers import RECORDED, answers


@pytest.mark.slow
def test_documents_hold_what_is_recorded(tmp_path):
    write_examples(tmp_path)
    kept, found = json.loads(RECORDED.read_text(encoding="utf-8")), answers(tmp_path)
    assert found.keys() == kept.keys()
    for name, lines in kept.items():
        assert found[name] == lines, name
