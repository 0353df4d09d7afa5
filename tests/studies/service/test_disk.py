import json
import os

import pytest

from studies.__main__ import main


@pytest.mark.slow
def test_nothing_is_lost_that_was_acknowledged_while_a_disk_is_full(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root mounts a small disk")
    assert main(["service-disk", "--clients", "6", "--seconds", "5", "-o", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "service-disk.json").read_bytes())
    assert document["faults"] == []
    assert document["told"] == "the disk of the database is full"
    assert document["causes"] == ["database or disk is full"]
    assert document["acknowledged"]["again"] > 0
