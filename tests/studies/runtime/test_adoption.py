"""What links carry from plan to plan, and the measurements of the study `adopt` on small tables."""

import itertools

import pytest

from studies.cluster.network import ClusterSpec
from studies.frame.jobs import run_job
from studies.runtime.adoption import Carried, plans

SPEC = ClusterSpec(num_nodes=2, ranks_per_node=2, bits_per_s=4e8)
#: Of a table of 1 MiB, with a moment of 4 bytes a row of 256.
TABLE_BYTES = 2**20 + 2**20 // 64


@pytest.mark.smoke
def test_links_carry_what_no_rank_of_a_node_has():
    made = plans(4, SPEC.topology(), 2)

    def carried(before, after):
        return Carried.between(made[before], made[after], 2)

    swapped = carried("table-wise", "table-wise, elsewhere")
    assert swapped.link_bytes == 2 * TABLE_BYTES
    assert swapped.bytes_RR.sum() == 4 * TABLE_BYTES
    assert swapped.bytes_RR[0, 2] == TABLE_BYTES
    # Of each table, half of the rows go to the other node, and a quarter to the other rank of this one.
    dealt = carried("table-wise", "row-wise")
    assert dealt.link_bytes == TABLE_BYTES
    assert dealt.bytes_RR.sum() == 3 * TABLE_BYTES
    # Each node lacks what the other one has; nothing comes back over a link.
    assert carried("table-wise", "a copy per node").link_bytes == 2 * TABLE_BYTES
    assert carried("a copy per node", "table-wise").link_bytes == 0
    assert carried("row-wise", "row-wise").bytes_RR.sum() == 0
    # Each of the four parts of a row's columns has a moment.
    assert carried("table-wise", "column-wise").bytes_RR.sum() == 3 * (2**20 + 4 * 2**20 // 64)


def test_bytes_of_adoptions_are_those_that_plans_lack():
    made = plans(4, SPEC.topology(), 2)
    chain = [made[name] for name in ("table-wise", "column-wise", "row-wise", "a copy per node")]
    expected = [Carried.between(*pair, 2).bytes_RR for pair in itertools.pairwise(chain)]
    job = {"measure": "adopt", "bytes": [one.tolist() for one in expected]}
    found = run_job("studies.runtime.adoption", job, chain, 4)
    for (seconds, alone_s, sent_bytes), bytes_RR in zip(found, expected, strict=True):
        assert seconds > 0
        assert alone_s > 0
        # Parts of messages are padded.
        assert bytes_RR.sum() <= sent_bytes < 1.01 * bytes_RR.sum()
    saving = run_job("studies.runtime.adoption", {"measure": "save"}, [plans(4, SPEC.topology(), 2)["row-wise"]], 4)
    assert saving["save_s"] > 0
    assert saving["load_s"] > 0
