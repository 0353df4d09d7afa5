import json

import pytest

from studies.__main__ import main


@pytest.mark.slow
def test_an_attack_is_answered_and_a_client_with_a_key_gets_its_plans(tmp_path):
    assert main(["service", "--rounds", "1", "--seconds", "6", "-o", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "service-attack.json").read_bytes())
    rows = {row["name"]: row for row in document["latencies"]}
    assert set(rows) == {"plans", "plans, attacked", "probes", "probes, attacked"}
    assert all(row["num_answered"] == row["num_requests"] for row in rows.values())
    attackers = document["attackers"]
    assert {"large body: 401", "sign-in: 401", "wrong key: 401"} <= set(attackers)
    assert not [name for name in attackers if name.rsplit(": ")[-1] in ("200", "202", "500")]
